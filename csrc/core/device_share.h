// SPDX-License-Identifier: Apache-2.0
// A step from tables and lengths that only the device knows: its prefix forest by a cluster of thread blocks,
// then the levels and the plan by the first of them. The bytes are those of the host for the same forest.
#pragma once
#include "device_plan.h"

namespace fi {

// What shared prefixes have saved since it was zeroed; each plan with nodes adds to it.
struct ShareTally {
  uint64_t plans;  // with one node or more
  uint64_t nodes;
  uint64_t tokens;  // KV tokens that would have been read again, for one KV head of one layer
};

struct DeviceShareArgs {
  DevicePlanArgs plan;
  DeviceForestArgs forest;
  ShareTally* tally;  // or null
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

// One warp: adds a plan whose nodes are all of `levels`.
template <class Block>
FI_DEVICE void add_to_tally(Block& block, const PlannerConfig& c, const Levels& levels, int32_t nodes,
                            ShareTally& tally) {
  int64_t tokens = 0;
  for (int32_t j = block.thread(); j < nodes; j += kWarp)
    tokens +=
        int64_t(levels.end[j] - levels.begin[j]) * (levels.members[j] - node_tile_count(c, levels.tokens[j]));
  tokens = warp_sum64(block, tokens);
  if (block.thread() != 0) return;
  // Without waiting for what is there.
  block.add(&tally.plans, uint64_t(1));
  block.add(&tally.nodes, uint64_t(nodes));
  block.add(&tally.tokens, uint64_t(tokens));
}

template <class Block>
FI_DEVICE void plan_shared(Block& block, const DeviceShareArgs& args, DeviceShareMemory<Block>& m) {
  using Scan = Collectives<Block, 4>;
  const DevicePlanArgs& plan = args.plan;
  ForestFinder<Block> finder(block, args.forest, m.pairs);
  const bool shared = finder.run(plan.config, plan.num_requests, plan.qo_indptr, plan.kv_lens);
  if (block.cta() != 0) return;
  Scan scan(block, m.slots);
  const int32_t requests = finder.num_requests();
  int32_t nodes = 0;
  if (shared)
    nodes = ForestNodeBuilder<Block, Scan>(block, scan, finder, m.pairs, m.sorting, m.nodes)
                .run(args.forest.max_depth);
  if (nodes > 0)
    nodes = LevelChooser<Block, Scan>(block, scan, m.nodes, nodes, requests, args.forest.page_size,
                                      m.choosing, m.levels)
                .choose(plan.config, plan.qo_indptr);
  nodes = DevicePlanner<Block, true>(block, plan, m.planning, &m.levels, &m.tables).run(nodes);
  if (args.tally && nodes > 0 && block.thread() < kWarp)
    add_to_tally(block, plan.config, m.levels, nodes, *args.tally);
}

}  // namespace fi
