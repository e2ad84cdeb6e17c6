// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "builtins.h"

namespace fi::ptx {

#define FI_DYNAMIC_SHARED(name) char* const name = fi::emulator::machine().block->shared
inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const char*>(p) - emulator::machine().block->shared) + emulator::kSharedBase;
}
inline void cp_async_16(uint32_t dst, const void* src, uint32_t bytes) {
  emulator::Machine& m = emulator::machine();
  if (reinterpret_cast<uintptr_t>(src) % 16 != 0) m.fail("cp.async: a source that is no multiple of 16");
  m.copy({m.at(dst, 16), static_cast<const char*>(src), bytes});
}
inline void cp_async_16(uint32_t dst, const void* src, uint32_t bytes, uint64_t) {
  cp_async_16(dst, src, bytes);
}
inline uint64_t read_once_policy() { return 1; }
inline uint64_t normal_policy() { return 0; }

inline void prefetch_l2(const void*) {}
inline void prefetch_l1(const void*) {}

}  // namespace fi::ptx
