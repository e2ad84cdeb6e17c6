// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "builtins.h"

namespace fi::ptx {

inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  emulator::Machine& m = emulator::machine();
  if ((reinterpret_cast<uintptr_t>(to) | from | bytes) % 16 != 0) m.fail("bulk copy: not by 16 bytes");
  for (uint32_t i = 0; i < bytes; i += 16) m.bulk_store(static_cast<char*>(to) + i, from + i);
}
inline void bulk_commit() { emulator::machine().bulk_commit(); }
inline void bulk_wait_read() { emulator::machine().bulk_wait(); }

}  // namespace fi::ptx
