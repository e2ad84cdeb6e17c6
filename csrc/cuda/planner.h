// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include "../core/device_share.h"

namespace fi::cuda {

// Loads the kernel on the current device, which a capture must not do.
cudaError_t prepare_planner();

// After prepare_planner(): queues one thread block on `stream` that writes the plan. Never waits, so that a
// graph can capture it.
cudaError_t plan_on_device(const DevicePlanArgs& args, cudaStream_t stream);

// The same for steps whose tables are searched for shared prefixes; `ctas`: thread blocks that do it together
// on the current device, a cluster where it has them.
cudaError_t prepare_share_planner(int* ctas);
cudaError_t plan_shared_on_device(const DeviceShareArgs& args, int ctas, cudaStream_t stream);

}  // namespace fi::cuda
