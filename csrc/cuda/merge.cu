// SPDX-License-Identifier: Apache-2.0
// The union of attention states. Some lanes of a warp share a row of one head; each owns runs of its elements
// and folds all parts, in their order, before it writes: the result may lie on one of the parts.
#include "merge.h"

#include <initializer_list>

#include "divide.cuh"
#include "elements.cuh"

namespace fi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kRunBytes = 16;
constexpr int kBatch = 4;  // parts whose loads are in flight together

struct Arguments {
  MergeParams p;
  IndexDivide heads;
  int log2_lanes;  // of a row
};

__device__ __forceinline__ bool is_empty(float lse) { return lse == -INFINITY; }

// (o, lse) becomes (o, lse) ⊕ (x, lse_x). An empty side leaves the bits of the other one, whatever its o
// holds.
template <int N>
__device__ __forceinline__ void fold(float (&o)[N], float& lse, const float (&x)[N], float lse_x) {
  if (is_empty(lse_x)) return;
  if (is_empty(lse)) {
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] = x[i];
    lse = lse_x;
    return;
  }
  const float top = lse > lse_x ? lse : lse_x;
  const float a = expf(lse - top), b = expf(lse_x - top);
  const float sum = a + b;
  const float weight = a / sum, weight_x = b / sum;
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] = fmaf(o[i], weight, x[i] * weight_x);
  lse = top + logf(sum);
}

template <Dtype D>
__device__ __forceinline__ const char* element(const void* base, int64_t index) {
  return static_cast<const char*>(base) + index * kBytes<D>;
}

template <Dtype D, int N>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Arguments a) {
  using Elements = Run<D, N>;
  const MergeParams& p = a.p;
  const int64_t state = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> a.log2_lanes;
  const int lanes = 1 << a.log2_lanes, lane = threadIdx.x & (lanes - 1);
  const bool inside = state < p.num_rows * p.num_heads;
  float* out_lse = nullptr;
  float lse = -INFINITY;
  if (inside) {
    const int64_t row = a.heads.divide(state), head = state - row * p.num_heads;
    const bool merged = !p.mask || p.mask[row];
    const char* o_first = element<D>(p.o[0], row * p.o_stride_row[0] + head * p.o_stride_head[0]);
    const char* o_second = element<D>(p.o[1], row * p.o_stride_row[1] + head * p.o_stride_head[1]);
    const float* lse_first = p.lse[0] + row * p.lse_stride_row[0] + head * p.lse_stride_head[0];
    const float* lse_second = p.lse[1] + row * p.lse_stride_row[1] + head * p.lse_stride_head[1];
    char* out = static_cast<char*>(p.out) + (row * p.out_stride_row + head * p.out_stride_head) * kBytes<D>;
    out_lse = p.out_lse + row * p.out_lse_stride_row + head * p.out_lse_stride_head;
    // The first lane takes one turn even where a head has no elements: there is an lse all the same.
    for (int64_t d = int64_t(lane) * N; d < p.dim || d == 0; d += int64_t(lanes) * N) {
      const bool any = d < p.dim;
      if (!merged) {
        if (any)
          *reinterpret_cast<Elements*>(out + d * kBytes<D>) =
              *reinterpret_cast<const Elements*>(o_first + d * kBytes<D>);
        lse = *lse_first;
        continue;
      }
      float sum[N] = {};
      lse = -INFINITY;
      for (int64_t first = 0; first < p.num_parts; first += kBatch) {
        Elements x[kBatch];
        float x_lse[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int64_t part = first + k;
          x_lse[k] = -INFINITY;
          if (part >= p.num_parts) continue;
          x_lse[k] = part == 0 ? *lse_first : lse_second[(part - 1) * p.lse_stride_part];
          const char* o = part == 0 ? o_first : o_second + (part - 1) * p.o_stride_part * kBytes<D>;
          if (any) x[k] = *reinterpret_cast<const Elements*>(o + d * kBytes<D>);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          float values[N];
          to_floats<D, N>(x[k], values);
          fold(sum, lse, values, x_lse[k]);
        }
      }
      if (any) *reinterpret_cast<Elements*>(out + d * kBytes<D>) = from_floats<D, N>(sum);
    }
  }
  // All lanes have read the parts' lse, on one of which the result may lie.
  __syncwarp();
  if (inside && lane == 0) *out_lse = lse;
}

bool has_runs(const MergeParams& p, int bytes) {
  int64_t all = 0;
  const auto add = [&](const void* base, std::initializer_list<int64_t> strides) {
    all |= int64_t(reinterpret_cast<uintptr_t>(base));
    for (int64_t stride : strides) all |= stride * bytes;
  };
  // The stride of a dimension of one element is arbitrary and multiplies nothing.
  const auto used = [](int64_t size, int64_t stride) { return size > 1 ? stride : 0; };
  for (int i = 0; i < 2; ++i)
    add(p.o[i], {used(p.num_rows, p.o_stride_row[i]), used(p.num_heads, p.o_stride_head[i])});
  add(nullptr, {used(p.num_parts - 1, p.o_stride_part)});
  add(p.out, {used(p.num_rows, p.out_stride_row), used(p.num_heads, p.out_stride_head)});
  return p.dim * bytes % kRunBytes == 0 && all % kRunBytes == 0;
}

template <Dtype D, int N>
cudaError_t launch(const MergeParams& p, cudaStream_t stream) {
  Arguments a{};
  a.p = p;
  const int64_t states = p.num_rows * p.num_heads;
  a.heads = IndexDivide(p.num_heads, states);
  while ((1 << a.log2_lanes) < kWarp && (int64_t(N) << a.log2_lanes) < p.dim) ++a.log2_lanes;
  const int64_t states_a_block = kThreads >> a.log2_lanes;
  const int64_t blocks = (states + states_a_block - 1) / states_a_block;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  merge_kernel<D, N><<<unsigned(blocks), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <Dtype D>
cudaError_t launch_runs(const MergeParams& p, cudaStream_t stream) {
  return has_runs(p, kBytes<D>) ? launch<D, kRunBytes / kBytes<D>>(p, stream) : launch<D, 1>(p, stream);
}

}  // namespace

cudaError_t merge_states(const MergeParams& p, cudaStream_t stream) {
  if (p.num_rows == 0 || p.num_heads == 0) return cudaSuccess;
  if (p.dtype == Dtype::float32) return launch_runs<Dtype::float32>(p, stream);
  if (p.dtype == Dtype::float16) return launch_runs<Dtype::float16>(p, stream);
  return launch_runs<Dtype::bfloat16>(p, stream);
}

}  // namespace fi::cuda
