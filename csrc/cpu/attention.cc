// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <omp.h>

#include <algorithm>

#include "executor.h"

#if !defined(FI_Q_DTYPE) || !defined(FI_KV_DTYPE)
#error "define FI_Q_DTYPE and FI_KV_DTYPE, names of fi::cpu::dtype"
#endif
#if defined(FI_VARIANT)
#include "user_variant.h"  // generated
#else
#define FI_VARIANT StandardVariant
#endif

namespace fi::cpu {
namespace {

// About ten microseconds of work: waking the threads costs more than they save.
constexpr int64_t kSerialWork = int64_t(8192) * 256;

// Multiplications, with rows counted in the sixteens in which they are handled.
bool is_small(const AttentionParams& p, const PlanHeader& header) {
  const auto* items = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items);
  const int64_t limit = kSerialWork / (p.head_dim + p.head_dim_v) / header.num_kv_heads;
  int64_t products = 0;
  for (int32_t i = 0; i < header.num_items && products < limit; ++i)
    products += (items[i].q_rows + 15) / 16 * 16 * (int64_t(items[i].kv_end) - items[i].kv_begin);
  return products < limit;
}

// KV heads of an item that a thread takes at once: as many as leave every thread enough to choose from, or
// the same share of equal items.
int32_t heads_together(const AttentionParams& p, const PlanHeader& header, int num_threads, int32_t limit) {
  constexpr int64_t kShare = 8;
  const auto* items = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items);
  const bool equal = std::all_of(items, items + header.num_items,
                                 [&](const WorkItem& item) { return item.cost == items[0].cost; });
  int32_t best = 1;
  for (int32_t n = 2; n <= std::min(header.num_kv_heads, limit); ++n) {
    const int64_t tickets = int64_t(header.num_items) * (header.num_kv_heads / n);
    if (header.num_kv_heads % n == 0 &&
        (tickets >= kShare * num_threads || (equal && tickets % num_threads == 0)))
      best = n;
  }
  return best;
}

}  // namespace

void run_attention(const AttentionParams& params, int num_threads) {
  using ThisExecutor = Executor<dtype::FI_Q_DTYPE, dtype::FI_KV_DTYPE, FI_VARIANT>;
  const auto* header = reinterpret_cast<const PlanHeader*>(params.plan + params.layout.header);
  const auto* queue_begin = reinterpret_cast<const int32_t*>(params.plan + params.layout.queue_begin);
  const auto* queue_entries = reinterpret_cast<const int32_t*>(params.plan + params.layout.queue_entries);
  const int32_t heads = header->num_kv_heads;
  const int32_t queues = header->num_queues;
  if (is_small(params, *header)) num_threads = 1;
  const int32_t together = ThisExecutor::prefers_many_heads(params)
                               ? heads_together(params, *header, num_threads, ThisExecutor::kMaxHeads)
                               : 1;
  const int32_t groups = heads / together;
  const int32_t tickets = header->num_items * groups;

#pragma omp parallel num_threads(num_threads)
  {
    thread_local ThisExecutor executor;
    executor.begin(params);
    if (queues > 0) {
      for (int32_t q = omp_get_thread_num(); q < queues; q += omp_get_num_threads())
        for (int32_t i = queue_begin[q]; i < queue_begin[q + 1]; ++i)
          executor.run_tickets(queue_entries[i] / heads, queue_entries[i] % heads, 1);
    } else {
      std::atomic_ref<int32_t> next(params.counters[kTicket]);
      for (int32_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tickets;)
        executor.run_tickets(t / groups, t % groups * together, together);
    }
    executor.end();
  }
  params.counters[kTicket] = 0;
}

}  // namespace fi::cpu
