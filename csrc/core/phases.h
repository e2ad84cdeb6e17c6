// SPDX-License-Identifier: Apache-2.0
// Marks the ends of phases of a kernel that one launch runs once, to see where its time goes: with the define
// FI_PHASES, FI_PHASE(block, "name") notes the time under that name (csrc/cuda/phases.cuh), and each barrier
// of the block notes it under no name. Without the define nothing is left of either.
// benchmarks/kernels/plan_phases.py prints them.
#pragma once

#if FI_PHASES || FI_MARKS
#include <cstdint>

namespace fi {

// FNV-1a of a name; 0 stands for a barrier.
constexpr uint32_t phase_id(const char* name) {
  uint32_t hash = 0x811c9dc5u;
  for (; *name; ++name) hash = (hash ^ uint8_t(*name)) * 0x01000193u;
  return hash;
}

template <uint32_t kId>
struct Phase {
  static constexpr uint32_t id = kId;
};

}  // namespace fi
#endif

#if FI_PHASES
#define FI_PHASE(block, name) (block).mark(::fi::Phase<::fi::phase_id(name)>::id)
#else
#define FI_PHASE(block, name)
#endif
