// SPDX-License-Identifier: Apache-2.0
// A thread block as the device planner's templates see it (core/collectives.h, core/device_forest.h).
#pragma once
#include <cuda_runtime.h>

#include "../core/device_forest.h"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#if FI_PHASES
#include "phases.cuh"
#endif

namespace fi::cuda {

// Enough for a tile a thread of most steps; more warps would make every barrier and shuffle wait for longer.
inline constexpr int kPlanThreads = 512;
inline constexpr uint32_t kAllLanes = 0xffffffff;

// The dynamic shared memory of a kernel. Where it begins is what a special register says, which a compiler
// reads again at every use: tens of cycles. What comes from another lane it keeps.
template <class T>
__device__ __forceinline__ T& shared_memory() {
  extern __shared__ __align__(16) uint8_t memory[];
  const auto begin = uint32_t(__cvta_generic_to_shared(memory));
  return *reinterpret_cast<T*>(__cvta_shared_to_generic(__shfl_sync(kAllLanes, begin, 0)));
}

// One block of a grid that is one cluster, or the one block of a grid.
class CudaBlock {
 public:
  static constexpr int kThreads = kPlanThreads;

  __device__ __forceinline__ int thread() const { return int(threadIdx.x); }
  __device__ __forceinline__ int cta() const { return int(blockIdx.x); }
  __device__ __forceinline__ int ctas() const { return int(gridDim.x); }
  __device__ __forceinline__ void sync() {
    __syncthreads();
#if FI_PHASES
    mark(0);
#endif
  }
#if FI_PHASES
  __device__ __forceinline__ void mark(uint32_t id) { phases_.mark(id); }
#endif
  __device__ __forceinline__ bool sync_or(bool v) {
    const bool any = __syncthreads_or(v);
#if FI_PHASES
    mark(0);
#endif
    return any;
  }
  __device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    // Releases are cumulative: one warp's, behind a barrier of the block, is one for all that the block
    // wrote, and fifteen fewer of the fences that wait for all caches.
    __syncthreads();
    if (threadIdx.x < kWarp)
      ptx::barrier_cluster_arrive();
    else
      ptx::barrier_cluster_arrive_relaxed();
    __syncwarp();  // what .aligned asks for
    ptx::barrier_cluster_wait();
#else
    __syncthreads();
#endif
  }
  __device__ __forceinline__ void open_inbox(Inbox* box, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      const uint32_t barrier = shared(&box->barrier);
      ptx::mbarrier_init(barrier, 1);
      ptx::mbarrier_arrive_expect(barrier, bytes);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
#endif
  }
  __device__ __forceinline__ void wait_for_inboxes() {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    ptx::barrier_cluster_wait();
#endif
  }
  __device__ __forceinline__ void send(Comparison* to, const Comparison& v, Inbox* box, int cta) {
#if __CUDA_ARCH__ >= 900
    ptx::store_async(ptx::map_shared(shared(to), cta), {v.leader, v.common, v.next, v.reserved},
                     ptx::map_shared(shared(&box->barrier), cta));
#else
    *to = v;
#endif
  }
  __device__ __forceinline__ void receive(Inbox* box) {
#if __CUDA_ARCH__ >= 900
    ptx::mbarrier_wait(shared(&box->barrier), 0);
#else
    __syncthreads();
#endif
  }
  __device__ __forceinline__ void leave(Inbox* box) { receive(box); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }
  __device__ __forceinline__ uint32_t ballot(bool v) { return __ballot_sync(kAllLanes, v); }
  template <class T>
  __device__ __forceinline__ T shuffle(T v, int lane) {
    return __shfl_sync(kAllLanes, v, lane);
  }
  template <class T>
  __device__ __forceinline__ T shuffle_up(T v, int distance) {
    return __shfl_up_sync(kAllLanes, v, distance);
  }
  __device__ __forceinline__ uint32_t warp_sum(uint32_t v) { return __reduce_add_sync(kAllLanes, v); }
  __device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(kAllLanes, v); }
  __device__ __forceinline__ uint32_t warp_or(uint32_t v) { return __reduce_or_sync(kAllLanes, v); }
  __device__ __forceinline__ void add(uint32_t* to, uint32_t v) { atomicAdd(to, v); }
  __device__ __forceinline__ void add(uint64_t* to, uint64_t v) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), v);
  }
  __device__ __forceinline__ int32_t compare_and_swap(int32_t* to, int32_t expected, int32_t desired) {
    return atomicCAS(to, expected, desired);
  }
  __device__ __forceinline__ void keep_least(int32_t* to, int32_t v) { atomicMin(to, v); }
  __device__ __forceinline__ void copy_async(int32_t* to, const int32_t* from) {
    ptx::cp_async_4(shared(to), from);
  }
  __device__ __forceinline__ void wait_copies() { ptx::cp_async_wait_all(); }
  // From the L2 cache, in which the blocks of a cluster meet.
  __device__ __forceinline__ Comparison load_exchanged(const Comparison* from) {
    const int4 v = __ldcg(reinterpret_cast<const int4*>(from));
    return {v.x, v.y, v.z, v.w};
  }
  // 16 bytes an instruction: words of structures side by side would be a sector each, again and again.
  template <class T>
  __device__ __forceinline__ void store(T* to, const T& v) {
    static_assert(sizeof(T) % sizeof(int4) == 0);
    int4 words[sizeof(T) / sizeof(int4)];
    memcpy(words, &v, sizeof(T));
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / sizeof(int4)); ++i) reinterpret_cast<int4*>(to)[i] = words[i];
  }

 private:
  static __device__ __forceinline__ uint32_t shared(const void* p) {
    return uint32_t(__cvta_generic_to_shared(p));
  }

#if FI_PHASES
  PhaseClock phases_;
#endif
};

}  // namespace fi::cuda
