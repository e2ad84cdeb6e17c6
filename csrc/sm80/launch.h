// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include "../core/params.h"

namespace fi::sm80 {

// Starts the persistent kernel on `num_ctas` CTAs; the plan has been uploaded on the same stream.
cudaError_t launch(const AttentionParams& params, int num_ctas, cudaStream_t stream);

}  // namespace fi::sm80
