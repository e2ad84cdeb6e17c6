// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "../cuda/append.h"
#include "../cuda/merge.h"
#include "../cuda/pack_mask.h"
#include "cuda_call.h"
#include "operator_args.h"
#include "pack_mask_args.h"

namespace fi::bind {
namespace {

// Waits for the device, which a stream that is being captured forbids.
void expect_slots_on_device(const AppendParams& p, cudaStream_t stream) {
  cudaStreamCaptureStatus capture;
  expect_success("append_kv", cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return;
  std::vector<int64_t> slots(static_cast<size_t>(p.num_slots));
  expect_success("append_kv", cudaMemcpyAsync(slots.data(), p.slots, slots.size() * sizeof(int64_t),
                                              cudaMemcpyDeviceToHost, stream));
  expect_success("append_kv", cudaStreamSynchronize(stream));
  expect_slots(slots.data(), p);
}

}  // namespace

void append_kv(TensorView key, TensorView value, TensorView slot_mapping, TensorView k_scale,
               TensorView v_scale, bool debug, TensorView k_cache, TensorView v_cache) {
  const CudaCall call("key", key);
  const AppendParams p =
      append_params(key, value, slot_mapping, k_scale, v_scale, k_cache, v_cache, call.device());
  if (debug) expect_slots_on_device(p, call.stream());
  expect_success("append_kv", cuda::append_kv(p, call.stream()));
}

void merge_state(TensorView o_a, TensorView lse_a, TensorView o_b, TensorView lse_b,
                 Optional<TensorView> mask, TensorView out, TensorView lse) {
  const CudaCall call("o_a", o_a);
  const MergeParams p = two_states(o_a, lse_a, o_b, lse_b, mask, out, lse, call.device());
  expect_success("merge_state", cuda::merge_states(p, call.stream()));
}

void merge_states(TensorView o, TensorView lse_parts, TensorView out, TensorView lse) {
  const CudaCall call("o", o);
  const MergeParams p = states_of_parts(o, lse_parts, out, lse, call.device());
  expect_success("merge_states", cuda::merge_states(p, call.stream()));
}

void pack_mask(Optional<TensorView> mask, TensorView source, TensorView qo_indptr, TensorView kv_lens,
               bool tree, int64_t heads, TensorView bits, TensorView mask_kv_len) {
  const CudaCall call("kv_lens", kv_lens);
  const PackMaskParams p =
      pack_mask_params(mask, source, qo_indptr, kv_lens, tree, heads, bits, mask_kv_len, call.device());
  expect_success("pack_mask", cuda::pack_mask(p, call.stream()));
}

}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_kv, fi::bind::append_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_state, fi::bind::merge_state);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_states, fi::bind::merge_states);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_mask, fi::bind::pack_mask);
