// SPDX-License-Identifier: Apache-2.0
#include "../core/planner.h"

#include <algorithm>

#include "../core/scratch.h"
#include "planner_config.h"

namespace fi::bind {
namespace {

std::span<const int32_t> int32_vector(const char* name, TensorView t) {
  expect_vector(name, t, kInt32, -1);
  return {data<const int32_t>(t), size_t(t.size(0))};
}

// capacity (11 values), plan layout (12), scratch bytes: everything a caller has to allocate.
void sizes(TensorView config, int64_t head_dim_v, TensorView out) {
  const PlannerConfig c = read_config(config);
  const PlanCapacity cap = refusing([&] { return plan_capacity(c); });
  const PlanLayout l = plan_layout(cap);
  const int64_t values[] = {
      cap.requests,      cap.items,        cap.units,
      cap.parts,         cap.partial_rows, cap.queues,
      cap.queue_entries, cap.nodes,        cap.node_tokens,
      cap.reports,       cap.counters,     l.header,
      l.items,           l.units,          l.parts,
      l.kv_len_bounds,   l.queue_begin,    l.queue_entries,
      l.nodes,           l.node_tokens,    l.reports,
      l.counters,        l.total,          scratch_layout(cap, c.num_kv_heads, int32_t(head_dim_v)).total,
  };
  std::copy(std::begin(values), std::end(values), data<int64_t>(out));
}

void plan(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView buffer) {
  expect_vector("plan buffer", buffer, kUInt8, -1);
  refusing([&] {
    make_plan(read_config(config), int32_vector("qo_indptr", qo_indptr), int32_vector("kv_lens", kv_lens),
              {data<uint8_t>(buffer), size_t(buffer.numel())});
  });
}

}  // namespace
}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sizes, fi::bind::sizes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, fi::bind::plan);
