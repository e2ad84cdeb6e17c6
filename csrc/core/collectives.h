// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over the threads of a block. `Block` is a CUDA thread block, or its emulation on the host:
// thread(), sync(), ballot(), shuffle(), shuffle_up(), shuffle_xor(), all of them called by whole warps.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace fi {

inline constexpr int kWarp = 32;
inline constexpr uint32_t kSaturated = 0x7fffffff;

// Associative, so that sums that saturate do not depend on their order either.
FI_DEVICE uint32_t saturating_add(uint32_t a, uint32_t b) {
  const uint32_t sum = a + b;
  return sum < kSaturated ? sum : kSaturated;
}

struct Sum {
  template <class T>
  FI_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  FI_DEVICE T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Or {
  template <class T>
  FI_DEVICE T operator()(T a, T b) const {
    return a | b;
  }
};

template <class Block, class T, class Op>
FI_DEVICE T warp_reduce(Block& block, T v, Op op) {
  for (int d = kWarp / 2; d; d /= 2) v = op(v, block.shuffle_xor(v, d));
  return v;
}

// Values of all warps, in two halves by turns: one barrier a collective, since a half is written again only
// after the barrier of the next one.
template <int kWarps, int kFields>
struct CollectiveSlots {
  int64_t reduced[2][kWarps];
  uint32_t scanned[2][kFields][kWarps];
};

template <class Block, int kFields>
class Collectives {
 public:
  static constexpr int kWarps = Block::kThreads / kWarp;
  using Slots = CollectiveSlots<kWarps, kFields>;

  FI_DEVICE Collectives(Block& block, Slots& slots)
      : block_(block), slots_(slots), warp_(block.thread() / kWarp), lane_(block.thread() % kWarp) {}

  // Of all threads, to all threads; `neutral` is op's. Ends a phase: what was written before is visible
  // after.
  template <class T, class Op>
  FI_DEVICE T reduce(T v, Op op, T neutral) {
    int64_t (&slots)[kWarps] = slots_.reduced[half_];
    v = warp_reduce(block_, v, op);
    if (lane_ == 0) slots[warp_] = int64_t(v);
    block_.sync();
    half_ ^= 1;
    return warp_reduce(block_, lane_ < kWarps ? T(slots[lane_]) : neutral, op);
  }

  // Replaces every value by the sum of those of the threads before; saturates. Ends a phase.
  template <int N>
  FI_DEVICE void exclusive_scan(uint32_t (&v)[N], uint32_t (&total)[N]) {
    static_assert(N <= kFields);
    uint32_t own[N];
    for (int k = 0; k < N; ++k) {
      own[k] = v[k];
      v[k] = inclusive(v[k]);
      if (lane_ == kWarp - 1) slots_.scanned[half_][k][warp_] = v[k];
    }
    block_.sync();
    for (int k = 0; k < N; ++k) {
      const uint32_t warps = inclusive(lane_ < kWarps ? slots_.scanned[half_][k][lane_] : 0);
      const uint32_t before = block_.shuffle(warps, warp_ > 0 ? warp_ - 1 : 0);
      total[k] = block_.shuffle(warps, kWarps - 1);
      v[k] = saturating_add(v[k] - own[k], warp_ > 0 ? before : 0);
    }
    half_ ^= 1;
  }

 private:
  FI_DEVICE uint32_t inclusive(uint32_t v) {
    for (int d = 1; d < kWarp; d *= 2) {
      const uint32_t left = block_.shuffle_up(v, d);
      if (lane_ >= d) v = saturating_add(v, left);
    }
    return v;
  }

  Block& block_;
  Slots& slots_;
  const int warp_, lane_;
  int half_ = 0;
};

}  // namespace fi
