// SPDX-License-Identifier: Apache-2.0
// Longest processing time first: the order of the work items, and the queues of Algorithm 1.
#pragma once
#include <cstdint>
#include <span>

#include "plan.h"
#include "planner.h"

namespace fi {

// Copies `items` to `sorted`: those of nodes, then by falling cost (by bucket, see plan_rules.h), ties by
// rising index; as they stand where the configuration says so, or moved by overlap(). The header's `bundled`
// follows from it. num_nodes: of the plan.
void sort_longest_first(const PlannerConfig& config, std::span<const WorkItem> items, WorkItem* sorted,
                        int32_t num_nodes, PlanHeader& header);

// FlashInfer paper, Algorithm 1: each (item, KV head) in list order goes to the CTA with the least cost so
// far, ties to the lower CTA. begin: num_queues + 1; entries: item * num_kv_heads + head, queue by queue.
void assign_queues(std::span<const WorkItem> items, int32_t num_kv_heads, int32_t num_queues, int32_t* begin,
                   int32_t* entries);

}  // namespace fi
