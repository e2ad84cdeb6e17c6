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
  LaunchConstants c;
  c.group = FastDivide(p.group);
  c.page_size = FastDivide(p.level.page_size);
  c.index_divisor = FastDivide(p.level.index_divisor);
  c.num_kv_heads = FastDivide(p.num_kv_heads);
  c.k_page_bytes = p.k_stride_page * kItem;
  c.v_page_bytes = p.v_stride_page * kItem;
  c.k_head_bytes = p.k_stride_head * kItem;
  c.v_head_bytes = p.v_stride_head * kItem;
  c.k_token_bytes = p.k_stride_token * kItem;
  c.v_token_bytes = p.v_stride_token * kItem;
  const int64_t reach = p.level.num_pages * c.k_page_bytes + p.level.page_size * c.k_token_bytes;
  c.one_offset = reach < int64_t(kWholeTile) * 16 && c.k_page_bytes == c.v_page_bytes &&
                 c.k_head_bytes == c.v_head_bytes && c.k_token_bytes == c.v_token_bytes &&
                 c.k_page_bytes >= 0 && c.k_token_bytes >= 0;
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
