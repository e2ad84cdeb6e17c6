// SPDX-License-Identifier: Apache-2.0
#include "lpt.h"

#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <utility>

namespace fi {
namespace {

constexpr int kDigitBits = 8;
constexpr uint32_t kBuckets = 1u << kDigitBits;
constexpr size_t kInsertionLimit = 32;

void insertion_sort(std::vector<SortKey>& keys) {
  for (size_t i = 1; i < keys.size(); ++i) {
    const SortKey key = keys[i];
    size_t j = i;
    for (; j > 0 && keys[j - 1].cost < key.cost; --j) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

}  // namespace

void sort_longest_first(std::vector<SortKey>& keys, std::vector<SortKey>& spare) {
  if (keys.size() <= kInsertionLimit) return insertion_sort(keys);
  spare.resize(keys.size());
  uint32_t varying = 0;
  for (const SortKey& k : keys) varying |= k.cost ^ keys[0].cost;
  for (int shift = 0; shift < 32; shift += kDigitBits) {
    if (((varying >> shift) & (kBuckets - 1)) == 0) continue;
    std::array<uint32_t, kBuckets> position{};
    for (const SortKey& k : keys) ++position[(~k.cost >> shift) & (kBuckets - 1)];
    uint32_t sum = 0;
    for (uint32_t& p : position) sum += std::exchange(p, sum);
    for (const SortKey& k : keys) spare[position[(~k.cost >> shift) & (kBuckets - 1)]++] = k;
    keys.swap(spare);
  }
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
