// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

namespace fi {

// Reads `bytes` (a multiple of 16, 16-byte aligned) once; `sink` is one 32-bit word that may be written.
cudaError_t launch_read_all(const void* data, size_t bytes, void* sink, int num_sms, cudaStream_t stream);

}  // namespace fi
