// SPDX-License-Identifier: Apache-2.0
// A stable counting sort by a thread block, one key a thread and round: first all keys are counted, then a
// round after the other learns where its keys go.
#pragma once
#include "collectives.h"

namespace fi {

template <int kWarps, int kBuckets>
struct BucketSortMemory {
  // A byte a warp, of which there are at most 32.
  struct alignas(16) Ranks {
    static constexpr int kWords = (kWarps + 15) / 16 * 4;
    uint32_t word[kWords];
  };
  alignas(16) uint32_t position[kBuckets];  // where the next key of a bucket goes
  Ranks rank[kBuckets];                     // of a round: keys of a warp in a bucket
};

template <class Block, int kBits>
class BucketSort {
 public:
  static constexpr int kWarps = Block::kThreads / kWarp, kBuckets = 1 << kBits;
  using Memory = BucketSortMemory<kWarps, kBuckets>;

  struct Key {
    int bucket = 0;
    uint32_t peers = 0;  // lanes of the warp whose keys have the same bucket
    bool valid = false;
  };

  FI_DEVICE BucketSort(Block& block, Memory& memory)
      : block_(block), m_(memory), warp_(block.thread() / kWarp), lane_(block.thread() % kWarp) {}

  // Before the first barrier.
  FI_DEVICE void clear() {
    FI_ROLL
    for (int i = block_.thread(); i < kBuckets; i += Block::kThreads) {
      m_.position[i] = 0;
      m_.rank[i] = {};
    }
  }

  // Called by whole warps. One ballot a bit in which valid keys differ: a match instruction takes longer.
  FI_DEVICE Key key(int bucket, bool valid) {
    Key k{bucket, block_.ballot(valid), valid};
    const int common = block_.shuffle(bucket, lowest_bit(k.peers));
    FI_ROLL
    for (uint32_t left = block_.warp_or(valid ? uint32_t(bucket ^ common) : 0); left; left &= left - 1) {
      const bool set = bucket >> lowest_bit(left) & 1;
      const uint32_t with = block_.ballot(set);
      k.peers &= set ? with : ~with;
    }
    return k;
  }

  // Keys of the first round are ranked as they are counted.
  FI_DEVICE void count(const Key& k, bool first_round) {
    if (!leads(k)) return;
    const auto keys = uint32_t(count_bits(k.peers));
    block_.add(&m_.position[k.bucket], keys);
    if (first_round) set_rank(k.bucket, keys);
  }

  // When all keys are counted, by one warp, neighbouring buckets a lane. Has a barrier before and behind it.
  FI_DEVICE void scan_positions() {
    constexpr int kOfLane = kBuckets / kWarp;
    uint32_t count[kOfLane], before[1] = {0};
    FI_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      count[i] = m_.position[lane_ * kOfLane + i];
      before[0] += count[i];
    }
    const uint32_t own = before[0];
    add_lanes_before(block_, before);
    uint32_t at = before[0] - own;
    FI_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      m_.position[lane_ * kOfLane + i] = at;
      at += count[i];
    }
  }

  // Then where a bucket begins, until the first next_round().
  FI_DEVICE uint32_t position(int bucket) const { return m_.position[bucket]; }

  // Where the key goes.
  FI_DEVICE uint32_t place(const Key& k) {
    if (!k.valid) return 0;
    uint32_t at = m_.position[k.bucket] + uint32_t(count_bits(k.peers & lower_lanes()));
    const Ranks ranks = m_.rank[k.bucket];
    FI_UNROLL
    for (int w = 0; w < Ranks::kWords; ++w) {
      // The bytes of the warps before.
      const int bytes = warp_ - 4 * w;
      at = add_bytes(bytes <= 0   ? 0
                     : bytes >= 4 ? ranks.word[w]
                                  : ranks.word[w] & ((1u << 8 * bytes) - 1),
                     at);
    }
    return at;
  }

  // Between two rounds, with the keys of the next one; called by all threads.
  FI_DEVICE void next_round(const Key& k) {
    block_.sync();
    FI_ROLL
    for (int b = block_.thread(); b < kBuckets; b += Block::kThreads) {
      FI_ROLL
      for (int w = 0; w < Ranks::kWords; ++w) m_.position[b] = add_bytes(m_.rank[b].word[w], m_.position[b]);
      m_.rank[b] = {};
    }
    block_.sync();
    if (leads(k)) set_rank(k.bucket, uint32_t(count_bits(k.peers)));
    block_.sync();
  }

 private:
  using Ranks = typename Memory::Ranks;

  // The first of four bytes is the lowest one.
  FI_DEVICE void set_rank(int bucket, uint32_t keys) {
    reinterpret_cast<uint8_t*>(m_.rank[bucket].word)[warp_] = uint8_t(keys);
  }
  FI_DEVICE uint32_t lower_lanes() const { return (1u << lane_) - 1; }
  FI_DEVICE bool leads(const Key& k) const { return k.valid && (k.peers & lower_lanes()) == 0; }

  Block& block_;
  Memory& m_;
  const int warp_, lane_;
};

}  // namespace fi
