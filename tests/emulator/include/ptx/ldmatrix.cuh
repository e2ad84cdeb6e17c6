// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "builtins.h"

namespace fi::ptx {

// Element (row, column) of matrix i is at the address of lane 8 i + row; a lane gets two neighbours of row
// lane / 4, or of column lane / 4 of the transposed matrix.
inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
  using namespace emulator;
  machine().at(address, 16);
  const auto act = [&](Meeting& m) {
    for (int i = 0; i < 4; ++i)
      for (int lane = 0; lane < kWarpSize; ++lane) {
        uint16_t pair[2];
        for (int e = 0; e < 2; ++e) {
          const int across = lane % 4 * 2 + e, row = transposed ? across : lane / 4;
          const uint32_t at = m.posted[8 * i + row].words[0];
          std::memcpy(&pair[e], machine().at(at, 16) + 2 * (transposed ? lane / 4 : across), 2);
        }
        m.words[lane][i] = pair[0] | uint32_t(pair[1]) << 16;
      }
  };
  const Meeting& m = machine().meet(transposed ? "ldmatrix.trans" : "ldmatrix", {{address}, {}}, act);
  std::memcpy(r, m.words[machine().lane], 16);
}
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  using namespace emulator;
  machine().at(address, 16);
  const auto act = [&](Meeting& m) {
    machine().note_writes();
    for (int i = 0; i < 4; ++i)
      for (int lane = 0; lane < kWarpSize; ++lane) {
        const uint32_t at = m.posted[8 * i + lane / 4].words[0];
        std::memcpy(static_cast<char*>(machine().at(at, 16)) + lane % 4 * 4, &m.posted[lane].words[1 + i], 4);
      }
  };
  machine().meet("stmatrix", {{address, r[0], r[1], r[2], r[3]}, {}}, act);
}
inline uint4 load_shared_16(uint32_t address) {
  uint4 v;
  std::memcpy(&v, emulator::machine().at(address, 16), 16);
  return v;
}
inline uint16_t load_shared_2(uint32_t address) {
  uint16_t v;
  std::memcpy(&v, emulator::machine().at(address, 2), 2);
  return v;
}
inline void sync_warp() { __syncwarp(); }
inline void store_shared_16(uint32_t address, const uint4& v) {
  emulator::machine().note_writes();
  std::memcpy(emulator::machine().at(address, 16), &v, 16);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, true); }

}  // namespace fi::ptx
