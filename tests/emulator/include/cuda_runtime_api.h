// SPDX-License-Identifier: Apache-2.0
// What the kernels' headers use of the CUDA runtime.
#pragma once

using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr cudaError_t cudaSuccess = 0;
