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
  using Sort = BucketSort<Block, kSortBits>;

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
  // counts: scratch memory for how many members a node has among 32 requests, Sort::kRanks of them.
  template <class Collective>
  FI_DEVICE NodeUse run(Collective& all, int32_t num_nodes, int16_t* counts) {
    const int32_t groups = (requests_ + kWarp - 1) / kWarp;
    bool odd = groups * num_nodes > Sort::kRanks;
    FI_ROLL
    for (int32_t j = thread_; j < num_nodes; j += kThreads) odd |= !has_single_rows(j);
    odd = block_.sync_or(odd);
    if (odd) {
      FI_ROLL
      for (int32_t j = warp_; j < num_nodes; j += kWarps) {
        const int32_t pairs = for_members(j, [](int32_t, int32_t, int32_t, TileRange, int32_t) {});
        if (lane_ == 0) n_.reports_begin[j] = pairs;
      }
      block_.sync();
    }
    NodeUse use{};
    FI_ROLL
    for (int32_t base = 0; base < num_nodes; base += kThreads) {
      const int32_t j = base + thread_;
      uint32_t before[2] = {0, 0}, total[2];
      if (j < num_nodes) {
        const int32_t tokens = l_.tokens[j], pairs = odd ? n_.reports_begin[j] : tokens;
        before[0] = uint32_t(node_tile_count(a_.config, tokens) + pairs);
        before[1] = uint32_t(tokens);
        section<PrefixNode>(a_.layout.nodes)[j] = {l_.leader[j], n_.tokens_begin[j], tokens, l_.end[j]};
      }
      all.exclusive_scan(before, total);
      if (j < num_nodes) n_.reports_begin[j] = use.reports + int32_t(before[0]);
      use.reports += int32_t(total[0]);
      use.tokens += int32_t(total[1]);
    }
    block_.sync();
    if (odd) {
      FI_ROLL
      for (int32_t j = warp_; j < num_nodes; j += kWarps)
        for_members(j, [&](int32_t r, int32_t q_len, int32_t before, TileRange range, int32_t pair) {
          put_member(j, r, q_len, before, range, pair);
        });
    } else {
      put_single_rows(num_nodes, groups, counts);
    }
    block_.sync();
    int32_t* const reports = section<int32_t>(a_.layout.reports);
    FI_ROLL
    for (int32_t t = first_tile_ + thread_; t < num_tiles_; t += kThreads) {
      const int32_t at = tiles_.at(kUnit, t),
                    next = t + 1 < num_tiles_ ? tiles_.at(kUnit, t + 1) : use.reports;
      reports[at] = next - at - 1;
    }
    return use;
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

  // Whether all members have one query token, whose rows lie in one tile of the node.
  FI_DEVICE bool has_single_rows(int32_t j) const {
    const int32_t tokens = l_.tokens[j];
    return tokens == l_.members[j] && tile_height(node_kind(a_.config, tokens)) % a_.config.group == 0;
  }

  // All nodes of a level at once, 32 requests a warp: a member's place is how many members come before it.
  FI_DEVICE void put_single_rows(int32_t num_nodes, int32_t groups, int16_t* counts) {
    FI_ROLL
    for (int32_t i = thread_; i < groups * num_nodes; i += kThreads) counts[i] = 0;
    block_.sync();
    FI_ROLL
    for (int32_t task = warp_; task < groups * kForestDepth; task += kWarps) {
      const int32_t node = node_of(task, groups);
      const uint32_t peers = find_peers(node, num_nodes);
      if (node >= 0 && (peers & lanes_before()) == 0)
        counts[task % groups * num_nodes + node] = int16_t(count_bits(peers));
    }
    block_.sync();
    FI_ROLL
    for (int32_t j = thread_; j < num_nodes; j += kThreads) {
      int32_t before = 0;
      for (int32_t g = 0; g < groups; ++g) {
        const int32_t own = counts[g * num_nodes + j];
        counts[g * num_nodes + j] = int16_t(before);
        before += own;
      }
    }
    block_.sync();
    FI_ROLL
    for (int32_t task = warp_; task < groups * kForestDepth; task += kWarps) {
      const int32_t node = node_of(task, groups);
      const uint32_t peers = find_peers(node, num_nodes);
      if (node < 0) continue;
      const int32_t before = counts[task % groups * num_nodes + node] + count_bits(peers & lanes_before());
      const TileRange range =
          member_tiles(node_kind(a_.config, l_.tokens[node]), before * a_.config.group, 1);
      put_member(node, task % groups * kWarp + lane_, 1, before, range, before);
    }
  }

  FI_DEVICE uint32_t lanes_before() const { return (1u << lane_) - 1; }

  // The node of this lane's request: the task's number is level * groups + group of 32 requests.
  FI_DEVICE int32_t node_of(int32_t task, int32_t groups) const {
    const int32_t r = task % groups * kWarp + lane_;
    return r < requests_ ? l_.path[task / groups][r] : -1;
  }

  // Lanes with the same node; by whole warps.
  FI_DEVICE uint32_t find_peers(int32_t node, int32_t num_nodes) {
    uint32_t peers = block_.ballot(node >= 0);
    if (!peers) return 0;
    FI_ROLL
    for (int bit = 0; num_nodes - 1 >> bit; ++bit) {
      const bool set = node >> bit & 1;
      const uint32_t with = block_.ballot(set);
      peers &= set ? with : ~with;
    }
    return peers;
  }

  FI_DEVICE void put_member(int32_t j, int32_t r, int32_t q_len, int32_t before, TileRange range,
                            int32_t pair) {
    const int32_t tile = n_.tile[j], tokens = l_.tokens[j], group = a_.config.group, rows = tokens * group;
    const int32_t height = tile_height(node_kind(a_.config, tokens)), chunks = tiles_.at(kChunks, tile);
    const int32_t own = tile_begin_[r], unit = tiles_.at(kUnit, own), first_token = a_.qo_indptr[r];
    int32_t* const node_tokens = section<int32_t>(a_.layout.node_tokens) + n_.tokens_begin[j] + before;
    FI_ROLL
    for (int32_t i = 0; i < q_len; ++i) node_tokens[i] = first_token + i;
    block_.add(reinterpret_cast<uint32_t*>(&section<MergeUnit>(a_.layout.units)[unit].num_items),
               uint32_t(chunks * (range.last - range.first + 1)));
    int32_t* const parts =
        section<int32_t>(a_.layout.parts) + tiles_.at(kFirstPart, own) + n_.path_chunks[j] - chunks;
    const int32_t first_row = tiles_.at(kFirstRow, tile) + before * group;
    FI_ROLL
    for (int32_t c = 0; c < chunks; ++c) parts[c] = first_row + c * rows;
    // The lists of the tiles before and of this one each begin with their length.
    int32_t at = n_.reports_begin[j] + pair + range.first + 1;
    FI_ROLL
    for (int32_t t = range.first; t <= range.last; ++t, at += 2) {
      section<int32_t>(a_.layout.reports)[at] = unit;
      if (before * group <= t * height) tiles_.at(kUnit, tile + t) = at - 1;
    }
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
