// Arithmetic of dense nets that torch is slow at. Addresses of tensors cross as integers: the Python side has checked
// their type, device and layout, and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.h"
#include "math/finite.h"
#include "math/interaction.h"
#include "math/score_counts.h"
#include "threads/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

std::vector<Vectors> vectors_of(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& strides) {
  if (addresses.size() != strides.size()) throw std::invalid_argument("Expected a stride for each address.");
  std::vector<Vectors> vectors;
  for (size_t i = 0; i < addresses.size(); ++i)
    vectors.push_back({reinterpret_cast<const float*>(addresses[i]), strides[i]});
  return vectors;
}

void forward(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& strides, size_t samples, size_t dim,
             uint64_t out, size_t out_stride) {
  const auto vectors = vectors_of(addresses, strides);
  nb::gil_scoped_release release;
  Exclusive exclusive;
  interact(vectors, samples, dim, reinterpret_cast<float*>(out), out_stride);
}

void backward(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& strides, size_t samples, size_t dim,
              uint64_t out_gradient, size_t out_stride, uint64_t gradient) {
  const auto vectors = vectors_of(addresses, strides);
  nb::gil_scoped_release release;
  Exclusive exclusive;
  interact_backward(vectors, samples, dim, reinterpret_cast<const float*>(out_gradient), out_stride,
                    reinterpret_cast<float*>(gradient));
}

bool finite(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& counts) {
  if (addresses.size() != counts.size()) throw std::invalid_argument("Expected a count for each address.");
  std::vector<Floats> arrays;
  for (size_t i = 0; i < addresses.size(); ++i)
    arrays.push_back({reinterpret_cast<const float*>(addresses[i]), counts[i]});
  nb::gil_scoped_release release;
  Exclusive exclusive;
  return all_finite(arrays);
}

void count(uint64_t scores, uint64_t labels, uint64_t weights, size_t samples, double limit, size_t bins,
           uint64_t counts) {
  nb::gil_scoped_release release;
  count_scores(reinterpret_cast<const double*>(scores), reinterpret_cast<const double*>(labels),
               reinterpret_cast<const double*>(weights), samples, limit, bins, reinterpret_cast<double*>(counts));
}

}  // namespace

void bind_math(nb::module_& m) {
  m.def("interact", &forward, "addresses"_a, "strides"_a, "samples"_a, "dim"_a, "out"_a, "out_stride"_a,
        "Dot products of all pairs of a sample's vectors, each given by address and stride, to rows of out.");
  m.def("interact_backward", &backward, "addresses"_a, "strides"_a, "samples"_a, "dim"_a, "out_gradient"_a,
        "out_stride"_a, "gradient"_a, "From the gradient of out to those of the vectors, (samples, vectors, dim).");
  m.def("all_finite", &finite, "addresses"_a, "counts"_a, "Whether arrays of float32 have neither infinities nor NaNs.");
  m.def("count_scores", &count, "scores"_a, "labels"_a, "weights"_a, "samples"_a, "limit"_a, "bins"_a, "counts"_a,
        "Adds samples to a histogram (3, bins + 2) of scores by their logits; all arrays are float64, weights may be 0.");
}

}  // namespace karvan::bindings
