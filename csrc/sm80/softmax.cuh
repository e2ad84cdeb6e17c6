// SPDX-License-Identifier: Apache-2.0
// Online softmax over C fragments of m16n8: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) + {0,
// 1}.
#pragma once
#include <type_traits>

#include "choice.cuh"
#include "traits.cuh"

namespace fi::sm80 {

inline __device__ float quiet_nan() { return __int_as_float(0x7FC00000); }

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Natural log of a row's denominator, and the factor that normalises the row's output.
__device__ __forceinline__ void finish_state(float max, float sum, float& lse, float& inverse) {
  if constexpr (!Variant::kSoftmax) {
    lse = 0.f, inverse = 1.f;
    return;
  }
  lse = sum > 0.f ? max * kLn2 + logf(sum) : -INFINITY;
  inverse = sum > 0.f ? 1.f / sum : 0.f;
  if (sum != sum) lse = inverse = sum;
}

// Keeps the assembler from putting the exponentials of the first row in front of the maximum of the second
// one, during which their unit would idle: nothing passes a branch. It is never taken, for a maximum of NaNs
// is the canonical NaN.
__device__ __forceinline__ void hold_maxima(float a, float b) {
  constexpr int kNoMaximum = 0x7f812345;
  if (__float_as_int(a) == kNoMaximum || __float_as_int(b) == kNoMaximum) __trap();
}

// What weights are rounded to before they multiply values. Beside fp8 values they are halfs whatever the
// queries are: they are more exact there, and one instruction turns two fp8 into halfs where bfloat16 takes
// four. Without softmax or behind a transform nothing says that they fit.
template <class Traits>
using WeightOf = std::conditional_t<Traits::kHalfWeights && Variant::kSoftmax && !Variant::kTransformsValue,
                                    __half, typename Traits::T>;
// Halfs begin at 2^-24: the greatest weight is 2^15 there, so that a row of a million keys loses nothing that
// its sum counts. More must not be, since 2^16 is infinity: what is taken from exponents is rounded up, which
// shows beyond 2^24, where neighbouring floats are more than 1 apart.
template <typename Weight>
inline constexpr float kWeightBits = std::is_same_v<Weight, __half> ? 15.f : 0.f;

// Weights are 2^(scale * s - max), the maximum being in units of log2(e) too, less kWeightBits. `scale` is
// positive.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};  // of this lane's columns; quad_sum gives the row's

  // Raises the maximum of row r to that of logits up to `top`; returns what their exponents lose, and the
  // factor by which the output so far shrinks.
  template <typename Weight>
  __device__ __forceinline__ float raise(int r, float scale, float top, float& shrink) {
    constexpr float kBits = kWeightBits<Weight>;
    top = fmaxf(max[r], kBits > 0.f ? __fmaf_ru(top, scale, -kBits) : top * scale);
    const float base = top == -INFINITY ? 0.f : top;
    shrink = ptx::exp2_approx(max[r] - base);
    max[r] = top;
    return base;
  }

  // Turns logits into weights and returns the factors by which the outputs so far shrink. Both rows of the
  // lane go through each stage together, so that shuffles and exponentials of one hide behind the other's.
  // kRows: 1 where the second row does not exist.
  template <typename Weight, int kRows = 2, int kTiles>
  __device__ __forceinline__ void update(float scale, float (&s)[kTiles][4], float (&shrink)[2]) {
    float top[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      top[r] = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (int t = 1; t < kTiles; ++t) top[r] = fmaxf(top[r], fmaxf(s[t][2 * r], s[t][2 * r + 1]));
    }
#pragma unroll
    for (int step = 1; step <= 2; ++step)
#pragma unroll
      for (int r = 0; r < kRows; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], step));
    hold_maxima(top[0], top[kRows - 1]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float base = raise<Weight>(r, scale, top[r], shrink[r]);
      float total = 0.f;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        s[t][2 * r] = ptx::exp2_approx(fmaf(s[t][2 * r], scale, -base));
        s[t][2 * r + 1] = ptx::exp2_approx(fmaf(s[t][2 * r + 1], scale, -base));
        total += s[t][2 * r] + s[t][2 * r + 1];
      }
      sum[r] = fmaf(sum[r], shrink[r], total);
    }
  }

  // Weights by the maximum so far: whoever does not look for the tile's own has them in little more than half
  // of the time, and later tiles rarely hold a much greater one. Returns false, with state and logits as they
  // were, where a row of the warp would get weights above kMost, has no maximum yet or meets a NaN, all of
  // which its sum shows.
  template <int kRows = 2, int kTiles>
  __device__ __forceinline__ bool weigh_below(float scale, const float (&s)[kTiles][4],
                                              float (&weights)[kTiles][4]) {
    constexpr float kMost = 65536.f;  // small beside the range of floats, in which outputs add up
    // Columns apart: an addition beside each exponential, which waits for none of the others.
    float total[kRows][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2 * kRows; ++e) {
        const float x = ptx::exp2_approx(fmaf(s[t][e], scale, -max[e / 2]));
        total[e / 2][e % 2] = t ? total[e / 2][e % 2] + x : x;
        weights[t][e] = x;
      }
    constexpr int kLast = kRows - 1;
    const float all[2] = {total[0][0] + total[0][1], total[kLast][0] + total[kLast][1]};
    if (__any_sync(~0u, !(all[0] <= kMost && all[kLast] <= kMost))) return false;
    sum[0] += all[0];
    if constexpr (kRows == 2) sum[1] += all[1];
    return true;
  }

  // The same in place of the logits.
  template <int kRows, int kTiles>
  __device__ __forceinline__ bool update_below(float scale, float (&s)[kTiles][4]) {
    float weights[kTiles][4];
    if (!weigh_below<kRows>(scale, s, weights)) return false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2 * kRows; ++e) s[t][e] = weights[t][e];
    return true;
  }

  __device__ __forceinline__ void finish(int r, float& lse, float& inverse) const {
    finish_state(max[r], quad_sum(sum[r]), lse, inverse);
  }
};

// How two states (o, lse) join: o = a * factor_a + b * factor_b. -inf is the neutral element. Without softmax
// outputs add up. The factors sum to one, so a chain of joins may be cut anywhere without changing a bit.
__device__ __forceinline__ void join(float lse_a, float lse_b, float& factor_a, float& factor_b, float& lse) {
  if (lse_b == -INFINITY) {
    factor_a = 1.f, factor_b = 0.f, lse = lse_a;
  } else if (lse_a == -INFINITY) {
    factor_a = 0.f, factor_b = 1.f, lse = lse_b;
  } else if constexpr (!Variant::kSoftmax) {
    // A part that met a fault has lse NaN.
    lse = lse_a + lse_b;
    factor_a = factor_b = lse == lse ? 1.f : lse;
  } else {
    const float top = fmaxf(lse_a, lse_b);
    const float a = ptx::exp2_approx((lse_a - top) * kLog2e), b = ptx::exp2_approx((lse_b - top) * kLog2e);
    const float inverse = 1.f / (a + b);
    factor_a = a * inverse;
    factor_b = b * inverse;
    lse = top + logf(a + b);
    if (lse_a != lse_a || lse_b != lse_b) factor_a = factor_b = lse = lse_a + lse_b;
  }
}

__device__ __forceinline__ float joined(float a, float factor_a, float b, float factor_b) {
  return fmaf(a, factor_a, __fmul_rn(b, factor_b));
}

}  // namespace fi::sm80
