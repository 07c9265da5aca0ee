// Dot products of all pairs of a sample's vectors, and their gradients.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace karvan {

// One of a sample's vectors: rows of so many floats, `stride` floats apart.
struct Vectors {
  const float* data;
  size_t stride;
};

// out[s][i (i - 1) / 2 + j] = the dot product of vectors i and j of sample s, for j < i: the lower triangle, row by
// row. Rows of out are `out_stride` floats apart. Runs on the core's threads; the caller holds an Exclusive. Each
// sample's sums have a fixed order, so the number of threads changes nothing.
void interact(const std::vector<Vectors>& vectors, size_t samples, size_t dim, float* out, size_t out_stride);

// From the gradient of out, laid out like it, to those of the vectors: gradient[s][i][k], without gaps.
void interact_backward(const std::vector<Vectors>& vectors, size_t samples, size_t dim, const float* out_gradient,
                       size_t out_stride, float* gradient);

}  // namespace karvan
