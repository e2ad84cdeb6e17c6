// SPDX-License-Identifier: Apache-2.0
// Division by numbers that many threads or many elements share.
#pragma once
#include <cstdint>

#include "../core/fast_divide.h"

namespace fi::cuda {

// Quotients of non-negative 64-bit integers below `limit`; by multiplication where they have 31 bits.
struct IndexDivide {
  FastDivide fast;
  int64_t divisor = 1;
  bool narrow = true;

  IndexDivide() = default;
  IndexDivide(int64_t d, int64_t limit) : divisor(d), narrow(d <= INT32_MAX && limit <= INT32_MAX) {
    if (narrow) fast = FastDivide(int32_t(d));
  }

  __device__ __forceinline__ int64_t divide(int64_t n) const {
    return narrow ? fast.divide(int32_t(n)) : n / divisor;
  }
};

// x / scale for many x, correctly rounded; NaN keeps its sign and payload, as on the CPU.
class ScaleDivide {
 public:
  __device__ __forceinline__ explicit ScaleDivide(float scale) : scale_(scale), inverse_(1.0f / scale) {
    const uint32_t bits = __float_as_uint(scale);
    // Powers of two with a normal reciprocal: the product is the quotient.
    power_of_two_ = (bits & 0x7fffffu) == 0 && bits - kLeast <= (253u << 23) - kLeast;
  }

  __device__ __forceinline__ bool by_one() const { return scale_ == 1.0f; }

  template <int N>
  __device__ __forceinline__ void divide(float (&x)[N]) const {
    if (power_of_two_) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = keep_nan(x[i], x[i] * inverse_);
      return;
    }
    bool plain = is_plain(scale_);
#pragma unroll
    for (int i = 0; i < N; ++i) plain = plain && (is_plain(fabsf(x[i])) || x[i] == 0.0f);
    if (plain) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = plain_quotient(x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = keep_nan(x[i], x[i] / scale_);
    }
  }

 private:
  static constexpr uint32_t kLeast = 1u << 23;

  // Quotients of two such numbers, and their remainders, neither overflow nor lose digits.
  __device__ __forceinline__ static bool is_plain(float x) { return x >= 0x1p-50f && x <= 0x1p50f; }

  // Two Newton steps from x * (1 / scale), the first to within one unit in the last place, the second to the
  // nearest (Markstein 1990); a fraction of what the division of arbitrary floats costs.
  __device__ __forceinline__ float plain_quotient(float x) const {
    const float rough = x * inverse_;
    const float close = fmaf(fmaf(-rough, scale_, x), inverse_, rough);
    // The last sum turns -0 into 0.
    return copysignf(fmaf(fmaf(-close, scale_, x), inverse_, close), x);
  }

  __device__ __forceinline__ static float keep_nan(float x, float quotient) {
    return x == x ? quotient : __uint_as_float(__float_as_uint(x) | 0x400000u);
  }

  float scale_, inverse_;
  bool power_of_two_;
};

}  // namespace fi::cuda
