// SPDX-License-Identifier: Apache-2.0
// Composition on the host: which nodes of a forest are read once for all their members.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "planner.h"

namespace fi {

// A node that became a level.
struct KeptNode {
  int32_t parent;      // the kept node above it, or -1
  int32_t begin, end;  // KV tokens, from the end of the node above on
  int32_t member_begin, member_end;
  int32_t tokens;  // query tokens of the members
  int kind;        // of its tiles
  int32_t num_tiles;
};

struct Composition {
  std::vector<KeptNode> nodes;  // in the forest's order
  std::vector<int32_t> leaf;    // by request: its deepest kept node, or -1

  bool empty() const { return nodes.empty(); }
  void clear() {
    nodes.clear();
    leaf.clear();
  }
};

// Throws std::invalid_argument that says what is wrong with a forest for these lengths, which have been
// checked.
void check_forest(const PlannerConfig& config, std::span<const int32_t> qo_indptr,
                  std::span<const int32_t> kv_lens, const Forest& forest);

// Chooses the levels of a checked forest by the rules of compose_rules.h. Empty where nothing pays, and where
// `config` has no room for sharing.
void compose(const PlannerConfig& config, std::span<const int32_t> qo_indptr, const Forest& forest,
             Composition& composition);

}  // namespace fi
