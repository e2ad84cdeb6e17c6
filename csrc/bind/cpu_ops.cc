// SPDX-License-Identifier: Apache-2.0
#include "../cpu/ops.h"

#include "tensor_checks.h"

namespace fi::bind {
namespace {

using cpu::Dtype;

Dtype dtype_of(const char* name, const TensorView& t, bool allow_fp8) {
  if (same_dtype(t.dtype(), kFloat32)) return Dtype::float32;
  if (same_dtype(t.dtype(), kFloat16)) return Dtype::float16;
  if (same_dtype(t.dtype(), kBFloat16)) return Dtype::bfloat16;
  if (allow_fp8 && same_dtype(t.dtype(), kE4M3)) return Dtype::float8_e4m3fn;
  if (allow_fp8 && same_dtype(t.dtype(), kE5M2)) return Dtype::float8_e5m2;
  TVM_FFI_THROW(TypeError) << name << ": expected float32, float16"
                           << (allow_fp8 ? ", bfloat16, float8_e4m3fn or float8_e5m2" : " or bfloat16")
                           << "; got " << dtype_text(t.dtype()) << ".";
}

cpu::AppendSide append_side(const char* name, const TensorView& x, const char* cache_name,
                            const TensorView& cache, const char* scale_name, const TensorView& scale,
                            int64_t heads) {
  cpu::AppendSide s{};
  expect_host(name, x);
  expect_host(cache_name, cache);
  expect_shape(name, x, {-1, heads, -1});
  expect_unit_stride(name, x);
  if (cache.ndim() == 3)
    expect_shape(cache_name, cache, {-1, heads, x.size(2)});
  else
    expect_shape(cache_name, cache, {-1, -1, heads, x.size(2)});
  expect_unit_stride(cache_name, cache);
  expect_vector(scale_name, scale, kFloat32, scale.ndim() == 1 && scale.size(0) == heads ? heads : 1);
  s.from = data<void>(x);
  s.to = data<void>(cache);
  s.from_dtype = dtype_of(name, x, false);
  s.to_dtype = dtype_of(cache_name, cache, true);
  s.from_stride_token = x.stride(0);
  s.from_stride_head = x.stride(1);
  s.to_stride_page = cache.stride(0);
  s.to_stride_token = cache.ndim() == 3 ? 0 : cache.stride(1);
  s.to_stride_head = cache.stride(-2);
  s.dim = x.size(2);
  s.scale = data<const float>(scale);
  s.scale_stride = scale.size(0) == 1 ? 0 : 1;
  return s;
}

void expect_state(const char* o_name, const TensorView& o, const char* lse_name, const TensorView& lse) {
  expect_host(o_name, o);
  expect_host(lse_name, lse);
  expect_dtype(lse_name, lse, kFloat32);
  if (o.ndim() > 0) expect_unit_stride(o_name, o);
}

void take_result(cpu::MergeParams& p, const TensorView& out, const TensorView& lse) {
  expect_state("out", out, "lse", lse);
  expect_shape("out", out, {p.num_rows, p.num_heads, p.dim});
  expect_shape("lse", lse, {p.num_rows, p.num_heads});
  p.out = data<void>(out);
  p.out_lse = data<float>(lse);
  p.out_stride_row = out.stride(0);
  p.out_stride_head = out.stride(1);
  p.out_lse_stride_row = lse.stride(0);
  p.out_lse_stride_head = lse.stride(1);
}

void take_part(cpu::MergeParams& p, int i, const TensorView& o, const TensorView& lse) {
  p.o[i] = data<void>(o);
  p.lse[i] = data<const float>(lse);
  p.o_stride_row[i] = o.stride(0);
  p.o_stride_head[i] = o.stride(-2);
  p.lse_stride_row[i] = lse.stride(0);
  p.lse_stride_head[i] = lse.stride(-1);
}

}  // namespace

void append_kv(TensorView key, TensorView value, TensorView slot_mapping, TensorView k_scale,
               TensorView v_scale, int64_t num_threads, TensorView k_cache, TensorView v_cache) {
  cpu::AppendParams p{};
  expect_shape("key", key, {-1, -1, -1});
  const int64_t tokens = key.size(0), heads = key.size(1);
  if (k_cache.ndim() != 3 && k_cache.ndim() != 4)
    TVM_FFI_THROW(ValueError)
        << "k_cache: expected [pages, page_size, KV heads, head_dim] or [tokens, KV heads, head_dim]; got "
        << shape_text(k_cache) << ".";
  p.side[0] = append_side("key", key, "k_cache", k_cache, "k_scale", k_scale, heads);
  p.side[1] = append_side("value", value, "v_cache", v_cache, "v_scale", v_scale, heads);
  if (v_cache.ndim() != k_cache.ndim() || v_cache.size(0) != k_cache.size(0) ||
      (k_cache.ndim() == 4 && v_cache.size(1) != k_cache.size(1)))
    TVM_FFI_THROW(ValueError) << "v_cache: expected the pages and page size of k_cache, "
                              << shape_text(k_cache) << "; got " << shape_text(v_cache) << ".";
  expect_vector("slot_mapping", slot_mapping, kInt64, -1);
  p.num_slots = slot_mapping.size(0);
  if (p.num_slots > tokens || p.num_slots > value.size(0))
    TVM_FFI_THROW(ValueError)
        << "slot_mapping: expected at most one slot for each token of key and value; got " << p.num_slots
        << " for " << tokens << " and " << value.size(0) << " tokens.";
  p.num_heads = heads;
  p.page_size = k_cache.ndim() == 3 ? 1 : k_cache.size(1);
  p.slots = data<const int64_t>(slot_mapping);
  const int64_t capacity = k_cache.size(0) * p.page_size;
  for (int64_t i = 0; i < p.num_slots; ++i)
    if (p.slots[i] < -1 || p.slots[i] >= capacity)
      TVM_FFI_THROW(ValueError) << "slot_mapping[" << i << "]: expected -1 (skip) or a slot in 0.."
                                << capacity - 1 << ", for " << k_cache.size(0) << " pages of " << p.page_size
                                << " tokens; got " << p.slots[i] << ".";
  cpu::append_kv(p, int(num_threads));
}

void merge_state(TensorView o_a, TensorView lse_a, TensorView o_b, TensorView lse_b,
                 Optional<TensorView> mask, int64_t num_threads, TensorView out, TensorView lse) {
  cpu::MergeParams p{};
  expect_shape("o_a", o_a, {-1, -1, -1});
  expect_state("o_a", o_a, "lse_a", lse_a);
  p.num_rows = o_a.size(0);
  p.num_heads = o_a.size(1);
  p.dim = o_a.size(2);
  p.dtype = dtype_of("o_a", o_a, false);
  expect_shape("lse_a", lse_a, {p.num_rows, p.num_heads});
  expect_state("o_b", o_b, "lse_b", lse_b);
  expect_dtype("o_b", o_b, o_a.dtype());
  expect_shape("o_b", o_b, {p.num_rows, p.num_heads, p.dim});
  expect_shape("lse_b", lse_b, {p.num_rows, p.num_heads});
  if (mask.has_value()) {
    expect_vector("mask", mask.value(), kBool, p.num_rows);
    p.mask = data<const uint8_t>(mask.value());
  }
  expect_dtype("out", out, o_a.dtype());
  take_part(p, 0, o_a, lse_a);
  take_part(p, 1, o_b, lse_b);
  p.num_parts = 2;
  take_result(p, out, lse);
  cpu::merge_states(p, int(num_threads));
}

void merge_states(TensorView o, TensorView lse_parts, int64_t num_threads, TensorView out, TensorView lse) {
  cpu::MergeParams p{};
  expect_shape("o", o, {-1, -1, -1, -1});
  expect_state("o", o, "lse_parts", lse_parts);
  p.num_rows = o.size(0);
  p.num_parts = o.size(1);
  p.num_heads = o.size(2);
  p.dim = o.size(3);
  p.dtype = dtype_of("o", o, false);
  expect_shape("lse_parts", lse_parts, {p.num_rows, p.num_parts, p.num_heads});
  expect_dtype("out", out, o.dtype());
  take_part(p, 0, o, lse_parts);
  take_part(p, 1, o, lse_parts);
  p.o_stride_part = o.stride(1);
  p.lse_stride_part = lse_parts.stride(1);
  const int64_t item = o.dtype().bits / 8;
  p.o[1] = static_cast<const char*>(p.o[0]) + p.o_stride_part * item;
  p.lse[1] = p.lse[0] + p.lse_stride_part;
  take_result(p, out, lse);
  cpu::merge_states(p, int(num_threads));
}

}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_kv, fi::bind::append_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_state, fi::bind::merge_state);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_states, fi::bind::merge_states);
