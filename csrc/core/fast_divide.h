// SPDX-License-Identifier: Apache-2.0
// Division of non-negative 31-bit integers by a launch constant: multiply, shift (Granlund and Montgomery
// 1994).
#pragma once
#include <cstdint>

#include "variant.h"

namespace fi {

struct FastDivide {
  int32_t divisor = 1;
  uint32_t multiplier = 0;
  int32_t shift = 0;

  FastDivide() = default;
  explicit FastDivide(int32_t d) : divisor(d) {
    if (d == 1) return;
    int32_t log2 = 0;
    while ((int64_t(1) << log2) < d) ++log2;
    shift = log2 - 1;
    multiplier = uint32_t(((uint64_t(1) << (32 + shift)) + uint64_t(d) - 1) / uint64_t(d));
  }

  FI_HOST_DEVICE int32_t divide(int32_t n) const {
    if (divisor == 1) return n;
    return int32_t((uint64_t(uint32_t(n)) * multiplier >> 32) >> shift);
  }
};

}  // namespace fi
