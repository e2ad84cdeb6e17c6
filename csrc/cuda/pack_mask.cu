// SPDX-License-Identifier: Apache-2.0
// A thread makes bytes of one request's packed mask; lengths are read on the device.
#include "pack_mask.h"

namespace fi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksOfRequest = 64;
constexpr int64_t kMaxRequests = 65535;  // in the second dimension of a grid

__global__ void __launch_bounds__(kThreads) pack_mask_kernel(const __grid_constant__ PackMaskParams p) {
  const int64_t request = blockIdx.y;
  const MaskRows m = mask_rows(p, request);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.mask_kv_len[request] = m.bytes < 0 ? -1 : int32_t(m.kv_len);
  for (int64_t byte = int64_t(blockIdx.x) * kThreads + threadIdx.x; byte < m.bytes;
       byte += int64_t(gridDim.x) * kThreads)
    p.bits[request * p.stride + byte] = mask_byte(p, m, byte);
}

}  // namespace

cudaError_t pack_mask(const PackMaskParams& p, cudaStream_t stream) {
  if (p.num_requests == 0) return cudaSuccess;
  if (p.num_requests > kMaxRequests) return cudaErrorInvalidValue;
  const int64_t blocks = ::min(kBlocksOfRequest, (p.stride + kThreads - 1) / kThreads);
  pack_mask_kernel<<<dim3{unsigned(blocks), unsigned(p.num_requests)}, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fi::cuda
