// SPDX-License-Identifier: Apache-2.0
// Many query rows over one KV head on the matrix unit: the keys and values of a tile serve one block of 16
// rows after the other. Used as VectorTile is.
#pragma once
#include "amx_base.h"
#include "softmax.h"

#if defined(FI_AMX)

namespace fi::cpu {

template <class KV>
class AmxTile : public AmxBase<KV> {
 public:
  // begin_sums() takes all that is needed of the scores of a block.
  static constexpr bool kKeepsScores = false;
  static constexpr bool kSoftensWhole = true;
  using Base = AmxBase<KV>;
  using Element = typename Base::Element;

  void begin_item() { amx::configure(amx::kRows); }
  static void stay_awake() { amx::stay_awake(); }

  // Calls of ahead.step() in a tile.
  int64_t steps(int rows) const {
    const int64_t blocks = (rows + amx::kRows - 1) / amx::kRows;
    return kKeyTile / 2 + kKeyTile + rows + blocks * (this->dot_steps() + 1 + 2 * this->sum_steps());
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

  // The scores of a block, for take_scores() or soften_whole().
  template <class F>
  void dot_keys(int first, int, float*, F& ahead) {
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
  }

  // s[row][key] of the last dot products. Keys outside the tile keep what s held, or get any number.
  void take_scores(float* s) const {
    for (int g = 0; g < Base::kGroups; ++g)
      if (has_keys(g))
        this->transpose_scores(this->scores_ + g * amx::kRows * amx::kRows, amx::kRows, s + g * amx::kRows);
  }

  // What take_scores(), the softmax of each row and begin_sums() do, for 16 rows that see all 64 keys: with a
  // lane for each row nothing has to be reduced across lanes. The bits are the same.
  void soften_whole(int first, float scale, RunningSoftmax* states, float* alpha, float* o, int o_stride) {
    constexpr int kRows = amx::kRows;
    Vec top[4] = {splat(kEmpty), splat(kEmpty), splat(kEmpty), splat(kEmpty)};
    for (int k = 0; k < kKeyTile; ++k) top[k % 4] = max(cpu::load(this->scores_ + k * kRows), top[k % 4]);
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    static_assert(sizeof(RunningSoftmax) == 8);
    const auto* pairs = reinterpret_cast<const float*>(states);
    const __m512 low = (__m512)cpu::load(pairs), high = (__m512)cpu::load(pairs + kLanes);
    const Vec old_max = (Vec)_mm512_permutex2var_ps(low, evens, high);
    Vec sum = (Vec)_mm512_permutex2var_ps(low, odds, high);
    const Vec new_max = max(max(max(top[0], top[1]), max(top[2], top[3])) * scale, old_max);
    const Vec base = new_max == kEmpty ? Vec{} : new_max;
    const Vec factor = new_max == old_max ? splat(1.0f) : exp2(old_max - base);
    amx::stay_awake();

    Vec part[kRows] = {};  // of keys that are 16 apart, as the lanes of a row are
    for (int half = 0; half < 2; ++half) {
      Vec weights[kRows];  // of a pair of keys
      for (int i = 0; i < kRows; ++i) {
        const int k = half * 32 + 2 * i;
        const Vec a = exponential(k, scale, base), b = exponential(k + 1, scale, base);
        part[k % kRows] += a;
        part[(k + 1) % kRows] += b;
        weights[i] = (Vec)pair_of((__m512)a, (__m512)b);
      }
      amx::stay_awake();
      transpose(weights);
      for (int r = 0; r < kRows; ++r)
        std::memcpy(this->weights_ + (first + r) * kKeyTile + half * 32, &weights[r], sizeof(Vec));
    }
    for (int distance = kRows / 2; distance > 0; distance /= 2)
      for (int i = 0; i < distance; ++i) part[i] += part[i + distance];
    sum = sum * factor + part[0];

    for (int r = 0; r < kRows; ++r) {
      states[r] = {new_max[r], sum[r]};
      alpha[r] = factor[r];
    }
    if (_mm512_cmpneq_ps_mask((__m512)factor, _mm512_set1_ps(1.0f)))
      for (int r = 0; r < kRows; ++r) this->rescale(o + int64_t(r) * o_stride, alpha[r]);
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

  Vec exponential(int key, float scale, Vec base) const {
    return exp2_where(~uint64_t(0), fused(cpu::load(this->scores_ + key * amx::kRows), splat(scale), -base));
  }

  // bfloat16 (a[i], b[i]) in each 32-bit lane.
  static __m512i pair_of(__m512 a, __m512 b) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                        21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                        11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)_mm512_cvtne2ps_pbh(b, a));
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
