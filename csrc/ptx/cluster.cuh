// SPDX-License-Identifier: Apache-2.0
// Barriers of a cluster of thread blocks and stores into another one's shared memory, compute capability 9.0
// and newer. PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster" and "Data
// Movement and Conversion Instructions: mapa, st.async".
#pragma once
#include <cstdint>

namespace fi::ptx {

// All threads of the cluster arrive; what they wrote before is visible behind barrier_cluster_wait().
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// The same without a word about what was written.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Behind mbarrier_init() and before an arrival at the cluster's barrier: other blocks may then use it.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The address that block `cta` of the cluster has in place of one's own.
__device__ __forceinline__ uint32_t map_shared(uint32_t address, int cta) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}

// Stores 16 bytes, which count down the mbarrier when they are there; both in the same block.
__device__ __forceinline__ void store_async(uint32_t to, int4 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

}  // namespace fi::ptx
