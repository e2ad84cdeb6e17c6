// SPDX-License-Identifier: Apache-2.0
#include "lpt.h"

#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "plan_rules.h"

namespace fi {

void sort_longest_first(const PlannerConfig& config, std::span<const WorkItem> items, WorkItem* sorted,
                        int32_t num_nodes, PlanHeader& header) {
  int32_t greatest = 0, tall = 0;
  int64_t load = 0;
  for (const WorkItem& item : items) {
    greatest = std::max(greatest, item.cost);
    load += item.cost;
    tall += is_tall(item);
  }
  const Overlap order = overlap(config, num_nodes, int32_t(items.size()), tall);
  const int shift = sort_shift(config, uint32_t(greatest));
  std::array<uint32_t, kSortBuckets> position{};
  for (const WorkItem& item : items) ++position[size_t(sort_bucket(config, item, shift))];
  uint32_t sum = 0;
  for (uint32_t& p : position) sum += std::exchange(p, sum);
  for (int k = 0; k < kBundleSizes; ++k) {
    const int bucket = first_bundled_bucket(config, num_nodes, load, shift, k + 1);
    header.bundled[k] = bucket < kSortBuckets ? int32_t(items.size() - position[size_t(bucket)]) : 0;
  }
  for (const WorkItem& item : items)
    sorted[order.place(int32_t(position[size_t(sort_bucket(config, item, shift))]++))] = item;
}

void assign_queues(std::span<const WorkItem> items, int32_t num_kv_heads, int32_t num_queues, int32_t* begin,
                   int32_t* entries) {
  using Load = std::pair<int64_t, int32_t>;
  std::vector<Load> idle(static_cast<size_t>(num_queues));
  for (int32_t c = 0; c < num_queues; ++c) idle[size_t(c)] = {0, c};
  std::priority_queue<Load, std::vector<Load>, std::greater<>> heap(std::greater<>{}, std::move(idle));
  std::vector<int32_t> owner(items.size() * size_t(num_kv_heads));
  std::vector<int32_t> count(size_t(num_queues) + 1, 0);
  for (size_t i = 0; i < items.size(); ++i)
    for (int32_t h = 0; h < num_kv_heads; ++h) {
      auto [cost, cta] = heap.top();
      heap.pop();
      owner[i * size_t(num_kv_heads) + size_t(h)] = cta;
      ++count[size_t(cta) + 1];
      heap.push({cost + items[i].cost, cta});
    }
  for (int32_t c = 0; c < num_queues; ++c) count[size_t(c) + 1] += count[size_t(c)];
  std::copy(count.begin(), count.end(), begin);
  for (size_t e = 0; e < owner.size(); ++e) entries[count[size_t(owner[e])]++] = int32_t(e);
}

}  // namespace fi
