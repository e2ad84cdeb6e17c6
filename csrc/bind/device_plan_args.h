// SPDX-License-Identifier: Apache-2.0
// Tensors of the device planner to its arguments, for the device and for its emulation on the host.
#pragma once
#include "../core/device_plan.h"
#include "planner_config.h"

namespace fi::bind {

// int32 words of the workspace that device_plan_args() expects.
inline int64_t device_workspace_words(TensorView config) { return workspace_words(read_config(config)); }

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
  a.tile_capacity = int32_t(tile_capacity(a.config));
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

}  // namespace fi::bind
