// SPDX-License-Identifier: Apache-2.0
// The matrix products of one KV tile in float. Every element of a result is a chain of fused multiply-adds
// over an ascending index, or a sum of such chains of fixed length, however many rows are handled together: a
// row's bits do not depend on its neighbours. `ahead` is called between steps: a place to ask for the memory
// of the next tile.
#pragma once
#include <type_traits>

#include "dtype.h"

namespace fi::cpu {

inline constexpr int kKeyTile = 64;  // keys of one KV tile: the visibility of a row fits one uint64_t
#if defined(FI_AVX512)
inline constexpr int kRowUnroll = 6;  // 6 x 4 accumulators of 32 registers
inline constexpr int kColVecs = 4;
#else
inline constexpr int kRowUnroll = 4;  // 4 x 2 accumulators of 16 registers
inline constexpr int kColVecs = 2;
#endif

inline constexpr int pad_lanes(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The first n <= kLanes elements as floats, zeros behind them.
template <class T>
Vec load_part(const T* p, int n) {
  return n >= kLanes ? load_as_float(p) : load_as_float(p, n);
}

// kt[d][key] for 16 or so keys and all dimensions from d on that fill whole pairs of vectors: two dimensions
// of a bfloat16 key travel through one transposition and are then shifted apart.
inline void transpose_pairs(const dtype::bfloat16* const (&rows)[kLanes], int d, float* kt) {
  Vec pairs[kLanes];
  for (int i = 0; i < kLanes; ++i) std::memcpy(&pairs[i], rows[i] + d, sizeof(Vec));
  transpose(pairs);
  for (int i = 0; i < kLanes; ++i) {
    store(kt + int64_t(2 * i) * kKeyTile, (Vec)((UVec)pairs[i] << 16));
    store(kt + int64_t(2 * i + 1) * kKeyTile, (Vec)((UVec)pairs[i] & 0xffff0000u));
  }
}

// kt[d][key] = K[key][d] for the key vectors that overlap [begin, end); lanes outside hold a copy of another
// key.
template <class KV, class F>
void transpose_keys(const KV* const* rows, int begin, int end, int dim, float* kt, F ahead) {
  for (int k0 = begin / kLanes * kLanes; k0 < end; k0 += kLanes) {
    const KV* lane_row[kLanes];
    for (int i = 0; i < kLanes; ++i) lane_row[i] = rows[k0 + i >= begin && k0 + i < end ? k0 + i : begin];
    int d = 0;
    if constexpr (std::is_same_v<KV, dtype::bfloat16>) {
      for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
        transpose_pairs(lane_row, d, kt + int64_t(d) * kKeyTile + k0);
        ahead();
      }
    }
    for (; d < dim; d += kLanes) {
      const int n = dim - d < kLanes ? dim - d : kLanes;
      Vec block[kLanes];
      if (n == kLanes) {
        for (int i = 0; i < kLanes; ++i) block[i] = load_as_float(lane_row[i] + d);
      } else {
        for (int i = 0; i < kLanes; ++i) block[i] = load_as_float(lane_row[i] + d, n);
      }
      transpose(block);
      for (int i = 0; i < n; ++i) store(kt + int64_t(d + i) * kKeyTile + k0, block[i]);
      ahead();
    }
  }
}

// Products of one chain of a logit. The rounding of a chain grows as the square root of its length: one over
// 512 dimensions strays twice as far as four over 128.
inline constexpr int kChain = 128;

// s[r][key] = sum over d of q[r][d] * kt[d][key], for the key vectors that overlap [begin, end).
template <int R>
void dot_keys(const float* q, int q_stride, const float* kt, int begin, int end, int dim, float* s) {
  constexpr int kStep = kColVecs * kLanes;
  for (int c = begin / kStep * kStep; c < end; c += kStep)
    for (int first = 0; first == 0 || first < dim; first += kChain) {
      const int last = dim - first < kChain ? dim : first + kChain;
      Vec acc[R][kColVecs] = {};
      for (int d = first; d < last; ++d) {
        Vec k[kColVecs];
#pragma GCC unroll 4
        for (int j = 0; j < kColVecs; ++j) k[j] = load(kt + int64_t(d) * kKeyTile + c + j * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Vec x = splat(q[r * q_stride + d]);
#pragma GCC unroll 4
          for (int j = 0; j < kColVecs; ++j) acc[r][j] = fma(x, k[j], acc[r][j]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kColVecs; ++j) {
          float* to = s + r * kKeyTile + c + j * kLanes;
          store(to, first == 0 ? acc[r][j] : load(to) + acc[r][j]);
        }
    }
}

// o[r][d .. d + N lanes) += sum over keys in [begin, end) of p[r][key] * rows[key][d ..).
template <int R, int N, class V, class F>
void weigh_columns(const V* const* rows, const float* p, int begin, int end, int d, float* o, int o_stride,
                   F ahead) {
  Vec acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) acc[r][j] = load(o + int64_t(r) * o_stride + d + j * kLanes);
  for (int k = begin; k < end; ++k) {
    const V* row = rows[k] + d;
    Vec v[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) v[j] = load_as_float(row + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec x = splat(p[r * kKeyTile + k]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) acc[r][j] = fma(x, v[j], acc[r][j]);
    }
    ahead();
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(o + int64_t(r) * o_stride + d + j * kLanes, acc[r][j]);
}

// The same over all columns; the rows of V have whole vectors.
template <int R, class V, class F>
void weigh_values(const V* const* rows, const float* p, int begin, int end, int dim, float* o, int o_stride,
                  F ahead) {
  int d = 0;
  for (; d + kColVecs * kLanes <= dim; d += kColVecs * kLanes)
    weigh_columns<R, kColVecs>(rows, p, begin, end, d, o, o_stride, ahead);
  for (; d < dim; d += kLanes) weigh_columns<R, 1>(rows, p, begin, end, d, o, o_stride, ahead);
}

// One row over the keys whose bit is set, no other row of V being touched.
inline void weigh_visible(const float* const* rows, const float* p, uint64_t visible, int dim, float* o) {
  for (int d = 0; d < dim; d += kLanes) {
    Vec acc = load(o + d);
    for (uint64_t bits = visible; bits; bits &= bits - 1) {
      const int k = __builtin_ctzll(bits);
      acc = fma(splat(p[k]), load(rows[k] + d), acc);
    }
    store(o + d, acc);
  }
}

// Whether all elements of some vectors are finite.
class FiniteCheck {
 public:
  // The sign bit appears where the exponent is all ones.
  void add(Vec v) { special_ |= ((UVec)v & 0x7fffffffu) + 0x00800000u; }

  explicit operator bool() const {
    for (int i = 0; i < kLanes; ++i)
      if (special_[i] >> 31) return false;
    return true;
  }

 private:
  UVec special_{};
};

// Converts rows of V to floats, zeros up to whole vectors; says whether all of them are finite.
template <class KV, class F>
bool convert_values(const KV* const* rows, int begin, int end, int dim, float* out, int out_stride, F ahead) {
  FiniteCheck finite;
  for (int k = begin; k < end; ++k) {
    float* to = out + int64_t(k) * out_stride;
    for (int d = 0; d < dim; d += kLanes) {
      const Vec v = load_part(rows[k] + d, dim - d);
      finite.add(v);
      store(to + d, v);
    }
    ahead();
  }
  return bool(finite);
}

}  // namespace fi::cpu
