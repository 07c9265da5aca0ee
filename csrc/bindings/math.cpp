// Arithmetic of dense nets that torch is slow at. Addresses of tensors cross as integers: the Python side has checked
// their type, device and layout, and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.h"
#include "math/interaction.h"
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

}  // namespace

void bind_math(nb::module_& m) {
  m.def("interact", &forward, "addresses"_a, "strides"_a, "samples"_a, "dim"_a, "out"_a, "out_stride"_a,
        "Dot products of all pairs of a sample's vectors, each given by address and stride, to rows of out.");
  m.def("interact_backward", &backward, "addresses"_a, "strides"_a, "samples"_a, "dim"_a, "out_gradient"_a,
        "out_stride"_a, "gradient"_a, "From the gradient of out to those of the vectors, (samples, vectors, dim).");
}

}  // namespace karvan::bindings
