// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over the threads of a block. `Block` is a CUDA thread block, or its emulation on the host:
// thread(), sync(), and, called by whole warps, sync_warp(), ballot(), shuffle(), shuffle_up(), warp_sum(),
// warp_max(), warp_or().
#pragma once
#include <bit>
#include <cstdint>

#include "host_device.h"

namespace fi {

inline constexpr int kWarp = 32;
inline constexpr uint32_t kSaturated = 0x7fffffff;

FI_DEVICE int count_bits(uint32_t v) {
#if defined(__CUDA_ARCH__)
  return __popc(v);
#else
  return std::popcount(v);
#endif
}

// Of v != 0.
FI_DEVICE int lowest_bit(uint32_t v) {
#if defined(__CUDA_ARCH__)
  return __ffs(int(v)) - 1;
#else
  return std::countr_zero(v);
#endif
}

// Associative, so that sums that saturate do not depend on their order either.
FI_DEVICE uint32_t saturating_add(uint32_t a, uint32_t b) {
  const uint32_t sum = a + b;
  return sum < kSaturated ? sum : kSaturated;
}

// Of non-negative values below 2^63 whose sum is, in pieces that 32 bits can add up for a warp.
template <class Block>
FI_DEVICE int64_t warp_sum64(Block& block, int64_t v) {
  constexpr int kPiece = 27;
  constexpr int64_t kMask = (int64_t(1) << kPiece) - 1;
  const int64_t low = block.warp_sum(uint32_t(v & kMask)),
                middle = block.warp_sum(uint32_t(v >> kPiece & kMask));
  const int64_t high = block.warp_sum(uint32_t(v >> 2 * kPiece));
  return low + (middle << kPiece) + (high << 2 * kPiece);
}

template <class Block>
FI_DEVICE int64_t warp_max64(Block& block, int64_t v) {
  const uint32_t high = block.warp_max(uint32_t(v >> 32));
  const uint32_t low = block.warp_max(uint32_t(v >> 32) == high ? uint32_t(v) : 0);
  return int64_t(high) << 32 | low;
}

// The saturating sum over a warp's lanes up to the caller's. A call, for its code is long and seldom runs.
template <class Block>
FI_DEVICE_CALL uint32_t sum_of_lanes(Block& block, uint32_t v) {
  for (int d = 1; d < kWarp; d *= 2) {
    const uint32_t left = block.shuffle_up(v, d);
    if (block.thread() % kWarp >= d) v = saturating_add(v, left);
  }
  return v;
}

template <int kWarps, int kFields>
struct CollectiveSlots {
  int64_t posted[2][kFields][kWarps];  // two halves by turns
  uint32_t totals[kFields][kWarps];
  uint32_t before[kFields][kWarps];
  uint32_t total[kFields];
};

template <class Block, int kFields>
class Collectives {
 public:
  static constexpr int kWarps = Block::kThreads / kWarp;
  using Slots = CollectiveSlots<kWarps, kFields>;

  FI_DEVICE Collectives(Block& block, Slots& slots)
      : block_(block), slots_(slots), warp_(block.thread() / kWarp), lane_(block.thread() % kWarp) {}

  // A reduction over the block: each warp posts its value, all meet, each reduces what was posted. Posting
  // again needs no further barrier, for a half is written again only after the next meet().
  FI_DEVICE void post(int field, int64_t of_warp) {
    if (lane_ == 0) slots_.posted[half_][field][warp_] = of_warp;
  }
  FI_DEVICE void meet() {
    block_.sync();
    half_ ^= 1;
  }
  // To lane i what warp i posted, 0 to lanes without a warp.
  FI_DEVICE int64_t posted(int field) const {
    return lane_ < kWarps ? slots_.posted[half_ ^ 1][field][lane_] : 0;
  }

  // Replaces every value by the sum of those of the threads before; saturates. Ends a phase.
  template <int N>
  FI_DEVICE void exclusive_scan(uint32_t (&v)[N], uint32_t (&total)[N]) {
    static_assert(N <= kFields && N <= kWarps);
    for (int k = 0; k < N; ++k) {
      const uint32_t own = v[k], sum = inclusive_of_few(own);
      v[k] = sum - own;
      if (lane_ == kWarp - 1) slots_.totals[k][warp_] = sum;
    }
    block_.sync();
    // A warp a field; for all warps to do this for themselves would take longer than a barrier.
    if (warp_ < N) {
      const uint32_t own = lane_ < kWarps ? slots_.totals[warp_][lane_] : 0, sum = sum_of_lanes(block_, own);
      if (lane_ < kWarps) slots_.before[warp_][lane_] = sum - own;
      if (lane_ == kWarp - 1) slots_.total[warp_] = sum;
    }
    block_.sync();
    for (int k = 0; k < N; ++k) {
      v[k] = saturating_add(v[k], slots_.before[k][warp_]);
      total[k] = slots_.total[k];
    }
  }

 private:
  // Mostly each value is 0 or 1: no request has several tiles, no tile several items.
  FI_DEVICE uint32_t inclusive_of_few(uint32_t v) {
    if (block_.ballot(v > 1)) return sum_of_lanes(block_, v);
    return uint32_t(count_bits(block_.ballot(v) & (~0u >> (kWarp - 1 - lane_))));
  }

  Block& block_;
  Slots& slots_;
  const int warp_, lane_;
  int half_ = 0;
};

}  // namespace fi
