// SPDX-License-Identifier: Apache-2.0
// Barriers of a cluster of thread blocks, compute capability 9.0 and newer. PTX ISA, "Parallel
// Synchronization and Communication Instructions: barrier.cluster".
#pragma once

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

}  // namespace fi::ptx
