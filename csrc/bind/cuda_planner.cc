// SPDX-License-Identifier: Apache-2.0
#include "../cuda/planner.h"

#include "cuda_call.h"
#include "device_plan_args.h"

namespace fi::bind {
namespace {

// Queues the device planner on the caller's stream. The host looks at shapes only.
void plan_on_device(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView workspace,
                    TensorView buffer) {
  const CudaCall call("kv_lens", kv_lens);
  const DevicePlanArgs args = device_plan_args(config, qo_indptr, kv_lens, workspace, buffer, call.device());
  expect_success("plan", cuda::plan_on_device(args, call.stream()));
}

// Queues detection of shared prefixes and the plan. ctas: what prepare_shared() returned for the device.
void plan_shared_on_device(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView indices,
                           TensorView row_begin, TensorView row_end, int64_t step, int64_t page_size,
                           Optional<TensorView> limits, Optional<TensorView> tally, TensorView workspace,
                           TensorView buffer, int64_t ctas) {
  const CudaCall call("kv_lens", kv_lens);
  const DeviceShareArgs args =
      device_share_args(config, qo_indptr, kv_lens, indices, row_begin, row_end, step, page_size, limits,
                        tally, workspace, buffer, call.device());
  expect_success("plan", cuda::plan_shared_on_device(args, int(ctas), call.stream()));
}

// Loads the kernel on the device of any tensor; returns the int32 words of its workspace.
int64_t prepare(TensorView config, TensorView there) {
  const CudaCall call("device", there);
  expect_success("prepare", cuda::prepare_planner());
  return device_workspace_words(config);
}

// Loads the kernel that finds shared prefixes; returns how many thread blocks run it.
int64_t prepare_shared(TensorView there) {
  const CudaCall call("device", there);
  int ctas = 0;
  expect_success("prepare", cuda::prepare_share_planner(&ctas));
  return ctas;
}

}  // namespace
}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_on_device, fi::bind::plan_on_device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_shared_on_device, fi::bind::plan_shared_on_device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, fi::bind::prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_shared, fi::bind::prepare_shared);
