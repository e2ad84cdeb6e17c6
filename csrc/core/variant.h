// SPDX-License-Identifier: Apache-2.0
// The functors that fill the holes of the attention template; one source for the host and the device.
#pragma once
#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "params.h"

namespace fi {

// Where a logit stands. Positions count the request's tokens from 0; q_pos of query token i is
// kv_len - q_len + i (bottom-right alignment), so it may be negative when q_len > kv_len.
// `Int` is int32_t, or a vector of them where a kernel transforms several keys at once.
template <class Int>
struct LogitIndexOf {
  int32_t request;
  int32_t q_token;  // within the request
  int32_t q_pos;
  Int kv_pos;
  int32_t qo_head;
  int32_t kv_head;
};
using LogitIndex = LogitIndexOf<int32_t>;

// Where a row of queries or of the output stands; `token` counts the rows of q and out.
struct RowIndex {
  int32_t request, q_token, q_pos, token, qo_head, kv_head;
};

// Where a key stands.
template <class Int>
struct KeyIndexOf {
  int32_t request;
  Int kv_pos;
  int32_t kv_head;
};

// Keys [begin, end) of a request.
struct KeyRange {
  int32_t begin, end;
};

// What a variant provides. A kernel asks the has_*() predicates once a launch and leaves out what is off.
//   visible_keys      the contiguous range outside which nothing is read, from positions alone
//   logits_mask       whether a key inside that range is visible; only asked when has_mask()
//   logits_transform  the logit of a scaled dot product; F is float or a vector of floats, `Math` supplies
//                     tanh and the conversion of positions for F; only asked when has_transform()
//   finish            final factor of the output, and the final lse, of a row that saw at least one key
//   output_transform  element `d` of such a row of the output; only asked when kTransformsOutput
//   kSoftmax          false: transformed logits are the weights themselves, masked ones 0; outputs add up,
//                     the lse is 0
//   query_transform   element `d` of a query row, given a way to load the row's elements and what
//                     query_row() has made of the whole row; only asked when kTransformsQuery
//   key_transform     the same of dequantised keys, with key_row(); only asked when kTransformsKey
//   value_transform   element `d` of a value, dequantised by v_scale too; only asked when kTransformsValue
//   key_turns         by how many turns key_transform() turns elements `pair` and pair + head_dim / 2 of a
//                     key, or 2 pair and 2 pair + 1 (kTurnsNeighbours), where kTurnsKeys and turns_keys() say
//                     that it does nothing else; by as many more from each key to the next (kTurnsEvenly)
// In kernels for GPUs kMasks and kTransformsLogits stand for the has_*() of what the spec does not ask for,
// and kShares says that nothing depends on the row's position: rows of many requests may read keys together.
struct StandardVariant {
  static constexpr bool kSoftmax = true, kTransformsQuery = false, kTransformsKey = false;
  static constexpr bool kTransformsValue = false, kTransformsOutput = false, kTransformsLogits = false;
  static constexpr bool kMasks = false, kShares = true, kTurnsKeys = false;
  static constexpr bool kTurnsEvenly = false, kTurnsNeighbours = false;
  FI_HOST_DEVICE static bool turns_keys(const AttentionParams&) { return false; }

  // The element mask may differ between the heads of a KV head's group.
  static constexpr bool kMaskPerHead = false;
  FI_HOST_DEVICE static bool packed_mask_per_head(const AttentionParams& p) {
    return p.mask_heads > 1 && p.mask_heads != p.num_kv_heads;
  }

  FI_HOST_DEVICE static KeyRange visible_keys(const AttentionParams& p, int32_t q_pos, int32_t kv_len) {
    int32_t begin = 0, end = kv_len;
    if (p.causal && q_pos + 1 < end) end = q_pos + 1;
    // A difference of the two could leave 32 bits: a negative position minus a huge window.
    if (p.window_left >= 0 && q_pos > p.window_left) begin = q_pos - p.window_left;
    if (end < begin) end = begin;
    return {begin, end};
  }

  FI_HOST_DEVICE static bool has_mask(const AttentionParams& p) { return p.custom_mask != nullptr; }

  FI_HOST_DEVICE static bool logits_mask(const AttentionParams& p, const LogitIndex& i) {
    const int32_t width = p.mask_kv_len[i.request];
    if (i.kv_pos >= width) return false;
    const int32_t head = p.mask_heads == 1 ? 0 : p.mask_heads == p.num_kv_heads ? i.kv_head : i.qo_head;
    const int64_t bit = (int64_t(i.q_token) * p.mask_heads + head) * width + i.kv_pos;
    return (p.custom_mask[p.mask_begin[i.request] + (bit >> 3)] >> (bit & 7)) & 1;
  }

  FI_HOST_DEVICE static bool has_transform(const AttentionParams& p) {
    return p.soft_cap > 0.0f || p.alibi_slopes != nullptr;
  }

  template <class Math, class F, class Int>
  FI_HOST_DEVICE static F logits_transform(const AttentionParams& p, F logit, const LogitIndexOf<Int>& i) {
    if (p.soft_cap > 0.0f) logit = Math::tanh(logit * (1.0f / p.soft_cap)) * p.soft_cap;
    if (p.alibi_slopes) logit = logit + Math::to_float(i.kv_pos - i.q_pos) * p.alibi_slopes[i.qo_head];
    return logit;
  }

  template <class Load>
  FI_HOST_DEVICE static float query_row(const AttentionParams&, Load, const RowIndex&) {
    return 0.0f;
  }
  template <class Load>
  FI_HOST_DEVICE static float query_transform(const AttentionParams&, Load load, int32_t d, const RowIndex&,
                                              float) {
    return load(d);
  }

  template <class F, class Load, class Int>
  FI_HOST_DEVICE static F key_row(const AttentionParams&, Load, const KeyIndexOf<Int>&) {
    return F{};
  }
  template <class F, class Load, class Int>
  FI_HOST_DEVICE static F key_transform(const AttentionParams&, Load load, int32_t d, const KeyIndexOf<Int>&,
                                        F) {
    return load(d);
  }

  template <class F, class Load, class Int>
  FI_HOST_DEVICE static F value_transform(const AttentionParams&, Load load, int32_t d,
                                          const KeyIndexOf<Int>&) {
    return load(d);
  }

  FI_HOST_DEVICE static float output_transform(const AttentionParams&, float o, int32_t, const RowIndex&,
                                               float) {
    return o;
  }

  // kScales: v_scale is still to be applied, as it is to sums of values that nothing has transformed.
  template <bool kScales = true>
  FI_HOST_DEVICE static float finish(const AttentionParams& p, const RowIndex& i, float& lse) {
    float factor = kScales && p.v_scale ? p.v_scale[i.kv_head * p.v_scale_stride] : 1.0f;
    if (p.sinks) {
      const float sink = p.sinks[i.qo_head];
      const float top = sink > lse ? sink : lse;
      const float total = top + logf(expf(sink - top) + expf(lse - top));
      factor *= expf(lse - total);
      lse = total;
    }
    return factor;
  }
};

}  // namespace fi
