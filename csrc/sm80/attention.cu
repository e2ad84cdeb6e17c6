// SPDX-License-Identifier: Apache-2.0
// One instance of the template: FI_T, FI_HEAD_DIM and FI_HEAD_DIM_V come from the module's defines.
#include "attention.cuh"
#include "launch.h"

namespace fi::sm80 {
namespace {

struct Plain {
  static constexpr bool kTransform = false, kAlwaysMask = false;
  __device__ float transform(const AttentionParams&, float x, int, int, int, int) const { return x; }
  __device__ bool visible(const AttentionParams&, int, int, int, int) const { return true; }
};

using Instance = Traits<FI_T, FI_HEAD_DIM, FI_HEAD_DIM_V>;

template <bool kIndexed>
cudaError_t launch_as(const AttentionParams& p, const LaunchConstants& c, int num_ctas, cudaStream_t stream) {
  auto* kernel = attention_kernel<Instance, kIndexed, Plain>;
  static const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Instance::kSharedBytes);
  if (raised != cudaSuccess) return raised;
  kernel<<<num_ctas, kThreads, Instance::kSharedBytes, stream>>>(p, c);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch(const AttentionParams& p, int num_ctas, cudaStream_t stream) {
  LaunchConstants c;
  c.group = FastDivide(p.group);
  c.page_size = FastDivide(p.level.page_size);
  c.index_divisor = FastDivide(p.level.index_divisor);
  c.num_kv_heads = FastDivide(p.num_kv_heads);
  c.k_page_bytes = p.k_stride_page * int64_t(sizeof(FI_T));
  c.v_page_bytes = p.v_stride_page * int64_t(sizeof(FI_T));
  c.k_head_bytes = p.k_stride_head * int64_t(sizeof(FI_T));
  c.v_head_bytes = p.v_stride_head * int64_t(sizeof(FI_T));
  c.k_token_bytes = int32_t(p.k_stride_token * int64_t(sizeof(FI_T)));
  c.v_token_bytes = int32_t(p.v_stride_token * int64_t(sizeof(FI_T)));
  return p.level.indices ? launch_as<true>(p, c, num_ctas, stream) : launch_as<false>(p, c, num_ctas, stream);
}

}  // namespace fi::sm80
