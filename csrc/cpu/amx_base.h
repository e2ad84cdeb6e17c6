// SPDX-License-Identifier: Apache-2.0
// What the engines of the bfloat16 matrix unit share. Keys are the rows of the first product (S^T = K Q^T),
// so that they are read where they lie; probabilities are rounded to bfloat16 for the second. A row's bits do
// not depend on the engine: both do the same products in the same order.
#pragma once
#include "amx.h"

#if defined(FI_AMX)
#include "arena.h"
#include "microkernels.h"

namespace fi::cpu {

template <class KV>
class AmxBase {
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
  }

  // Rows [first, first + count), first being a multiple of 16. Layout: [block][32 dims][pair][columns].
  void set_queries(int first, int count, const Element* const* rows, int columns) {
    for (int d = 0; d < dim_; d += 32) {
      Vec pairs[kLanes] = {};
      for (int r = 0; r < count; ++r) pairs[r] = (Vec)load_32(rows[r] + d, dim_ - d);
      transpose(pairs);
      uint32_t* to = query_tile(first, d, columns);
      for (int j = 0; j < kLanes; ++j)
        _mm512_mask_storeu_ps(to + j * columns, __mmask16((1u << columns) - 1), (__m512)pairs[j]);
    }
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

 protected:
  static constexpr int kGroups = kKeyTile / amx::kRows;

  // 16 keys as a tile can be loaded from: null when no key of the group is used.
  struct KeyGroup {
    const Element* base;
    int64_t step_bytes;
  };

  int64_t dot_steps() const { return pad_dim(dim_) / 32 * kGroups; }
  int64_t sum_steps() const { return v_stride_ / 64 * 4; }  // of 32 keys

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

  uint32_t* query_tile(int first_row, int d, int columns) const {
    return queries_ + int64_t(first_row / kRowBlock) * pad_dim(dim_) / 2 * kRowBlock + d / 2 * columns;
  }

  // Whether keys [first, first + 16) are used one and all and evenly spaced, so that they need no copy.
  bool in_place(const KV* const* rows, int first, int begin, int end) const {
    if (!kInPlace || dim_ % 32 != 0 || first < begin || first + amx::kRows > end) return false;
    const int64_t step = rows[first + 1] - rows[first];
    bool even = true;
    for (int k = first + 2; k < first + amx::kRows; ++k) even = even && rows[k] - rows[k - 1] == step;
    return even;
  }

  KeyGroup group_in_place(const KV* const* rows, int first, int64_t offset) const {
    return {reinterpret_cast<const Element*>(rows[first] + offset),
            (rows[first + 1] - rows[first]) * int64_t(sizeof(KV))};
  }

  KeyGroup copy_group(const KV* const* rows, int first, int begin, int end, int64_t offset) const {
    for (int k = first; k < first + amx::kRows; ++k) {
      Element* to = keys_ + int64_t(k) * pad_dim(dim_);
      const bool used = k >= begin && k < end;
      for (int d = 0; d < dim_; d += 32)
        _mm512_storeu_si512(to + d, used ? load_32(rows[k] + offset + d, dim_ - d) : _mm512_setzero_si512());
    }
    return {keys_ + int64_t(first) * pad_dim(dim_), pad_dim(dim_) * int64_t(sizeof(Element))};
  }

  // s[row][key] of 16 keys from the scores [key][column] that a product left.
  static void transpose_scores(const float* from, int columns, float* to) {
    if (columns == 4) return transpose_four_rows(from, to);
    Vec rows[kLanes];
    const __mmask16 used = __mmask16((1u << columns) - 1);
    for (int i = 0; i < kLanes; ++i) rows[i] = (Vec)_mm512_maskz_loadu_ps(used, from + i * columns);
    transpose(rows);
    for (int i = 0; i < columns; ++i) cpu::store(to + i * kKeyTile, rows[i]);
  }

  // The usual group of query heads while decoding.
  static void transpose_four_rows(const float* from, float* to) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    Vec part[4];  // lane l of part[i]: the four columns of key 4 i + l
    for (int i = 0; i < 4; ++i) part[i] = cpu::load(from + i * kLanes);
    const Vec ab_low = detail::unpack<1, 0>(part[0], part[1], lanes);
    const Vec ab_high = detail::unpack<1, 1>(part[0], part[1], lanes);
    const Vec cd_low = detail::unpack<1, 0>(part[2], part[3], lanes);
    const Vec cd_high = detail::unpack<1, 1>(part[2], part[3], lanes);
    const Vec rows[4] = {
        detail::unpack<2, 0>(ab_low, cd_low, lanes), detail::unpack<2, 1>(ab_low, cd_low, lanes),
        detail::unpack<2, 0>(ab_high, cd_high, lanes), detail::unpack<2, 1>(ab_high, cd_high, lanes)};
    // Element 4 l + i of a row is key 4 i + l.
    for (int r = 0; r < 4; ++r)
      cpu::store(to + r * kKeyTile, (Vec)_mm512_maskz_permutexvar_ps(0xffff, order, (__m512)rows[r]));
  }

  // Values of keys k and k + 1 of a tile, paired as the matrix unit wants them; keys outside [begin, end)
  // become zeros. Pairing by the shuffles that cost one instruction leaves dimensions 8 i + 0..3 of 32 in the
  // first half of a group of columns and 8 i + 4..7 in the second; finish_row() puts them right.
  void pair_values(const KV* const* rows, int k, int begin, int end, int64_t offset, uint32_t* to) const {
    const bool first = k >= begin && k < end, second = k + 1 >= begin && k + 1 < end;
    if (kInPlace && dim_v_ % 32 == 0 && first && second) {
      const KV *a = rows[k] + offset, *b = rows[k + 1] + offset;
      for (int d = 0; d < dim_v_; d += 32)
        store_pairs(to + d, _mm512_loadu_si512(a + d), _mm512_loadu_si512(b + d));
      return;
    }
    for (int d = 0; d < dim_v_; d += 32)
      store_pairs(to + d, first ? load_32(rows[k] + offset + d, dim_v_ - d) : _mm512_setzero_si512(),
                  second ? load_32(rows[k + 1] + offset + d, dim_v_ - d) : _mm512_setzero_si512());
  }

  static void store_pairs(uint32_t* to, __m512i a, __m512i b) {
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(a, b));
  }

  // Whether the values of a pair of keys are finite.
  bool finite_pair(const uint32_t* pairs) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 special = 0;
    for (int d = 0; d < v_stride_; d += 16)
      special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_load_si512(pairs + d), exponent), exponent);
    return special == 0;
  }

  // masked_values_: the pairs without the values of keys whose bit is not set.
  void mask_values(const uint32_t* pairs, int keys, uint64_t visible) const {
    for (int k = 0; k < keys; k += 2, visible >>= 2) {
      const uint32_t keep = (visible & 1 ? 0x0000ffffu : 0u) | (visible & 2 ? 0xffff0000u : 0u);
      for (int d = 0; d < v_stride_; d += 16) {
        const int64_t at = int64_t(k / 2) * v_stride_ + d;
        _mm512_store_si512(masked_values_ + at,
                           _mm512_and_si512(_mm512_load_si512(pairs + at), _mm512_set1_epi32(int(keep))));
      }
    }
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

  // o[row] += weights x values over `steps` times 32 keys, for the rows of a tile.
  template <class F>
  void add_products(const Element* weights, const uint32_t* values, int steps, float* o, int o_stride,
                    F& ahead) const {
    using namespace amx;
    const int64_t o_bytes = int64_t(o_stride) * 4, v_bytes = int64_t(v_stride_) * 4;
    constexpr int64_t kWeightBytes = kKeyTile * int64_t(sizeof(Element));
    int d = 0;
    for (; d + 64 <= v_stride_; d += 64) {
      amx::load<kSums0>(o + d, o_bytes);
      amx::load<kSums1>(o + d + 16, o_bytes);
      amx::load<kSums2>(o + d + 32, o_bytes);
      amx::load<kSums3>(o + d + 48, o_bytes);
      for (int s = 0; s < steps; ++s) {
        const uint32_t* v = values + int64_t(s) * 16 * v_stride_ + d;
        amx::load<kWeights>(weights + s * 32, kWeightBytes);
        amx::load<kOperand>(v, v_bytes);
        multiply_add<kSums0, kWeights, kOperand>();
        ahead.step();
        amx::load<kOperand>(v + 16, v_bytes);
        multiply_add<kSums1, kWeights, kOperand>();
        ahead.step();
        amx::load<kOperand>(v + 32, v_bytes);
        multiply_add<kSums2, kWeights, kOperand>();
        ahead.step();
        amx::load<kOperand>(v + 48, v_bytes);
        multiply_add<kSums3, kWeights, kOperand>();
        ahead.step();
      }
      amx::store<kSums0>(o + d, o_bytes);
      amx::store<kSums1>(o + d + 16, o_bytes);
      amx::store<kSums2>(o + d + 32, o_bytes);
      amx::store<kSums3>(o + d + 48, o_bytes);
    }
    for (; d < v_stride_; d += 16) {
      amx::load<kSums0>(o + d, o_bytes);
      for (int s = 0; s < steps; ++s) {
        amx::load<kWeights>(weights + s * 32, kWeightBytes);
        amx::load<kOperand>(values + int64_t(s) * 16 * v_stride_ + d, v_bytes);
        multiply_add<kSums0, kWeights, kOperand>();
      }
      amx::store<kSums0>(o + d, o_bytes);
    }
  }

  // add_products() row by row, each with the values of the keys that it sees alone; bit 0 is the first key.
  template <class F>
  void add_visible_products(const Element* weights, const uint32_t* values, int steps, int count,
                            const uint64_t* visible, int shift, float* o, int o_stride, F& ahead) const {
    for (int r = 0; r < count; ++r) {
      if (!(visible[r] >> shift)) continue;
      float *row = o + int64_t(r) * o_stride, *copy = spare_ + r * v_stride_;
      mask_values(values, steps * 32, visible[r] >> shift);
      for (int d = 0; d < v_stride_; d += kLanes) cpu::store(copy + d, cpu::load(row + d));
      add_products(weights, masked_values_, steps, spare_, v_stride_, ahead);
      for (int d = 0; d < v_stride_; d += kLanes) cpu::store(row + d, cpu::load(copy + d));
    }
  }

  int dim_ = 0, dim_v_ = 0, v_stride_ = 0;
  uint32_t *queries_ = nullptr, *values_ = nullptr, *masked_values_ = nullptr;
  Element *keys_ = nullptr, *weights_ = nullptr;
  float *scores_ = nullptr, *spare_ = nullptr;
};

}  // namespace fi::cpu
#endif

namespace fi::cpu {

// Whether the unit serves queries and a cache of these types.
#if defined(FI_AMX)
template <class Q, class KV>
inline constexpr bool kHasAmx = std::is_same_v<Q, dtype::bfloat16> && AmxBase<KV>::kExact;
#else
template <class Q, class KV>
inline constexpr bool kHasAmx = false;
#endif

}  // namespace fi::cpu
