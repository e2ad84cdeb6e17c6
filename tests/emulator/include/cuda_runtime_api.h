// SPDX-License-Identifier: Apache-2.0
// The names of the CUDA runtime that the kernels' headers mention.
#pragma once
using cudaError_t = int;
using cudaStream_t = void*;
