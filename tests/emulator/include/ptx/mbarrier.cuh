// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "builtins.h"

namespace fi::ptx {

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulator::machine().mbarrier_init(barrier, arrivals);
}
inline void mbarrier_arrive(uint32_t barrier) { emulator::machine().mbarrier_arrive(barrier); }
inline void mbarrier_arrive_after_copies(uint32_t barrier) {
  emulator::machine().copy({nullptr, nullptr, 0, barrier});
}
inline constexpr int kArrivalsOfWarp = 1;
inline void mbarrier_arrive_warp(uint32_t barrier, int lane, int times = 1) {
  __syncwarp();
  if (lane < times) mbarrier_arrive(barrier);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::machine().mbarrier_wait(barrier, parity);
}
inline void named_barrier(int id, int threads) { emulator::machine().named_barrier(id, threads); }
inline bool named_barrier_or(int id, int threads, bool said) {
  return emulator::machine().named_barrier(id, threads, said);
}
inline int32_t load_acquire(const int32_t* counter) { return *counter; }
template <int kRegisters>
inline void take_registers() {}
template <int kRegisters>
inline void give_registers() {}

}  // namespace fi::ptx
