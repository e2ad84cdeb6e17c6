// SPDX-License-Identifier: Apache-2.0
// The rows of a work item, of one head or of several at once: where they stand and which keys they see.
#pragma once
#include <algorithm>

#include "../core/params.h"
#include "../core/variant.h"
#include "softmax.h"
#include "tokens.h"

namespace fi::cpu {

// Row slots of one head when an item is run for several heads at once.
inline constexpr int kSlotRows = 16;

class ItemRows {
 protected:
  // Which rows of a request exist, and which keys they may see: from the exact lengths, not from the plan's
  // bounds.
  template <class Variant>
  void locate_request(int32_t request, int32_t q_begin, int32_t q_rows) {
    const LevelParams& level = p_->level;
    request_ = request;
    token0_ = p_->qo_indptr[request];
    const int64_t q_len = int64_t(p_->qo_indptr[request + 1]) - token0_;
    const int64_t capacity = row_capacity(level, request);
    kv_len_ = int32_t(std::min<int64_t>(level.kv_lens[request], capacity));
    q_pos0_ = int32_t(kv_len_ - q_len);
    rows_ = int32_t(std::clamp<int64_t>(q_len * p_->group - q_begin, 0, q_rows));
    keys_ = {kv_len_, 0};
    for (int r = 0; r < rows_; ++r) {
      token_[r] = (q_begin + r) / p_->group;
      head_in_group_[r] = (q_begin + r) % p_->group;
      row_keys_[r] = Variant::visible_keys(*p_, q_pos0_ + token_[r], kv_len_);
      if (row_keys_[r].begin >= row_keys_[r].end) continue;
      keys_.begin = std::min(keys_.begin, row_keys_[r].begin);
      keys_.end = std::max(keys_.end, row_keys_[r].end);
    }
  }

  // The rows of a prefix node, which see all of the item's keys.
  void locate_node(const WorkItem& item) {
    const auto& node = reinterpret_cast<const PrefixNode*>(p_->plan + p_->layout.nodes)[item.request];
    const auto* tokens = reinterpret_cast<const int32_t*>(p_->plan + p_->layout.node_tokens);
    request_ = node.request;
    token0_ = 0;
    kv_len_ = item.kv_end;
    q_pos0_ = item.kv_end;
    rows_ = p_->num_tokens > 0 ? item.q_rows : 0;
    keys_ = {item.kv_begin, item.kv_end};
    for (int r = 0; r < rows_; ++r) {
      // A request that has shrunk since leaves rows whose states nobody merges.
      const int32_t token = tokens[node.tokens_begin + (item.q_begin + r) / p_->group];
      token_[r] = std::min(token, p_->num_tokens - 1);
      head_in_group_[r] = (item.q_begin + r) % p_->group;
      row_keys_[r] = keys_;
    }
  }

  // Calls f(slot, row) for every row of every head. Rows of one head alone fill the slots one by one.
  template <class F>
  void for_slots(F f) const {
    for (int h = 0; h < heads_; ++h)
      for (int r = 0; r < rows_; ++r) f(h * kSlotRows + r, r);
  }

  int32_t kv_head_of(int slot) const { return kv_head_ + (heads_ > 1 ? slot / kSlotRows : 0); }
  int32_t qo_head_of(int slot, int row) const { return kv_head_of(slot) * p_->group + head_in_group_[row]; }
  float logit_scale_of(int slot) const {
    return p_->scale * (p_->k_scale ? p_->k_scale[kv_head_of(slot) * p_->k_scale_stride] : 1.0f);
  }
  RowIndex row_index_of(int slot, int row) const {
    return {request_,
            token_[row],
            q_pos0_ + token_[row],
            int32_t(token0_) + token_[row],
            qo_head_of(slot, row),
            kv_head_of(slot)};
  }
  LogitIndex index_of(int slot, int row) const {
    return {request_, token_[row], q_pos0_ + token_[row], 0, qo_head_of(slot, row), kv_head_of(slot)};
  }

  // Which keys [begin, end) of a tile the rows of `slot` .. see. Returns whether all see all of them.
  template <class Variant>
  bool find_visible(uint64_t* visible, int slot, int32_t tile, int begin, int end) const {
    const uint64_t all = bit_range(begin, end);
    for (int r = 0; r < rows_; ++r)
      visible[r] = bit_range(std::clamp(row_keys_[r].begin - tile, begin, end),
                             std::clamp(row_keys_[r].end - tile, begin, end));
    if (Variant::has_mask(*p_)) apply_mask<Variant>(visible, slot, tile);
    bool uniform = true;
    for (int r = 0; r < rows_; ++r) uniform = uniform && visible[r] == all;
    return uniform;
  }

  const AttentionParams* p_ = nullptr;
  int32_t request_ = 0, kv_head_ = 0, heads_ = 1, rows_ = 0, kv_len_ = 0, q_pos0_ = 0;
  int64_t token0_ = 0;
  KeyRange keys_{};  // hull of what the rows may see
  // By row.
  int32_t token_[kMaxQueryTile];  // from token0_ on
  int32_t head_in_group_[kMaxQueryTile];
  KeyRange row_keys_[kMaxQueryTile];

 private:
  template <class Variant>
  void apply_mask(uint64_t* visible, int slot, int32_t tile) const {
    const bool per_head = Variant::kMaskPerHead || Variant::packed_mask_per_head(*p_);
    for (int r = 0; r < rows_; ++r) {
      if (!per_head && r > 0 && token_[r] == token_[r - 1]) {
        visible[r] = visible[r - 1];
        continue;
      }
      LogitIndex index = index_of(slot, r);
      uint64_t kept = 0;
      for (uint64_t bits = visible[r]; bits; bits &= bits - 1) {
        index.kv_pos = tile + __builtin_ctzll(bits);
        if (Variant::logits_mask(*p_, index)) kept |= bits & -bits;
      }
      visible[r] = kept;
    }
  }
};

}  // namespace fi::cpu
