// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "builtins.h"
#include "cuda.h"

namespace fi::ptx {

inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulator::machine().mbarrier_expect(barrier, bytes);
  emulator::machine().mbarrier_arrive(barrier);
}

// Rows of 128 bytes in the order of the coordinates, chunks swizzled by the address; zeros outside of the
// tensor.
inline void copy_box(uint32_t dst, const void* encoded, uint32_t barrier, int x, int y, int z, int w) {
  emulator::Machine& m = emulator::machine();
  const CUtensorMap& map = *static_cast<const CUtensorMap*>(encoded);
  const int begin[4] = {x, y, z, w};
  if (dst % 128 != 0) m.fail("copy of a box: a destination that is no multiple of 128");
  uint32_t rows = 0;
  for (uint32_t c = 0; c < map.box[3]; ++c)
    for (uint32_t b = 0; b < map.box[2]; ++b)
      for (uint32_t a = 0; a < map.box[1]; ++a, ++rows) {
        const int64_t at[3] = {begin[1] + int64_t(a), begin[2] + int64_t(b), begin[3] + int64_t(c)};
        bool inside = true;
        int64_t offset = 0;
        for (int i = 0; i < 3; ++i) {
          inside = inside && at[i] >= 0 && at[i] < int64_t(map.sizes[i + 1]);
          offset += at[i] * int64_t(map.strides[i]);
        }
        for (int chunk = 0; chunk < 8; ++chunk) {
          const int64_t first = int64_t(x) * map.item + chunk * 16, size = int64_t(map.sizes[0]) * map.item;
          const int64_t bytes = inside ? std::clamp<int64_t>(size - first, 0, 16) : 0;
          uint32_t to = dst + rows * 128 + uint32_t(chunk) * 16;
          to ^= to >> 3 & 0x70;
          m.copy({m.at(to, 16), map.data + offset + first, uint32_t(bytes)});
        }
      }
  m.copy({nullptr, nullptr, 0, barrier, rows * 128});
}

}  // namespace fi::ptx
