// SPDX-License-Identifier: Apache-2.0
// The online softmax of one row over one KV tile.
#pragma once
#include <algorithm>

#include "microkernels.h"
#include "state.h"

namespace fi::cpu {

inline Vec select_bits(uint64_t bits, Vec x, float otherwise) {
#if defined(FI_AVX512)
  return (Vec)_mm512_mask_mov_ps((__m512)splat(otherwise), __mmask16(bits), (__m512)x);
#else
  UVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = 1u << i;
  return (lane & uint32_t(bits)) != 0u ? x : splat(otherwise);
#endif
}

// Bits [begin, end) of a key tile.
inline uint64_t bit_range(int begin, int end) {
  if (end <= begin) return 0;
  const uint64_t below = end >= 64 ? ~uint64_t(0) : (uint64_t(1) << end) - 1;
  return below & ~((uint64_t(1) << begin) - 1);
}

// Keys seen so far: their largest logit, and the sum of exp(logit - max).
struct RunningSoftmax {
  float max = kEmpty;
  float sum = 0.0f;
};

// Dot products s[64] become exp(logit - max), zero where `visible` has no bit, with the logit
// transform(dot * scale, first key of the vector). Returns what earlier sums have to be multiplied with.
template <class F>
inline float soften(float* s, uint64_t visible, float scale, RunningSoftmax& state, F transform) {
  constexpr int kVecs = kKeyTile / kLanes;
  if (visible == 0) {
    for (int j = 0; j < kVecs; ++j) store(s + j * kLanes, Vec{});
    return 1.0f;
  }
  Vec x[kVecs];
  Vec top = splat(kEmpty);
#pragma GCC unroll 16
  for (int j = 0; j < kVecs; ++j) {
    x[j] = select_bits(visible >> (j * kLanes), transform(load(s + j * kLanes) * scale, j * kLanes), kEmpty);
    top = max(top, x[j]);
  }
  const float old_max = state.max;
  const float new_max = std::max(old_max, reduce_max(top));
  // With nothing but -inf so far the difference would be NaN.
  const float base = new_max == kEmpty ? 0.0f : new_max;
  Vec sum{};
#pragma GCC unroll 16
  for (int j = 0; j < kVecs; ++j) {
    const Vec e = exp(x[j] - base);
    sum += e;
    store(s + j * kLanes, e);
  }
  const float alpha = new_max == old_max ? 1.0f : exp(old_max - base);
  state.max = new_max;
  state.sum = state.sum * alpha + reduce_add(sum);
  return alpha;
}

}  // namespace fi::cpu
