// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "mma.cuh"

namespace fi::ptx {

struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

template <typename F8>
float float_of(uint8_t x) {
  constexpr int kFraction = __is_same(F8, E4M3) ? 3 : 2, kBias = __is_same(F8, E4M3) ? 7 : 15;
  const int exponent = (x & 0x7f) >> kFraction, fraction = x & ((1 << kFraction) - 1);
  float value = exponent == 0 ? std::ldexp(float(fraction), 1 - kBias - kFraction)
                              : std::ldexp(float(fraction + (1 << kFraction)), exponent - kBias - kFraction);
  if (__is_same(F8, E4M3) ? (x & 0x7f) == 0x7f : exponent == 31 && fraction) value = NAN;
  if (!__is_same(F8, E4M3) && exponent == 31 && !fraction) value = INFINITY;
  return x & 0x80 ? -value : value;
}

template <typename T, typename F8>
uint32_t widen2(uint32_t x) {
  return pack2<T>(float_of<F8>(uint8_t(x)), float_of<F8>(uint8_t(x >> 8)));
}

}  // namespace fi::ptx
