// SPDX-License-Identifier: Apache-2.0
// Longest processing time first: the order of the work items, and the queues of Algorithm 1.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "plan.h"

namespace fi {

struct SortKey {
  uint32_t cost;
  uint32_t index;
};

// Sorts by falling cost, ties by rising index. A radix sort: a few microseconds for a thousand items, and
// an order that a device reproduces whatever its algorithm.
void sort_longest_first(std::vector<SortKey>& keys, std::vector<SortKey>& spare);

// FlashInfer paper, Algorithm 1: each (item, KV head) in list order goes to the CTA with the least cost so
// far, ties to the lower CTA. begin: num_queues + 1; entries: item * num_kv_heads + head, queue by queue.
void assign_queues(std::span<const WorkItem> items, int32_t num_kv_heads, int32_t num_queues, int32_t* begin,
                   int32_t* entries);

}  // namespace fi
