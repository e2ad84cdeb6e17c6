// SPDX-License-Identifier: Apache-2.0
// A step from tables and lengths that only the device knows: its prefix forest by a cluster of thread blocks,
// then the levels and the plan by the first of them. The bytes are those of the host for the same forest.
#pragma once
#include "device_plan.h"

namespace fi {

struct DeviceShareArgs {
  DevicePlanArgs plan;
  DeviceForestArgs forest;
};

// int32 words of the workspace: those of the exchange, then the planner's.
inline int64_t share_workspace_words(const PlannerConfig& config) {
  return kExchangeWords + workspace_words(config);
}

template <class Block>
struct DeviceShareMemory {
  CollectiveSlots<Block::kThreads / kWarp, 4> slots;
  union {
    ForestMemory pairs;     // until nodes are built
    LevelsMemory choosing;  // until levels are chosen
    typename DevicePlanner<Block, true>::Memory planning;
  };
  union {
    ForestNodesMemory sorting;  // until nodes are built
    Levels levels;
  };
  union {
    ForestNodes nodes;  // until levels are chosen
    NodeTables tables;
  };
};

template <class Block>
FI_DEVICE void plan_shared(Block& block, const DeviceShareArgs& args, DeviceShareMemory<Block>& m) {
  using Scan = Collectives<Block, 4>;
  const DevicePlanArgs& plan = args.plan;
  ForestFinder<Block> finder(block, args.forest, m.pairs);
  finder.run(plan.config, plan.num_requests, plan.qo_indptr, plan.kv_lens);
  if (block.cta() != 0) return;
  Scan scan(block, m.slots);
  const int32_t requests = finder.num_requests();
  int32_t nodes = ForestNodeBuilder<Block, Scan>(block, scan, finder, m.pairs, m.sorting, m.nodes)
                      .run(args.forest.max_depth);
  if (nodes > 0)
    nodes = LevelChooser<Block, Scan>(block, scan, m.nodes, nodes, requests, args.forest.page_size,
                                      m.choosing, m.levels)
                .choose(plan.config, plan.qo_indptr);
  DevicePlanner<Block, true>(block, plan, m.planning, &m.levels, &m.tables).run(nodes);
}

}  // namespace fi
