// SPDX-License-Identifier: Apache-2.0
// PTX ISA, "Data Movement and Conversion Instructions: Tensor copy": boxes of a tensor by the copy engine
// (sm_90).
#pragma once
#include <cstdint>

namespace fi::ptx {

// Starts the copy of one box, whose bytes count towards the transactions of `barrier`.
__device__ __forceinline__ void copy_box(uint32_t dst, const void* map, uint32_t barrier, int x, int y, int z,
                                         int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Arrives, and lets the phase wait for `bytes` more.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

}  // namespace fi::ptx
