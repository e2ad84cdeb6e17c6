// SPDX-License-Identifier: Apache-2.0
// The online softmax of one row over one KV tile.
#pragma once
#include <algorithm>

#include "../core/variant.h"
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

struct VecMath {
  static Vec tanh(Vec x) { return cpu::tanh(x); }
  static Vec to_float(IVec x) { return __builtin_convertvector(x, Vec); }
};

// Dot products s[64] become logits; index.kv_pos is that of the first key.
template <class Variant>
void transform_row(const AttentionParams& p, const LogitIndex& index, float scale, float* s) {
  IVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int k = 0; k < kKeyTile; k += kLanes) {
    const LogitIndexOf<IVec> at{index.request, index.q_token, index.q_pos, lane + (index.kv_pos + k),
                                index.qo_head, index.kv_head};
    Vec x = load(s + k) * scale;
    if (Variant::has_transform(p)) x = Variant::template logits_transform<VecMath>(p, x, at);
    store(s + k, x);
  }
}

// Weights that are no exponentials: those of keys that the row does not see become zero.
inline void keep_visible(float* s, uint64_t visible) {
  for (int k = 0; k < kKeyTile; k += kLanes) store(s + k, select_bits(visible >> k, load(s + k), 0.0f));
}

// The step of one tile comes in two halves, so that the rows of a block can do the first one together: it is
// a chain of operations that wait for each other. scale > 0 turns dot products into exponents.

// Raises the maximum of the row to that of the tile's visible keys. Returns what earlier sums have to be
// multiplied with.
inline float raise_max(const float* s, uint64_t visible, float scale, RunningSoftmax& state) {
  if (visible == 0) return 1.0f;
  Vec top = splat(kEmpty);
#pragma GCC unroll 16
  for (int k = 0; k < kKeyTile; k += kLanes) top = max_where(visible >> k, load(s + k), top);
  const float old_max = state.max;
  state.max = std::max(old_max, reduce_max(top) * scale);
  if (state.max == old_max) return 1.0f;
  const float alpha = exp2(old_max - state.max);
  state.sum *= alpha;
  return alpha;
}

// s[key] becomes 2^(s * scale - max), zero where `visible` has no bit, and the sum grows by them.
inline void take_exponents(float* s, uint64_t visible, float scale, RunningSoftmax& state) {
  if (visible == 0) {
    for (int k = 0; k < kKeyTile; k += kLanes) store(s + k, Vec{});
    return;
  }
  // With nothing but -inf so far the difference would be NaN.
  const float base = state.max == kEmpty ? 0.0f : state.max;
  Vec sum{};
#pragma GCC unroll 16
  for (int k = 0; k < kKeyTile; k += kLanes) {
    const Vec x = fused(load(s + k), splat(scale), splat(-base));
    const Vec e = exp2_where(visible >> k, x);
    sum += e;
    store(s + k, e);
  }
  state.sum += reduce_add(sum);
}

}  // namespace fi::cpu
