// SPDX-License-Identifier: Apache-2.0
// Tensors of the device planner to its arguments, for the device and for its emulation on the host.
#pragma once
#include <algorithm>

#include "../core/device_share.h"
#include "page_rows_args.h"
#include "planner_config.h"

namespace fi::bind {

// int32 words of the workspace that device_plan_args() and device_share_args() expect.
inline int64_t device_workspace_words(TensorView config) {
  const PlannerConfig c = read_config(config);
  return c.sharing.max_nodes > 0 ? share_workspace_words(c) : workspace_words(c);
}

inline DevicePlanArgs device_plan_args(TensorView config, TensorView qo_indptr, TensorView kv_lens,
                                       TensorView workspace, TensorView buffer, DLDevice device) {
  DevicePlanArgs a{};
  a.config = read_config(config);
  if (a.config.planned_queues)
    TVM_FFI_THROW(ValueError) << "planned_queues: expected False where lengths are on the device only; got "
                                 "True. Pass qo_indptr_host and kv_lens_host.";
  expect_vector("kv_lens", kv_lens, kInt32, -1, device);
  const int64_t requests = kv_lens.size(0);
  expect_vector("qo_indptr", qo_indptr, kInt32, requests + 1, device);
  if (requests > a.config.limits.max_requests)
    TVM_FFI_THROW(ValueError) << "kv_lens: expected at most max_requests = " << a.config.limits.max_requests
                              << " requests; got " << requests << ". Raise max_requests at construction.";
  a.capacity = refusing([&] { return plan_capacity(a.config); });
  a.layout = plan_layout(a.capacity);
  a.cost_shift = cost_shift(a.config, a.capacity);
  a.tile_capacity = int32_t(all_tile_capacity(a.config));
  a.num_requests = int32_t(requests);
  a.qo_indptr = data<const int32_t>(qo_indptr);
  a.kv_lens = data<const int32_t>(kv_lens);

  expect_vector("plan buffer", buffer, kUInt8, -1, device);
  a.plan = data<uint8_t>(buffer);
  if (buffer.numel() < a.layout.total)
    TVM_FFI_THROW(ValueError) << "plan buffer: expected " << a.layout.total << " bytes; got "
                              << buffer.numel() << ".";
  if (reinterpret_cast<uintptr_t>(a.plan) % 16 != 0)
    TVM_FFI_THROW(ValueError) << "plan buffer: expected a start that is aligned to 16 bytes.";
  const int64_t words = workspace_words(a.config);
  expect_vector("workspace", workspace, kInt32, -1, device);
  if (workspace.numel() < words)
    TVM_FFI_THROW(ValueError) << "workspace: expected at least " << words << " int32 values; got "
                              << workspace.numel() << ".";
  a.workspace = words > 0 ? data<int32_t>(workspace) : nullptr;
  return a;
}

// limits: int32 [requests], or none. tally: int64 [3], or none.
inline DeviceShareArgs device_share_args(TensorView config, TensorView qo_indptr, TensorView kv_lens,
                                         TensorView indices, TensorView row_begin, TensorView row_end,
                                         int64_t step, int64_t page_size, Optional<TensorView> limits,
                                         Optional<TensorView> tally, TensorView workspace, TensorView buffer,
                                         DLDevice device) {
  DeviceShareArgs a{};
  a.plan = device_plan_args(config, qo_indptr, kv_lens, workspace, buffer, device);
  const PlannerConfig& c = a.plan.config;
  if (c.sharing.max_nodes < 1 || c.window_left >= 0 || c.invariant_grid > 0)
    TVM_FFI_THROW(ValueError) << "detect_prefixes: expected a planner with room for shared prefixes; got "
                                 "none. Pass sharing at construction.";
  if (const int32_t beta = *std::max_element(std::begin(c.beta), std::end(c.beta)); beta > kMaxSharedBeta)
    TVM_FFI_THROW(ValueError) << "costs.beta: expected at most " << kMaxSharedBeta
                              << " where prefixes are found on the device; got " << beta << ".";
  if (page_size < 1) TVM_FFI_THROW(ValueError) << "page_size: expected >= 1; got " << page_size << ".";
  const int64_t requests = kv_lens.size(0);
  a.forest.rows = page_rows(indices, row_begin, row_end, step, device);
  expect_vector("row_begin", row_begin, kInt64, requests, device);
  a.forest.page_size = int32_t(page_size);
  a.forest.max_depth = kForestDepth;
  if (limits.has_value()) {
    expect_vector("shareable", limits.value(), kInt32, requests, device);
    a.forest.limits = data<const int32_t>(limits.value());
  }
  if (tally.has_value()) {
    expect_vector("tally", tally.value(), kInt64, 3, device);
    a.tally = data<ShareTally>(tally.value());
  }
  const int64_t words = share_workspace_words(c);
  if (workspace.numel() < words)
    TVM_FFI_THROW(ValueError) << "workspace: expected at least " << words << " int32 values; got "
                              << workspace.numel() << ".";
  a.forest.exchange = data<int32_t>(workspace);
  if (a.plan.workspace) a.plan.workspace += kExchangeWords;
  return a;
}

}  // namespace fi::bind
