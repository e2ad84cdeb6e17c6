// SPDX-License-Identifier: Apache-2.0
// The last step of the host planner: cut tiles become items and the reduction map.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "compose.h"
#include "plan_rules.h"

namespace fi {

struct CutTiles {
  std::vector<Tile> tiles;  // of the requests, then of the composition's nodes
  std::vector<Split> splits;
  // By node: chunks of the kept nodes from the root to it, which are parts of each member's unit.
  std::vector<int32_t> path_chunks;
};

// Sections of the buffer that emit() writes.
struct PlanSections {
  MergeUnit* units;
  int32_t* parts;
  PrefixNode* nodes;
  int32_t* node_tokens;
  int32_t* reports;
};

struct NodeCounts {
  int32_t tokens, reports;
};

// Items in the order of their tiles, and everything that tells how their states are joined.
NodeCounts emit(const PlannerConfig& config, std::span<const int32_t> qo_indptr, const Forest& forest,
                const Composition& composition, const CutTiles& cut, std::vector<WorkItem>& items,
                const PlanSections& to);

}  // namespace fi
