// SPDX-License-Identifier: Apache-2.0
// Rounding of floats to shorter formats: one source for the vectors of a host and the lanes of a GPU.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace fi {

// Rounds to nearest even to sign, exponent and `Mantissa` bits; what is beyond `largest` becomes `overflow`.
// Lanes: F (float or a vector of floats), U (as many 32-bit integers), bits(F) and value(U) that reinterpret,
// truncate(F) to integers.
template <int Mantissa, int Bias, class Lanes>
FI_HOST_DEVICE typename Lanes::U encode(typename Lanes::F x, float largest, uint32_t overflow, uint32_t nan) {
  using F = typename Lanes::F;
  using U = typename Lanes::U;
  const U sign = (Lanes::bits(x) >> 31) << (Mantissa == 10 ? 15 : 7);
  F magnitude = Lanes::value(Lanes::bits(x) & 0x7fffffffu);
  magnitude = magnitude > 2.0f * largest ? F{} + 2.0f * largest : magnitude;
  // Adding the magic number aligns the last bit that the format keeps with the last bit of a float.
  U exponent = Lanes::bits(magnitude) >> 23;
  constexpr uint32_t kSmallest = 127 + 1 - Bias;
  exponent = exponent < kSmallest ? U{} + kSmallest : exponent;
  const F magic = Lanes::value(((exponent + (23 - Mantissa)) << 23) | 0x400000u);
  const F rounded = (magnitude + magic) - magic;
  const U normal = (Lanes::bits(rounded) >> (23 - Mantissa)) - (uint32_t(127 - Bias) << Mantissa);
  const F units = rounded * (float(1u << (Bias - 1)) * float(1u << Mantissa));
  U code = Lanes::bits(rounded) < (kSmallest << 23) ? Lanes::truncate(units) : normal;
  code = rounded > largest ? U{} + overflow : code;
  return (x == x ? code : U{} + nan) | sign;
}

}  // namespace fi
