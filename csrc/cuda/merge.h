// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include "../core/operators.h"

namespace fi::cuda {

// Queued on `stream`.
cudaError_t merge_states(const MergeParams& params, cudaStream_t stream);

}  // namespace fi::cuda
