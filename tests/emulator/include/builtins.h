// SPDX-License-Identifier: Apache-2.0
// What CUDA C++ has built in, for sources that a host's compiler translates for the emulated machine.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "machine.h"

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline __half __low2half(__half2 h) { return h.x; }
inline float __half2float(__half h) { return float(h); }

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  // To the nearest, halves to even; every NaN becomes one.
  explicit __nv_bfloat16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    bits = x != x ? 0x7fff : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
};

namespace fi::emulator {

struct Index {
  unsigned x;
};
inline Machine& machine() { return Machine::get(); }
inline int grid_blocks = 1;

inline uint64_t bits_of(uint64_t x) { return x; }
template <class T>
uint64_t bits_of(T x) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}

// The value of lane `from(lane)`.
template <class T, class From>
T exchange(const char* kind, T mine, From from) {
  const uint64_t bits = bits_of(mine);
  const Posted posted{{uint32_t(bits), uint32_t(bits >> 32)}, {}};
  const Meeting& m = machine().meet(kind, posted, [](Meeting&) {});
  const uint32_t (&words)[8] = m.posted[from(machine().lane) & 31].words;
  return from_bits<T>(words[0] | uint64_t(words[1]) << 32);
}

inline uint32_t ballot(const char* kind, bool mine) {
  const Meeting& m = machine().meet(kind, {{mine}, {}}, [](Meeting&) {});
  uint32_t mask = 0;
  for (int i = 0; i < kWarpSize; ++i) mask |= m.posted[i].words[0] << i;
  return mask;
}

}  // namespace fi::emulator

#define threadIdx (fi::emulator::Index{unsigned(fi::emulator::machine().thread)})
#define blockIdx (fi::emulator::Index{unsigned(fi::emulator::machine().block->index)})
#define gridDim (fi::emulator::Index{unsigned(fi::emulator::grid_blocks)})

inline void __syncwarp() { fi::emulator::machine().sync_warp(); }
inline void __threadfence() {}
inline void __trap() { fi::emulator::machine().fail("trap"); }
inline void __syncthreads() {
  fi::emulator::Machine& m = fi::emulator::machine();
  m.named_barrier(0, int(m.block->warps.size()) * fi::emulator::kWarpSize);
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return fi::emulator::exchange("shfl", x, [=](int) { return lane; });
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int with) {
  return fi::emulator::exchange("shfl.bfly", x, [=](int lane) { return lane ^ with; });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
  return fi::emulator::exchange("shfl.up", x, [=](int lane) { return lane < by ? lane : lane - by; });
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by) {
  return fi::emulator::exchange("shfl.down", x, [=](int lane) { return lane + by > 31 ? lane : lane + by; });
}
inline bool __any_sync(unsigned, bool x) { return fi::emulator::ballot("any", x) != 0; }
inline bool __all_sync(unsigned, bool x) { return fi::emulator::ballot("all", x) == ~0u; }
inline unsigned __ballot_sync(unsigned, bool x) { return fi::emulator::ballot("ballot", x); }

template <class T>
T atomicAdd(T* to, T x) {
  const T was = *to;
  *to += x;
  return was;
}
template <class T>
T atomicOr(T* to, int x) {
  const T was = *to;
  *to |= x;
  return was;
}
template <class T>
T __ldg(const T* p) {
  fi::emulator::machine().check_read(p, sizeof(T));
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T x) {
  *p = x;
}
inline float __int_as_float(int x) { return fi::emulator::from_bits<float>(uint32_t(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __float_as_int(float x) { return int(fi::emulator::bits_of(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_ru(float a, float b, float c) {
  const long double exact = static_cast<long double>(a) * b + c;
  const auto near = static_cast<float>(exact);
  return near < exact ? std::nextafter(near, INFINITY) : near;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = a | uint64_t(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline void* __cvta_shared_to_generic(uint32_t address) {
  return fi::emulator::machine().block->shared + (address - fi::emulator::kSharedBase);
}

using std::max;
using std::min;
inline int min(int a, int64_t b) { return int(std::min<int64_t>(a, b)); }
