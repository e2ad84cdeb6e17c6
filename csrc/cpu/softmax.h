// SPDX-License-Identifier: Apache-2.0
// The online softmax of one row over one KV tile.
#pragma once
#include <algorithm>

#include "microkernels.h"
#include "state.h"

namespace fi::cpu {

// Bits [begin, end) of a key tile.
inline uint64_t bit_range(int begin, int end) {
  if (end <= begin) return 0;
  const uint64_t below = end >= 64 ? ~uint64_t(0) : (uint64_t(1) << end) - 1;
  return below & ~((uint64_t(1) << begin) - 1);
}

// Exponents are counted in powers of two: one multiplication less for each of them.
inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147182f;

// Keys seen so far: their largest exponent, and the sum of 2^(exponent - max).
struct RunningSoftmax {
  float max = kEmpty;
  float sum = 0.0f;

  // Natural log of the sum of exponentials. Some key was seen.
  float lse() const { return (max + std::log2(sum)) * kLn2; }
};

// s[key] becomes 2^(s * scale - max), zero where `visible` has no bit; scale > 0. Returns what earlier sums
// have to be multiplied with.
inline float soften(float* s, uint64_t visible, float scale, RunningSoftmax& state) {
  constexpr int kVecs = kKeyTile / kLanes;
  if (visible == 0) {
    for (int j = 0; j < kVecs; ++j) store(s + j * kLanes, Vec{});
    return 1.0f;
  }
  Vec top = splat(kEmpty);
#pragma GCC unroll 16
  for (int j = 0; j < kVecs; ++j) top = max_where(visible >> (j * kLanes), load(s + j * kLanes), top);
  const float old_max = state.max;
  const float new_max = std::max(old_max, reduce_max(top) * scale);
  // With nothing but -inf so far the difference would be NaN.
  const float base = new_max == kEmpty ? 0.0f : new_max;
  Vec sum{};
#pragma GCC unroll 16
  for (int j = 0; j < kVecs; ++j) {
    const Vec x = fused(load(s + j * kLanes), splat(scale), splat(-base));
    const Vec e = exp2_where(visible >> (j * kLanes), x);
    sum += e;
    store(s + j * kLanes, e);
  }
  const float alpha = new_max == old_max ? 1.0f : exp2(old_max - base);
  state.max = new_max;
  state.sum = state.sum * alpha + reduce_add(sum);
  return alpha;
}

}  // namespace fi::cpu
