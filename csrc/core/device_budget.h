// SPDX-License-Identifier: Apache-2.0
// Which budget the items of a step are cut by, among those that plan_rules.h compares; by one block.
#pragma once
#include "device_tiles.h"

namespace fi {

struct Budget {
  int64_t item;  // what an item may cost
  int64_t time;  // the estimate of the step; 0 where none was asked for
};

// kShares: some tiles may be of prefix nodes.
template <class Block, bool kShares>
class BudgetChooser {
 public:
  static constexpr int kThreads = Block::kThreads, kWarps = kThreads / kWarp;
  static constexpr int kCandidateThreads = kThreads / kNumCandidates;
  static_assert(kCandidateThreads % kWarp == 0);

  FI_DEVICE BudgetChooser(Block& block, const PlannerConfig& config, int32_t cost_shift,
                          BudgetMemory<kWarps>& memory)
      : block_(block),
        c_(config),
        m_(memory),
        cost_shift_(cost_shift),
        thread_(block.thread()),
        warp_(thread_ / kWarp),
        lane_(thread_ % kWarp) {}

  // total: of the tiles' scaled costs. With many tickets the ideal share is taken as it is, and no thread
  // waits for another. Sets the chunks of the budget. Between two calls with few tickets lies a barrier.
  template <class Tiles>
  FI_DEVICE Budget choose(Tiles tiles, int32_t num_tiles, int64_t total, bool many_tickets) {
    const int64_t ideal = ideal_budget(c_, total, cost_shift_);
    if (many_tickets) {
      set_chunks(ideal);
      return {ideal, 0};
    }
    // A quarter of the threads to each candidate.
    constexpr int kGroup = kCandidateThreads / kWarp;
    const int candidate = warp_ / kGroup, first = thread_ % kCandidateThreads;
    set_chunks(candidate_budget(ideal, candidate));
    const auto share = [&](int32_t t) {
      const int32_t shape = tiles.at(kShape, t);
      const TileLevel level = kShares ? shape_level(shape) : kFlat;
      return estimate_share(c_, level, shape_kind(shape), tile_length(tiles, t), chunk(shape_kind(shape)),
                            cost_shift_);
    };
    int64_t load = 0, largest = 0, counts = 0;
    FI_ROLL
    for (int32_t t = first; t < num_tiles; t += kCandidateThreads) {
      const Share s = share(t);
      load += s.items * s.cost;
      largest = s.cost > largest ? s.cost : largest;
    }
    load = warp_sum64(block_, load);
    largest = warp_max64(block_, largest);
    if (lane_ == 0) {
      m_.load[warp_] = load;
      m_.largest[warp_] = largest;
    }
    block_.sync();
    largest = warp_max64(block_, m_.largest[candidate * kGroup + lane_ % kGroup]);
    FI_ROLL
    for (int32_t t = first; t < num_tiles; t += kCandidateThreads) counts += count_items(share(t), largest);
    counts = warp_sum64(block_, counts);
    if (lane_ == 0) m_.counts[warp_] = counts;
    block_.sync();
    return best_candidate(ideal);
  }

  // KV tokens of an item of this tile kind.
  FI_DEVICE int32_t chunk(int kind) const { return m_.chunk[warp_][kind]; }

  // The same that the last warp has set, a barrier before; of kNumTiles the least one.
  FI_DEVICE int32_t last_warps_chunk(int kind) const { return m_.chunk[kWarps - 1][kind]; }

  FI_DEVICE void set_chunks(int64_t budget) {
    block_.sync_warp();
    int32_t chunk = kMaxInt32;
    if (lane_ < kNumTiles) m_.chunk[warp_][lane_] = chunk = chunk_tokens(c_, lane_, budget);
    const auto least = int32_t(kMaxInt32 - block_.warp_max(uint32_t(kMaxInt32 - chunk)));
    if (lane_ == 0) m_.chunk[warp_][kNumTiles] = least;
    block_.sync_warp();
  }

 private:
  // By every warp, one lane a candidate.
  FI_DEVICE Budget best_candidate(int64_t ideal) {
    constexpr int kGroup = kCandidateThreads / kWarp;
    int64_t time = 0;
    if (lane_ < kNumCandidates) {
      int64_t load = 0, largest = 0, counts = 0;
      for (int w = lane_ * kGroup; w < (lane_ + 1) * kGroup; ++w) {
        load += m_.load[w];
        counts += m_.counts[w];
        largest = m_.largest[w] > largest ? m_.largest[w] : largest;
      }
      time = estimate_time(c_, load, largest, counts);
    }
    int choice = 0;
    int64_t best = block_.shuffle(time, 0);
    for (int i = 1; i < kNumCandidates; ++i) {
      const int64_t next = block_.shuffle(time, i);
      if (is_better(next, best)) {
        best = next;
        choice = i;
      }
    }
    const int64_t item = candidate_budget(ideal, choice);
    set_chunks(item);
    return {item, best};
  }

  Block& block_;
  const PlannerConfig& c_;
  BudgetMemory<kWarps>& m_;
  const int32_t cost_shift_;
  const int thread_, warp_, lane_;
};

}  // namespace fi
