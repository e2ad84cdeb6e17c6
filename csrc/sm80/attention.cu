// SPDX-License-Identifier: Apache-2.0
// One instance of the template. The module's defines: FI_Q_DTYPE (queries), FI_KV_DTYPE (KV cache),
// FI_HEAD_DIM, FI_HEAD_DIM_V, FI_INVARIANT, FI_SHARED_KIB, and those of choice.cuh.
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

cudaError_t prepare() {
  return cudaFuncSetAttribute(attention_kernel<Instance>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Instance::kSharedBytes);
}

cudaError_t launch(const AttentionParams& p, int num_ctas, cudaStream_t stream) {
  constexpr int64_t kItem = sizeof(FI_KV_DTYPE);
  LaunchConstants c = launch_constants(p, kItem);
#if FI_TMA
  const sm90::Cache k{p.k,        p.level.num_pages, p.level.page_size, p.num_kv_heads,
                      p.head_dim, c.k_page_bytes,    c.k_token_bytes,   c.k_head_bytes,
                      int(kItem)};
  const sm90::Cache v{p.v,          p.level.num_pages, p.level.page_size, p.num_kv_heads,
                      p.head_dim_v, c.v_page_bytes,    c.v_token_bytes,   c.v_head_bytes,
                      int(kItem)};
  c.box_keys =
      p.level.indices && p.level.last_page_size == p.level.page_size ? sm90::box_keys(p.level.page_size) : 0;
  c.k_heads_first = sm90::heads_first(k);
  c.v_heads_first = sm90::heads_first(v);
  if (c.box_keys && !(sm90::make_map(k, c.box_keys, c.k_map) && sm90::make_map(v, c.box_keys, c.v_map)))
    c.box_keys = 0;
#endif
  // An attribute of the current device; setting it again is cheap and legal during capture.
  if (const cudaError_t error = prepare(); error != cudaSuccess) return error;
  attention_kernel<Instance><<<num_ctas, kThreads, Instance::kSharedBytes, stream>>>(p, c);
  return cudaGetLastError();
}

}  // namespace fi::sm80
