// SPDX-License-Identifier: Apache-2.0
#include "../cpu/ops.h"

#include "operator_args.h"
#include "pack_mask_args.h"

namespace fi::bind {

void append_kv(TensorView key, TensorView value, TensorView slot_mapping, TensorView k_scale,
               TensorView v_scale, int64_t num_threads, TensorView k_cache, TensorView v_cache) {
  const AppendParams p = append_params(key, value, slot_mapping, k_scale, v_scale, k_cache, v_cache, kHost);
  expect_slots(p.slots, p);
  cpu::append_kv(p, int(num_threads));
}

void merge_state(TensorView o_a, TensorView lse_a, TensorView o_b, TensorView lse_b,
                 Optional<TensorView> mask, int64_t num_threads, TensorView out, TensorView lse) {
  cpu::merge_states(two_states(o_a, lse_a, o_b, lse_b, mask, out, lse, kHost), int(num_threads));
}

void merge_states(TensorView o, TensorView lse_parts, int64_t num_threads, TensorView out, TensorView lse) {
  cpu::merge_states(states_of_parts(o, lse_parts, out, lse, kHost), int(num_threads));
}

void pack_mask(Optional<TensorView> mask, TensorView source, TensorView qo_indptr, TensorView kv_lens,
               bool tree, int64_t heads, TensorView bits, TensorView mask_kv_len) {
  cpu::pack_mask(pack_mask_params(mask, source, qo_indptr, kv_lens, tree, heads, bits, mask_kv_len, kHost));
}

}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_kv, fi::bind::append_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_state, fi::bind::merge_state);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_states, fi::bind::merge_states);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_mask, fi::bind::pack_mask);
