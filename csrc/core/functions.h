// SPDX-License-Identifier: Apache-2.0
// The mathematics that the functors of a user's variant are given: the same names for a float on any device
// and, on the CPU, for vectors of them (../cpu/functions.h).
#pragma once
#include <cmath>

#include "host_device.h"

namespace fi::functions {

FI_DEVICE float exp(float x) { return expf(x); }
FI_DEVICE float exp2(float x) { return exp2f(x); }
FI_DEVICE float log(float x) { return logf(x); }
FI_DEVICE float log2(float x) { return log2f(x); }
FI_DEVICE float sin(float x) { return sinf(x); }
FI_DEVICE float cos(float x) { return cosf(x); }
FI_DEVICE float tanh(float x) { return tanhf(x); }
FI_DEVICE float sqrt(float x) { return sqrtf(x); }
FI_DEVICE float abs(float x) { return fabsf(x); }
FI_DEVICE float max(float a, float b) { return fmaxf(a, b); }
FI_DEVICE float min(float a, float b) { return fminf(a, b); }
FI_DEVICE float fma(float a, float b, float c) { return fmaf(a, b, c); }
FI_DEVICE float to_float(int x) { return float(x); }
FI_DEVICE float where(bool condition, float a, float b) { return condition ? a : b; }
FI_DEVICE float rsqrt(float x) {
#if defined(__CUDACC__)
  return rsqrtf(x);
#else
  return 1.0f / sqrtf(x);
#endif
}
// On a GPU without the branches of an exact division, behind which nothing is read ahead: within 2^-17 of the
// value, and 0 below -87.
FI_DEVICE float sigmoid(float x) {
#if defined(__CUDACC__)
  return __fdividef(1.0f, 1.0f + __expf(-x));
#else
  return 1.0f / (1.0f + expf(-x));
#endif
}

// The nearest integer, for |x| < 2^22. On a GPU two additions: a conversion has a quarter of their rate or
// less, and shares its unit with sines.
FI_DEVICE float round(float x) {
#if defined(__CUDACC__)
  return (x + 12582912.0f) - 12582912.0f;
#else
  return rintf(x);
#endif
}

#if defined(__CUDACC__)
// Of 2 pi x. The hardware's sine is within 2^-21 on one turn.
FI_DEVICE float sin_turns(float x) { return __sinf((x - round(x)) * 6.28318531f); }
FI_DEVICE float cos_turns(float x) { return __cosf((x - round(x)) * 6.28318531f); }
#endif

}  // namespace fi::functions

#if !defined(__CUDACC__)
#include "../cpu/functions.h"
#endif

// Inside of a functor these names hide those of the C library, which know no vectors.
#define FI_FUNCTIONS                                                                      \
  using fi::functions::exp, fi::functions::exp2, fi::functions::log, fi::functions::log2; \
  using fi::functions::sin, fi::functions::cos, fi::functions::tanh, fi::functions::sqrt; \
  using fi::functions::abs, fi::functions::max, fi::functions::min, fi::functions::fma;   \
  using fi::functions::to_float, fi::functions::where, fi::functions::rsqrt;              \
  using fi::functions::sigmoid, fi::functions::round, fi::functions::sin_turns;           \
  using fi::functions::cos_turns;
