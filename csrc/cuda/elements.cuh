// SPDX-License-Identifier: Apache-2.0
// Runs of N neighbouring elements, their conversion to floats and rounding from them. The bits are those of
// the CPU (csrc/cpu/dtype.h), signs and payloads of NaN included.
#pragma once
#include <cstdint>

#include "../core/encode.h"
#include "../core/operators.h"
#include "../ptx/convert.cuh"

namespace fi::cuda {

template <Dtype D>
inline constexpr int kBytes = D == Dtype::float32                           ? 4
                              : D == Dtype::float16 || D == Dtype::bfloat16 ? 2
                                                                            : 1;

namespace detail {

template <int Bytes>
struct BitsOf;
template <>
struct BitsOf<4> {
  using Type = uint32_t;
};
template <>
struct BitsOf<2> {
  using Type = uint16_t;
};
template <>
struct BitsOf<1> {
  using Type = uint8_t;
};

struct Lane {
  using F = float;
  using U = uint32_t;
  __device__ __forceinline__ static U bits(F x) { return __float_as_uint(x); }
  __device__ __forceinline__ static F value(U u) { return __uint_as_float(u); }
  __device__ __forceinline__ static U truncate(F x) { return U(x); }
};

// Two fp8 codes, the first in the low byte.
template <Dtype D>
__device__ __forceinline__ uint16_t encode_fp8(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
  const uint16_t code = D == Dtype::float8_e4m3fn ? ptx::floats_to_e4m3(lo, hi) : ptx::floats_to_e5m2(lo, hi);
  // The instruction drops the sign of NaN.
  const uint32_t signs = ((__float_as_uint(lo) >> 24) & 0x80u) | ((__float_as_uint(hi) >> 16) & 0x8000u);
  return uint16_t(code | signs);
#else
  const auto one = [](float x) {
    return D == Dtype::float8_e4m3fn ? encode<3, 7, Lane>(x, 448.0f, 0x7eu, 0x7fu)
                                     : encode<2, 15, Lane>(x, 57344.0f, 0x7bu, 0x7fu);
  };
  return uint16_t(one(lo) | one(hi) << 8);
#endif
}

template <Dtype D>
__device__ __forceinline__ float decode(uint32_t bits) {
  if constexpr (D == Dtype::float32) {
    return __uint_as_float(bits);
  } else if constexpr (D == Dtype::bfloat16) {
    return __uint_as_float(bits << 16);
  } else {
    static_assert(D == Dtype::float16);
    const float value = ptx::half_to_float(uint16_t(bits));
    const uint32_t nan = (bits & 0x8000u) << 16 | 0x7fc00000u | (bits & 0x3ffu) << 13;
    return value == value ? value : __uint_as_float(nan);
  }
}

template <Dtype D>
__device__ __forceinline__ uint32_t encode_float(float x) {
  const uint32_t u = __float_as_uint(x);
  if constexpr (D == Dtype::float32) {
    return u;
  } else if constexpr (D == Dtype::bfloat16) {
    return x == x ? (u + 0x7fffu + ((u >> 16) & 1u)) >> 16 : u >> 16 | 0x40u;
  } else {
    static_assert(D == Dtype::float16);
    const uint32_t nan = (u >> 16 & 0x8000u) | 0x7e00u | (u >> 13 & 0x3ffu);
    return x == x ? ptx::float_to_half(x) : nan;
  }
}

}  // namespace detail

// Loaded and stored by instructions of up to 16 bytes, so it has to lie at a multiple of its alignment.
template <Dtype D, int N>
struct alignas(N* kBytes<D> < 16 ? N * kBytes<D> : 16) Run {
  static constexpr int kSize = N * kBytes<D>;
  typename detail::BitsOf<kBytes<D>>::Type e[N];
};

template <Dtype D, int N>
__device__ __forceinline__ void to_floats(const Run<D, N>& from, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = detail::decode<D>(from.e[i]);
}

template <Dtype D, int N>
__device__ __forceinline__ Run<D, N> from_floats(const float (&x)[N]) {
  Run<D, N> to;
  if constexpr (kBytes<D> == 1) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t pair = detail::encode_fp8<D>(x[i], i + 1 < N ? x[i + 1] : 0.0f);
      to.e[i] = uint8_t(pair);
      if (i + 1 < N) to.e[i + 1] = uint8_t(pair >> 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to.e[i] = detail::encode_float<D>(x[i]);
  }
  return to;
}

}  // namespace fi::cuda
