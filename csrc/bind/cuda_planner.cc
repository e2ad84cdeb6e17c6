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

// Loads the kernel on the device of any tensor; returns the int32 words of its workspace.
int64_t prepare(TensorView config, TensorView there) {
  const CudaCall call("device", there);
  expect_success("prepare", cuda::prepare_planner());
  return device_workspace_words(config);
}

}  // namespace
}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_on_device, fi::bind::plan_on_device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, fi::bind::prepare);
