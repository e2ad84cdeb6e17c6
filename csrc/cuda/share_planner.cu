// SPDX-License-Identifier: Apache-2.0
#include "block.cuh"
#include "planner.h"

namespace fi::cuda {
namespace {

// Blocks of a cluster: eight are what every GPU with clusters has. Long tables are read by all of them, and
// one multiprocessor alone would read 2 MB no faster than in 20 us.
constexpr int kClusterSize = 8;

// Whether the planner begins beside the search: where there are clusters, and shared memory for both.
__host__ __device__ constexpr bool plans_beside(int major) { return major >= 9 && major < 12; }

template <bool kBeside>
using ShareMemory = DeviceShareMemory<CudaBlock, kBeside>;
// The least that a block of any supported architecture can have, and of those with clusters up to 11.x.
static_assert(sizeof(ShareMemory<false>) <= 99 * 1024);
static_assert(sizeof(ShareMemory<true>) <= 227 * 1024);

__global__ void __launch_bounds__(kPlanThreads, 1)
    share_kernel(const __grid_constant__ DeviceShareArgs args) {
#if defined(__CUDA_ARCH__)
  CudaBlock block;
  plan_shared(block, args, shared_memory<ShareMemory<plans_beside(__CUDA_ARCH__ / 100)>>());
#endif
}

class Launch {
 public:
  Launch(int ctas, int major, cudaStream_t stream) {
    config_.gridDim = dim3(unsigned(ctas));
    config_.blockDim = dim3(kPlanThreads);
    config_.dynamicSmemBytes = memory_bytes(major);
    config_.stream = stream;
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim = {unsigned(ctas), 1, 1};
    config_.attrs = &attribute_;
    config_.numAttrs = ctas > 1;
  }
  Launch(const Launch&) = delete;
  const cudaLaunchConfig_t* config() const { return &config_; }

  static size_t memory_bytes(int major) {
    return plans_beside(major) ? sizeof(ShareMemory<true>) : sizeof(ShareMemory<false>);
  }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attribute_{};
};

cudaError_t find_major(int* major) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device)
                              : error;
}

}  // namespace

cudaError_t prepare_share_planner(int* ctas) {
  *ctas = 1;
  int major = 0;
  cudaError_t error = find_major(&major);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(share_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 int(Launch::memory_bytes(major)));
  // A slice of a GPU may have no room for the largest cluster.
  for (int size = kClusterSize; error == cudaSuccess && major >= 9 && size > 1 && *ctas == 1; size /= 2) {
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, share_kernel, Launch(size, major, nullptr).config());
    if (clusters > 0) *ctas = size;
  }
  return error;
}

cudaError_t plan_shared_on_device(const DeviceShareArgs& args, int ctas, cudaStream_t stream) {
  int major = 0;
  const cudaError_t error = find_major(&major);
  return error == cudaSuccess ? cudaLaunchKernelEx(Launch(ctas, major, stream).config(), share_kernel, args)
                              : error;
}

}  // namespace fi::cuda

#if FI_PHASES
// Copies the marks of the last launch to the host, [kPhaseBlocks][kMostPhases + 1]; returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fi_read_phases(void* to) {
  return int(cudaMemcpyFromSymbol(to, fi::cuda::phase_marks, sizeof(fi::cuda::phase_marks)));
}
#endif
