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

// `sum` and the four bytes of a word.
FI_DEVICE uint32_t add_bytes(uint32_t word, uint32_t sum) {
#if defined(__CUDA_ARCH__)
  return __dp4a(word, 0x01010101u, sum);
#else
  for (; word; word >>= 8) sum += word & 0xff;
  return sum;
#endif
}

// The same value, of which a compiler knows nothing before: what follows from it is computed where it is used
// instead of ahead of a loop, on the way of those who never use it.
FI_DEVICE int32_t only_here(int32_t v) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(v));
#endif
  return v;
}

// The first task of a thread where its warp has another kind of tasks from thread() on: both halves of a
// block then fetch code that only one of them runs.
template <class Block>
FI_DEVICE int other_half(const Block& block) {
  static_assert((Block::kThreads & (Block::kThreads - 1)) == 0);
  return block.thread() ^ Block::kThreads / 2;
}

// Associative, so that sums that saturate do not depend on their order either.
FI_DEVICE uint32_t saturating_add(uint32_t a, uint32_t b) {
  const uint32_t sum = a + b;
  return sum < kSaturated ? sum : kSaturated;
}

// Replaces every value by its sum over a warp. Of non-negative values below 2^63 whose sums are, in pieces
// that 32 bits can add up for a warp; mostly the first one holds all of them. The reductions of several
// values do not wait for each other.
template <int N, class Block>
FI_DEVICE void warp_sums64(Block& block, int64_t (&v)[N]) {
  constexpr int kPiece = 27;
  constexpr uint32_t kMask = (uint32_t(1) << kPiece) - 1;
  int64_t sum[N] = {};
  FI_ROLL
  for (int shift = 0;; shift += kPiece) {
    int64_t left = 0;
    FI_UNROLL
    for (int k = 0; k < N; ++k) {
      sum[k] += int64_t(block.warp_sum(uint32_t(v[k]) & kMask)) << shift;
      v[k] >>= kPiece;
      left |= v[k];
    }
    if (!block.ballot(left != 0)) break;
  }
  FI_UNROLL
  for (int k = 0; k < N; ++k) v[k] = sum[k];
}
template <class Block>
FI_DEVICE int64_t warp_sum64(Block& block, int64_t v) {
  int64_t sum[1] = {v};
  warp_sums64(block, sum);
  return sum[0];
}

template <class Block>
FI_DEVICE int64_t warp_max64(Block& block, int64_t v) {
  const uint32_t high = block.warp_max(uint32_t(v >> 32));
  const uint32_t low = block.warp_max(uint32_t(v >> 32) == high ? uint32_t(v) : 0);
  return int64_t(high) << 32 | low;
}

// Replaces every value by its saturating sum over a warp's lanes up to the caller's.
template <int N, class Block>
FI_DEVICE void add_lanes_before(Block& block, uint32_t (&v)[N]) {
  const int lane = block.thread() % kWarp;
  FI_ROLL
  for (int d = 1; d < kWarp; d *= 2) {
    uint32_t left[N];
    FI_UNROLL
    for (int k = 0; k < N; ++k) left[k] = block.shuffle_up(v[k], d);
    FI_UNROLL
    for (int k = 0; k < N; ++k)
      if (lane >= d) v[k] = saturating_add(v[k], left[k]);
  }
}

template <int kWarps, int kFields>
struct CollectiveSlots {
  int64_t posted[2][kFields][kWarps];  // two halves by turns
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

  // Replaces every value by the sum of those of the threads before; saturates. It meets as meet() does: what
  // has been posted to fields from N on is there behind it.
  template <int N>
  FI_DEVICE void exclusive_scan(uint32_t (&v)[N], uint32_t (&total)[N]) {
    begin_scan(v);
    end_scan(v, total);
  }

  // Its two halves: up to the barrier, and behind it. In between a thread may read what has been posted.
  template <int N>
  FI_DEVICE void begin_scan(uint32_t (&v)[N]) {
    static_assert(N <= kFields);
    uint32_t own[N], bits = 0;
    FI_UNROLL
    for (int k = 0; k < N; ++k) {
      own[k] = v[k];
      bits |= v[k];
    }
    bits = block_.warp_or(bits);
    if (bits <= 1) {
      // No request has several tiles, no tile several items.
      FI_UNROLL
      for (int k = 0; k < N; ++k)
        v[k] = uint32_t(count_bits(block_.ballot(v[k]) & (~0u >> (kWarp - 1 - lane_))));
    } else if (N > 1 && bits < kHalfWord / kWarp) {
      add_small_lanes_before(v);
    } else {
      add_lanes_before(block_, v);
    }
    FI_UNROLL
    for (int k = 0; k < N; ++k) {
      if (lane_ == kWarp - 1) slots_.posted[half_][k][warp_] = v[k];
      v[k] -= own[k];
    }
    meet();
  }
  template <int N>
  FI_DEVICE void end_scan(uint32_t (&v)[N], uint32_t (&total)[N]) {
    // Every warp adds up the warps before it: shorter than a second barrier.
    uint32_t of_lane[N];
    bool large = false;
    FI_UNROLL
    for (int k = 0; k < N; ++k) {
      of_lane[k] = uint32_t(posted(k));
      large |= of_lane[k] > kSaturated / kWarp;
    }
    if (block_.ballot(large)) {
      add_lanes_before(block_, of_lane);
      FI_UNROLL
      for (int k = 0; k < N; ++k) {
        const uint32_t before = block_.shuffle(of_lane[k], (warp_ + kWarp - 1) % kWarp);
        if (warp_ > 0) v[k] = saturating_add(v[k], before);
        total[k] = block_.shuffle(of_lane[k], kWarp - 1);
      }
    } else {
      FI_UNROLL
      for (int k = 0; k < N; ++k) {
        v[k] += block_.warp_sum(lane_ < warp_ ? of_lane[k] : 0);
        total[k] = block_.warp_sum(of_lane[k]);
      }
    }
  }

 private:
  static constexpr uint32_t kHalfWord = 1 << 16;

  // Values whose sums fit half a word, two at once.
  template <int N>
  FI_DEVICE void add_small_lanes_before(uint32_t (&v)[N]) {
    constexpr int kWords = (N + 1) / 2;
    uint32_t word[kWords];
    FI_UNROLL
    for (int k = 0; k < kWords; ++k) word[k] = v[2 * k] | (2 * k + 1 < N ? v[2 * k + 1] * kHalfWord : 0);
    FI_ROLL
    for (int d = 1; d < kWarp; d *= 2) {
      FI_UNROLL
      for (int k = 0; k < kWords; ++k) {
        const uint32_t left = block_.shuffle_up(word[k], d);
        if (lane_ >= d) word[k] += left;
      }
    }
    FI_UNROLL
    for (int k = 0; k < N; ++k) v[k] = k % 2 ? word[k / 2] / kHalfWord : word[k / 2] % kHalfWord;
  }

  Block& block_;
  Slots& slots_;
  const int warp_, lane_;
  int half_ = 0;
};

}  // namespace fi
