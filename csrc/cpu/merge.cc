// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

#include <vector>

#include "dtype.h"
#include "state.h"

namespace fi::cpu {
namespace {

constexpr int64_t kSerialElements = 1 << 15;

template <class T>
void load_row(const T* from, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int n = int(dim - d < kLanes ? dim - d : kLanes);
    store(to + d, n == kLanes ? load_as_float(from + d) : load_as_float(from + d, n));
  }
}

template <class T>
void store_row(const float* from, int64_t dim, T* to) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int n = int(dim - d < kLanes ? dim - d : kLanes);
    if (n == kLanes)
      store_float(to + d, load(from + d));
    else
      store_float(to + d, load(from + d), n);
  }
}

// One row of one head. All parts are read before anything is written: `out` may be one of them.
template <class T>
void merge_row(const MergeParams& p, int64_t row, int64_t head, float* state, float* part) {
  const int padded = int((p.dim + kLanes - 1) / kLanes * kLanes);
  const auto o_at = [&](int i) {
    return static_cast<const T*>(p.o[i]) + row * p.o_stride_row[i] + head * p.o_stride_head[i];
  };
  const auto lse_at = [&](int i) {
    return p.lse[i] + row * p.lse_stride_row[i] + head * p.lse_stride_head[i];
  };
  T* out = static_cast<T*>(p.out) + row * p.out_stride_row + head * p.out_stride_head;
  float* out_lse = p.out_lse + row * p.out_lse_stride_row + head * p.out_lse_stride_head;

  float lse = kEmpty;
  for (int d = 0; d < padded; d += kLanes) store(state + d, Vec{});
  const bool merged = !p.mask || p.mask[row];
  if (!merged) {
    // A copy, bit for bit: the row is not a state that this call looks at.
    const float first = *lse_at(0);
    if (out != o_at(0))
      std::memmove(static_cast<void*>(out), static_cast<const void*>(o_at(0)), size_t(p.dim) * sizeof(T));
    *out_lse = first;
    return;
  }
  for (int64_t i = 0; i < p.num_parts; ++i) {
    const int side = i == 0 ? 0 : 1;
    const int64_t step = i == 0 ? 0 : i - 1;
    load_row(o_at(side) + step * p.o_stride_part, p.dim, part);
    merge_into(state, lse, part, lse_at(side)[step * p.lse_stride_part], padded);
  }
  store_row(state, p.dim, out);
  *out_lse = lse;
}

template <class T>
void merge_all(const MergeParams& p, int num_threads) {
  const int64_t rows = p.num_rows * p.num_heads;
  const int threads = rows * p.dim < kSerialElements ? 1 : num_threads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> memory(2 * size_t(p.dim + kLanes));
    float* state = memory.data();
    float* part = state + p.dim + kLanes;
#pragma omp for
    for (int64_t i = 0; i < rows; ++i) merge_row<T>(p, i / p.num_heads, i % p.num_heads, state, part);
  }
}

}  // namespace

void merge_states(const MergeParams& p, int num_threads) {
  if (p.dtype == Dtype::float32)
    merge_all<dtype::float32>(p, num_threads);
  else if (p.dtype == Dtype::float16)
    merge_all<dtype::float16>(p, num_threads);
  else
    merge_all<dtype::bfloat16>(p, num_threads);
}

}  // namespace fi::cpu
