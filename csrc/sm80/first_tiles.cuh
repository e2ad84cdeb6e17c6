// SPDX-License-Identifier: Apache-2.0
// What the consumers do while a CTA's first item is still worked out: the keys of its first tiles are brought
// into the L2 cache, by fewer steps than the scheduler and the guide need to find them.
#pragma once
#include "work.cuh"

namespace fi::sm80 {

// A lane brings one key and its value. Whatever the plan or the lengths say, nothing outside of the page
// table is read.
template <class Traits>
__device__ __forceinline__ void warm_first_tiles(const AttentionParams& p, const LaunchConstants& c) {
  const int index = c.num_kv_heads.divide(blockIdx.x), kv_head = int(blockIdx.x) - index * p.num_kv_heads;
  // Both are read at once: the section has room for an item that the plan may not have.
  if (int64_t(index + 1) * int64_t(sizeof(WorkItem)) > p.layout.units - p.layout.items) return;
  const WorkItem item = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items)[index];
  const auto* header = reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header);
  if (index >= header->num_items || header->num_queues > 0 || header->bundled[0] > 0) return;
  if (item.flags & kPrefix || uint32_t(item.request) >= uint32_t(p.num_requests)) return;
  const LevelParams& level = p.level;
  const int64_t row_begin = level.row_begin[item.request], row_end = level.row_end[item.request];
  const int kv_len = level.kv_lens[item.request];
  const int key = item.kv_begin + int(threadIdx.x);
  if (!holds(level, c, row_begin, row_end, kv_len) || key < 0 || key >= min(item.kv_end, kv_len)) return;
  const int page_of_row = c.page_size.divide(key), in_page = key - page_of_row * level.page_size;
  int64_t page = row_begin + page_of_row;
  if (level.indices != nullptr) {
    const int32_t found = __ldg(level.indices + row_begin + int64_t(page_of_row) * level.index_step);
    page = found < 0 ? level.num_pages : c.index_divisor.divide(found);
  }
  const int64_t last = level.num_pages - 1;
  if (page > last || (page == last && in_page >= level.last_page_size)) return;
  const char* k = static_cast<const char*>(p.k) + kv_head * c.k_head_bytes + page * c.k_page_bytes +
                  in_page * c.k_token_bytes;
  const char* v = static_cast<const char*>(p.v) + kv_head * c.v_head_bytes + page * c.v_page_bytes +
                  in_page * c.v_token_bytes;
  constexpr int kLine = 128;
#pragma unroll
  for (int at = 0; at < Traits::kKChunks * 16; at += kLine) ptx::prefetch_l2(k + at);
#pragma unroll
  for (int at = 0; at < Traits::kVChunks * 16; at += kLine) ptx::prefetch_l2(v + at);
}

}  // namespace fi::sm80
