// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include "../core/pack_mask.h"

namespace fi::cuda {

// Queued on `stream`. The grid depends on the number of requests and the stride alone.
cudaError_t pack_mask(const PackMaskParams& params, cudaStream_t stream);

}  // namespace fi::cuda
