// SPDX-License-Identifier: Apache-2.0
// When the first thread of the first two blocks of a launch passed the marks of core/phases.h. Only compiled
// with the define FI_PHASES.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../core/phases.h"

namespace fi::cuda {

inline constexpr int kPhaseBlocks = 2, kMostPhases = 127;

struct PhaseMark {
  uint32_t id;       // phase_id(), 0 for a barrier
  uint32_t time_ns;  // of all multiprocessors alike, in steps of some 32 ns; of the first and last mark only
  uint64_t clock;    // of this multiprocessor
};

// Of a block: the number of marks as the first one's clock, then the marks.
static __device__ PhaseMark phase_marks[kPhaseBlocks][kMostPhases + 1];

class PhaseClock {
 public:
  __device__ __forceinline__ PhaseClock() { mark(phase_id("launched"), time_ns()); }
  __device__ __forceinline__ ~PhaseClock() { mark(phase_id("end"), time_ns()); }
  PhaseClock(const PhaseClock&) = delete;

  __device__ __forceinline__ void mark(uint32_t id, uint32_t time = 0) {
    if (threadIdx.x > 0 || blockIdx.x >= kPhaseBlocks || marks_ >= kMostPhases) return;
    uint64_t clock;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
    PhaseMark* const marks = phase_marks[blockIdx.x];
    marks[++marks_] = {id, time, clock};
    marks[0].clock = uint64_t(marks_);
  }

 private:
  static __device__ __forceinline__ uint32_t time_ns() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return uint32_t(time);
  }

  int marks_ = 0;
};

}  // namespace fi::cuda
