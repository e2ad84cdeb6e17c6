// SPDX-License-Identifier: Apache-2.0
// The nodes of a forest in the order of the host's, from the leaders that ForestFinder found; by one block.
#pragma once
#include "device_forest.h"

namespace fi {

// Nodes are (leader, common): the leader and all requests that have at least so many pages in common with it.
// Sorted by that pair they are in the forest's order. A leader's own pair is the node that its first node
// lies below.
struct ForestNodes {
  int32_t begin[kForestRequests], end[kForestRequests];  // pages
  int16_t parent[kForestRequests], leader[kForestRequests];
  uint8_t depth[kForestRequests];
  int16_t deepest[kForestRequests];  // by request: the last node that it is a member of, or -1
};

struct ForestNodesMemory {
  int64_t key[kForestRequests];    // of the nodes in any order
  int16_t first[kForestRequests];  // of the nodes in any order, then sorted: a request with that pair
  int16_t sorted[kForestRequests];
  int16_t branch[kForestRequests];  // by request: the node of its pair, or -1
};

// Reads `pairs`, where ForestFinder left leaders and common pages, until run() returns.
template <class Block, class Scan>
class ForestNodeBuilder {
 public:
  static constexpr int kThreads = Block::kThreads;

  FI_DEVICE ForestNodeBuilder(Block& block, Scan& scan, ForestFinder<Block>& finder, ForestMemory& pairs,
                              ForestNodesMemory& memory, ForestNodes& nodes)
      : block_(block),
        scan_(scan),
        finder_(finder),
        p_(pairs),
        m_(memory),
        n_(nodes),
        thread_(block.thread()) {}

  // Returns how many nodes there are. Begins and ends with a barrier of its own.
  FI_DEVICE int32_t run(int32_t max_depth) {
    const int32_t requests = finder_.num_requests();
    finder_.clear_table();
    block_.sync();
    FI_ROLL
    for (int32_t base = 0; base < requests; base += kThreads) {
      const int32_t r = base + thread_;
      const bool active = r < requests && p_.leader[r] >= 0;
      uint32_t hash = 0;
      if (active) hash = uint32_t(p_.common[r]) * 0x85ebca6bu ^ uint32_t(p_.leader[r]) * 0xc2b2ae35u;
      finder_.find_slot(r, active, hash, [&](int32_t other) {
        return p_.common[other] == p_.common[r] && p_.leader[other] == p_.leader[r];
      });
    }
    block_.sync();
    const int32_t count = list_nodes(requests);
    if (count == 0) {
      FI_ROLL
      for (int32_t r = thread_; r < requests; r += kThreads) n_.deepest[r] = -1;
      block_.sync();
      return 0;
    }
    sort_nodes(count);
    FI_ROLL
    for (int32_t r = thread_; r < requests; r += kThreads)
      n_.deepest[r] = m_.branch[r] = p_.leader[r] < 0 ? int16_t(-1) : int16_t(p_.least[p_.slot[r]]);
    block_.sync();
    FI_ROLL
    for (int32_t i = thread_; i < count; i += kThreads) place_node(i, count);
    block_.sync();
    bool deep = false;
    FI_ROLL
    for (int32_t i = thread_; i < count; i += kThreads) deep |= find_depth(i, max_depth) >= max_depth;
    return block_.sync_or(deep) ? cut(count, requests, max_depth) : count;
  }

 private:
  FI_DEVICE int32_t list_nodes(int32_t requests) {
    uint32_t carry = 0;
    FI_ROLL
    for (int32_t base = 0; base < requests; base += kThreads) {
      const int32_t r = base + thread_;
      const bool first = r < requests && p_.leader[r] >= 0 && p_.least[p_.slot[r]] == r;
      uint32_t at[1] = {first}, total[1];
      scan_.exclusive_scan(at, total);
      if (first) {
        m_.first[carry + at[0]] = int16_t(r);
        m_.key[carry + at[0]] = int64_t(p_.leader[r]) << 32 | p_.common[r];
      }
      carry += total[0];
    }
    block_.sync();
    return int32_t(carry);
  }

  // After it, `least` of a pair's slot is its node.
  FI_DEVICE void sort_nodes(int32_t count) {
    FI_ROLL
    for (int32_t i = thread_; i < count; i += kThreads) {
      const int64_t own = m_.key[i];
      int32_t rank = 0;
      for (int32_t k = 0; k < count; ++k) rank += m_.key[k] < own;
      m_.sorted[rank] = m_.first[i];
      p_.least[p_.slot[m_.first[i]]] = rank;
    }
    block_.sync();
  }

  FI_DEVICE void place_node(int32_t i, int32_t count) {
    const int32_t r = m_.sorted[i], leader = p_.leader[r];
    const int32_t before = i > 0 ? m_.sorted[i - 1] : -1;
    const bool first = before < 0 || p_.leader[before] != leader;
    const bool last = i + 1 == count || p_.leader[m_.sorted[i + 1]] != leader;
    n_.leader[i] = int16_t(leader);
    n_.end[i] = p_.common[r];
    n_.begin[i] = !first ? p_.common[before] : p_.leader[leader] < 0 ? 0 : p_.common[leader];
    n_.parent[i] = first ? m_.branch[leader] : int16_t(i - 1);
    if (last) n_.deepest[leader] = int16_t(i);
  }

  FI_DEVICE int find_depth(int32_t i, int32_t max_depth) {
    int depth = 0;
    FI_ROLL
    for (int32_t up = n_.parent[i]; up >= 0 && depth < max_depth; up = n_.parent[up]) ++depth;
    n_.depth[i] = uint8_t(depth);
    return depth;
  }

  // Leaves out what is too deep; nodes move forwards only.
  FI_DEVICE int32_t cut(int32_t count, int32_t requests, int32_t max_depth) {
    FI_ROLL
    for (int32_t r = thread_; r < requests; r += kThreads) {
      int32_t up = n_.deepest[r];
      FI_ROLL
      while (up >= 0 && n_.depth[up] >= max_depth) up = n_.parent[up];
      n_.deepest[r] = int16_t(up);
    }
    uint32_t carry = 0;
    FI_ROLL
    for (int32_t base = 0; base < count; base += kThreads) {
      const int32_t i = base + thread_;
      const bool kept = i < count && n_.depth[i] < max_depth;
      const int32_t from = i < count ? i : 0;
      const int32_t begin = n_.begin[from], end = n_.end[from];
      const int16_t parent = n_.parent[from], leader = n_.leader[from];
      const uint8_t depth = n_.depth[from];
      uint32_t at[1] = {kept}, total[1];
      scan_.exclusive_scan(at, total);
      const int32_t to = int32_t(carry + at[0]);
      if (kept) {
        n_.begin[to] = begin;
        n_.end[to] = end;
        n_.parent[to] = parent;
        n_.leader[to] = leader;
        n_.depth[to] = depth;
        m_.branch[i] = int16_t(to);
      }
      carry += total[0];
    }
    block_.sync();
    FI_ROLL
    for (int32_t i = thread_; i < int32_t(carry); i += kThreads)
      if (n_.parent[i] >= 0) n_.parent[i] = m_.branch[n_.parent[i]];
    FI_ROLL
    for (int32_t r = thread_; r < requests; r += kThreads)
      if (n_.deepest[r] >= 0) n_.deepest[r] = m_.branch[n_.deepest[r]];
    block_.sync();
    return int32_t(carry);
  }

  Block& block_;
  Scan& scan_;
  ForestFinder<Block>& finder_;
  ForestMemory& p_;
  ForestNodesMemory& m_;
  ForestNodes& n_;
  const int thread_;
};

}  // namespace fi
