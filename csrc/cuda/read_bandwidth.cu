// SPDX-License-Identifier: Apache-2.0
// The read ceiling of `fi-backend bench kernels`: every byte is loaded once and nothing is written.
#include "read_bandwidth.h"

#include <cstdint>

namespace fi {
namespace {

constexpr int kThreads = 512;
constexpr int kCtasPerSm = 4;
// Independent 16-byte loads of a thread before the first is used: 4 CTAs x 512 threads x 8 x 16 bytes is
// 256 KiB in flight on an SM, several times what latency times bandwidth asks for.
constexpr int kLoads = 8;

__global__ void __launch_bounds__(kThreads)
    read_all(const uint4* __restrict__ data, size_t count, uint32_t* sink) {
  const size_t stride = size_t(gridDim.x) * kThreads;
  uint32_t folded = 0;
  size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + (kLoads - 1) * stride < count; i += kLoads * stride) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) loaded[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) folded ^= loaded[j].x ^ loaded[j].y ^ loaded[j].z ^ loaded[j].w;
  }
  for (; i < count; i += stride) {
    const uint4 one = __ldcs(data + i);
    folded ^= one.x ^ one.y ^ one.z ^ one.w;
  }
  // A store that the compiler cannot rule out keeps the loads; with random data it hardly ever happens.
  if (folded == 0x5eed1e55u) *sink = folded;
}

}  // namespace

cudaError_t launch_read_all(const void* data, size_t bytes, void* sink, int num_sms, cudaStream_t stream) {
  read_all<<<num_sms * kCtasPerSm, kThreads, 0, stream>>>(
      static_cast<const uint4*>(data), bytes / sizeof(uint4), static_cast<uint32_t*>(sink));
  return cudaGetLastError();
}

}  // namespace fi
