// SPDX-License-Identifier: Apache-2.0
// Attention states (o, lse) and their union: the one implementation that the executor, the reduction map
// and the merge operators share.
#pragma once
#include "simd.h"

namespace fi::cpu {

// lse of the empty set, neutral for the union.
inline constexpr float kEmpty = -kInfinity;

struct UnionWeights {
  float a, b, lse;
};

// Neither side may be empty.
inline UnionWeights union_weights(float lse_a, float lse_b) {
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float a = exp(lse_a - top), b = exp(lse_b - top);
  const float sum = a + b;
  return {a / sum, b / sum, top + std::log(sum)};
}

// (o, lse) becomes (o, lse) ⊕ (other, lse_other). An empty side leaves the bits of the other one, whatever
// its o holds; the union of two empty sets is o = 0. `o` has `dim` elements rounded up to whole vectors.
inline void merge_into(float* o, float& lse, const float* other, float lse_other, int dim) {
  if (lse_other == kEmpty) {
    if (lse == kEmpty)
      for (int d = 0; d < dim; d += kLanes) store(o + d, Vec{});
    return;
  }
  if (lse == kEmpty) {
    for (int d = 0; d < dim; d += kLanes) store(o + d, load(other + d));
    lse = lse_other;
    return;
  }
  const UnionWeights w = union_weights(lse, lse_other);
  const Vec a = splat(w.a), b = splat(w.b);
  for (int d = 0; d < dim; d += kLanes) store(o + d, fma(load(o + d), a, load(other + d) * b));
  lse = w.lse;
}

// The same of outputs that are sums, without a softmax.
inline void add_into(float* o, float& lse, const float* other, int dim) {
  for (int d = 0; d < dim; d += kLanes) store(o + d, load(o + d) + load(other + d));
  lse = 0.0f;
}

}  // namespace fi::cpu
