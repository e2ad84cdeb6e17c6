// SPDX-License-Identifier: Apache-2.0
// When the warps of a launch passed what FI_MARK(control, "name") marks. Only compiled with the define
// FI_MARKS; benchmarks/kernels/item_times.py prints them.
#pragma once

#if FI_MARKS
#include <cstdint>

#include "../core/phases.h"

namespace fi::sm80 {

inline constexpr int kMarkedCtas = 132, kMarkedWarps = 12, kMostMarks = 64;

struct Mark {
  uint32_t id;     // phase_id() of the name; 0 behind the last one
  uint32_t clock;  // of this multiprocessor, the lower half
  uint64_t time_ns;
};

static __device__ Mark marks_of_warps[kMarkedCtas][kMarkedWarps][kMostMarks];

// By the first lane of every warp. `count` counts a warp's marks.
template <uint32_t kId>
__device__ __forceinline__ void mark(int32_t (&count)[kMarkedWarps]) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 != 0 || blockIdx.x >= kMarkedCtas || count[warp] >= kMostMarks - 1) return;
  uint32_t clock;
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
  Mark* const marks = marks_of_warps[blockIdx.x][warp];
  marks[count[warp]++] = {kId, clock, time};
  marks[count[warp]].id = 0;
}

}  // namespace fi::sm80

#define FI_MARK(control, name) ::fi::sm80::mark<::fi::phase_id(name)>((control).marks)
#else
#define FI_MARK(control, name)
#endif
