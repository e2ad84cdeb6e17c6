// SPDX-License-Identifier: Apache-2.0
#include "block.cuh"
#include "planner.h"

namespace fi::cuda {
namespace {

// Blocks of a cluster: eight are what every GPU with clusters has. Long tables are read by all of them, and
// one multiprocessor alone would read 2 MB no faster than in 20 us.
constexpr int kClusterSize = 8;

using ShareMemory = DeviceShareMemory<CudaBlock>;
// The least that a block of any supported architecture can have.
static_assert(sizeof(ShareMemory) <= 99 * 1024);

__global__ void __launch_bounds__(kPlanThreads, 1)
    share_kernel(const __grid_constant__ DeviceShareArgs args) {
  extern __shared__ __align__(16) uint8_t memory[];
  CudaBlock block;
  plan_shared(block, args, *reinterpret_cast<ShareMemory*>(memory));
}

class Launch {
 public:
  Launch(int ctas, cudaStream_t stream) {
    config_.gridDim = dim3(unsigned(ctas));
    config_.blockDim = dim3(kPlanThreads);
    config_.dynamicSmemBytes = sizeof(ShareMemory);
    config_.stream = stream;
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim = {unsigned(ctas), 1, 1};
    config_.attrs = &attribute_;
    config_.numAttrs = ctas > 1;
  }
  Launch(const Launch&) = delete;
  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attribute_{};
};

}  // namespace

cudaError_t prepare_share_planner(int* ctas) {
  *ctas = 1;
  cudaError_t error = cudaFuncSetAttribute(share_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           int(sizeof(ShareMemory)));
  int device = 0, major = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  // A slice of a GPU may have no room for the largest cluster.
  for (int size = kClusterSize; error == cudaSuccess && major >= 9 && size > 1 && *ctas == 1; size /= 2) {
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, share_kernel, Launch(size, nullptr).config());
    if (clusters > 0) *ctas = size;
  }
  return error;
}

cudaError_t plan_shared_on_device(const DeviceShareArgs& args, int ctas, cudaStream_t stream) {
  return cudaLaunchKernelEx(Launch(ctas, stream).config(), share_kernel, args);
}

}  // namespace fi::cuda
