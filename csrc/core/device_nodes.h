// SPDX-License-Identifier: Apache-2.0
// What a plan says of its prefix nodes: whose rows they hold, where these rows' states lie, and to which
// merge units the nodes' items report; by one block, when all tiles are cut.
#pragma once
#include "device_levels.h"
#include "device_tiles.h"

namespace fi {

// Sections of a plan that list words for each member, in the plan or where they are gathered.
struct MemberLists {
  int32_t *node_tokens, *reports, *parts;
};

// By level and request: how many of the 32 requests around it are members of the same node before it.
using MemberRanks = uint8_t[kForestDepth][kForestRequests];

struct NodeTables {
  int32_t reports_begin[kForestRequests];  // unless all members have single rows
  int32_t path_chunks[kForestRequests];    // of the nodes from the root to this one
};

template <class Block, class Tiles>
class NodeEmitter {
 public:
  static constexpr int kThreads = Block::kThreads, kWarps = kThreads / kWarp;

  // The nodes' tiles are [first_tile, num_tiles).
  FI_DEVICE NodeEmitter(Block& block, const DevicePlanArgs& args, Levels& levels, NodeTables& nodes,
                        const LevelCounts& count, const int32_t* tile_begin, Tiles tiles, int32_t first_tile,
                        int32_t num_tiles)
      : block_(block),
        a_(args),
        l_(levels),
        n_(nodes),
        count_(count),
        tile_begin_(tile_begin),
        tiles_(tiles),
        first_tile_(first_tile),
        num_tiles_(num_tiles),
        thread_(block.thread()),
        warp_(thread_ / kWarp),
        lane_(thread_ % kWarp),
        requests_(args.num_requests < kForestRequests ? args.num_requests : kForestRequests) {}

  // With single rows, a phase before add_members(): how many members each node has among 32 requests.
  // Begins with warp `first`. ranks: written, unless null.
  FI_DEVICE void count_members(int first, MemberRanks* ranks = nullptr) {
    for_tasks((warp_ - first) & (kWarps - 1), kWarps, kMaxInt32,
              [&](int32_t level, int32_t group, int32_t node, uint32_t peers) {
                if (node < 0) return;
                const int before = count_bits(peers & lanes_before());
                if (before == 0) l_.counts[group * count_.nodes + node] = int16_t(count_bits(peers));
                if (ranks) (*ranks)[level][group * kWarp + lane_] = uint8_t(before);
              });
  }

  // A phase before put_single_rows(): among how many requests before. By the last threads first, which mostly
  // have nothing else to do.
  FI_DEVICE void add_members() {
    constexpr int kBatch = 8;  // loads under way
    FI_ROLL
    for (int32_t j = kThreads - 1 - thread_; j < count_.nodes; j += kThreads) {
      const int32_t end = groups() * count_.nodes;
      int32_t before = 0;
      FI_ROLL
      for (int32_t first = j; first < end; first += kBatch * count_.nodes) {
        int32_t members[kBatch];
        FI_UNROLL
        for (int k = 0; k < kBatch; ++k) {
          const int32_t i = first + k * count_.nodes;
          members[k] = i < end ? l_.counts[i] : 0;
        }
        FI_UNROLL
        for (int k = 0; k < kBatch; ++k) {
          const int32_t i = first + k * count_.nodes;
          if (i < end) l_.counts[i] = int16_t(before);
          before += members[k];
        }
      }
    }
  }

  // As before count_members().
  FI_DEVICE void clear_members() {
    FI_ROLL
    for (int32_t i = thread_; i < groups() * count_.nodes; i += kThreads) l_.counts[i] = 0;
  }

  // Of all nodes of a level at once, 32 requests a warp: a member's place is how many members come before it.
  // Every step-th task from `task` on, before `end`; needs no barrier behind it. to: lists().
  FI_DEVICE void put_single_rows(const MemberLists& to, int task, int step, int32_t end) {
    for_tasks(task, step, end, [&](int32_t, int32_t group, int32_t node, uint32_t peers) {
      if (node < 0) return;
      const int32_t before = l_.counts[group * count_.nodes + node] + count_bits(peers & lanes_before());
      put_single_row(to, node, group * kWarp + lane_, before);
    });
  }

  // The same, of all tasks, where ranks are known.
  FI_DEVICE void put_ranked_rows(const MemberLists& to, const MemberRanks& ranks, int task, int step) {
    const int log2 = bit_width(uint32_t(groups() - 1));
    FI_ROLL
    for (; task < count_.levels << log2; task += step) {
      const int32_t level = task >> log2, group = task & ((1 << log2) - 1), r = group * kWarp + lane_;
      const int32_t node = r < requests_ ? l_.path[level][r] : -1;
      if (node >= 0) put_single_row(to, node, r, l_.counts[group * count_.nodes + node] + ranks[level][r]);
    }
  }

  FI_DEVICE MemberLists lists() const {
    return {section<int32_t>(a_.layout.node_tokens), section<int32_t>(a_.layout.reports),
            section<int32_t>(a_.layout.parts)};
  }

  FI_DEVICE void put_node(int32_t j) {
    block_.store(section<PrefixNode>(a_.layout.nodes) + j,
                 PrefixNode{l_.leader[j], l_.tokens_begin[j], l_.tokens[j], l_.end[j]});
  }

  // When tiles are cut. Returns how many words of reports there are. Without single rows it ends with a
  // barrier: merge units count their arrivals, node tiles know their report lists (kUnit). With them, both
  // have been said where tiles were cut, and put_single_rows() is still to come.
  template <class Collective>
  FI_DEVICE int32_t run(Collective& all) {
    FI_ROLL
    for (int32_t j = other_half(block_); j < count_.nodes; j += kThreads) put_node(j);
    if (!count_.single_rows) return put_any_rows(all);
    return count_.tiles + count_.tokens;
  }

 private:
  template <class T>
  FI_DEVICE T* section(int64_t offset) const {
    return reinterpret_cast<T*>(a_.plan + offset);
  }

  // Sums over the lanes before, and over all.
  FI_DEVICE uint32_t sum_before(uint32_t v, uint32_t& total) {
    if (block_.ballot(v > 1)) {
      uint32_t sum[1] = {v};
      add_lanes_before(block_, sum);
      total = block_.shuffle(sum[0], kWarp - 1);
      return sum[0] - v;
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
    const int16_t* const path = l_.path[l_.level(j)];
    const int kind = l_.kind(j);
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

  template <class Collective>
  FI_DEVICE int32_t put_any_rows(Collective& all) {
    FI_ROLL
    for (int32_t j = warp_; j < count_.nodes; j += kWarps) {
      const int32_t pairs = for_members(j, [](int32_t, int32_t, int32_t, TileRange, int32_t) {});
      if (lane_ == 0) n_.reports_begin[j] = pairs;
    }
    block_.sync();
    int32_t words = 0;
    FI_ROLL
    for (int32_t base = 0; base < count_.nodes; base += kThreads) {
      const int32_t j = base + thread_;
      uint32_t before[1] = {0}, total[1];
      if (j < count_.nodes)
        before[0] = uint32_t(node_tile_count(a_.config, l_.tokens[j]) + n_.reports_begin[j]);
      all.exclusive_scan(before, total);
      if (j < count_.nodes) n_.reports_begin[j] = words + int32_t(before[0]);
      words += int32_t(total[0]);
    }
    block_.sync();
    FI_ROLL
    for (int32_t j = warp_; j < count_.nodes; j += kWarps)
      for_members(j, [&](int32_t r, int32_t q_len, int32_t before, TileRange range, int32_t pair) {
        put_member(j, r, q_len, before, range, pair);
      });
    block_.sync();
    int32_t* const reports = section<int32_t>(a_.layout.reports);
    FI_ROLL
    for (int32_t t = first_tile_ + thread_; t < num_tiles_; t += kThreads) {
      const int32_t at = tiles_.at(kUnit, t), next = t + 1 < num_tiles_ ? tiles_.at(kUnit, t + 1) : words;
      reports[at] = next - at - 1;
    }
    return words;
  }

  // A task is a level and 32 requests: visit(level, group of requests, the node of this lane's request or -1,
  // lanes with the same node).
  template <class Visit>
  FI_DEVICE void for_tasks(int first, int step, int32_t end, Visit visit) {
    const int log2 = bit_width(uint32_t(groups() - 1));
    FI_ROLL
    for (int32_t task = first; task < (count_.levels << log2) && task < end; task += step) {
      const int32_t group = task & ((1 << log2) - 1), r = group * kWarp + lane_;
      const int32_t node = r < requests_ ? l_.path[task >> log2][r] : -1;
      const uint32_t peers = find_peers(node);
      if (peers) visit(task >> log2, group, node, peers);
    }
  }

  FI_DEVICE void put_single_row(const MemberLists& to, int32_t j, int32_t r, int32_t before) {
    const int32_t row = before * a_.config.group;
    const int32_t number = l_.tile[j] + (row >> tile_log2(l_.kind(j)));
    const int32_t token = l_.tokens_begin[j] + before, own = tile_begin_[r];
    to.node_tokens[token] = tiles_.at(kToken, own);
    // Behind the lists of all members before, and the lengths of these lists and of its own.
    to.reports[number + token + 1] = tiles_.at(kUnit, own);
    put_parts(to.parts, j, own, row);
  }

  FI_DEVICE int32_t groups() const { return (requests_ + kWarp - 1) / kWarp; }
  FI_DEVICE uint32_t lanes_before() const { return (1u << lane_) - 1; }

  // Lanes with the same node, 0 where none has one; by whole warps. One ballot a bit in which they differ:
  // mostly neighbours are members of one node.
  FI_DEVICE uint32_t find_peers(int32_t node) {
    uint32_t peers = block_.ballot(node >= 0);
    if (!peers || count_.nodes == 1) return peers;
    const int32_t common = block_.shuffle(node, lowest_bit(peers));
    FI_ROLL
    for (uint32_t left = block_.warp_or(node >= 0 ? uint32_t(node ^ common) : 0); left; left &= left - 1) {
      const bool set = node >> lowest_bit(left) & 1;
      const uint32_t with = block_.ballot(set);
      peers &= set ? with : ~with;
    }
    return peers;
  }

  // Where the states of the node's items lie, for the member whose first row in the node is `row`.
  FI_DEVICE void put_parts(int32_t* to, int32_t j, int32_t own, int32_t row) {
    const int32_t tile = first_tile_ + l_.tile[j], chunks = tiles_.at(kChunks, tile);
    const int32_t first_row = tiles_.at(kFirstRow, tile) + row, rows = l_.tokens[j] * a_.config.group;
    int32_t* const parts = to + tiles_.at(kFirstPart, own) + n_.path_chunks[j] - chunks;
    FI_ROLL
    for (int32_t c = 0; c < chunks; ++c) parts[c] = first_row + c * rows;
  }

  FI_DEVICE void put_member(int32_t j, int32_t r, int32_t q_len, int32_t before, TileRange range,
                            int32_t pair) {
    const int32_t tile = first_tile_ + l_.tile[j], group = a_.config.group;
    const int32_t height = tile_height(l_.kind(j));
    const int32_t own = tile_begin_[r], unit = tiles_.at(kUnit, own), first_token = a_.qo_indptr[r];
    int32_t* const node_tokens = section<int32_t>(a_.layout.node_tokens) + l_.tokens_begin[j] + before;
    FI_ROLL
    for (int32_t i = 0; i < q_len; ++i) node_tokens[i] = first_token + i;
    block_.add(reinterpret_cast<uint32_t*>(&section<MergeUnit>(a_.layout.units)[unit].num_items),
               uint32_t(tiles_.at(kChunks, tile) * (range.last - range.first + 1)));
    put_parts(section<int32_t>(a_.layout.parts), j, own, before * group);
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
  Levels& l_;
  NodeTables& n_;
  const LevelCounts& count_;
  const int32_t* const tile_begin_;
  const Tiles tiles_;
  const int32_t first_tile_, num_tiles_;
  const int thread_, warp_, lane_;
  const int32_t requests_;
};

}  // namespace fi
