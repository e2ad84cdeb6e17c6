// SPDX-License-Identifier: Apache-2.0
// The products of one KV tile in float arithmetic, for any element types.
#pragma once
#include <algorithm>

#include "arena.h"
#include "microkernels.h"

namespace fi::cpu {

// Used by the executor in this order: set_queries() once an item; for each KV tile set_keys(),
// then for each block of rows dot_keys() and begin_sums(); set_values();
// and for each block finish_sums() or finish_visible_sums(). AmxTile has the same shape.
template <class Q, class KV>
class VectorTile {
 public:
  static constexpr int kRowBlock = kRowUnroll;
  // finish_sums() reads the scores of a block again.
  static constexpr bool kKeepsScores = true;
  static constexpr bool kSoftensWhole = false;

  void take_memory(Arena& arena, int max_rows, int dim, int dim_v) {
    queries_ = arena.take<float>(int64_t(max_rows) * pad_lanes(dim));
    keys_ = arena.take<float>(int64_t(kKeyTile) * dim);
    values_ = arena.take<float>(int64_t(kKeyTile) * pad_lanes(dim_v));
  }

  void begin(int dim, int dim_v) {
    dim_ = dim;
    dim_v_ = dim_v;
  }
  void begin_item() {}
  static void stay_awake() {}

  // Calls of ahead.step() in a tile, about.
  int64_t steps(int rows) const {
    const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock, groups = kKeyTile / kLanes;
    return groups * ((dim_ + kLanes - 1) / kLanes) +
           blocks * kKeyTile * ((dim_v_ + kColVecs * kLanes - 1) / (kColVecs * kLanes)) + rows;
  }

  // Rows [first, first + count) of the item.
  void set_queries(int first, int count, const Q* const* rows) {
    for (int r = 0; r < count; ++r) {
      float* to = queries_ + int64_t(first + r) * pad_lanes(dim_);
      for (int d = 0; d < dim_; d += kLanes) store(to + d, load_part(rows[r] + d, dim_ - d));
    }
  }

  // Keys [begin, end) of the tile.
  template <class F>
  void set_keys(const KV* const* rows, int begin, int end, F& ahead) {
    begin_ = begin;
    end_ = end;
    transpose_keys(rows, begin, end, dim_, keys_, [&] { ahead.step(); });
  }

  // Replaces elements of the tile's keys: f(elements, d, key) gives element d of the keys from `key` on, of
  // which elements[i * kLanes] are the elements i. `elements` has room for one vector a dimension.
  template <class F>
  void transform_keys(float* elements, F f) {
    for (int key = begin_ / kLanes * kLanes; key < end_; key += kLanes) {
      float* tile = keys_ + key;
      for (int d = 0; d < dim_; ++d) store(elements + d * kLanes, load(tile + int64_t(d) * kKeyTile));
      f.begin(elements, key);
      for (int d = 0; d < dim_; ++d) store(tile + int64_t(d) * kKeyTile, f(elements, d, key));
    }
  }

  // A row that set_queries() has read.
  float* query(int slot) { return queries_ + int64_t(slot) * pad_lanes(dim_); }

  // Values of the same keys, for `num_rows` query rows. Says whether all are finite, if asked to `check`.
  template <class F>
  bool set_values(const KV* const* rows, int num_rows, bool check, F& ahead) {
    // A few rows convert values on the fly, more of them share the conversion.
    direct_ = !check && num_rows <= 2 * kRowBlock && dim_v_ % kLanes == 0;
    value_rows_ = rows;
    if (direct_) return true;
    const int stride = pad_lanes(dim_v_);
    for (int k = begin_; k < end_; ++k) float_rows_[k] = values_ + int64_t(k) * stride;
    return convert_values(rows, begin_, end_, dim_v_, values_, stride, [&] { ahead.step(); });
  }

  // Replaces elements of the tile's values, which set_values() has checked, as transform_keys() does those of
  // keys. Says whether all are finite now. `elements` has room for whole vectors of dimensions.
  template <class F>
  bool transform_values(float* elements, const F& f) {
    const int stride = pad_lanes(dim_v_);
    FiniteCheck finite;
    Vec block[kLanes];
    for (int key = begin_ / kLanes * kLanes; key < end_; key += kLanes) {
      const int first = std::max(begin_ - key, 0), last = std::min(end_ - key, kLanes);
      const auto row_at = [&](int lane) { return values_ + int64_t(key + lane) * stride; };
      for (int d = 0; d < dim_v_; d += kLanes) {
        // Lanes of keys that do not exist hold a copy of one that does.
        for (int i = 0; i < kLanes; ++i) block[i] = load(row_at(i >= first && i < last ? i : first) + d);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(elements + (d + i) * kLanes, block[i]);
      }
      for (int d = 0; d < dim_v_; d += kLanes) {
        for (int i = 0; i < kLanes; ++i) block[i] = d + i < dim_v_ ? f(elements, d + i, key) : Vec{};
        transpose(block);
        for (int i = first; i < last; ++i) {
          finite.add(block[i]);
          store(row_at(i) + d, block[i]);
        }
      }
    }
    return bool(finite);
  }

  // s[row][key] for the rows of a block. Keys outside the tile keep what s held, or get any number.
  template <class F>
  void dot_keys(int first, int count, float* s, F&) const {
    const int stride = pad_lanes(dim_);
    with_rows(count, [&](auto n) {
      cpu::dot_keys<n()>(queries_ + int64_t(first) * stride, stride, keys_, begin_, end_, dim_, s);
    });
  }

  void take_scores(float*) const {}

  // First half of o[row] = alpha[row] * o[row] + sum of s[row][key] * V[key] for the rows of a block.
  void begin_sums(int, int count, const float*, const float* alpha, float* o, int o_stride) const {
    for (int r = 0; r < count; ++r)
      if (alpha[r] != 1.0f)
        for (int d = 0; d < dim_v_; d += kLanes)
          store(o + int64_t(r) * o_stride + d, load(o + int64_t(r) * o_stride + d) * alpha[r]);
  }

  // Second half.
  template <class F>
  void finish_sums(int, int count, const float* s, float* o, int o_stride, F& ahead) const {
    const auto step = [&] { ahead.step(); };
    const int columns = pad_lanes(dim_v_);
    with_rows(count, [&](auto n) {
      if (direct_)
        weigh_values<n()>(value_rows_, s, begin_, end_, columns, o, o_stride, step);
      else
        weigh_values<n()>(float_rows_, s, begin_, end_, columns, o, o_stride, step);
    });
  }

  // Second half for single rows, without touching the values of keys that a row does not see.
  template <class F>
  void finish_visible_sums(int, int count, const float* s, const uint64_t* visible, float* o, int o_stride,
                           F&) {
    for (int r = 0; r < count; ++r)
      weigh_visible(float_rows_, s + r * kKeyTile, visible[r], pad_lanes(dim_v_), o + int64_t(r) * o_stride);
  }

  void finish_row(float*) const {}

 private:
  template <class F>
  static void with_rows(int n, F f) {
    switch (n) {
      case 1:
        return f(std::integral_constant<int, 1>{});
      case 2:
        return f(std::integral_constant<int, 2>{});
      case 3:
        return f(std::integral_constant<int, 3>{});
      case 4:
        return f(std::integral_constant<int, 4>{});
      case 5:
        return f(std::integral_constant<int, std::min(5, kRowBlock)>{});
      default:
        return f(std::integral_constant<int, kRowBlock>{});
    }
  }

  int dim_ = 0, dim_v_ = 0, begin_ = 0, end_ = 0;
  bool direct_ = false;
  float *queries_ = nullptr, *keys_ = nullptr, *values_ = nullptr;
  const KV* const* value_rows_ = nullptr;
  const float* float_rows_[kKeyTile];
};

}  // namespace fi::cpu
