// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include "../core/operators.h"

namespace fi::cuda {

// Queued on `stream`. A slot outside the cache is skipped like -1.
cudaError_t append_kv(const AppendParams& params, cudaStream_t stream);

}  // namespace fi::cuda
