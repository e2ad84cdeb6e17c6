// SPDX-License-Identifier: Apache-2.0
// The element types of caches, queries and outputs, under the names that Python uses, and their exact
// conversion to float and rounding from it.
#pragma once
#include "../core/encode.h"
#include "simd.h"

namespace fi::cpu {

namespace dtype {

using float32 = float;
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct float8_e4m3fn {
  uint8_t bits;
};
struct float8_e5m2 {
  uint8_t bits;
};

}  // namespace dtype

namespace detail {

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// The compiler's own conversions of whole registers go through two halves.
inline UVec widen(Halves h) {
#if defined(FI_AVX512)
  return (UVec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
#else
  return __builtin_convertvector(h, UVec);
#endif
}

inline UVec widen(Bytes b) {
#if defined(FI_AVX512)
  return (UVec)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)b);
#else
  return __builtin_convertvector(b, UVec);
#endif
}

inline Halves widen_to_halves(Bytes b) {
#if defined(FI_AVX512)
  return (Halves)_mm256_cvtepu8_epi16((__m128i)b);
#else
  return __builtin_convertvector(b, Halves);
#endif
}

inline Halves narrow(UVec u) {
#if defined(FI_AVX512)
  return (Halves)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)u);
#else
  return __builtin_convertvector(u, Halves);
#endif
}

inline Vec half_to_float(Halves h) {
#if defined(FI_AVX512)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(__F16C__) && defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps((__m128i)h);
#else
  const UVec u = widen(h);
  const UVec magnitude = u & 0x7fffu;
  // Reading the bits as a float leaves the exponent 112 too low, for subnormals as well.
  const Vec value = (Vec)(magnitude << 13) * 0x1p112f;
  const UVec special = (magnitude << 13) | 0x7f800000u;
  const UVec bits = magnitude >= 0x7c00u ? special : (UVec)value;
  return (Vec)(bits | ((u & 0x8000u) << 16));
#endif
}

struct VectorLanes {
  using F = Vec;
  using U = UVec;
  static U bits(F x) { return (U)x; }
  static F value(U u) { return (F)u; }
  static U truncate(F x) { return (U) __builtin_convertvector(x, IVec); }
};

}  // namespace detail

// Vec of kLanes consecutive elements.
inline Vec load_as_float(const float* p) { return load(p); }

inline Vec load_as_float(const dtype::bfloat16* p) {
  detail::Halves h;
  std::memcpy(&h, p, sizeof(h));
  return (Vec)(detail::widen(h) << 16);
}

inline Vec load_as_float(const dtype::float16* p) {
  detail::Halves h;
  std::memcpy(&h, p, sizeof(h));
  return detail::half_to_float(h);
}

// The upper byte of a float16.
inline Vec load_as_float(const dtype::float8_e5m2* p) {
  detail::Bytes b;
  std::memcpy(&b, p, sizeof(b));
  return detail::half_to_float(detail::widen_to_halves(b) << 8);
}

// Seven bits moved to float16's fields are 2^8 too small, subnormals included; 0x7f is the one NaN.
inline Vec load_as_float(const dtype::float8_e4m3fn* p) {
  detail::Bytes b;
  std::memcpy(&b, p, sizeof(b));
  const detail::Halves u = detail::widen_to_halves(b);
  const Vec value = detail::half_to_float(((u & 0x7f) << 7) | ((u & 0x80) << 8)) * 256.0f;
  const UVec wide = detail::widen(b);
  return (wide & 0x7fu) == 0x7fu ? (Vec)(UVec{} + 0x7fc00000u) : value;
}

// The first n elements, zeros behind them; nothing past them is read.
template <class T>
inline Vec load_as_float(const T* p, int n) {
  alignas(64) T buffer[kLanes] = {};
#if defined(FI_AVX512)
  const __mmask16 first = __mmask16((1u << n) - 1);
  if constexpr (sizeof(T) == 4)
    _mm512_store_ps(buffer, _mm512_maskz_loadu_ps(first, p));
  else if constexpr (sizeof(T) == 2)
    _mm256_store_si256(reinterpret_cast<__m256i*>(buffer), _mm256_maskz_loadu_epi16(first, p));
  else
    _mm_store_si128(reinterpret_cast<__m128i*>(buffer), _mm_maskz_loadu_epi8(first, p));
#else
  std::memcpy(static_cast<void*>(buffer), static_cast<const void*>(p), sizeof(T) * size_t(n));
#endif
  return load_as_float(buffer);
}

inline void store_float(float* p, Vec v) { store(p, v); }

inline void store_float(dtype::bfloat16* p, Vec v) {
  const UVec u = (UVec)v;
  const UVec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const UVec quiet = (u >> 16) | 0x40u;
  const detail::Halves h = detail::narrow(v == v ? rounded : quiet);
  std::memcpy(static_cast<void*>(p), &h, sizeof(h));
}

inline void store_float(dtype::float16* p, Vec v) {
#if defined(FI_AVX512)
  const __m256i h = _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(static_cast<void*>(p), &h, sizeof(h));
#elif defined(__F16C__) && defined(__AVX2__)
  const __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(static_cast<void*>(p), &h, sizeof(h));
#else
  const detail::Halves h = detail::narrow(encode<10, 15, detail::VectorLanes>(v, 65504.0f, 0x7c00u, 0x7e00u));
  std::memcpy(static_cast<void*>(p), &h, sizeof(h));
#endif
}

// fp8 stores saturate: what is too large, infinities too, becomes the largest finite number.
inline void store_float(dtype::float8_e4m3fn* p, Vec v) {
  const auto b =
      __builtin_convertvector(encode<3, 7, detail::VectorLanes>(v, 448.0f, 0x7eu, 0x7fu), detail::Bytes);
  std::memcpy(static_cast<void*>(p), &b, sizeof(b));
}

inline void store_float(dtype::float8_e5m2* p, Vec v) {
  const auto b =
      __builtin_convertvector(encode<2, 15, detail::VectorLanes>(v, 57344.0f, 0x7bu, 0x7fu), detail::Bytes);
  std::memcpy(static_cast<void*>(p), &b, sizeof(b));
}

// Writes the first n lanes only.
template <class T>
inline void store_float(T* p, Vec v, int n) {
  alignas(64) T buffer[kLanes];
  store_float(buffer, v);
  std::memcpy(static_cast<void*>(p), static_cast<const void*>(buffer), sizeof(T) * size_t(n));
}

}  // namespace fi::cpu
