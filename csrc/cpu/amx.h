// SPDX-License-Identifier: Apache-2.0
// The bfloat16 matrix unit of x86 (AMX-TILE, AMX-BF16): permission, and one function an instruction.
#pragma once
#include "simd.h"

#if defined(FI_AVX512) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define FI_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

namespace fi::cpu::amx {

inline constexpr int kRows = 16;      // of a tile
inline constexpr int kRowBytes = 64;  // 32 bfloat16 or 16 floats

// The kernel gives a process the tile registers only on request; asked once. False: use another path.
inline bool available() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// How the tiles are used: sums and weights have a row for each query row, scores and queries a column.
enum Tile { kSums0, kSums1, kSums2, kSums3, kWeights, kScores, kOperand, kQueries };

// Shapes the tiles for this many query rows, 1 to 16; fewer take less time. Costs about a hundred cycles;
// other code of the thread may change it.
inline void configure(int rows) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = uint16_t(i == kScores || i == kQueries ? rows * 4 : kRowBytes);
    config.rows[i] = uint8_t(i <= kWeights ? rows : kRows);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release() { asm volatile("tilerelease"); }

template <int T>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
inline void load(const void* base, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride_bytes), "i"(T) : "memory");
}

template <int T>
inline void store(void* base, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride_bytes), "i"(T) : "memory");
}

// C += A B: A is 16 rows of 32 bfloat16; row i of B holds elements 2i and 2i + 1 of 16 columns, in pairs.
template <int C, int A, int B>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// A product whose result nobody reads. After some 200 ns without one the unit powers down, and the next
// product waits for about 300 ns (measured on Emerald Rapids; loads and stores of tiles do not count): vector
// code in between has to call this now and then. Changes kScores.
inline void stay_awake() { multiply_add<kScores, kOperand, kQueries>(); }

}  // namespace fi::cpu::amx
#endif
