// SPDX-License-Identifier: Apache-2.0
// Many query rows over one KV head on the matrix unit: the keys and values of a tile serve one block of 16
// rows after the other. Used as VectorTile is.
#pragma once
#include "amx_base.h"

#if defined(FI_AMX)

namespace fi::cpu {

template <class KV>
class AmxTile : public AmxBase<KV> {
 public:
  // begin_sums() takes all that is needed of the scores of a block.
  static constexpr bool kKeepsScores = false;
  using Base = AmxBase<KV>;
  using Element = typename Base::Element;

  void begin_item() { amx::configure(amx::kRows); }
  static void stay_awake() { amx::stay_awake(); }

  // Calls of ahead.step() in a tile.
  int64_t steps(int rows) const {
    const int64_t blocks = (rows + amx::kRows - 1) / amx::kRows;
    return kKeyTile / 2 + kKeyTile + rows + blocks * (this->dot_steps() + 2 + 2 * this->sum_steps());
  }

  void set_queries(int first, int count, const Element* const* rows) {
    Base::set_queries(first, count, rows, amx::kRows);
  }

  // Keys [begin, end) of the tile, copied to [16 keys][32 dims] after [16 keys][32 dims]: in the cache, rows
  // a page apart would push each other out of the first level before the second block of queries.
  template <class F>
  void set_keys(const KV* const* rows, int begin, int end, F& ahead) {
    begin_ = begin;
    end_ = end;
    const int tiles = this->pad_dim(this->dim_) / 32;
    for (int k = begin / amx::kRows * amx::kRows; k < (end + amx::kRows - 1) / amx::kRows * amx::kRows; ++k) {
      Element* to = key_tile(k / amx::kRows, 0) + k % amx::kRows * 32;
      const bool used = k >= begin && k < end;
      for (int i = 0; i < tiles; ++i)
        _mm512_store_si512(
            to + i * amx::kRows * 32,
            used ? this->load_32(rows[k] + i * 32, this->dim_ - i * 32) : _mm512_setzero_si512());
      if (k % 16 == 0) amx::stay_awake();
      ahead.step();
    }
  }

  // s[row][key] for the rows of a block. Keys outside the tile keep what s held, or get any number.
  template <class F>
  void dot_keys(int first, int, float* s, F& ahead) {
    using namespace amx;
    // The sums are not needed yet: their tiles hold the scores of the four groups.
    zero<kSums0>();
    zero<kSums1>();
    zero<kSums2>();
    zero<kSums3>();
    for (int d = 0; d < this->dim_; d += 32) {
      amx::load<kQueries>(this->query_tile(first, d, kRows), kRowBytes);
      step<kSums0>(d);
      ahead.step();
      step<kSums1>(d);
      ahead.step();
      step<kSums2>(d);
      ahead.step();
      step<kSums3>(d);
      ahead.step();
    }
    spill<kSums0>();
    spill<kSums1>();
    spill<kSums2>();
    spill<kSums3>();
    ahead.step();
    for (int g = 0; g < Base::kGroups; ++g)
      if (has_keys(g)) this->transpose_scores(this->scores_ + g * kRows * kRows, kRows, s + g * kRows);
    ahead.step();
  }

  template <class F>
  bool set_values(const KV* const* rows, int, bool check, F& ahead) {
    bool finite = true;
    first_step_ = begin_ / 32;
    steps_ = (end_ + 31) / 32 - first_step_;
    uint32_t* to = this->values_;
    for (int k = first_step_ * 32; k < (first_step_ + steps_) * 32; k += 2, to += this->v_stride_) {
      this->pair_values(rows, k, begin_, end_, 0, to);
      if (check) finite = finite && this->finite_pair(to);
      if (k % 16 == 0) amx::stay_awake();
      ahead.step();
    }
    return finite;
  }

  // Second half of the sums. `o` has 16 rows.
  template <class F>
  void finish_sums(int first, int, const float*, float* o, int o_stride, F& ahead) {
    this->add_products(weights(first), this->values_, steps_, o, o_stride, ahead);
  }

  // Second half for single rows, each with the values of the keys that it sees alone.
  template <class F>
  void finish_visible_sums(int first, int count, const float*, const uint64_t* visible, float* o,
                           int o_stride, F& ahead) {
    this->add_visible_products(weights(first), this->values_, steps_, count, visible, first_step_ * 32, o,
                               o_stride, ahead);
  }

 private:
  const Element* weights(int first) const {
    return this->weights_ + int64_t(first) * kKeyTile + first_step_ * 32;
  }

  bool has_keys(int group) const { return group * amx::kRows < end_ && (group + 1) * amx::kRows > begin_; }

  Element* key_tile(int group, int d) const {
    return this->keys_ + (int64_t(group) * this->pad_dim(this->dim_) + d) * amx::kRows;
  }

  template <int Group>
  void step(int d) {
    if (!has_keys(Group)) return;
    amx::load<amx::kOperand>(key_tile(Group, d), amx::kRowBytes);
    amx::multiply_add<Group, amx::kOperand, amx::kQueries>();
  }

  template <int Group>
  void spill() {
    if (has_keys(Group)) amx::store<Group>(this->scores_ + Group * amx::kRows * amx::kRows, amx::kRowBytes);
  }

  int begin_ = 0, end_ = 0, first_step_ = 0, steps_ = 0;
};

}  // namespace fi::cpu
#endif
