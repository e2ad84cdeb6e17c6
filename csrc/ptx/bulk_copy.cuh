// SPDX-License-Identifier: Apache-2.0
// PTX ISA, "Data Movement and Conversion Instructions: Bulk copy": rows from shared to global memory, sm_90.
#pragma once
#include <cstdint>

namespace fi::ptx {

// `bytes` from shared to global memory, all multiples of 16. Ordinary writes to `from` need a fence of the
// async proxy in front.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's bulk stores have read their sources.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace fi::ptx
