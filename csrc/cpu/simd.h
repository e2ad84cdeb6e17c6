// SPDX-License-Identifier: Apache-2.0
// Float vectors of the host's width, and the functions that softmax needs of them. No function here
// contracts or reassociates on its own: a result depends on the operands alone, never on the caller.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FI_AVX512 1
#endif

namespace fi::cpu {

#if defined(FI_AVX512)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(FI_AVX512)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// a * b + c with one rounding on every host: what cancels between the product and c has to be exact.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(FI_AVX512) || (defined(__AVX2__) && defined(__FMA__))
  return fma(a, b, c);
#else
  typedef double Wide __attribute__((vector_size(kLanes * 8)));
  const Wide product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
  return __builtin_convertvector(product + __builtin_convertvector(c, Wide), Vec);
#endif
}

// A NaN operand may be dropped; the callers rely on exp() to bring it back.
inline Vec max(Vec a, Vec b) {
#if defined(FI_AVX512)
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// Lanes of x whose bit is set, `otherwise` in the others.
inline Vec select_bits(uint64_t bits, Vec x, float otherwise) {
#if defined(FI_AVX512)
  return (Vec)_mm512_mask_mov_ps((__m512)splat(otherwise), __mmask16(bits), (__m512)x);
#else
  UVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = 1u << i;
  return (lane & uint32_t(bits)) != 0u ? x : splat(otherwise);
#endif
}

// max(x, floor) in lanes whose bit is set, floor in the others.
inline Vec max_where(uint64_t bits, Vec x, Vec floor) {
#if defined(FI_AVX512)
  return (Vec)_mm512_mask_max_ps((__m512)floor, __mmask16(bits), (__m512)x, (__m512)floor);
#else
  return max(select_bits(bits, x, -kInfinity), floor);
#endif
}

namespace detail {

template <int Distance, int... I>
inline Vec rotate(Vec v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ Distance)...);
}

template <int Distance>
inline Vec rotate(Vec v) {
  return rotate<Distance>(v, std::make_integer_sequence<int, kLanes>{});
}

}  // namespace detail

// Butterflies: every lane ends with the same value, for f is commutative.
template <class F>
inline float reduce(Vec v, F f) {
  if constexpr (kLanes >= 16) v = f(v, detail::rotate<8>(v));
  if constexpr (kLanes >= 8) v = f(v, detail::rotate<4>(v));
  v = f(v, detail::rotate<2>(v));
  v = f(v, detail::rotate<1>(v));
  return v[0];
}

inline float reduce_max(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return max(a, b); });
}

inline float reduce_add(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return a + b; });
}

namespace detail {

// The integer next to x.
inline Vec round(Vec x) {
#if defined(FI_AVX512)
  return (Vec)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no digits behind the point
  return (x + kRound) - kRound;
#endif
}

// x * 2^n for integers n with a normal result.
inline Vec scale_by_exponent(Vec x, Vec n) {
#if defined(FI_AVX512)
  return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)x, (__m512)n);
#else
  constexpr float kRound = 12582912.0f;  // leaves n in the low bits
  const IVec exponent = (IVec)(n + kRound) << 23;
  return x * (Vec)(exponent + 0x3f800000);
#endif
}

// 2^r for -0.5 <= r <= 0.5.
inline Vec exp2_fraction(Vec r) {
  Vec p = splat(0.00015594838258f);
  p = fma(p, r, splat(0.00134067051248f));
  p = fma(p, r, splat(0.00961769224224f));
  p = fma(p, r, splat(0.055503103827f));
  p = fma(p, r, splat(0.240226527881f));
  p = fma(p, r, splat(0.693147215055f));
  return fma(p, r, splat(1.0f));
}

}  // namespace detail

// 2^x for x < 128, relative error below 2e-7; zero where it would be subnormal, NaN stays NaN.
inline Vec exp2(Vec x) {
  const Vec n = detail::round(x);
  return x < -126.0f ? Vec{} : detail::scale_by_exponent(detail::exp2_fraction(x - n), n);
}

// The same in lanes whose bit is set, zero in the others.
inline Vec exp2_where(uint64_t bits, Vec x) {
#if defined(FI_AVX512)
  const __mmask16 kept =
      _mm512_mask_cmp_ps_mask(__mmask16(bits), (__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Vec n = detail::round(x);
  return (Vec)_mm512_maskz_scalef_ps(kept, (__m512)detail::exp2_fraction(x - n), (__m512)n);
#else
  return select_bits(bits, exp2(x), 0.0f);
#endif
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

// e^x for x <= 88, as accurate: x = (n + f) ln 2 with ln 2 in two parts.
inline Vec exp(Vec x) {
  const Vec n = detail::round(x * 1.44269504f);
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(0.00138145401768f);
  p = fma(p, r, splat(0.00836874510894f));
  p = fma(p, r, splat(0.0416683907835f));
  p = fma(p, r, splat(0.16666520399f));
  p = fma(p, r, splat(0.499999934321f));
  p = fma(p * r, r, r) + 1.0f;
  return x < -87.33654f ? Vec{} : detail::scale_by_exponent(p, n);
}

inline float exp(float x) { return exp(splat(x))[0]; }

// Absolute error below 1e-7, relative error near zero below 2e-7.
inline Vec tanh(Vec x) {
  const Vec magnitude = (Vec)((UVec)x & 0x7fffffffu);
  const UVec sign = (UVec)x & 0x80000000u;
  const Vec z = x * x;
  Vec p = splat(-0.00571704547795f);
  p = fma(p, z, splat(0.0206505876963f));
  p = fma(p, z, splat(-0.0537434982112f));
  p = fma(p, z, splat(0.133314912887f));
  p = fma(p, z, splat(-0.333332839253f));
  const Vec small = fma(p * z, x, x);
  const Vec t = exp(magnitude * -2.0f);
  const Vec large = (Vec)((UVec)((1.0f - t) / (1.0f + t)) | sign);
  return magnitude < 0.625f ? small : large;
}

inline float tanh(float x) { return tanh(splat(x))[0]; }

namespace detail {

// Runs of `Run` elements of a and b by turns, from the lower or upper half of every 128-bit lane.
template <int Run, int Half, int... I>
inline Vec unpack(Vec a, Vec b, std::integer_sequence<int, I...>) {
  constexpr auto source = [](int i) {
    const int lane = i / 4 * 4, k = i % 4;
    const int run = k / Run, within = k % Run;
    return lane + Half * 2 + run / 2 * Run + within + (run % 2) * kLanes;
  };
  return __builtin_shufflevector(a, b, source(I)...);
}

// 128-bit lanes Odd, Odd + 2, ... of a, then of b.
template <int Odd, int... I>
inline Vec pick_lanes(Vec a, Vec b, std::integer_sequence<int, I...>) {
  constexpr auto source = [](int i) {
    const int lane = i / 4;
    constexpr int kHalf = kLanes >= 8 ? kLanes / 8 : 1;
    return (lane % kHalf * 2 + Odd) * 4 + i % 4 + lane / kHalf * kLanes;
  };
  return __builtin_shufflevector(a, b, source(I)...);
}

}  // namespace detail

// rows[i][j] becomes rows[j][i]: 4 x 4 blocks inside the 128-bit lanes, then the lanes, which are the
// shuffles that take one instruction each.
inline void transpose(Vec (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  Vec blocks[kLanes];  // blocks[4 g + k], lane l: column 4 l + k of rows 4 g .. 4 g + 3
#pragma GCC unroll 4
  for (int g = 0; g < kLanes; g += 4) {
    const Vec ab_low = detail::unpack<1, 0>(rows[g], rows[g + 1], lanes);
    const Vec ab_high = detail::unpack<1, 1>(rows[g], rows[g + 1], lanes);
    const Vec cd_low = detail::unpack<1, 0>(rows[g + 2], rows[g + 3], lanes);
    const Vec cd_high = detail::unpack<1, 1>(rows[g + 2], rows[g + 3], lanes);
    blocks[g] = detail::unpack<2, 0>(ab_low, cd_low, lanes);
    blocks[g + 1] = detail::unpack<2, 1>(ab_low, cd_low, lanes);
    blocks[g + 2] = detail::unpack<2, 0>(ab_high, cd_high, lanes);
    blocks[g + 3] = detail::unpack<2, 1>(ab_high, cd_high, lanes);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    if constexpr (kLanes == 16) {
      const Vec even01 = detail::pick_lanes<0>(blocks[k], blocks[4 + k], lanes);
      const Vec odd01 = detail::pick_lanes<1>(blocks[k], blocks[4 + k], lanes);
      const Vec even23 = detail::pick_lanes<0>(blocks[8 + k], blocks[12 + k], lanes);
      const Vec odd23 = detail::pick_lanes<1>(blocks[8 + k], blocks[12 + k], lanes);
      rows[k] = detail::pick_lanes<0>(even01, even23, lanes);
      rows[4 + k] = detail::pick_lanes<0>(odd01, odd23, lanes);
      rows[8 + k] = detail::pick_lanes<1>(even01, even23, lanes);
      rows[12 + k] = detail::pick_lanes<1>(odd01, odd23, lanes);
    } else if constexpr (kLanes == 8) {
      rows[k] = detail::pick_lanes<0>(blocks[k], blocks[4 + k], lanes);
      rows[4 + k] = detail::pick_lanes<1>(blocks[k], blocks[4 + k], lanes);
    } else {
      rows[k] = blocks[k];
    }
  }
}

}  // namespace fi::cpu
