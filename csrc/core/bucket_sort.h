// SPDX-License-Identifier: Apache-2.0
// A stable counting sort by a thread block, one key a thread and round: first all keys are counted, then a
// round after the other learns where its keys go.
#pragma once
#include "collectives.h"

namespace fi {

template <int kWarps, int kBuckets>
struct BucketSortMemory {
  uint32_t position[kBuckets];      // where the next key of a bucket goes
  uint32_t rank[kWarps][kBuckets];  // of a round: keys of a warp in a bucket, then where they go
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
    for (int i = block_.thread(); i < kBuckets; i += Block::kThreads) m_.position[i] = 0;
    clear_rank();
  }

  // Scratch memory until the first place(), which has to find it cleared by the warps.
  static constexpr int kRanks = kWarps * kBuckets * int(sizeof(uint32_t) / sizeof(int16_t));
  FI_DEVICE int16_t* lend_ranks() { return reinterpret_cast<int16_t*>(m_.rank); }
  FI_DEVICE void clear_rank() {
    for (int i = lane_; i < kBuckets; i += kWarp) m_.rank[warp_][i] = 0;
  }

  // Called by whole warps. One ballot a bit: a match instruction takes longer.
  FI_DEVICE Key key(int bucket, bool valid) {
    Key k{bucket, block_.ballot(valid), valid};
    for (int bit = 0; bit < kBits; ++bit) {
      const bool set = bucket >> bit & 1;
      const uint32_t with = block_.ballot(set);
      k.peers &= set ? with : ~with;
    }
    return k;
  }

  FI_DEVICE void count(const Key& k) {
    if (leads(k)) block_.add(&m_.position[k.bucket], uint32_t(count_bits(k.peers)));
  }

  // After the last count(); called by all threads.
  FI_DEVICE void end_counting() {
    block_.sync();
    if (warp_ == 0) scan_positions();
  }

  // Where the key goes. Called by all threads, with the number of warps that have keys in this round.
  FI_DEVICE uint32_t place(const Key& k, int warps) {
    if (leads(k)) m_.rank[warp_][k.bucket] = uint32_t(count_bits(k.peers));
    block_.sync();
    for (int b = block_.thread(); b < kBuckets; b += Block::kThreads) rank_warps(b, warps);
    block_.sync();
    return k.valid ? m_.rank[warp_][k.bucket] + uint32_t(count_bits(k.peers & lower_lanes())) : 0;
  }

  // Between two rounds.
  FI_DEVICE void next_round() {
    block_.sync_warp();
    clear_rank();
    block_.sync_warp();
  }

 private:
  FI_DEVICE uint32_t lower_lanes() const { return (1u << lane_) - 1; }
  FI_DEVICE bool leads(const Key& k) const { return k.valid && (k.peers & lower_lanes()) == 0; }

  FI_DEVICE void scan_positions() {
    uint32_t before = 0;
    for (int base = 0; base < kBuckets; base += kWarp) {
      const uint32_t own = m_.position[base + lane_];
      uint32_t sum = own;
      for (int d = 1; d < kWarp; d *= 2) {
        const uint32_t left = block_.shuffle_up(sum, d);
        if (lane_ >= d) sum += left;
      }
      m_.position[base + lane_] = before + sum - own;
      before += block_.shuffle(sum, kWarp - 1);
    }
  }

  FI_DEVICE void rank_warps(int bucket, int warps) {
    uint32_t next = m_.position[bucket];
    for (int w = 0; w < warps; ++w) {
      const uint32_t count = m_.rank[w][bucket];
      m_.rank[w][bucket] = next;
      next += count;
    }
    m_.position[bucket] = next;
  }

  Block& block_;
  Memory& m_;
  const int warp_, lane_;
};

}  // namespace fi
