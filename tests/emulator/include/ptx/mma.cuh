// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "builtins.h"

namespace fi::ptx {

template <typename T>
float element(uint32_t word, int which) {
  return float(emulator::from_bits<T>(word >> 16 * which & 0xffff));
}

// Row and column of elements 0 .. 7 of an A fragment.
inline int fragment_row(int lane, int e) { return lane / 4 + e / 2 % 2 * 8; }
inline int fragment_column(int lane, int e) { return lane % 4 * 2 + e % 2 + e / 4 * 8; }

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using namespace emulator;
  const auto act = [](Meeting& m) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const uint32_t (&w)[8] = m.posted[lane].words;
      for (int e = 0; e < 8; ++e)
        left[fragment_row(lane, e)][fragment_column(lane, e)] = element<T>(w[e / 2], e % 2);
      for (int e = 0; e < 4; ++e)
        right[lane % 4 * 2 + e % 2 + e / 2 * 8][lane / 4] = element<T>(w[4 + e / 2], e % 2);
    }
    float product[16][8] = {};
    for (int k = 0; k < 16; ++k)
      for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column) product[row][column] += left[row][k] * right[k][column];
    for (int lane = 0; lane < kWarpSize; ++lane)
      for (int e = 0; e < 4; ++e)
        m.floats[lane][e] = product[fragment_row(lane, e)][fragment_column(lane, e % 2)];
  };
  const Meeting& m = machine().meet("mma", {{a[0], a[1], a[2], a[3], b0, b1}, {}}, act);
  for (int e = 0; e < 4; ++e) d[e] += m.floats[machine().lane][e];
}

template <typename T>
uint32_t pack2(float lo, float hi) {
  return uint32_t(emulator::bits_of(T(lo))) | uint32_t(emulator::bits_of(T(hi))) << 16;
}

template <typename T>
float2 unpack2(uint32_t x) {
  return {element<T>(x, 0), element<T>(x, 1)};
}

inline float exp2_approx(float x) { return exp2f(x); }

}  // namespace fi::ptx
