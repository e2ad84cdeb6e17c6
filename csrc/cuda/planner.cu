// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "planner.h"

namespace fi::cuda {
namespace {

// Enough for a tile a thread of most steps; more warps would make every barrier and shuffle wait for longer.
constexpr int kPlanThreads = 512;
constexpr uint32_t kAllLanes = 0xffffffff;

class CudaBlock {
 public:
  static constexpr int kThreads = kPlanThreads;

  __device__ __forceinline__ int thread() const { return int(threadIdx.x); }
  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }
  __device__ __forceinline__ uint32_t ballot(bool v) { return __ballot_sync(kAllLanes, v); }
  template <class T>
  __device__ __forceinline__ T shuffle(T v, int lane) {
    return __shfl_sync(kAllLanes, v, lane);
  }
  template <class T>
  __device__ __forceinline__ T shuffle_up(T v, int distance) {
    return __shfl_up_sync(kAllLanes, v, distance);
  }
  __device__ __forceinline__ uint32_t warp_sum(uint32_t v) { return __reduce_add_sync(kAllLanes, v); }
  __device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(kAllLanes, v); }
  __device__ __forceinline__ uint32_t warp_or(uint32_t v) { return __reduce_or_sync(kAllLanes, v); }
  __device__ __forceinline__ void add(uint32_t* to, uint32_t v) { atomicAdd(to, v); }
  __device__ __forceinline__ void store(WorkItem* to, const WorkItem& item) {
    const auto* words = reinterpret_cast<const int4*>(&item);
    reinterpret_cast<int4*>(to)[0] = words[0];
    reinterpret_cast<int4*>(to)[1] = words[1];
  }
};

using PlanMemory = DevicePlanMemory<kPlanThreads>;
// The least that a block of any supported architecture can have.
static_assert(sizeof(PlanMemory) <= 99 * 1024);

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ DevicePlanArgs args) {
  extern __shared__ __align__(16) uint8_t memory[];
  CudaBlock block;
  DevicePlanner<CudaBlock>(block, args, *reinterpret_cast<PlanMemory*>(memory)).run();
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
