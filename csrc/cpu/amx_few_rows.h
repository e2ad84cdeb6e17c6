// SPDX-License-Identifier: Apache-2.0
// At most 16 query rows a head on the matrix unit, for one or more KV heads: reading the keys and values is
// what takes time. A step is one tile of one head; the values of a step are paired and summed while the dot
// products of the next one are made, so that reads and both units are busy all the time.
#pragma once
#include "amx_base.h"

#if defined(FI_AMX)

namespace fi::cpu {

template <class KV>
class AmxFewRows : public AmxBase<KV> {
 public:
  using Base = AmxBase<KV>;
  using Element = typename Base::Element;

  static void stay_awake() { amx::stay_awake(); }

  void begin_item(int rows) {
    rows_ = rows;
    amx::configure(rows);
  }

  // Calls of ahead.step() from one step to the next.
  int64_t steps() const { return kKeyTile / 2 + this->dot_steps() + 2 * this->sum_steps() + rows_; }

  void set_queries(int first, int count, const Element* const* rows) {
    Base::set_queries(first, count, rows, count);
  }

  // The tile that the next dot products read. `rows` stays as it is until then.
  void set_keys(const KV* const* rows, int begin, int end) {
    k_rows_ = rows;
    k_begin_ = begin;
    k_end_ = end;
    for (int g = 0; g < Base::kGroups; ++g) in_place_[g] = this->in_place(rows, g * amx::kRows, begin, end);
  }

  // Of a step, the keys [begin, end) and where their values lie: `offset` elements behind rows[key].
  struct Values {
    const KV* const* rows;
    int begin, end;
    int64_t offset;
    const uint64_t* visible;  // of each row, or null where all rows see all of these keys
    float* sums;              // [rows][stride]
    int stride;
  };

  // Adds the weighted values of the step that begin_sums() was called for.
  template <class F>
  void add_values(const Values& step, F& ahead) {
    advance(step, ahead, [](int) {});
  }

  // The same together with the dot products of the next step: query rows `first` .., keys `offset` elements
  // behind those of set_keys().
  template <class F>
  void add_values_and_dot(const Values& step, int first, int64_t offset, F& ahead) {
    advance(step, ahead, [&](int g) { dot_group(g, first, offset, ahead); });
  }

  template <class F>
  void dot(int first, int64_t offset, F& ahead) {
    for (int g = 0; g < Base::kGroups; ++g) dot_group(g, first, offset, ahead);
  }

  // s[row][key] of the last dot products.
  void take_scores(float* s) const {
    for (int g = 0; g < Base::kGroups; ++g)
      if (has_keys(g)) this->transpose_scores(scores_of(g), rows_, s + g * amx::kRows);
  }

 private:
  // Half a tile at a time: the pairs then stay in the first cache level beside what streams through it.
  template <class F, class Dot>
  void advance(const Values& step, F& ahead, Dot dot_next) {
    for (int half = 0; half < 2; ++half) {
      const int k0 = half * 32;
      const bool used = step.begin < k0 + 32 && step.end > k0;
      bool finite = true;
      for (int quarter = 0; quarter < 2; ++quarter) {
        uint32_t* to = this->values_ + int64_t(quarter) * 8 * this->v_stride_;
        for (int k = k0 + quarter * 16; used && k < k0 + quarter * 16 + 16; k += 2, to += this->v_stride_) {
          this->pair_values(step.rows, k, step.begin, step.end, step.offset, to);
          if (step.visible) finite = finite && this->finite_pair(to);
          ahead.step();
        }
        dot_next(half * 2 + quarter);
      }
      if (!used) continue;
      const Element* weights = this->weights_ + k0;
      // Zero times NaN is NaN: where rows differ in what they see, a special value must not reach all of
      // them.
      if (finite)
        this->add_products(weights, this->values_, 1, step.sums, step.stride, ahead);
      else
        this->add_visible_products(weights, this->values_, 1, rows_, step.visible, k0, step.sums, step.stride,
                                   ahead);
    }
  }

  template <class F>
  void dot_group(int g, int first, int64_t offset, F& ahead) {
    using namespace amx;
    if (!has_keys(g)) return;
    const int k0 = g * kRows;
    const auto group = in_place_[g] ? this->group_in_place(k_rows_, k0, offset)
                                    : this->copy_group(k_rows_, k0, k_begin_, k_end_, offset);
    zero<kScores>();
    for (int d = 0; d < this->dim_; d += 32) {
      amx::load<kOperand>(group.base + d, group.step_bytes);
      amx::load<kQueries>(this->query_tile(first, d, rows_), rows_ * 4);
      multiply_add<kScores, kOperand, kQueries>();
      ahead.step();
    }
    amx::store<kScores>(scores_of(g), rows_ * 4);
  }

  bool has_keys(int g) const { return g * amx::kRows < k_end_ && (g + 1) * amx::kRows > k_begin_; }
  float* scores_of(int g) const { return this->scores_ + g * amx::kRows * rows_; }

  int rows_ = 0, k_begin_ = 0, k_end_ = 0;
  const KV* const* k_rows_ = nullptr;
  bool in_place_[Base::kGroups] = {};
};

}  // namespace fi::cpu
#endif
