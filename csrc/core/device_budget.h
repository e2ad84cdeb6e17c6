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

  // of_requests: tiles that are not of nodes. total: of the tiles' scaled costs; nodes: of those of nodes.
  // With many tickets the ideal share is taken as it is, and no thread waits for another. Sets the chunks of
  // the budget. Between two calls with few tickets lies a barrier.
  template <class Tiles>
  FI_DEVICE Budget choose(Tiles tiles, int32_t num_tiles, int32_t of_requests, int64_t total, int64_t nodes,
                          bool many_tickets) {
    const int64_t own = ideal_of_lane(total, nodes, cost_shift_);
    const int64_t of_nodes = node_budget(c_, own, of_requests);
    const int64_t ideal = kShares ? block_.shuffle(own, 0) : own;
    if (many_tickets) {
      set_chunks(ideal, of_nodes);
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
    return best_candidate(ideal, of_nodes);
  }

  // KV tokens of an item of this tile kind.
  FI_DEVICE int32_t chunk(int kind) const { return m_.chunk[warp_][kind]; }

  // The same of a tile of a node, if it is one, of `length` KV tokens; without a condition before what is
  // read.
  FI_DEVICE int32_t chunk(int kind, int32_t length, bool node) const {
    return node_chunk(length, m_.chunk[warp_][kind],
                      m_.chunk[warp_][kShares && node ? kNumTiles + kind : kind]);
  }

  // The same that the last warp has set, a barrier before.
  FI_DEVICE int32_t last_warps_chunk(int kind) const { return m_.chunk[kWarps - 1][kind]; }
  FI_DEVICE int32_t last_warps_node_chunk(int kind, int32_t length) const {
    return node_chunk(length, m_.chunk[kWarps - 1][kind], m_.chunk[kWarps - 1][kNumTiles + kind]);
  }
  FI_DEVICE int32_t last_warps_least_chunk() const { return m_.least[kWarps - 1]; }

  // Nodes are cut by the same budget.
  FI_DEVICE void set_chunks(int64_t budget) { set_chunks(budget, budget); }

  // The chunks of many tickets, by one warp; total, nodes: as in choose(), not scaled.
  FI_DEVICE void set_ideal_chunks(int64_t total, int64_t nodes) {
    const int64_t own = ideal_of_lane(total, nodes, 0);
    set_chunks(own, node_share(c_, own));
  }

 private:
  // Lanes with a chunk to work out; those of nodes divide together with the others.
  static constexpr int kChunks = kShares ? 2 * kNumTiles : kNumTiles;

  FI_DEVICE int64_t ideal_of_lane(int64_t total, int64_t nodes, int shift) const {
    return ideal_budget(c_, kShares && lane_ >= kNumTiles ? nodes : total, shift);
  }

  // Of the first lanes `budget` counts, of those behind them `of_nodes`.
  FI_DEVICE void set_chunks(int64_t budget, int64_t of_nodes) {
    block_.sync_warp();
    const bool node = kShares && lane_ >= kNumTiles;
    int32_t chunk = kMaxInt32;
    if (lane_ < kChunks)
      m_.chunk[warp_][lane_] = chunk =
          chunk_tokens(c_, node ? lane_ - kNumTiles : lane_, node ? of_nodes : budget);
    const auto least = int32_t(kMaxInt32 - block_.warp_max(node ? 0 : uint32_t(kMaxInt32 - chunk)));
    if (lane_ == 0) m_.least[warp_] = least;
    block_.sync_warp();
  }

  // By every warp, one lane a candidate.
  FI_DEVICE Budget best_candidate(int64_t ideal, int64_t of_nodes) {
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
    set_chunks(item, of_nodes);
    return {item, best};
  }

  Block& block_;
  const PlannerConfig& c_;
  BudgetMemory<kWarps>& m_;
  const int32_t cost_shift_;
  const int thread_, warp_, lane_;
};

}  // namespace fi
