// SPDX-License-Identifier: Apache-2.0
#include "../core/planner.h"

#include <tvm/ffi/tvm_ffi.h>

#include <stdexcept>

#include "../core/scratch.h"
#include "tensor_checks.h"

namespace fi {
namespace {

using tvm::ffi::TensorView;

// The int64 vector that Python builds once per BatchAttention (fi_backend/core/planner.py).
constexpr int64_t kConfigFields = 21;

PlannerConfig read_config(TensorView config) {
  if (config.ndim() != 1 || config.size(0) != kConfigFields)
    TVM_FFI_THROW(ValueError) << "config: expected " << kConfigFields << " int64 values; got "
                              << config.numel();
  const auto* v = bind::data<const int64_t>(config);
  PlannerConfig c{};
  c.limits = {v[0], v[1], v[2]};
  c.num_kv_heads = int32_t(v[3]);
  c.group = int32_t(v[4]);
  c.causal = int32_t(v[5]);
  c.window_left = int32_t(v[6]);
  c.invariant_grid = int32_t(v[7]);
  c.num_ctas = int32_t(v[8]);
  c.planned_queues = int32_t(v[9]);
  c.granule = int32_t(v[10]);
  c.min_chunk = int32_t(v[11]);
  c.alpha = int32_t(v[12]);
  for (int i = 0; i < kNumTiles; ++i) c.beta[i] = int32_t(v[13 + i]);
  c.part_cost = int32_t(v[18]);
  c.min_tile = int32_t(v[19]);
  c.max_tile = int32_t(v[20]);
  return c;
}

std::span<const int32_t> int32_vector(const char* name, TensorView t) {
  bind::expect_vector(name, t, bind::kInt32, -1);
  return {bind::data<const int32_t>(t), size_t(t.size(0))};
}

// capacity (8 values), plan layout (9), scratch bytes: everything a caller has to allocate.
void sizes(TensorView config, int64_t head_dim_v, TensorView out) {
  const PlannerConfig c = read_config(config);
  PlanCapacity cap{};
  try {
    cap = plan_capacity(c);
  } catch (const std::invalid_argument& e) {
    TVM_FFI_THROW(ValueError) << e.what();
  }
  const PlanLayout l = plan_layout(cap);
  const int64_t values[] = {
      cap.requests,      cap.items,        cap.units,
      cap.parts,         cap.partial_rows, cap.queues,
      cap.queue_entries, cap.counters,     l.header,
      l.items,           l.units,          l.parts,
      l.kv_len_bounds,   l.queue_begin,    l.queue_entries,
      l.counters,        l.total,          scratch_layout(cap, c.num_kv_heads, int32_t(head_dim_v)).total};
  std::copy(std::begin(values), std::end(values), bind::data<int64_t>(out));
}

void plan(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView buffer) {
  bind::expect_vector("plan buffer", buffer, bind::kUInt8, -1);
  try {
    make_plan(read_config(config), int32_vector("qo_indptr", qo_indptr), int32_vector("kv_lens", kv_lens),
              {bind::data<uint8_t>(buffer), size_t(buffer.numel())});
  } catch (const std::invalid_argument& e) {
    TVM_FFI_THROW(ValueError) << e.what();
  }
}

}  // namespace
}  // namespace fi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sizes, fi::sizes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, fi::plan);
