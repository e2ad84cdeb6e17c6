// SPDX-License-Identifier: Apache-2.0
// What a plan says of its prefix nodes: whose rows they hold, where these rows' states lie, and to which
// merge units the nodes' items report; by one block, when all tiles are cut.
#pragma once
#include "device_levels.h"
#include "device_tiles.h"

namespace fi {

struct NodeTables {
  int32_t tile[kForestRequests];  // the node's first
  int32_t tokens_begin[kForestRequests];
  int32_t reports_begin[kForestRequests];
  int32_t path_chunks[kForestRequests];  // of the nodes from the root to this one
};

struct NodeUse {
  int32_t tokens, reports;
};

template <class Block, class Tiles>
class NodeEmitter {
 public:
  static constexpr int kThreads = Block::kThreads, kWarps = kThreads / kWarp;

  // The nodes' tiles are [first_tile, num_tiles).
  FI_DEVICE NodeEmitter(Block& block, const DevicePlanArgs& args, const Levels& levels, NodeTables& nodes,
                        const int32_t* tile_begin, Tiles tiles, int32_t first_tile, int32_t num_tiles)
      : block_(block),
        a_(args),
        l_(levels),
        n_(nodes),
        tile_begin_(tile_begin),
        tiles_(tiles),
        first_tile_(first_tile),
        num_tiles_(num_tiles),
        thread_(block.thread()),
        warp_(thread_ / kWarp),
        lane_(thread_ % kWarp),
        requests_(args.num_requests < kForestRequests ? args.num_requests : kForestRequests) {}

  // Ends with a barrier. Merge units count their arrivals, node tiles know their report lists (kUnit).
  template <class Collective>
  FI_DEVICE NodeUse run(Collective& all, int32_t num_nodes) {
    FI_ROLL
    for (int32_t j = warp_; j < num_nodes; j += kWarps) {
      const int32_t reports = count_reports(j);
      if (lane_ == 0) n_.reports_begin[j] = reports;
    }
    block_.sync();
    NodeUse counts{};
    FI_ROLL
    for (int32_t base = 0; base < num_nodes; base += kThreads) {
      const int32_t j = base + thread_;
      uint32_t before[2] = {0, 0}, total[2];
      if (j < num_nodes) {
        before[0] = uint32_t(n_.reports_begin[j]);
        before[1] = uint32_t(l_.tokens[j]);
      }
      all.exclusive_scan(before, total);
      if (j < num_nodes) n_.reports_begin[j] = counts.reports + int32_t(before[0]);
      counts.reports += int32_t(total[0]);
      counts.tokens += int32_t(total[1]);
    }
    block_.sync();
    FI_ROLL
    for (int32_t j = warp_; j < num_nodes; j += kWarps) emit(j);
    FI_ROLL
    for (int32_t j = thread_; j < num_nodes; j += kThreads)
      section<PrefixNode>(a_.layout.nodes)[j] = {l_.leader[j], n_.tokens_begin[j], l_.tokens[j], l_.end[j]};
    block_.sync();
    int32_t* const reports = section<int32_t>(a_.layout.reports);
    FI_ROLL
    for (int32_t t = first_tile_ + thread_; t < num_tiles_; t += kThreads) {
      const int32_t at = tiles_.at(kUnit, t),
                    next = t + 1 < num_tiles_ ? tiles_.at(kUnit, t + 1) : counts.reports;
      reports[at] = next - at - 1;
    }
    return counts;
  }

 private:
  template <class T>
  FI_DEVICE T* section(int64_t offset) const {
    return reinterpret_cast<T*>(a_.plan + offset);
  }

  // Sums over the lanes before, and over all.
  FI_DEVICE uint32_t sum_before(uint32_t v, uint32_t& total) {
    if (block_.ballot(v > 1)) {
      const uint32_t sum = sum_of_lanes(block_, v);
      total = block_.shuffle(sum, kWarp - 1);
      return sum - v;
    }
    const uint32_t ones = block_.ballot(v);
    total = uint32_t(count_bits(ones));
    return uint32_t(count_bits(ones & ((1u << lane_) - 1)));
  }

  // Visits the members of a node in ascending order, one a lane: visit(request, q_len, query tokens of the
  // members before, tiles with its rows, pairs of a member and a tile before). Returns how many pairs there
  // are.
  template <class Visit>
  FI_DEVICE int32_t for_members(int32_t j, Visit visit) {
    const int16_t* const path = l_.path[l_.level[j]];
    const int kind = node_kind(a_.config, l_.tokens[j]);
    uint32_t tokens = 0, pairs = 0, total;
    FI_ROLL
    for (int32_t base = 0; base < requests_; base += kWarp) {
      const int32_t r = base + lane_;
      const bool member = r < requests_ && path[r] == j;
      if (!block_.ballot(member)) continue;
      const int32_t q_len = member ? a_.qo_indptr[r + 1] - a_.qo_indptr[r] : 0, group = a_.config.group;
      const uint32_t before = tokens + sum_before(uint32_t(q_len), total);
      tokens += total;
      TileRange range{0, -1};
      if (member) range = member_tiles(kind, int32_t(before) * group, q_len * group);
      const uint32_t pair = pairs + sum_before(uint32_t(range.last - range.first + 1), total);
      pairs += total;
      if (member) visit(r, q_len, int32_t(before), range, int32_t(pair));
    }
    return int32_t(pairs);
  }

  // Words of the report lists of a node.
  FI_DEVICE int32_t count_reports(int32_t j) {
    const int32_t tokens = l_.tokens[j], tiles = node_tile_count(a_.config, tokens);
    const bool whole = tile_height(node_kind(a_.config, tokens)) % a_.config.group == 0;
    if (whole && tokens == l_.members[j]) return tiles + tokens;  // no member has rows in two tiles
    return tiles + for_members(j, [](int32_t, int32_t, int32_t, TileRange, int32_t) {});
  }

  FI_DEVICE void emit(int32_t j) {
    const int32_t tile = n_.tile[j], tokens = l_.tokens[j], group = a_.config.group, rows = tokens * group;
    const int32_t height = tile_height(node_kind(a_.config, tokens));
    const int32_t chunks = tiles_.at(kChunks, tile), first_row = tiles_.at(kFirstRow, tile);
    int32_t* const node_tokens = section<int32_t>(a_.layout.node_tokens) + n_.tokens_begin[j];
    int32_t* const reports = section<int32_t>(a_.layout.reports);
    int32_t* const parts = section<int32_t>(a_.layout.parts) + n_.path_chunks[j] - chunks;
    auto* const units = section<MergeUnit>(a_.layout.units);
    for_members(j, [&](int32_t r, int32_t q_len, int32_t before, TileRange range, int32_t pair) {
      const int32_t own = tile_begin_[r], unit = tiles_.at(kUnit, own), first_token = a_.qo_indptr[r];
      FI_ROLL
      for (int32_t i = 0; i < q_len; ++i) node_tokens[before + i] = first_token + i;
      block_.add(reinterpret_cast<uint32_t*>(&units[unit].num_items),
                 uint32_t(chunks * (range.last - range.first + 1)));
      FI_ROLL
      for (int32_t c = 0; c < chunks; ++c)
        parts[tiles_.at(kFirstPart, own) + c] = first_row + c * rows + before * group;
      // The lists of the tiles before and of this one each begin with their length.
      int32_t at = n_.reports_begin[j] + pair + range.first + 1;
      FI_ROLL
      for (int32_t t = range.first; t <= range.last; ++t, at += 2) {
        reports[at] = unit;
        if (before * group <= t * height) tiles_.at(kUnit, tile + t) = at - 1;
      }
    });
  }

  Block& block_;
  const DevicePlanArgs& a_;
  const Levels& l_;
  NodeTables& n_;
  const int32_t* const tile_begin_;
  const Tiles tiles_;
  const int32_t first_tile_, num_tiles_;
  const int thread_, warp_, lane_;
  const int32_t requests_;
};

}  // namespace fi
