// Both directions are products of small matrices for each sample. With X the sample's vectors (n x dim): forward is the
// lower triangle of X X', backward is G X with G the symmetric matrix of gradients, zero on its diagonal.
//
// Blocks of four rows by up to four registers of columns stay in registers while the sums run. Forward takes its columns
// from X', so that neither direction adds across a register. Rows and columns are filled up with zeros to multiples of
// four. Sums run in ascending order, over k forward and over j backward.
#include "math/interaction.h"

#include <algorithm>
#include <cstring>

#include "math/widest.h"
#include "threads/pool.h"

#define KARVAN_INLINE static inline __attribute__((always_inline))

namespace karvan {
namespace {

constexpr size_t kLanes = 4, kMostColumns = 4, kSamplesPerTask = 64;
constexpr size_t kTogether = 4;  // samples that are fetched at once: runs of memory, not single lines of many streams

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));

KARVAN_INLINE Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
KARVAN_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

size_t padded(size_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Calls take(a, c, sums) for four rows a and C registers c of columns: sums over the steps of left[a] * right[c][lane],
// where both advance by a row of their matrix with each step.
template <size_t C, class Take>
KARVAN_INLINE void multiply(const float* left, size_t left_stride, const float* right, size_t right_stride, size_t steps,
                            Take&& take) {
  Vec sums[kLanes][C] = {};
  for (size_t step = 0; step < steps; ++step, left += left_stride, right += right_stride) {
    Vec r[C];
#pragma GCC unroll 4
    for (size_t c = 0; c < C; ++c) r[c] = load(right + c * kLanes);
#pragma GCC unroll 4
    for (size_t a = 0; a < kLanes; ++a)
#pragma GCC unroll 4
      for (size_t c = 0; c < C; ++c) sums[a][c] += left[a] * r[c];  // scalars: compilers take lanes apart badly
  }
#pragma GCC unroll 4
  for (size_t a = 0; a < kLanes; ++a)
#pragma GCC unroll 4
    for (size_t c = 0; c < C; ++c) take(a, c, sums[a][c]);
}

template <class Take>
KARVAN_INLINE void multiply(size_t columns, const float* left, size_t left_stride, const float* right,
                            size_t right_stride, size_t steps, Take&& take) {
  switch (columns) {
    case 1: return multiply<1>(left, left_stride, right, right_stride, steps, take);
    case 2: return multiply<2>(left, left_stride, right, right_stride, steps, take);
    case 3: return multiply<3>(left, left_stride, right, right_stride, steps, take);
    default: return multiply<4>(left, left_stride, right, right_stride, steps, take);
  }
}

// Registers of columns that come next, so that `left` of them are shared out evenly and no loop has very few sums.
KARVAN_INLINE size_t next_columns(size_t left) {
  const size_t loops = (left + kMostColumns - 1) / kMostColumns;
  return (left + loops - 1) / loops;
}

KARVAN_INLINE void transpose(Vec& a, Vec& b, Vec& c, Vec& d) {
  const Vec ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Vec cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

struct Shape {
  const std::vector<Vectors>& vectors;
  size_t dim;
  size_t rows() const { return vectors.size(); }
  const float* row(size_t i, size_t sample) const { return vectors[i].data + sample * vectors[i].stride; }
};

// X' of some samples, one after the other, `width` floats a row; columns from rows() on stay as they are.
KARVAN_INLINE void transposed(const Shape& x, size_t begin, size_t end, float* out, size_t width) {
  const size_t whole = x.dim / kLanes * kLanes;
  for (size_t i = 0; i < x.rows(); i += kLanes) {
    const bool full = i + kLanes <= x.rows();
    float* block = out + i;
    for (size_t sample = begin; sample < end; ++sample, block += width * x.dim) {
      const size_t vectorised = full ? whole : 0;
      if (full) {
        const float *r0 = x.row(i, sample), *r1 = x.row(i + 1, sample), *r2 = x.row(i + 2, sample),
                    *r3 = x.row(i + 3, sample);
        for (size_t k = 0; k < whole; k += kLanes) {
          Vec a = load(r0 + k), b = load(r1 + k), c = load(r2 + k), d = load(r3 + k);
          transpose(a, b, c, d);
          float* to = block + k * width;
          store(to, a), store(to + width, b), store(to + 2 * width, c), store(to + 3 * width, d);
        }
      }
      for (size_t a = i; a < std::min(i + kLanes, x.rows()); ++a)
        for (size_t k = vectorised; k < x.dim; ++k) block[k * width + a - i] = x.row(a, sample)[k];
    }
  }
}

KARVAN_INLINE void forward(const Shape& x, size_t begin, size_t end, float* out, size_t out_stride) {
  const size_t n = x.rows(), width = padded(n);
  std::vector<float> scratch(kTogether * width * x.dim);
  for (size_t sample = begin; sample < end; ++sample) {
    const size_t turn = (sample - begin) % kTogether;
    if (turn == 0) transposed(x, sample, std::min(sample + kTogether, end), scratch.data(), width);
    const float* columns = scratch.data() + turn * width * x.dim;
    float* to = out + sample * out_stride;
    for (size_t i = 0; i < n; i += kLanes) {
      const size_t rows = std::min(kLanes, n - i), last = i / kLanes;  // the block of columns on the diagonal
      for (size_t block = 0, count; block <= last; block += count) {
        count = next_columns(last + 1 - block);
        const size_t diagonal = last - block;  // the last register of columns, if it is there
        multiply(count, columns + i, width, columns + block * kLanes, width, x.dim,
                 [&](size_t a, size_t c, Vec sums) __attribute__((always_inline)) {
                   if (a >= rows) return;
                   float* row = to + (i + a) * (i + a - 1) / 2 + (block + c) * kLanes;
                   if (c != diagonal) return store(row, sums);
                   for (size_t lane = 0; lane < a; ++lane) row[lane] = sums[lane];
                 });
      }
    }
  }
}

// G from its lower triangle; the diagonal and what fills it up stay as they are.
KARVAN_INLINE void symmetric(const float* triangle, size_t n, float* out, size_t width) {
  const auto row = [&](size_t i) { return triangle + i * (i - 1) / 2; };
  const size_t whole = n / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t j = 0; j < i; j += kLanes) {
      Vec a = load(row(i) + j), b = load(row(i + 1) + j), c = load(row(i + 2) + j), d = load(row(i + 3) + j);
      float *below = out + i * width + j, *above = out + j * width + i;
      store(below, a), store(below + width, b), store(below + 2 * width, c), store(below + 3 * width, d);
      transpose(a, b, c, d);
      store(above, a), store(above + width, b), store(above + 2 * width, c), store(above + 3 * width, d);
    }
    for (size_t a = 1; a < kLanes; ++a)
      for (size_t j = i; j < i + a; ++j) out[(i + a) * width + j] = out[j * width + i + a] = row(i + a)[j];
  }
  for (size_t i = whole; i < n; ++i)
    for (size_t j = 0; j < i; ++j) out[i * width + j] = out[j * width + i] = row(i)[j];
}

// X of some samples, one after the other, `width` floats a row; columns from dim on stay as they are.
KARVAN_INLINE void copied(const Shape& x, size_t begin, size_t end, float* out, size_t width) {
  const size_t whole = x.dim / kLanes * kLanes;
  for (size_t i = 0; i < x.rows(); ++i) {
    for (size_t sample = begin; sample < end; ++sample) {
      const float* row = x.row(i, sample);
      float* to = out + ((sample - begin) * x.rows() + i) * width;
      size_t k = 0;
      for (; k < whole; k += kLanes) store(to + k, load(row + k));
      for (; k < x.dim; ++k) to[k] = row[k];
    }
  }
}

KARVAN_INLINE void backward(const Shape& x, size_t begin, size_t end, const float* out_gradient, size_t out_stride,
                            float* gradient) {
  const size_t n = x.rows(), width = padded(n), dim = x.dim, filled = padded(dim);
  std::vector<float> g(n * width), scratch(kTogether * n * filled);
  for (size_t sample = begin; sample < end; ++sample) {
    symmetric(out_gradient + sample * out_stride, n, g.data(), width);
    const size_t turn = (sample - begin) % kTogether;
    if (turn == 0) copied(x, sample, std::min(sample + kTogether, end), scratch.data(), filled);
    const float* rows = scratch.data() + turn * n * filled;
    float* to = gradient + sample * n * dim;
    for (size_t i = 0; i < n; i += kLanes) {
      const size_t height = std::min(kLanes, n - i), blocks = filled / kLanes;
      for (size_t block = 0, count; block < blocks; block += count) {
        count = next_columns(blocks - block);
        const size_t k = block * kLanes;
        multiply(count, g.data() + i, width, rows + k, filled, n,
                 [&](size_t a, size_t c, Vec sums) __attribute__((always_inline)) {
                   if (a >= height) return;
                   const size_t column = k + c * kLanes;
                   float* row = to + (i + a) * dim + column;
                   if (column + kLanes <= dim) return store(row, sums);
                   for (size_t lane = 0; column + lane < dim; ++lane) row[lane] = sums[lane];
                 });
      }
    }
  }
}

template <class F>
void in_tasks(size_t samples, F&& f) {
  const auto tasks = static_cast<uint32_t>((samples + kSamplesPerTask - 1) / kSamplesPerTask);
  parallel(tasks, [&](uint32_t task) {
    f(task * kSamplesPerTask, std::min(samples, (task + 1) * kSamplesPerTask));
  });
}

}  // namespace

void interact(const std::vector<Vectors>& vectors, size_t samples, size_t dim, float* out, size_t out_stride) {
  const Shape x{vectors, dim};
  in_tasks(samples, [&](size_t begin, size_t end) { run_widest<forward, const Shape&>(x, begin, end, out, out_stride); });
}

void interact_backward(const std::vector<Vectors>& vectors, size_t samples, size_t dim, const float* out_gradient,
                       size_t out_stride, float* gradient) {
  const Shape x{vectors, dim};
  in_tasks(samples, [&](size_t begin, size_t end) {
    run_widest<backward, const Shape&>(x, begin, end, out_gradient, out_stride, gradient);
  });
}

}  // namespace karvan
