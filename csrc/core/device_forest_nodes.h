// SPDX-License-Identifier: Apache-2.0
// The nodes of a forest in the order of the host's, from the leaders that ForestFinder found; by one block.
#pragma once
#include "device_forest.h"
#include "device_tiles.h"

namespace fi {

// Nodes are (leader, common): the leader and all requests that have at least so many pages in common with it.
// Sorted by that pair they are in the forest's order. A leader's own pair is the node that its first node
// lies below. A node begins where its parent ends.
struct ForestNodes {
  int32_t end[kForestRequests];  // pages
  int16_t parent[kForestRequests], leader[kForestRequests];
  uint8_t depth[kForestRequests];
  int16_t deepest[kForestRequests];  // by request: the last node that it is a member of, or -1
};

struct ForestNodesMemory {
  ForestPairs pairs;
  int16_t node_of[kForestRequests];  // by the smallest request with its pair
  int16_t up[kForestRequests];       // by node that is not too deep: its parent
};

struct NodeCount {
  int32_t nodes;
  int32_t greatest_depth;
};

// By distance and node: the node so far above, from its parent on.
using Ancestors = int16_t[kForestDepth][kForestRequests];

// Reads `leaders`, where ForestFinder left leaders and common pages, until depths are found.
template <class Block, class Scan>
class ForestNodeBuilder {
 public:
  static constexpr int kThreads = Block::kThreads;

  FI_DEVICE ForestNodeBuilder(Block& block, Scan& scan, const ForestMemory& leaders, int32_t requests,
                              ForestNodesMemory& memory, ForestNodes& nodes, Ancestors& ancestors)
      : block_(block),
        scan_(scan),
        p_(leaders),
        requests_(requests),
        m_(memory),
        n_(nodes),
        ancestors_(ancestors),
        thread_(block.thread()),
        lane_(thread_ % kWarp) {}

  // After a barrier behind `count` > 0 pairs; ends with one. wide: not every pair fits a word. clear():
  // called in the first phase; members(parent): in the last one, where n_.deepest is known, and parent(node)
  // of every node; both again where nodes are left out that are too deep.
  template <class Clear, class Members>
  FI_DEVICE NodeCount run(int32_t count, bool wide, int32_t max_depth, Clear clear, Members members) {
    clear();
    sort_nodes(count, wide);
    block_.sync();
    // A leader's last node is its deepest one.
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) {
      const int32_t last = m_.pairs.last[r], own = branch(r);
      n_.deepest[r] = int16_t(last == ForestPairs::kNoNode ? own : ~last);
    }
    uint32_t greatest = find_depths(count, max_depth);
    const auto up = [&](int32_t node) { return parent(node); };
    members(up);
    scan_.post(0, block_.warp_max(greatest));
    scan_.meet();
    greatest = block_.warp_max(uint32_t(scan_.posted(0)));
    if (int32_t(greatest) < max_depth) return {count, int32_t(greatest)};
    count = cut(count, max_depth);
    clear();
    find_depths(count, max_depth);
    block_.sync();
    members(up);
    block_.sync();
    return {count, max_depth - 1};
  }

 private:
  static constexpr int32_t kNone = -1;

  // Some lanes a node, each of which counts how many of some others come before it.
  FI_DEVICE void sort_nodes(int32_t count, bool wide) {
    constexpr int kLanes = 4, kKeys = 8;  // two loads under way
    struct alignas(16) Keys {
      uint32_t key[kKeys];
    };
    FI_ROLL
    for (int32_t base = 0; base < count; base += kThreads / kLanes) {
      const int32_t i = base + thread_ / kLanes, lane = thread_ % kLanes;
      int32_t node = 0;
      if (!wide) {
        const uint32_t own = i < count ? m_.pairs.key[i] : 0;
        FI_ROLL
        for (int32_t k = lane * kKeys; k < count; k += kLanes * kKeys) {
          const Keys keys = *reinterpret_cast<const Keys*>(&m_.pairs.key[k]);
          FI_UNROLL
          for (int j = 0; j < kKeys; ++j) node += keys.key[j] < own && k + j < count;
        }
      } else {
        const int64_t own = i < count ? wide_key(i) : 0;
        FI_ROLL
        for (int32_t k = lane; k < count; k += kLanes) node += wide_key(k) < own;
      }
      node += block_.shuffle(node, lane_ ^ 1);
      node += block_.shuffle(node, lane_ ^ 2);
      if (i >= count || lane > 0) continue;
      const int32_t first = m_.pairs.first[i], leader = p_.leader[first], common = p_.common[first];
      m_.node_of[first] = int16_t(node);
      n_.leader[node] = int16_t(leader);
      n_.end[node] = common;
      block_.keep_least(&m_.pairs.last[leader], ~node);
    }
  }

  FI_DEVICE int64_t wide_key(int32_t pair) const {
    const int32_t first = m_.pairs.first[pair];
    return int64_t(p_.leader[first]) << 32 | p_.common[first];
  }

  // The node of a request's pair, or kNone.
  FI_DEVICE int32_t branch(int32_t r) const {
    const int32_t first = p_.pair[r], node = m_.node_of[first < 0 ? 0 : first];
    return first < 0 ? kNone : node;
  }

  // That of the leader's pair where there is no node of the same leader before.
  FI_DEVICE int32_t parent(int32_t node) const {
    if (cut_) return m_.up[node];
    // Asked for together.
    const int32_t before = node > 0 ? node - 1 : 0, leader = n_.leader[node], above = n_.leader[before];
    const int32_t other = branch(leader);
    return node > 0 && above == leader ? before : other;
  }

  // Returns the greatest that the thread has found, at most max_depth.
  FI_DEVICE uint32_t find_depths(int32_t count, int32_t max_depth) {
    int32_t greatest = 0;
    FI_ROLL
    for (int32_t i = other_half(block_); i < count; i += kThreads) {
      int32_t depth = 0;
      int32_t up = parent(i);
      n_.parent[i] = int16_t(up);
      FI_ROLL
      for (; up >= 0 && depth < max_depth; up = parent(up)) ancestors_[depth++][i] = int16_t(up);
      n_.depth[i] = uint8_t(depth);
      greatest = depth > greatest ? depth : greatest;
    }
    return uint32_t(greatest);
  }

  // Leaves out what is too deep; nodes move forwards only.
  FI_DEVICE int32_t cut(int32_t count, int32_t max_depth) {
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) {
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
      const int32_t end = n_.end[from];
      const int16_t parent = n_.parent[from], leader = n_.leader[from];
      const uint8_t depth = n_.depth[from];
      uint32_t at[1] = {kept}, total[1];
      scan_.exclusive_scan(at, total);
      const int32_t to = int32_t(carry + at[0]);
      if (kept) {
        n_.end[to] = end;
        n_.parent[to] = parent;
        n_.leader[to] = leader;
        n_.depth[to] = depth;
        m_.node_of[i] = int16_t(to);
      }
      carry += total[0];
    }
    block_.sync();
    FI_ROLL
    for (int32_t i = thread_; i < int32_t(carry); i += kThreads)
      m_.up[i] = n_.parent[i] < 0 ? int16_t(kNone) : m_.node_of[n_.parent[i]];
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads)
      if (n_.deepest[r] >= 0) n_.deepest[r] = m_.node_of[n_.deepest[r]];
    cut_ = true;
    block_.sync();
    return int32_t(carry);
  }

  Block& block_;
  Scan& scan_;
  const ForestMemory& p_;
  const int32_t requests_;
  ForestNodesMemory& m_;
  ForestNodes& n_;
  Ancestors& ancestors_;
  const int thread_, lane_;
  bool cut_ = false;  // nodes have been left out
};

}  // namespace fi
