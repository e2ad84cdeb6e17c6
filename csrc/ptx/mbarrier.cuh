// SPDX-License-Identifier: Apache-2.0
// PTX ISA, "Parallel Synchronization and Communication Instructions": mbarrier, named barriers, acquire.
#pragma once
#include <cstdint>

namespace fi::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for `bytes` more (sm_90).
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// Arrives once all cp.async of this thread so far have landed; counts as one of the barrier's arrivals.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// A warp arrives `times` times for all that its lanes have done before. One lane speaks for the others, which
// the memory model allows behind __syncwarp() but race checkers do not follow: for them every lane arrives.
#if !defined(FI_EVERY_LANE_ARRIVES)
#define FI_EVERY_LANE_ARRIVES 0
#endif
inline constexpr int kArrivalsOfWarp = FI_EVERY_LANE_ARRIVES ? 32 : 1;
__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier, int lane, int times = 1) {
  __syncwarp();
  if constexpr (FI_EVERY_LANE_ARRIVES) {
    for (int i = 0; i < times; ++i) mbarrier_arrive(barrier);
  } else {
    if (lane < times) mbarrier_arrive(barrier);
  }
}

// Waits for the phase of this parity to complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred done;\n"
      "waiting:\n"
      " mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      " @done bra finished;\n bra waiting;\n"
      "finished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n .reg .pred done;\n"
      "waiting:\n"
      " mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      " @done bra finished;\n bra waiting;\n"
      "finished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Barrier `id` (1 .. 15) among `threads` threads, whole warps.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, which tells all its threads whether one of them or more said so.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool said) {
  uint32_t any;
  asm volatile(
      "{\n .reg .pred said, any;\n"
      " setp.ne.u32 said, %3, 0;\n"
      " barrier.red.or.pred any, %1, %2, said;\n"
      " selp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(uint32_t(said))
      : "memory");
  return any;
}

// A counter in global memory, and with it what was written before the counter was last raised.
__device__ __forceinline__ int32_t load_acquire(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// The registers a thread of this warpgroup may use from here on (setmaxnreg, sm_90a).
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fi::ptx
