// SPDX-License-Identifier: Apache-2.0
#include "../core/planner.h"

#include <algorithm>
#include <limits>

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

void plan_forest(TensorView config, TensorView qo_indptr, TensorView kv_lens, const Forest& forest,
                 TensorView buffer) {
  expect_vector("plan buffer", buffer, kUInt8, -1);
  refusing([&] {
    make_plan(read_config(config), int32_vector("qo_indptr", qo_indptr), int32_vector("kv_lens", kv_lens),
              forest, {data<uint8_t>(buffer), size_t(buffer.numel())});
  });
}

void plan(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView buffer) {
  plan_forest(config, qo_indptr, kv_lens, {}, buffer);
}

// nodes: [nodes, 5], the fields of ForestNode.
void plan_shared(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView nodes,
                 TensorView members, int64_t page_size, TensorView buffer) {
  expect_host("forest.nodes", nodes);
  expect_dtype("forest.nodes", nodes, kInt32);
  expect_shape("forest.nodes", nodes, {-1, sizeof(ForestNode) / sizeof(int32_t)});
  if (!nodes.IsContiguous())
    TVM_FFI_THROW(ValueError) << "forest.nodes: expected a contiguous tensor. Call .contiguous() on it.";
  if (page_size < 1 || page_size > std::numeric_limits<int32_t>::max())
    TVM_FFI_THROW(ValueError) << "page_size: expected 1 .. 2^31 - 1; got " << page_size << ".";
  plan_forest(config, qo_indptr, kv_lens,
              {{data<const ForestNode>(nodes), size_t(nodes.size(0))},
               int32_vector("forest.members", members),
               int32_t(page_size)},
              buffer);
}

}  // namespace
}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sizes, fi::bind::sizes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, fi::bind::plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_shared, fi::bind::plan_shared);
