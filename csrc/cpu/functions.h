// SPDX-License-Identifier: Apache-2.0
// The functions of ../core/functions.h for vectors of floats.
#pragma once
#include <cmath>

#include "simd.h"

namespace fi::functions {

using cpu::IVec;
using cpu::Vec;

namespace detail {
template <class F>
inline Vec each(Vec x, F f) {
  for (int i = 0; i < cpu::kLanes; ++i) x[i] = f(x[i]);
  return x;
}
}  // namespace detail

// e^88 is near the largest float; what lies above becomes infinite in the end.
inline Vec exp(Vec x) {
  const Vec capped = x > 88.0f ? cpu::splat(88.0f) : x;
  const Vec value = cpu::exp(capped);
  return x > 88.72284f ? cpu::splat(cpu::kInfinity) : x > 88.0f ? value * cpu::exp(x - 88.0f) : value;
}
inline Vec exp2(Vec x) {
  return x >= 128.0f ? cpu::splat(cpu::kInfinity) : cpu::exp2(x >= 128.0f ? Vec{} : x);
}
inline Vec log(Vec x) {
  return detail::each(x, [](float v) { return std::log(v); });
}
inline Vec log2(Vec x) {
  return detail::each(x, [](float v) { return std::log2(v); });
}
inline Vec sin(Vec x) {
  return detail::each(x, [](float v) { return std::sin(v); });
}
inline Vec cos(Vec x) {
  return detail::each(x, [](float v) { return std::cos(v); });
}
inline Vec tanh(Vec x) { return cpu::tanh(x); }
inline Vec sqrt(Vec x) {
  return detail::each(x, [](float v) { return std::sqrt(v); });
}
inline Vec abs(Vec x) { return (Vec)((cpu::UVec)x & 0x7fffffffu); }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec max(Vec a, float b) { return max(a, cpu::splat(b)); }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec min(Vec a, float b) { return min(a, cpu::splat(b)); }
inline Vec fma(Vec a, Vec b, Vec c) { return cpu::fused(a, b, c); }
inline Vec fma(Vec a, float b, Vec c) { return cpu::fused(a, cpu::splat(b), c); }
inline Vec to_float(IVec x) { return __builtin_convertvector(x, Vec); }
inline Vec where(IVec condition, Vec a, Vec b) { return condition ? a : b; }
inline Vec where(IVec condition, float a, Vec b) { return condition ? cpu::splat(a) : b; }
inline Vec where(IVec condition, Vec a, float b) { return condition ? a : cpu::splat(b); }
inline Vec where(IVec condition, float a, float b) { return condition ? cpu::splat(a) : cpu::splat(b); }
inline Vec where(bool condition, Vec a, Vec b) { return condition ? a : b; }
inline Vec rsqrt(Vec x) { return 1.0f / sqrt(x); }
inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }
inline Vec round(Vec x) { return cpu::detail::round(x); }

// Sine and cosine of 2 pi x, for |x| < 2^20: the quarter turn next to x decides which polynomial of the rest.
inline void turn(Vec x, Vec& sine, Vec& cosine) {
  const Vec quarter = round(x * 4.0f);
  const Vec r = (x - quarter * 0.25f) * 6.28318531f, z = r * r;
  Vec s = cpu::splat(2.7557319e-6f);
  s = cpu::fma(s, z, cpu::splat(-1.98412698e-4f));
  s = cpu::fma(s, z, cpu::splat(8.33333333e-3f));
  s = cpu::fma(s, z, cpu::splat(-0.166666667f));
  s = cpu::fma(s * z, r, r);
  Vec c = cpu::splat(2.48015873e-5f);
  c = cpu::fma(c, z, cpu::splat(-1.38888889e-3f));
  c = cpu::fma(c, z, cpu::splat(4.16666667e-2f));
  c = cpu::fma(c, z, cpu::splat(-0.5f));
  c = cpu::fma(c, z, cpu::splat(1.0f));
  const IVec q = __builtin_convertvector(quarter, IVec);
  const IVec odd = (q & 1) != 0;
  sine = odd ? c : s;
  cosine = odd ? s : c;
  sine = (q & 2) != 0 ? -sine : sine;
  cosine = ((q + 1) & 2) != 0 ? -cosine : cosine;
}
inline Vec sin_turns(Vec x) {
  Vec s, c;
  turn(x, s, c);
  return s;
}
inline Vec cos_turns(Vec x) {
  Vec s, c;
  turn(x, s, c);
  return c;
}
inline float sin_turns(float x) { return sin_turns(cpu::splat(x))[0]; }
inline float cos_turns(float x) { return cos_turns(cpu::splat(x))[0]; }

}  // namespace fi::functions
