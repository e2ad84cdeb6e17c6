// SPDX-License-Identifier: Apache-2.0
// Pairs of 8-bit floats to pairs of 16-bit floats; exact, NaN stays NaN.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fi::ptx {

struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

// Two E4M3 in the low half of `x` to two halfs, the first in the low half.
__device__ __forceinline__ uint32_t half2_from_e4m3(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  uint32_t y;
  asm("{\n .reg .b16 pair;\n cvt.u16.u32 pair, %1;\n cvt.rn.f16x2.e4m3x2 %0, pair;\n}" : "=r"(y) : "r"(x));
  return y;
#else
  // Exponent and fraction moved to their places in a half, then rebased by 2^8: exact for subnormals too.
  const uint32_t spread = __byte_perm(x, 0, 0x1404);
  const uint32_t moved = (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 1);
  const __half2 scale = __half2half2(__ushort_as_half(0x5C00));  // 2^8
  const __half2 value = __hmul2(reinterpret_cast<const __half2&>(moved), scale);
  uint32_t y = reinterpret_cast<const uint32_t&>(value);
  if ((x & 0x7F) == 0x7F) y |= 0x7E00u;
  if ((x & 0x7F00) == 0x7F00) y |= 0x7E000000u;
  return y;
#endif
}

// An E5M2 is the upper byte of a half.
__device__ __forceinline__ uint32_t half2_from_e5m2(uint32_t x) { return __byte_perm(x, 0, 0x1404); }

// Two values of F8 in the low half of `x` to two values of T.
template <typename T, typename F8>
__device__ __forceinline__ uint32_t widen2(uint32_t x) {
  const uint32_t h = __is_same(F8, E4M3) ? half2_from_e4m3(x) : half2_from_e5m2(x);
  if constexpr (__is_same(T, __half)) {
    return h;
  } else {
    const float2 f = __half22float2(reinterpret_cast<const __half2&>(h));
    const __nv_bfloat162 b = __floats2bfloat162_rn(f.x, f.y);
    return reinterpret_cast<const uint32_t&>(b);
  }
}

}  // namespace fi::ptx
