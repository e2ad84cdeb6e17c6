// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "mma.cuh"

namespace fi::ptx {

inline void wgmma_fence() {}
inline void fence_async_shared() { emulator::machine().fence_async(); }
template <int kRows, int kColumns>
void settle(float (&)[kRows][kColumns]) {}
template <int kRows, int kColumns>
void settle(uint32_t (&)[kRows][kColumns]) {}

inline uint32_t descriptor_low(uint32_t address, int leading) {
  return uint32_t(leading >> 4) << 16 | (address >> 4 & 0x3fff);
}
inline uint64_t descriptor(uint32_t low, int stride) {
  return low | uint64_t(1u << 30 | uint32_t(stride >> 4)) << 32;
}

// Products are collected in groups. One takes place when the group is waited for or, by chance, before.
inline void run_groups(size_t pending) {
  auto& groups = emulator::machine().warp->groups;
  while (groups.size() > pending + 1) {
    for (const auto& product : groups.front()) product();
    groups.pop_front();
  }
}
inline void wgmma_commit() {
  using namespace emulator;
  machine().meet("wgmma.commit", {}, [](Meeting&) {
    auto& groups = machine().warp->groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
    if (machine().random(2) == 0) run_groups(0);
  });
}
template <int kPending>
void wgmma_wait() {
  emulator::machine().meet("wgmma.wait", {}, [](emulator::Meeting&) { run_groups(kPending); });
}

// Adds a product to the group that is being collected.
inline void collect(std::function<void()> multiply) {
  auto& groups = emulator::machine().warp->groups;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(std::move(multiply));
}

// An element of the matrix behind `descriptor`, rows of 128 bytes under the 128-byte swizzle.
template <typename T>
float matrix_element(uint64_t descriptor, bool transposed, int k, int n) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4,
                 leading = uint32_t(descriptor >> 16 & 0x3fff) << 4,
                 stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  const int row = transposed ? k : n, column = transposed ? n % 64 : k;
  uint32_t at = start + uint32_t(row / 8) * stride + uint32_t(row % 8) * 128 + uint32_t(column) * 2;
  if (transposed) at += uint32_t(n / 64) * leading;
  at ^= at >> 3 & 0x70;
  uint16_t bits;
  std::memcpy(&bits, emulator::machine().at(at, 2), 2);
  return float(emulator::from_bits<T>(bits));
}

// d (+)= left * b, where fill(left) reads the warp's 16 rows of 16 elements when the product takes place.
template <typename T, int kN, class Fill>
void run_product(float (*const (&d)[emulator::kWarpSize])[4], const Fill& fill, uint64_t b_matrix,
                 bool transposed, bool accumulate) {
  using namespace emulator;
  float left[16][16], right[16][8 * kN];
  fill(left);
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < 8 * kN; ++n) right[k][n] = matrix_element<T>(b_matrix, transposed, k, n);
  float product[16][8 * kN] = {};
  for (int k = 0; k < 16; ++k)
    for (int row = 0; row < 16; ++row)
      for (int n = 0; n < 8 * kN; ++n) product[row][n] += left[row][k] * right[k][n];
  for (int lane = 0; lane < kWarpSize; ++lane)
    for (int n = 0; n < kN; ++n)
      for (int e = 0; e < 4; ++e) {
        float& to = d[lane][n][e];
        to = (accumulate ? to : 0.f) + product[fragment_row(lane, e)][n * 8 + lane % 4 * 2 + e % 2];
      }
}

template <typename T, int kN, int kTransposed>
void wgmma_m64k16(float (*d)[4], const uint32_t (&a)[4], uint64_t b_matrix, int accumulate) {
  using namespace emulator;
  struct Product {
    float (*d[kWarpSize])[4];
    const uint32_t* a[kWarpSize];
  };
  const auto act = [&](Meeting& m) {
    machine().check_fence();
    Product p;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (m.posted[lane].words[0] != m.posted[0].words[0] || m.posted[lane].words[1] != m.posted[0].words[1])
        machine().fail("wgmma: lanes have different descriptors");
      p.d[lane] = static_cast<float (*)[4]>(m.posted[lane].pointers[0]);
      p.a[lane] = static_cast<const uint32_t*>(m.posted[lane].pointers[1]);
    }
    collect([p, b_matrix, accumulate] {
      const auto fill = [&](float (&left)[16][16]) {
        for (int lane = 0; lane < kWarpSize; ++lane)
          for (int e = 0; e < 8; ++e)
            left[fragment_row(lane, e)][fragment_column(lane, e)] = element<T>(p.a[lane][e / 2], e % 2);
      };
      run_product<T, kN>(p.d, fill, b_matrix, kTransposed, accumulate);
    });
  };
  const Posted mine{{uint32_t(b_matrix), uint32_t(b_matrix >> 32)}, {d, const_cast<uint32_t*>(&a[0])}};
  machine().meet("wgmma", mine, act);
}

// The same with A in shared memory, its rows along K: warp w of a warpgroup has rows 16 w .. 16 w + 15.
template <typename T, int kN>
void wgmma_m64k16(float (*d)[4], uint64_t a_matrix, uint64_t b_matrix, int accumulate) {
  using namespace emulator;
  struct Product {
    float (*d[kWarpSize])[4];
  };
  const int first_row = machine().thread / kWarpSize % 4 * 16;
  const auto act = [&](Meeting& m) {
    machine().check_fence();
    Product p;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      for (int word = 0; word < 4; ++word)
        if (m.posted[lane].words[word] != m.posted[0].words[word])
          machine().fail("wgmma: lanes have different descriptors");
      p.d[lane] = static_cast<float (*)[4]>(m.posted[lane].pointers[0]);
    }
    collect([p, a_matrix, b_matrix, first_row, accumulate] {
      const auto fill = [&](float (&left)[16][16]) {
        for (int row = 0; row < 16; ++row)
          for (int k = 0; k < 16; ++k) left[row][k] = matrix_element<T>(a_matrix, false, k, first_row + row);
      };
      run_product<T, kN>(p.d, fill, b_matrix, false, accumulate);
    });
  };
  const Posted mine{
      {uint32_t(a_matrix), uint32_t(a_matrix >> 32), uint32_t(b_matrix), uint32_t(b_matrix >> 32)}, {d}};
  machine().meet("wgmma", mine, act);
}

}  // namespace fi::ptx
