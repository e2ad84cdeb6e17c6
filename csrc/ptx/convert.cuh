// SPDX-License-Identifier: Apache-2.0
// PTX ISA, "Data Movement and Conversion Instructions: cvt": single floats to 16-bit ones and back, pairs of
// floats to fp8. Every NaN becomes the one NaN of the result's type.
#pragma once
#include <cstdint>

namespace fi::ptx {

__device__ __forceinline__ float half_to_float(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

__device__ __forceinline__ uint16_t float_to_half(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// The first float in the low byte; beyond the largest finite number saturates, infinities too.
__device__ __forceinline__ uint16_t floats_to_e4m3(float lo, float hi) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(hi), "f"(lo));
  return bits;
}

__device__ __forceinline__ uint16_t floats_to_e5m2(float lo, float hi) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(hi), "f"(lo));
  return bits;
}
#endif

}  // namespace fi::ptx
