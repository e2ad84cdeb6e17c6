// SPDX-License-Identifier: Apache-2.0
// PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy", non-bulk.
#pragma once
#include <cstdint>

namespace fi::ptx {

// Declares the block's dynamic shared memory.
#define FI_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) char name[]

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// cp.async.cg.shared.global 16 bytes, bypassing L1; `bytes` = 0 fills with zeros and reads nothing.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}

// The same under a policy of the L2 cache.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(src), "r"(bytes), "l"(policy)
               : "memory");
}

// Policies of the L2 cache: lines that nobody reads again, and all others. PTX ISA, "createpolicy".
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// cp.async.ca.shared.global 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

// Waits for all of this thread's, which the thread itself then sees.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Into L1, which is not coherent: of what no grid writes while this one runs.
__device__ __forceinline__ void prefetch_l1(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

}  // namespace fi::ptx
