// SPDX-License-Identifier: Apache-2.0
// The levels of a step on the device: which nodes of its forest are kept by the rules of compose_rules.h, and
// of which of them each request is a member; by one block.
#pragma once
#include "device_forest_nodes.h"

namespace fi {

// Sums of costs are added up in 32 bits on the device.
inline constexpr int32_t kMaxSharedBeta = 1 << 20;

// Of the members of a node among 32 requests; larger products of nodes and requests take longer.
inline constexpr int32_t kMemberCounts = 2048;

struct Levels {
  int32_t end[kForestRequests];           // KV tokens
  int32_t tokens[kForestRequests];        // query tokens of the members
  int32_t tile[kForestRequests];          // the node's first, among those of all nodes
  int32_t tokens_begin[kForestRequests];  // among the query tokens of all nodes
  int16_t members[kForestRequests];       // how many
  int16_t parent[kForestRequests];        // or -1
  int16_t leader[kForestRequests];        // the first member
  uint8_t shape[kForestRequests];         // nodes above, and from bit 4 on node_kind()
  int16_t leaf[kForestRequests];          // by request: its deepest node, or -1
  Ancestors path;                 // by level and request: its node, or -1; before, of the nodes of the forest
  int16_t counts[kMemberCounts];  // cleared; see NodeEmitter

  FI_DEVICE int level(int32_t node) const { return shape[node] & 15; }
  FI_DEVICE int kind(int32_t node) const { return shape[node] >> 4; }
  FI_DEVICE int32_t begin(int32_t node) const { return parent[node] < 0 ? 0 : end[parent[node]]; }
};

struct LevelCounts {
  int32_t nodes = 0;
  int32_t tiles = 0;
  int32_t tokens = 0;        // query tokens of members, once for each node
  int32_t levels = 0;        // most nodes above each other
  bool cuts = false;         // NodeCuts says how they are cut
  bool single_rows = false;  // all members have one query token, whose rows lie in one tile of each node
};

// How the tiles of kept nodes are cut, where the budget is known when they are.
struct NodeCuts {
  // More than a block of the uncut way has threads; no sum of it over all nodes leaves 32 bits.
  static constexpr int32_t kMostExtra = 1 << 20;
  int32_t chunk_len[kForestRequests];     // KV tokens
  int32_t path_chunks[kForestRequests];   // of the nodes from the root to this one
  uint32_t cut[kForestRequests / kWarp];  // a bit a node: it has several chunks
  int32_t extra[kForestRequests];         // then: items beside one for each of its tiles, or kMostExtra
  uint32_t more;                          // the sum of all extra ones

  FI_DEVICE int32_t chunks(const Levels& levels, int32_t node) const {
    const int32_t parent = levels.parent[node];
    return path_chunks[node] - (parent < 0 ? 0 : path_chunks[parent]);
  }
};

// Who decides about levels before the step's budget can be known.
struct NoBudget {
  static FI_DEVICE bool is_known() { return false; }
  static FI_DEVICE void set(int64_t, int64_t) {}
  static FI_DEVICE int32_t chunk(int, int32_t) { return 0; }
  static FI_DEVICE int32_t least_chunk() { return 0; }
};

struct LevelsMemory {
  // Sums over the members, cleared while leaders are still read (DeviceShareMemory).
  uint32_t tokens[kForestRequests], members[kForestRequests];
  uint32_t below[kForestRequests], saved[kForestRequests];  // see compose_rules.h
  union {
    struct {
      int64_t overhead[kForestRequests];
      uint32_t key_cost[kForestRequests];  // saturates
    };
    NodeCuts cuts;  // when levels are chosen
  };
  int16_t kept[kForestRequests];   // the kept node that is or lies above this one, or -1
  int16_t index[kForestRequests];  // among the kept ones, or -1
  uint8_t above[kForestRequests];  // kept nodes above
  uint8_t kind[kForestRequests];   // node_kind()
  // Of LevelCounts, before a limit is asked for.
  struct {
    int32_t nodes, tiles, tokens, levels;
    bool single_rows, fit;
  } kept_counts;
};

template <class Block>
class LevelChooser {
 public:
  static constexpr int kThreads = Block::kThreads;

  FI_DEVICE LevelChooser(Block& block, GroupScan<Block>& scan, const ForestNodes& nodes, int32_t count,
                         int32_t requests, int32_t page_size, LevelsMemory& memory, Levels& levels)
      : block_(block),
        scan_(scan),
        n_(nodes),
        m_(memory),
        l_(levels),
        count_(count),
        requests_(requests),
        page_size_(page_size),
        thread_(block.thread()),
        lane_(thread_ % kWarp) {}

  // A phase before add_requests().
  FI_DEVICE void clear() {
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads)
      m_.tokens[i] = m_.members[i] = m_.below[i] = m_.saved[i] = 0;
  }

  // A phase before choose(); adds each request to its deepest node and those above, parent(node). q_lens: of
  // the members.
  template <class Parent>
  FI_DEVICE void add_requests(const PlannerConfig& c, const uint8_t* q_lens, Parent parent) {
    FI_ROLL
    for (int32_t base = 0; base < requests_; base += kThreads) {
      const int32_t r = base + thread_;
      int32_t node = r < requests_ ? n_.deepest[r] : -1;
      uint32_t q_len = 0, cost = 0;
      if (node >= 0) {
        q_len = q_lens[r];
        cost = uint32_t(member_key_cost(c, int32_t(q_len)));
      }
      FI_ROLL
      for (int depth = 0; depth < kForestDepth; ++depth) {
        const uint32_t valid = block_.ballot(node >= 0);
        if (!valid) break;
        const int32_t above = node >= 0 ? parent(node) : -1;  // asked for before anything is added
        // Mostly neighbours are members of one node, to which a warp then adds once.
        const int first = lowest_bit(valid);
        const int32_t common = block_.shuffle(node, first);
        if (block_.ballot(node >= 0 && node != common)) {
          if (node >= 0) add(node, q_len, 1, cost);
        } else {
          const uint32_t tokens = block_.warp_sum(node >= 0 ? q_len : 0);
          const uint32_t below = block_.warp_sum(node >= 0 ? cost : 0);
          if (lane_ == first) add(node, tokens, uint32_t(count_bits(valid)), below);
        }
        node = above;
      }
    }
  }

  // budget: whether it is known as soon as one knows what all tiles cost less with nodes, and what those of
  // nodes cost; set(both), by the last warp, a barrier before it is asked for the chunk() of a node of a tile
  // kind and so many KV tokens, or for the least one that any tile has. Ends with a barrier.
  template <class Budget>
  FI_DEVICE LevelCounts choose(const PlannerConfig& c, const NodeCount& nodes, Budget& budget) {
    const int greatest = nodes.greatest_depth;
    int64_t costs[2] = {0, 0};  // of this thread's nodes: see decide()
    count_ = nodes.nodes;
    FI_ROLL
    for (int depth = greatest;; --depth) {
      FI_ROLL
      for (int32_t i = thread_; i < count_; i += kThreads) {
        if (depth == greatest) weigh(c, i);
        if (depth == 0)
          decide(c, i, costs);
        else if (n_.depth[i] == depth)
          tell_parent(i);
      }
      if (depth == 0) break;
      block_.sync();
    }
    const LevelCounts all = number(c, costs, budget);
    link(c, all, budget);
    return all;
  }

  // All nodes as they are, for who wants to see the forest. After a barrier behind the nodes.
  FI_DEVICE void keep_all(const PlannerConfig& c, const NodeCount& nodes) {
    count_ = nodes.nodes;
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads) {
      m_.tokens[i] = m_.members[i] = 0;
      m_.index[i] = m_.kept[i] = int16_t(i);
      m_.above[i] = n_.depth[i];
      m_.kind[i] = uint8_t(node_kind(c, 0));
      put_kept(i, i);
    }
    NoBudget none;
    block_.sync();
    link(c, {count_, 0, 0, kForestDepth}, none);
  }

 private:
  FI_DEVICE int32_t tokens_to(int32_t i) const { return n_.end[i] * page_size_; }

  FI_DEVICE void add(int32_t node, uint32_t tokens, uint32_t members, uint32_t below) {
    block_.add(&m_.tokens[node], tokens);
    block_.add(&m_.members[node], members);
    block_.add(&m_.below[node], below);
  }

  // What follows from the sums over the node's members.
  FI_DEVICE void weigh(const PlannerConfig& c, int32_t i) {
    const auto tokens = int32_t(m_.tokens[i]), members = int32_t(m_.members[i]);
    const int64_t cost = node_key_cost(c, tokens);
    m_.key_cost[i] = cost < kMaxInt32 ? uint32_t(cost) : uint32_t(kMaxInt32);
    m_.overhead[i] = node_overhead(c, tokens, members);
    m_.kind[i] = uint8_t(node_kind(c, tokens));
  }

  // When the nodes below have told what they take off.
  FI_DEVICE bool node_pays(int32_t i, int32_t length) const {
    return pays(length, int64_t(m_.below[i] - m_.saved[i]), m_.key_cost[i], m_.overhead[i]);
  }

  FI_DEVICE void tell_parent(int32_t i) {
    const int32_t parent = n_.parent[i];
    const uint32_t below = m_.below[i], cost = m_.key_cost[i], saved = m_.saved[i];
    const bool pays = node_pays(i, tokens_to(i) - tokens_to(parent));
    block_.add(&m_.saved[parent], pays ? below - cost : saved);
  }

  // Each node decides for itself what is kept above it, without waiting for those. Where it is kept, adds to
  // `costs` what the requests' tiles cost less for this node than its tiles cost, and what these cost.
  FI_DEVICE void decide(const PlannerConfig& c, int32_t i, int64_t (&costs)[2]) {
    const int32_t depth = n_.depth[i];
    int32_t above = -1, start = 0, kept = 0;
    int64_t saved = 0, own = 0;
    FI_ROLL
    for (int32_t up = depth; up >= 0; --up) {
      const int32_t node = up > 0 ? l_.path[up - 1][i] : i, end = tokens_to(node);
      const bool pays = node_pays(node, end - start);
      if (up == 0) {
        m_.above[i] = uint8_t(kept);
        saved = int64_t(m_.below[i] - m_.key_cost[i]) * (end - start);
        own = int64_t(m_.key_cost[i]) * (end - start);
      }
      if (kept >= c.sharing.max_levels || !pays) {
        if (up == 0) saved = own = 0;
        continue;
      }
      above = node;
      start = end;
      ++kept;
    }
    m_.kept[i] = int16_t(above);
    costs[0] += saved;
    costs[1] += own;
  }

  FI_DEVICE bool is_kept(int32_t i) const { return i < count_ && m_.kept[i] == i; }
  FI_DEVICE uint32_t lanes_before() const { return (1u << lane_) - 1; }

  // Writes the kept nodes, whose places each thread learns of its own. costs: of this thread's. Has a barrier
  // behind what was decided, and ends with one.
  template <class Budget>
  FI_DEVICE LevelCounts number(const PlannerConfig& c, int64_t (&costs)[2], Budget& budget) {
    constexpr uint32_t kSeveralRows = 1u << kForestDepth;
    LevelCounts all{};
    uint32_t of_roots = 0;  // query tokens of this thread's kept nodes that have none above
    uint32_t found = 0;     // a bit a level, and kSeveralRows
    // The last warp has mostly no node: it works out the budget while the others number theirs.
    const bool last = thread_ >= kThreads - kWarp, counts = !last || count_ > kThreads - kWarp;
    warp_sums64(block_, costs);
    int32_t base = 0;
    FI_ROLL
    do {
      const int32_t i = base + thread_;
      const bool kept = is_kept(i);
      uint32_t at[3] = {0, 0, 0}, total[3];
      if (kept) {
        const uint32_t tokens = m_.tokens[i], members = m_.members[i];
        const int above = m_.above[i], kind = m_.kind[i];
        at[0] = 1;
        at[1] = uint32_t(node_tile_count(c, int32_t(tokens), kind));
        at[2] = tokens;
        found |= 1u << above;
        if (above == 0) of_roots += tokens;
        // What divides a tile's height is a power of two, as it is.
        if (tokens != members || (c.group & (c.group - 1)) != 0 || tile_height(kind) < c.group)
          found |= kSeveralRows;
      }
      scan_.post(3, int64_t(block_.warp_or(found)) << kWarp | block_.warp_sum(of_roots));
      for (int k = 0; k < 2; ++k) scan_.post(4 + k, costs[k]);
      scan_.begin_scan(at);
      base += kThreads;
      if (!counts) break;
      scan_.end_scan(at, total);
      const int32_t to = all.nodes + int32_t(at[0]);
      if (i < count_) m_.index[i] = kept ? int16_t(to) : int16_t(-1);
      if (kept) {
        l_.tile[to] = all.tiles + int32_t(at[1]);
        l_.tokens_begin[to] = all.tokens + int32_t(at[2]);
        put_kept(i, to);
      }
      all.nodes += int32_t(total[0]);
      all.tiles += int32_t(total[1]);
      all.tokens += int32_t(total[2]);
    } while (base < count_);
    if (last && budget.is_known()) {
      for (int k = 0; k < 2; ++k) costs[k] = scan_.posted(4 + k);
      warp_sums64(block_, costs);
      budget.set(costs[0], costs[1]);
    }
    if (counts) {
      found = block_.warp_or(uint32_t(scan_.posted(3) >> kWarp));
      const uint32_t tokens = block_.warp_sum(uint32_t(scan_.posted(3)));
      if (thread_ == 0)
        m_.kept_counts = {all.nodes,
                          all.tiles,
                          all.tokens,
                          bit_width(found & (kSeveralRows - 1)),
                          !(found & kSeveralRows),
                          within_limits(c, all.nodes, tokens)};
      if (thread_ < kForestRequests / kWarp) m_.cuts.cut[thread_] = 0;
      if (thread_ == 0) m_.cuts.more = 0;
    }
    block_.sync();
    const auto kept = m_.kept_counts;
    all = {kept.nodes, kept.tiles, kept.tokens, kept.levels, kept.nodes > 0 && budget.is_known()};
    if (!kept.fit) leave_out(c, all);
    const int32_t members = (requests_ + kWarp - 1) / kWarp * all.nodes;
    all.single_rows = kept.single_rows && members <= kMemberCounts;
    if (all.single_rows) {
      FI_ROLL
      for (int32_t i = thread_; i < members; i += kThreads) l_.counts[i] = 0;
    }
    return all;
  }

  // Of numbered nodes those behind a limit; ends with a barrier.
  FI_DEVICE void leave_out(const PlannerConfig& c, LevelCounts& all) {
    const int32_t most = count_fitting(c);
    if (most < all.nodes) all = {most, l_.tile[most], l_.tokens_begin[most], all.levels};
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads)
      if (m_.index[i] >= most) m_.index[i] = -1;
    block_.sync();
  }

  // How many of the kept nodes come before a limit is exceeded.
  FI_DEVICE int32_t count_fitting(const PlannerConfig& c) {
    int32_t nodes = 0, fitting = 0;
    uint32_t tokens = 0;
    FI_ROLL
    for (int32_t base = 0; base < count_; base += kWarp) {
      const int32_t i = base + lane_;
      const uint32_t kept = block_.ballot(is_kept(i));
      uint32_t to[1] = {kept >> lane_ & 1 && m_.above[i] == 0 ? m_.tokens[i] : 0};
      const uint32_t own = to[0];
      add_lanes_before(block_, to);
      const bool fits = kept >> lane_ & 1 &&
                        within_limits(c, nodes + count_bits(kept & lanes_before()) + 1, tokens + to[0]);
      fitting += count_bits(block_.ballot(fits));
      nodes += count_bits(kept);
      tokens += block_.warp_sum(own);
    }
    return fitting;
  }

  FI_DEVICE void put_kept(int32_t i, int32_t to) {
    const int32_t end = tokens_to(i), tokens = int32_t(m_.tokens[i]), members = int32_t(m_.members[i]);
    const int16_t leader = n_.leader[i];
    const int above = m_.above[i], kind = m_.kind[i];
    l_.end[to] = end;
    l_.tokens[to] = tokens;
    l_.members[to] = int16_t(members);
    l_.leader[to] = leader;
    l_.shape[to] = uint8_t(above | kind << 4);
  }

  // Kept nodes to each other and requests to them; begins behind a barrier, ends with one.
  template <class Budget>
  FI_DEVICE void link(const PlannerConfig& c, const LevelCounts& all, Budget& budget) {
    FI_ROLL
    for (int32_t i = other_half(block_); i < count_; i += kThreads) {
      const int32_t to = m_.index[i], up = n_.parent[i], parent = up < 0 ? -1 : m_.kept[up];
      if (to < 0) continue;
      l_.parent[to] = parent < 0 ? int16_t(-1) : m_.index[parent];
      if (all.cuts) cut(c, all, i, to, parent, budget);
    }
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) {
      FI_ROLL
      for (int32_t level = 0; level < all.levels; ++level) l_.path[level][r] = -1;
      int32_t leaf = -1;
      FI_ROLL
      for (int32_t i = n_.deepest[r]; i >= 0; i = n_.parent[i]) {
        const int32_t to = m_.index[i];
        if (to < 0) continue;
        l_.path[m_.above[i]][r] = int16_t(to);
        leaf = leaf < 0 ? to : leaf;
      }
      l_.leaf[r] = int16_t(leaf);
    }
    block_.sync();
  }

  // parent: the kept node above, or -1.
  template <class Budget>
  FI_DEVICE void cut(const PlannerConfig& c, const LevelCounts& all, int32_t i, int32_t to, int32_t parent,
                     Budget& budget) {
    if (tokens_to(i) <= budget.least_chunk()) {
      // Nor is a node above it.
      m_.cuts.chunk_len[to] = tokens_to(i) - (parent < 0 ? 0 : tokens_to(parent));
      m_.cuts.path_chunks[to] = m_.above[i] + 1;
      return;
    }
    int32_t chunks = 0, node = i;
    FI_ROLL
    for (;;) {
      const int32_t length = tokens_to(node) - (parent < 0 ? 0 : tokens_to(parent));
      const Split s = split_tile(c, kNode, length, budget.chunk(l_.kind(m_.index[node]), length));
      chunks += s.chunks;
      if (node == i) {
        m_.cuts.chunk_len[to] = s.chunk_len;
        if (s.chunks > 1) {
          const int32_t end = to + 1 < all.nodes ? l_.tile[to + 1] : all.tiles;
          const int64_t more = int64_t(end - l_.tile[to]) * (s.chunks - 1);
          const int32_t extra = more < NodeCuts::kMostExtra ? int32_t(more) : NodeCuts::kMostExtra;
          m_.cuts.extra[to] = extra;
          block_.add(&m_.cuts.cut[to / kWarp], 1u << to % kWarp);
          block_.add(&m_.cuts.more, uint32_t(extra));
        }
      }
      if (parent < 0) break;
      node = parent;
      const int32_t up = n_.parent[node];
      parent = up < 0 ? -1 : m_.kept[up];
    }
    m_.cuts.path_chunks[to] = chunks;
  }

  Block& block_;
  GroupScan<Block>& scan_;
  const ForestNodes& n_;
  LevelsMemory& m_;
  Levels& l_;
  int32_t count_;
  const int32_t requests_, page_size_;
  const int thread_, lane_;
};

}  // namespace fi
