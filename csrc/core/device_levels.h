// SPDX-License-Identifier: Apache-2.0
// The levels of a step on the device: which nodes of its forest are kept by the rules of compose_rules.h, and
// of which of them each request is a member; by one block.
#pragma once
#include "device_forest_nodes.h"

namespace fi {

// Sums of costs are added up in 32 bits on the device.
inline constexpr int32_t kMaxSharedBeta = 1 << 20;

struct Levels {
  int32_t begin[kForestRequests], end[kForestRequests];  // KV tokens
  int32_t tokens[kForestRequests];                       // query tokens of the members
  int16_t members[kForestRequests];                      // how many
  int16_t parent[kForestRequests];
  int16_t leader[kForestRequests];              // the first member
  uint8_t level[kForestRequests];               // nodes above
  int16_t leaf[kForestRequests];                // by request: its deepest node, or -1
  int16_t path[kForestDepth][kForestRequests];  // by level and request: its node, or -1
};

struct LevelsMemory {
  uint32_t tokens[kForestRequests], members[kForestRequests];
  uint32_t below[kForestRequests], saved[kForestRequests];  // see compose_rules.h
  int32_t start[kForestRequests];                           // KV token at which the node begins if it is kept
  int16_t kept[kForestRequests];   // the kept node that is or lies above this one, or -1
  int16_t index[kForestRequests];  // among the kept ones, or -1
  uint8_t above[kForestRequests];  // kept nodes above
};

template <class Block, class Scan>
class LevelChooser {
 public:
  static constexpr int kThreads = Block::kThreads;

  FI_DEVICE LevelChooser(Block& block, Scan& scan, const ForestNodes& nodes, int32_t count, int32_t requests,
                         int32_t page_size, LevelsMemory& memory, Levels& levels)
      : block_(block),
        scan_(scan),
        n_(nodes),
        m_(memory),
        l_(levels),
        count_(count),
        requests_(requests),
        page_size_(page_size),
        thread_(block.thread()) {}

  // Returns how many nodes are kept. Ends with a barrier.
  FI_DEVICE int32_t choose(const PlannerConfig& c, const int32_t* qo_indptr) {
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads)
      m_.tokens[i] = m_.members[i] = m_.below[i] = m_.saved[i] = 0;
    block_.sync();
    add_requests(c, qo_indptr);
    int greatest = 0;
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads)
      greatest = n_.depth[i] > greatest ? n_.depth[i] : greatest;
    scan_.post(0, block_.warp_max(uint32_t(greatest)));
    scan_.meet();
    greatest = int(block_.warp_max(uint32_t(scan_.posted(0))));
    FI_ROLL
    for (int depth = greatest; depth >= 0; --depth) {
      FI_ROLL
      for (int32_t i = thread_; i < count_; i += kThreads)
        if (n_.depth[i] == depth) add_to_parent(c, i);
      block_.sync();
    }
    FI_ROLL
    for (int depth = 0; depth <= greatest; ++depth) {
      FI_ROLL
      for (int32_t i = thread_; i < count_; i += kThreads)
        if (n_.depth[i] == depth) decide(c, i);
      block_.sync();
    }
    const int32_t kept = number(c);
    keep(kept);
    return kept;
  }

  // All nodes as they are, for who wants to see the forest.
  FI_DEVICE void keep_all() {
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads) {
      m_.tokens[i] = m_.members[i] = 0;
      m_.index[i] = m_.kept[i] = int16_t(i);
      m_.above[i] = n_.depth[i];
      m_.start[i] = n_.begin[i] * page_size_;
    }
    keep(count_);
  }

 private:
  FI_DEVICE int32_t tokens_to(int32_t i) const { return n_.end[i] * page_size_; }

  FI_DEVICE void add_requests(const PlannerConfig& c, const int32_t* qo_indptr) {
    FI_ROLL
    for (int32_t base = 0; base < requests_; base += kThreads) {
      const int32_t r = base + thread_;
      const int32_t node = r < requests_ ? n_.deepest[r] : -1;
      const uint32_t valid = block_.ballot(node >= 0);
      if (!valid) continue;
      uint32_t q_len = 0, cost = 0;
      if (node >= 0) {
        q_len = uint32_t(qo_indptr[r + 1] - qo_indptr[r]);
        cost = uint32_t(member_key_cost(c, int32_t(q_len)));
      }
      // Mostly neighbours are members of one node, to which a warp then adds once.
      const int first = lowest_bit(valid);
      const int32_t common = block_.shuffle(node, first);
      if (block_.ballot(node >= 0 && node != common)) {
        if (node >= 0) add(node, q_len, 1, cost);
      } else {
        q_len = block_.warp_sum(q_len);
        cost = block_.warp_sum(cost);
        if (thread_ % kWarp == first) add(node, q_len, uint32_t(count_bits(valid)), cost);
      }
    }
    block_.sync();
  }

  FI_DEVICE void add(int32_t node, uint32_t tokens, uint32_t members, uint32_t below) {
    block_.add(&m_.tokens[node], tokens);
    block_.add(&m_.members[node], members);
    block_.add(&m_.below[node], below);
  }

  FI_DEVICE bool node_pays(const PlannerConfig& c, int32_t i, int32_t length) const {
    const auto tokens = int32_t(m_.tokens[i]);
    return pays(length, m_.below[i], node_key_cost(c, tokens),
                node_overhead(c, tokens, int32_t(m_.members[i])));
  }

  FI_DEVICE void add_to_parent(const PlannerConfig& c, int32_t i) {
    const uint32_t below = m_.below[i];
    uint32_t saved = m_.saved[i];
    m_.below[i] = below - saved;
    const int32_t parent = n_.parent[i];
    if (parent < 0) return;
    if (node_pays(c, i, tokens_to(i) - n_.begin[i] * page_size_))
      saved = below - uint32_t(node_key_cost(c, int32_t(m_.tokens[i])));
    add(parent, m_.tokens[i], m_.members[i], below);
    block_.add(&m_.saved[parent], saved);
  }

  FI_DEVICE void decide(const PlannerConfig& c, int32_t i) {
    const int32_t parent = n_.parent[i], above = parent < 0 ? -1 : m_.kept[parent];
    const int32_t start = above < 0 ? 0 : tokens_to(above);
    const int32_t levels = above < 0 ? 0 : m_.above[above] + 1;
    const bool kept = levels < c.sharing.max_levels && node_pays(c, i, tokens_to(i) - start);
    m_.start[i] = start;
    m_.above[i] = uint8_t(levels);
    m_.kept[i] = kept ? int16_t(i) : int16_t(above);
  }

  FI_DEVICE int32_t number(const PlannerConfig& c) {
    uint32_t carry[2] = {0, 0};
    FI_ROLL
    for (int32_t base = 0; base < count_; base += kThreads) {
      const int32_t i = base + thread_;
      const bool kept = i < count_ && m_.kept[i] == i;
      const uint32_t tokens = kept && m_.above[i] == 0 ? m_.tokens[i] : 0;
      uint32_t at[2] = {kept, tokens}, total[2];
      scan_.exclusive_scan(at, total);
      if (i < count_) {
        const bool fits = kept && within_limits(c, carry[0] + at[0] + 1, int64_t(carry[1]) + at[1] + tokens);
        m_.index[i] = fits ? int16_t(carry[0] + at[0]) : int16_t(-1);
      }
      carry[0] += total[0];
      carry[1] += total[1];
    }
    block_.sync();
    uint32_t most = 0;  // those that fit are the first ones
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads)
      most = m_.index[i] >= int32_t(most) ? uint32_t(m_.index[i] + 1) : most;
    scan_.post(0, block_.warp_max(most));
    scan_.meet();
    return int32_t(block_.warp_max(uint32_t(scan_.posted(0))));
  }

  FI_DEVICE void keep(int32_t kept) {
    block_.sync();
    if (kept == 0) return;
    FI_ROLL
    for (int32_t i = thread_; i < count_; i += kThreads) {
      const int32_t to = m_.index[i];
      if (to < 0) continue;
      const int32_t parent = n_.parent[i] < 0 ? -1 : m_.kept[n_.parent[i]];
      l_.begin[to] = m_.start[i];
      l_.end[to] = tokens_to(i);
      l_.tokens[to] = int32_t(m_.tokens[i]);
      l_.members[to] = int16_t(m_.members[i]);
      l_.parent[to] = parent < 0 ? int16_t(-1) : m_.index[parent];
      l_.leader[to] = n_.leader[i];
      l_.level[to] = m_.above[i];
    }
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) {
      FI_ROLL
      for (int level = 0; level < kForestDepth; ++level) l_.path[level][r] = -1;
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

  Block& block_;
  Scan& scan_;
  const ForestNodes& n_;
  LevelsMemory& m_;
  Levels& l_;
  const int32_t count_, requests_, page_size_;
  const int thread_;
};

}  // namespace fi
