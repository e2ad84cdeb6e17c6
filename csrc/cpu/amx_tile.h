// SPDX-License-Identifier: Apache-2.0
// The products of one KV tile on the bfloat16 matrix unit, 16 query rows at a time. Keys are the rows of the
// first product (S^T = K Q^T), so that they are read where they lie; probabilities are rounded to bfloat16.
#pragma once
#include "amx.h"

#if defined(FI_AMX)
#include "arena.h"
#include "microkernels.h"

namespace fi::cpu {

template <class KV>
class AmxTile {
 public:
  static constexpr int kRowBlock = amx::kRows;
  using Element = dtype::bfloat16;
  // fp8 numbers are bfloat16 numbers too; wider formats are not.
  static constexpr bool kInPlace = std::is_same_v<KV, Element>;
  static constexpr bool kExact = kInPlace || sizeof(KV) == 1;

  static int pad_dim(int dim) { return (dim + 31) / 32 * 32; }

  void take_memory(Arena& arena, int max_rows, int dim, int dim_v) {
    queries_ = arena.take<uint32_t>(int64_t(max_rows) * pad_dim(dim) / 2);
    keys_ = arena.take<Element>(int64_t(kKeyTile) * pad_dim(dim));
    values_ = arena.take<uint32_t>(int64_t(kKeyTile) / 2 * pad_dim(dim_v));
    masked_values_ = arena.take<uint32_t>(int64_t(kKeyTile) / 2 * pad_dim(dim_v));
    scores_ = arena.take<float>(kKeyTile * kRowBlock);
    weights_ = arena.take<Element>(int64_t(max_rows) * kKeyTile);
    spare_ = arena.take<float>(int64_t(kRowBlock) * pad_dim(dim_v));
  }

  void begin(int dim, int dim_v) {
    dim_ = dim;
    dim_v_ = dim_v;
    v_stride_ = pad_dim(dim_v);
    amx::configure();
  }
  void end() { amx::release(); }

  // Rows [first, first + count), first being a multiple of 16. Layout: [block][32 dims][pair][row].
  void set_queries(int first, int count, const Element* const* rows) {
    for (int d = 0; d < dim_; d += 32) {
      Vec pairs[kLanes] = {};
      for (int r = 0; r < count; ++r) pairs[r] = (Vec)load_32(rows[r] + d, dim_ - d);
      transpose(pairs);
      uint32_t* to = query_tile(first, d);
      for (int j = 0; j < kLanes; ++j) cpu::store(reinterpret_cast<float*>(to + j * kLanes), pairs[j]);
    }
  }

  // Keys [begin, end) of the tile. Groups of 16 that are evenly spaced are used in place, others copied.
  template <class F>
  void set_keys(const KV* const* rows, int begin, int end, F&) {
    begin_ = begin;
    end_ = end;
    const bool whole = kInPlace && dim_ % 32 == 0;
    for (int g = 0; g < kGroups; ++g) {
      const int k0 = g * kRowBlock, k1 = k0 + kRowBlock;
      key_group_[g] = nullptr;
      if (k1 <= begin || k0 >= end) continue;
      if (whole && k0 >= begin && k1 <= end) {
        const int64_t step = rows[k0 + 1] - rows[k0];
        bool even = true;
        for (int k = k0 + 1; k < k1; ++k) even = even && rows[k] - rows[k - 1] == step;
        if (even) {
          key_group_[g] = reinterpret_cast<const Element*>(rows[k0]);
          key_step_[g] = step * int64_t(sizeof(Element));
          continue;
        }
      }
      for (int k = k0; k < k1; ++k) {
        Element* to = keys_ + int64_t(k) * pad_dim(dim_);
        const bool used = k >= begin && k < end;
        for (int d = 0; d < dim_; d += 32)
          _mm512_storeu_si512(to + d, used ? load_32(rows[k] + d, dim_ - d) : _mm512_setzero_si512());
      }
      key_group_[g] = keys_ + int64_t(k0) * pad_dim(dim_);
      key_step_[g] = pad_dim(dim_) * int64_t(sizeof(Element));
    }
  }

  // s[row][key] for the rows of a block. Keys outside the tile keep what s held, or get any number.
  template <class F>
  void dot_keys(int first, int count, float* s, F& ahead) {
    amx::zero<0>();
    amx::zero<1>();
    amx::zero<2>();
    amx::zero<3>();
    for (int d = 0; d < dim_; d += 32) {
      amx::load<4>(query_tile(first, d), amx::kRowBytes);
      step<0>(d);
      ahead.step();
      step<1>(d);
      ahead.step();
      step<2>(d);
      ahead.step();
      step<3>(d);
      ahead.step();
    }
    spill<0>();
    spill<1>();
    spill<2>();
    spill<3>();
    ahead.step();
    for (int g = 0; g < kGroups; ++g)
      if (key_group_[g]) count <= 4 ? transpose_four_rows(g, s) : transpose_rows(g, s);
    ahead.step();
  }

  // Values of the same keys, paired as the matrix unit wants them; keys outside the tile become zeros.
  // Pairing by the shuffles that cost one instruction leaves dimensions 8 i + 0..3 of 32 in the first half of
  // a group of columns and 8 i + 4..7 in the second; finish_row() puts them right.
  template <class F>
  bool set_values(const KV* const* rows, int, bool check, F& ahead) {
    const bool whole = kInPlace && dim_v_ % 32 == 0;
    bool finite = true;
    for (int k = begin_ / 32 * 32; k < (end_ + 31) / 32 * 32; k += 2) {
      uint32_t* to = values_ + int64_t(k / 2) * v_stride_;
      const bool first = k >= begin_ && k < end_, second = k + 1 >= begin_ && k + 1 < end_;
      if (whole && first && second) {
        for (int d = 0; d < dim_v_; d += 32)
          store_pairs(to + d, _mm512_loadu_si512(rows[k] + d), _mm512_loadu_si512(rows[k + 1] + d));
      } else {
        for (int d = 0; d < dim_v_; d += 32)
          store_pairs(to + d, first ? load_32(rows[k] + d, dim_v_ - d) : _mm512_setzero_si512(),
                      second ? load_32(rows[k + 1] + d, dim_v_ - d) : _mm512_setzero_si512());
      }
      if (check) finite = finite && all_finite(to);
      ahead.step();
    }
    return finite;
  }

  // First half of o[row] = alpha[row] * o[row] + sum of s[row][key] * V[key] for the rows of a block: all
  // that needs no values. A tile cannot be loaded before what was stored to its lines has left the store
  // buffer, so that other work should come before the second half.
  void begin_sums(int first, int count, const float* s, const float* alpha, float* o, int o_stride) {
    for (int r = 0; r < count; ++r) {
      set_weights(first + r, s + r * kKeyTile);
      rescale(o + int64_t(r) * o_stride, alpha[r]);
    }
  }

  // Second half. `o` has 16 rows.
  template <class F>
  void finish_sums(int first, int, const float*, float* o, int o_stride, F& ahead) {
    add_products(weights_ + int64_t(first) * kKeyTile, values_, o, o_stride, ahead);
  }

  // Second half for single rows, each with the values of the keys that it sees alone.
  template <class F>
  void finish_visible_sums(int first, int count, const float*, const uint64_t* visible, float* o,
                           int o_stride, F& ahead) {
    const int columns = pad_dim(dim_v_);
    for (int r = 0; r < count; ++r) {
      if (!visible[r]) continue;
      float* row = o + int64_t(r) * o_stride;
      mask_values(visible[r]);
      for (int d = 0; d < columns; d += kLanes) cpu::store(spare_ + r * columns + d, cpu::load(row + d));
      add_products(weights_ + int64_t(first) * kKeyTile, masked_values_, spare_, columns, ahead);
      for (int d = 0; d < columns; d += kLanes) cpu::store(row + d, cpu::load(spare_ + r * columns + d));
    }
  }

  // Orders the columns of an output row, which hold whole groups of 32.
  void finish_row(float* o) const {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int d = 0; d < dim_v_; d += 32) {
      const __m512 a = _mm512_loadu_ps(o + d), b = _mm512_loadu_ps(o + d + 16);
      _mm512_storeu_ps(o + d, _mm512_permutex2var_ps(a, low, b));
      _mm512_storeu_ps(o + d + 16, _mm512_permutex2var_ps(a, high, b));
    }
  }

 private:
  static constexpr int kGroups = kKeyTile / kRowBlock;

  // The first n of 32 elements as bfloat16, zeros behind them.
  static __m512i load_32(const Element* p, int n) {
    return _mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1, p);
  }
  template <class T>
  static __m512i load_32(const T* p, int n) {
    const Vec low = n >= kLanes ? load_as_float(p) : load_as_float(p, n);
    const Vec high = n >= 2 * kLanes ? load_as_float(p + kLanes)
                     : n > kLanes    ? load_as_float(p + kLanes, n - kLanes)
                                     : Vec{};
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }

  uint32_t* query_tile(int first_row, int d) const {
    return queries_ + (int64_t(first_row / kRowBlock) * pad_dim(dim_) + d) / 2 * kRowBlock;
  }

  void set_weights(int row, const float* p) {
    for (int k = 0; k < kKeyTile; k += 32) {
      const __m512 low = (__m512)cpu::load(p + k), high = (__m512)cpu::load(p + k + 16);
      _mm512_store_si512(weights_ + row * kKeyTile + k, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }

  // The matrix unit flushes subnormal sums, even when all it adds is zero. Flushing them here as well keeps a
  // tile without visible keys free of effect.
  void rescale(float* o, float alpha) const {
    if (alpha == 1.0f) return;
    for (int d = 0; d < v_stride_; d += kLanes) {
      const Vec x = cpu::load(o + d) * alpha;
      const Vec magnitude = (Vec)((UVec)x & 0x7fffffffu);
      cpu::store(o + d, magnitude < std::numeric_limits<float>::min() ? Vec{} : x);
    }
  }

  void mask_values(uint64_t visible) {
    for (int k = begin_ / 32 * 32; k < (end_ + 31) / 32 * 32; k += 2) {
      const uint32_t keep =
          ((visible >> k) & 1 ? 0x0000ffffu : 0u) | ((visible >> (k + 1)) & 1 ? 0xffff0000u : 0u);
      for (int d = 0; d < v_stride_; d += 16) {
        const int64_t at = int64_t(k / 2) * v_stride_ + d;
        _mm512_store_si512(masked_values_ + at,
                           _mm512_and_si512(_mm512_load_si512(values_ + at), _mm512_set1_epi32(int(keep))));
      }
    }
  }

  template <int G>
  void step(int d) {
    if (!key_group_[G]) return;
    amx::load<5 + G % 2>(key_group_[G] + d, key_step_[G]);
    amx::multiply_add<G, 5 + G % 2, 4>();
  }

  template <int G>
  void spill() {
    if (key_group_[G]) amx::store<G>(scores_ + G * amx::kRows * kRowBlock, amx::kRowBytes);
  }

  void transpose_rows(int group, float* s) const {
    const float* from = scores_ + group * amx::kRows * kRowBlock;
    Vec rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = cpu::load(from + i * kLanes);
    transpose(rows);
    for (int i = 0; i < kLanes; ++i) cpu::store(s + i * kKeyTile + group * kRowBlock, rows[i]);
  }

  // Decoding fills few of the 16 columns.
  void transpose_four_rows(int group, float* s) const {
    const float* from = scores_ + group * amx::kRows * kRowBlock;
    float* to = s + group * kRowBlock;
    __m512 part[4];  // lane l of part[i]: the first four columns of key 4 l + i
    for (int i = 0; i < 4; ++i) {
      const float* key = from + i * kLanes;
      const __m256 low = _mm256_set_m128(_mm_load_ps(key + 4 * kLanes), _mm_load_ps(key));
      const __m256 high = _mm256_set_m128(_mm_load_ps(key + 12 * kLanes), _mm_load_ps(key + 8 * kLanes));
      part[i] = (__m512)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
    }
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
    const Vec ab_low = detail::unpack<1, 0>((Vec)part[0], (Vec)part[1], lanes);
    const Vec ab_high = detail::unpack<1, 1>((Vec)part[0], (Vec)part[1], lanes);
    const Vec cd_low = detail::unpack<1, 0>((Vec)part[2], (Vec)part[3], lanes);
    const Vec cd_high = detail::unpack<1, 1>((Vec)part[2], (Vec)part[3], lanes);
    cpu::store(to, detail::unpack<2, 0>(ab_low, cd_low, lanes));
    cpu::store(to + kKeyTile, detail::unpack<2, 1>(ab_low, cd_low, lanes));
    cpu::store(to + 2 * kKeyTile, detail::unpack<2, 0>(ab_high, cd_high, lanes));
    cpu::store(to + 3 * kKeyTile, detail::unpack<2, 1>(ab_high, cd_high, lanes));
  }

  static void store_pairs(uint32_t* to, __m512i a, __m512i b) {
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(a, b));
  }

  // Of one pair of values.
  bool all_finite(const uint32_t* pairs) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 special = 0;
    for (int d = 0; d < v_stride_; d += 16)
      special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_load_si512(pairs + d), exponent), exponent);
    return special == 0;
  }

  template <class F>
  void add_products(const Element* weights, const uint32_t* values, float* o, int o_stride, F& ahead) {
    const int64_t o_bytes = int64_t(o_stride) * 4, v_bytes = int64_t(v_stride_) * 4;
    const int columns = pad_dim(dim_v_), first_step = begin_ / 32, last_step = (end_ + 31) / 32;
    int d = 0;
    for (; d + 64 <= columns; d += 64) {
      amx::load<0>(o + d, o_bytes);
      amx::load<1>(o + d + 16, o_bytes);
      amx::load<2>(o + d + 32, o_bytes);
      amx::load<3>(o + d + 48, o_bytes);
      for (int s = first_step; s < last_step; ++s) {
        const uint32_t* v = values + int64_t(s) * 16 * v_stride_ + d;
        amx::load<4>(weights + s * 32, kKeyTile * int64_t(sizeof(Element)));
        amx::load<5>(v, v_bytes);
        amx::multiply_add<0, 4, 5>();
        ahead.step();
        amx::load<6>(v + 16, v_bytes);
        amx::multiply_add<1, 4, 6>();
        ahead.step();
        amx::load<5>(v + 32, v_bytes);
        amx::multiply_add<2, 4, 5>();
        ahead.step();
        amx::load<6>(v + 48, v_bytes);
        amx::multiply_add<3, 4, 6>();
        ahead.step();
      }
      amx::store<0>(o + d, o_bytes);
      amx::store<1>(o + d + 16, o_bytes);
      amx::store<2>(o + d + 32, o_bytes);
      amx::store<3>(o + d + 48, o_bytes);
    }
    for (; d < columns; d += 16) {
      amx::load<0>(o + d, o_bytes);
      for (int s = first_step; s < last_step; ++s) {
        amx::load<4>(weights + s * 32, kKeyTile * int64_t(sizeof(Element)));
        amx::load<5>(values + int64_t(s) * 16 * v_stride_ + d, v_bytes);
        amx::multiply_add<0, 4, 5>();
      }
      amx::store<0>(o + d, o_bytes);
    }
  }

  int dim_ = 0, dim_v_ = 0, v_stride_ = 0, begin_ = 0, end_ = 0;
  uint32_t *queries_ = nullptr, *values_ = nullptr, *masked_values_ = nullptr;
  Element *keys_ = nullptr, *weights_ = nullptr;
  float *scores_ = nullptr, *spare_ = nullptr;
  const Element* key_group_[kGroups] = {};
  int64_t key_step_[kGroups] = {};
};

}  // namespace fi::cpu
#endif
