// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "block.cuh"
#include "planner.h"

namespace fi::cuda {
namespace {

using Planner = DevicePlanner<CudaBlock>;
using PlanMemory = Planner::Memory;
// The least that a block of any supported architecture can have.
static_assert(sizeof(PlanMemory) <= 99 * 1024);

__global__ void __launch_bounds__(kPlanThreads, 1) plan_kernel(const __grid_constant__ DevicePlanArgs args) {
  CudaBlock block;
  Planner(block, args, shared_memory<PlanMemory>()).run();
}

}  // namespace

cudaError_t prepare_planner() {
  return cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              int(sizeof(PlanMemory)));
}

cudaError_t plan_on_device(const DevicePlanArgs& args, cudaStream_t stream) {
  plan_kernel<<<1, kPlanThreads, sizeof(PlanMemory), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace fi::cuda
