// SPDX-License-Identifier: Apache-2.0
// From the tensors of pack_mask to its parameters, on whichever device they lie.
#pragma once
#include <limits>

#include "../core/pack_mask.h"
#include "tensor_checks.h"

namespace fi::bind {

inline PackMaskParams pack_mask_params(const Optional<TensorView>& mask, const TensorView& source,
                                       const TensorView& qo_indptr, const TensorView& kv_lens, bool tree,
                                       int64_t heads, const TensorView& bits, const TensorView& mask_kv_len,
                                       DLDevice device) {
  PackMaskParams p{};
  expect_vector("kv_lens", kv_lens, kInt32, -1, device);
  p.num_requests = kv_lens.size(0);
  expect_vector("qo_indptr", qo_indptr, kInt32, p.num_requests + 1, device);
  expect_vector("source", source, kInt64, p.num_requests, device);
  expect_vector("mask_kv_len", mask_kv_len, kInt32, p.num_requests, device);
  expect_vector("bits", bits, kUInt8, -1, device);
  if (mask.has_value()) {
    expect_vector("mask", mask.value(), kBool, -1, device);
    p.mask = data<const uint8_t>(mask.value());
    p.num_elements = mask.value().size(0);
  }
  p.source = data<const int64_t>(source);
  p.qo_indptr = data<const int32_t>(qo_indptr);
  p.kv_lens = data<const int32_t>(kv_lens);
  p.tree = tree;
  if (heads < 1 || heads > std::numeric_limits<int32_t>::max())
    TVM_FFI_THROW(ValueError) << "heads: expected 1 or more; got " << heads << ".";
  p.heads = int32_t(heads);
  p.bits = data<uint8_t>(bits);
  p.stride = p.num_requests ? bits.size(0) / p.num_requests : 0;
  p.mask_kv_len = data<int32_t>(mask_kv_len);
  return p;
}

}  // namespace fi::bind
