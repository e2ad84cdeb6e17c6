// SPDX-License-Identifier: Apache-2.0
// One instance of the template. The module's defines: FI_Q_DTYPE (queries), FI_KV_DTYPE (KV cache),
// FI_HEAD_DIM, FI_HEAD_DIM_V, FI_INVARIANT, FI_SHARED_KIB, FI_SM90A, FI_WGMMA, and those of choice.cuh.
#include "attention.cuh"
#include "launch.h"

namespace fi::sm80 {
namespace {

using float16 = __half;
using bfloat16 = __nv_bfloat16;
using float8_e4m3fn = ptx::E4M3;
using float8_e5m2 = ptx::E5M2;

using Instance = Traits<FI_Q_DTYPE, FI_KV_DTYPE, FI_HEAD_DIM, FI_HEAD_DIM_V, bool(FI_INVARIANT)>;

}  // namespace

#if FI_MARKS
extern "C" __attribute__((visibility("default"))) int fi_read_marks(void* to) {
  return int(cudaMemcpyFromSymbol(to, marks_of_warps, sizeof(marks_of_warps)));
}
#endif

cudaError_t prepare() {
  return cudaFuncSetAttribute(attention_kernel<Instance>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Instance::kSharedBytes);
}

cudaError_t launch(const AttentionParams& p, int num_ctas, cudaStream_t stream) {
  constexpr int64_t kItem = sizeof(FI_KV_DTYPE);
  const LaunchConstants c = launch_constants(p, kItem);
  // An attribute of the current device; setting it again is cheap and legal during capture.
  if (const cudaError_t error = prepare(); error != cudaSuccess) return error;
#if FI_PDL
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(num_ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Instance::kSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, attention_kernel<Instance>, p, c);
#else
  attention_kernel<Instance><<<num_ctas, kThreads, Instance::kSharedBytes, stream>>>(p, c);
  return cudaGetLastError();
#endif
}

}  // namespace fi::sm80
