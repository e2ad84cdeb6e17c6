// SPDX-License-Identifier: Apache-2.0
// Online softmax over C fragments of m16n8: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) + {0,
// 1}.
#pragma once
#include "../ptx/mma.cuh"
#include "traits.cuh"

namespace fi::sm80 {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Weights are 2^(scale * s - max), the maximum being in units of log2(e) too. `scale` is positive.
template <int kFragments>
struct RowState {
  float max[kFragments][2];
  float sum[kFragments][2];  // of this lane's columns; quad_sum gives the row's

  __device__ __forceinline__ RowState() {
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max[f][r] = -INFINITY;
        sum[f][r] = 0.f;
      }
  }

  // Turns logits into weights and returns the factors by which the outputs so far shrink. All rows of the
  // lane go through each stage together, so that shuffles and exponentials of one row hide behind another's.
  template <int kTiles>
  __device__ __forceinline__ void update(float scale, float (&s)[kFragments][kTiles][4],
                                         float (&shrink)[kFragments][2]) {
    float top[kFragments][2];
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[f][r] = fmaxf(s[f][0][2 * r], s[f][0][2 * r + 1]);
#pragma unroll
        for (int t = 1; t < kTiles; ++t)
          top[f][r] = fmaxf(top[f][r], fmaxf(s[f][t][2 * r], s[f][t][2 * r + 1]));
      }
#pragma unroll
    for (int step = 1; step <= 2; ++step)
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
#pragma unroll
        for (int r = 0; r < 2; ++r) top[f][r] = fmaxf(top[f][r], __shfl_xor_sync(~0u, top[f][r], step));
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[f][r] = fmaxf(max[f][r], top[f][r] * scale);
        const float base = top[f][r] == -INFINITY ? 0.f : top[f][r];
        shrink[f][r] = ptx::exp2_approx(max[f][r] - base);
        max[f][r] = top[f][r];
        float total = 0.f;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          s[f][t][2 * r] = ptx::exp2_approx(fmaf(s[f][t][2 * r], scale, -base));
          s[f][t][2 * r + 1] = ptx::exp2_approx(fmaf(s[f][t][2 * r + 1], scale, -base));
          total += s[f][t][2 * r] + s[f][t][2 * r + 1];
        }
        sum[f][r] = sum[f][r] * shrink[f][r] + total;
      }
  }
};

}  // namespace fi::sm80
