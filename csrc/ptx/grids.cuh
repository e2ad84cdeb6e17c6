// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch, compute capability 9.0 and newer. PTX ISA, "griddepcontrol".
#pragma once

namespace fi::ptx {

// Waits until the grids before this one are complete and what they wrote is visible.
__device__ __forceinline__ void wait_for_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace fi::ptx
