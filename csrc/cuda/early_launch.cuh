// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch, 9.0 and newer, of what comes before attention (planners, cache appends): it
// is on its way to the SMs while the kernel before it ends, and attention, which waits for it, while it runs.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "ptx/grids.cuh"

namespace fi::cuda {

// Off until it has been measured.
#if !defined(FI_EARLY_LAUNCH)
#define FI_EARLY_LAUNCH 0
#endif
// A module is compiled for one target.
inline constexpr bool kLaunchesEarly = FI_EARLY_LAUNCH && (__CUDA_ARCH_LIST__) >= 900;

// The first thing that such a kernel does: nothing in global memory is touched before. What depends on it
// begins behind the grids before this one too, so that its own wait need not be told of them.
__device__ __forceinline__ void begin_grid() {
  if constexpr (kLaunchesEarly) {
    ptx::wait_for_grids();
    ptx::start_dependent_grids();
  }
}

inline cudaLaunchAttribute early_launch() {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = kLaunchesEarly;
  return early;
}

template <class Arguments>
cudaError_t launch_early(void (*kernel)(Arguments), dim3 grid, dim3 block, size_t shared_bytes,
                         cudaStream_t stream, const std::type_identity_t<Arguments>& arguments) {
  cudaLaunchAttribute early = early_launch();
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = kLaunchesEarly;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace fi::cuda
