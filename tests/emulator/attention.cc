// SPDX-License-Identifier: Apache-2.0
// The attention kernel for GPUs on the emulated machine, called as the CPU's kernel is.
#pragma GCC optimize("O1")
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#include "core/params.h"
//
#include "bind/attention_args.h"
#include "bind/variant_call.h"
#include "sm80/attention.cuh"

namespace fi::emulator {
namespace {

using namespace bind;
using float16 = __half;
using bfloat16 = __nv_bfloat16;
using float8_e4m3fn = ptx::E4M3;
using float8_e5m2 = ptx::E5M2;
using Instance = sm80::Traits<FI_Q_DTYPE, FI_KV_DTYPE, FI_HEAD_DIM, FI_HEAD_DIM_V, bool(FI_INVARIANT)>;

uint64_t seed_of_next = 0;

void seed(int64_t value) { seed_of_next = uint64_t(value); }

void run(TensorView q, TensorView k_cache, TensorView v_cache, TensorView qo_indptr,
         Optional<TensorView> indices, TensorView row_begin, TensorView row_end, TensorView kv_lens,
         int64_t index_step, int64_t index_divisor, int64_t page_size, int64_t num_pages, TensorView plan,
         TensorView caps, TensorView workspace, double scale, TensorView k_scale, TensorView v_scale,
         bool causal, int64_t window_left, double soft_cap, Optional<TensorView> alibi,
         Optional<TensorView> sinks, Optional<TensorView> mask, Optional<TensorView> mask_begin,
         Optional<TensorView> mask_kv_len, int64_t mask_heads, bool, int64_t, TensorView out,
         Optional<TensorView> lse FI_VARIANT_PARAMETERS) {
  AttentionParams p = read_arguments(q, k_cache, v_cache, qo_indptr, indices, row_begin, row_end, kv_lens,
                                     index_step, index_divisor, page_size, num_pages, plan, caps, workspace,
                                     scale, k_scale, v_scale, causal, window_left, soft_cap, alibi, sinks,
                                     mask, mask_begin, mask_kv_len, mask_heads, 1, out, lse);
  FI_READ_VARIANT(p, q.device());
  const sm80::LaunchConstants c = sm80::launch_constants(p, sizeof(FI_KV_DTYPE));
  // As many blocks as the plan has queues, else a few that draw tickets.
  const auto* header = reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header);
  grid_blocks = header->num_queues > 0 ? header->num_queues : 3;
  const int64_t last = (p.num_tokens - 1) * p.q_stride_token + (q.size(1) - 1) * p.q_stride_head;
  machine().readable = {{p.q, p.num_tokens > 0 ? (last + FI_HEAD_DIM) * int64_t(sizeof(FI_Q_DTYPE)) : 0},
                        {p.level.indices, p.level.num_indices * 4},
                        {p.plan, p.layout.total}};
  try {
    machine().run(grid_blocks, sm80::kThreads, Instance::kSharedBytes, ++seed_of_next,
                  [&] { sm80::attention_kernel<Instance>(p, c); });
  } catch (const std::runtime_error& e) {
    TVM_FFI_THROW(RuntimeError) << e.what();
  }
}

}  // namespace
}  // namespace fi::emulator

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, fi::emulator::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, fi::emulator::seed);
