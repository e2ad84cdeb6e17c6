// SPDX-License-Identifier: Apache-2.0
// A step from tables and lengths that only the device knows: its prefix forest by a cluster of thread blocks,
// then the levels and the plan by the first of them. The bytes are those of the host for the same forest.
#pragma once
#include <cstddef>
#include <type_traits>

#include "device_plan.h"
#include "phases.h"

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

// kBeside: the planner begins while prefixes are searched, with memory of its own.
template <class Block, bool kBeside>
struct DeviceShareMemory {
  using Planning = typename DevicePlanner<Block, true>::Memory;
  struct None {};
  typename GroupScan<Block>::Slots slots;
  Inbox inbox;
  union {
    ForestMemory leaders;   // until depths are found
    LevelsMemory choosing;  // until the plan is made if kBeside, else until levels are chosen; its sums are
                            // cleared while nodes are sorted
    std::conditional_t<kBeside, None, Planning> planning_behind;
  };
  std::conditional_t<kBeside, Planning, None> planning_beside;
  std::conditional_t<kBeside, GatheredLists, None> lists;
  union {
    struct {
      ForestNodesMemory sorting;             // until nodes are built
      Comparison received[kForestRequests];  // until pairs are found
    };
    Levels levels;
  };
  union {
    ForestNodes nodes;  // until levels are chosen
    NodeTables tables;
  };
  // Of the leaders, what is read until depths are found lies behind the sums.
  static_assert(offsetof(LevelsMemory, overhead) <=
                offsetof(ForestMemory, table) + kPairSlots * sizeof(int32_t));
  // And what is noted of the nodes behind what they are sorted with.
  static_assert(sizeof(ForestNodesMemory) <= offsetof(Levels, path));
  static_assert(sizeof(LevelsMemory) <= offsetof(ForestMemory, q_len));

  FI_DEVICE GatheredLists* gathered() {
    if constexpr (kBeside)
      return &lists;
    else
      return nullptr;
  }
  FI_DEVICE Planning& planning() {
    if constexpr (kBeside)
      return planning_beside;
    else
      return planning_behind;
  }
};

// One warp: adds a plan whose nodes are all of `levels`.
template <class Block>
FI_DEVICE void add_to_tally(Block& block, const PlannerConfig& c, const Levels& levels, int32_t nodes,
                            ShareTally& tally) {
  int64_t tokens = 0;
  for (int32_t j = block.thread(); j < nodes; j += kWarp)
    tokens +=
        int64_t(levels.end[j] - levels.begin(j)) * (levels.members[j] - node_tile_count(c, levels.tokens[j]));
  tokens = warp_sum64(block, tokens);
  if (block.thread() != 0) return;
  // Without waiting for what is there.
  block.add(&tally.plans, uint64_t(1));
  block.add(&tally.nodes, uint64_t(nodes));
  block.add(&tally.tokens, uint64_t(tokens));
}

// Of the nodes of a forest those that pay; by one block. pairs: what the finder has found.
template <class Block, bool kBeside, class Budget>
FI_DEVICE LevelCounts choose_levels(Block& block, GroupScan<Block>& scan, const DeviceShareArgs& args,
                                    int32_t requests, int32_t pairs, bool wide,
                                    DeviceShareMemory<Block, kBeside>& m, Budget budget) {
  const DevicePlanArgs& plan = args.plan;
  LevelChooser<Block> chooser(block, scan, m.nodes, pairs, requests, args.forest.page_size, m.choosing,
                              m.levels);
  const NodeCount nodes =
      ForestNodeBuilder<Block, GroupScan<Block>>(block, scan, m.leaders, requests, m.sorting, m.nodes,
                                                 m.levels.path)
          .run(
              pairs, wide, args.forest.max_depth, [&] { chooser.clear(); },
              [&](auto parent) { chooser.add_requests(plan.config, m.leaders.q_len, parent); });
  FI_PHASE(block, "nodes");
  return chooser.choose(plan.config, nodes, budget);
}

template <class Block, bool kBeside>
FI_DEVICE void plan_shared(Block& block, const DeviceShareArgs& args, DeviceShareMemory<Block, kBeside>& m) {
  const DevicePlanArgs& plan = args.plan;
  GroupScan<Block> scan(block, m.slots);
  DevicePlanner<Block, true> planner(block, plan, m.planning(), &m.levels, &m.tables, &m.choosing.cuts,
                                     m.gathered());
  ForestFinder<Block, kBeside> finder(block, scan, args.forest, m.leaders, m.sorting.pairs, m.received,
                                      m.inbox);
  bool begun = false;
  const int32_t pairs =
      finder.run(plan.config, plan.num_requests, plan.qo_indptr, plan.kv_lens, [&](auto between) {
        if constexpr (kBeside) planner.begin(between);
        begun = kBeside;
        FI_PHASE(block, "flat tiles, beside");
      });
  FI_PHASE(block, "searched");
  if (block.cta() != 0) return finder.leave();
  LevelCounts levels;
  if (pairs > 0) {
    if constexpr (kBeside)
      levels = choose_levels(block, scan, args, finder.num_requests(), pairs, finder.wide(), m,
                             planner.levels_budget());
    else
      levels = choose_levels(block, scan, args, finder.num_requests(), pairs, finder.wide(), m, NoBudget{});
  }
  FI_PHASE(block, "levels");
  if (!begun) planner.begin([] {});
  FI_PHASE(block, "flat tiles");
  const int32_t nodes = planner.finish(levels);
  FI_PHASE(block, "plan");
  if (args.tally && nodes > 0 && block.thread() < kWarp)
    add_to_tally(block, plan.config, m.levels, nodes, *args.tally);
  finder.leave();
}

}  // namespace fi
