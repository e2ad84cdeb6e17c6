// SPDX-License-Identifier: Apache-2.0
// The persistent kernel: one CTA an SM, warps specialised. Nobody waits for another CTA.
#pragma once
#include "item.cuh"
#include "producer.cuh"
#include "ptx/grids.cuh"

namespace fi::sm80 {

// By one thread: a warp sets one address at a time, so that a thread for each barrier took a microsecond
// more.
template <class Traits>
__device__ __forceinline__ void init_barriers(Control& control) {
  constexpr int kReaders = kConsumerWarps + kProducerWarps + 1;
  for (int i = 0; i < Traits::kStages; ++i) {
    for (int lap = 0; lap < 2; ++lap)
      ptx::mbarrier_init(ptx::shared_address(&control.full[lap][i]), kProducers);
    ptx::mbarrier_init(ptx::shared_address(&control.empty[i]), kConsumerWarps * ptx::kArrivalsOfWarp);
  }
  for (int i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&control.slot_full[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&control.draw[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&control.slot_empty[i]), kReaders * ptx::kArrivalsOfWarp);
  }
  for (int i = 0; i < kRowTiles; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&control.rows_full[i]), ptx::kArrivalsOfWarp);
    ptx::mbarrier_init(ptx::shared_address(&control.rows_empty[i]), kProducerWarps * ptx::kArrivalsOfWarp);
  }
  if constexpr (kTurnsEvenly<Traits>) {
    for (int i = 0; i < Traits::kStages; ++i)
      ptx::mbarrier_init(ptx::shared_address(&control.turned[i]), kConsumerWarps * ptx::kArrivalsOfWarp);
    for (int i = 0; i < kConsumerWarps; ++i) control.turned_laps[i] = 0;
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ LaunchConstants c) {
  FI_DYNAMIC_SHARED(shared);
  if (threadIdx.x < kConsumers) warm_lengths(p, c);
  static_assert(sizeof(Control) <= Traits::kControlBytes);
  Control& control = *reinterpret_cast<Control*>(shared + Traits::kSharedBytes - Traits::kControlBytes);
  const uint32_t stages = ptx::shared_address(shared) + Traits::kRingAt;
  auto* rows = reinterpret_cast<uint32_t*>(shared + Traits::kRingAt + Traits::kStages * Traits::kStageBytes);
#if FI_MARKS
  if (threadIdx.x % 32 == 0) control.marks[threadIdx.x / 32] = 0;
#endif
  FI_MARK(control, "begun");
  if (threadIdx.x == kSchedulerWarp * 32) init_barriers<Traits>(control);
  __syncthreads();
#if FI_PDL
  ptx::wait_for_grids();
#endif
  FI_MARK(control, "barriers made");
  const int warp = threadIdx.x / 32;
  if (warp < kConsumerWarps) {
    if constexpr (kMovesRegisters) ptx::take_registers<kConsumerRegisters>();
    consume<Traits>(p, c, control, shared, stages);
    return;
  }
  if constexpr (kMovesRegisters) ptx::give_registers<kProducerRegisters>();
  if (warp == kSchedulerWarp)
    schedule<Traits>(p, c, control);
  else if (warp != kGuideWarp)
    produce<Traits>(p, c, control, rows, stages);
  else if (p.level.indices != nullptr)
    guide<Traits, true>(p, c, control, rows);
  else
    guide<Traits, false>(p, c, control, rows);
}

}  // namespace fi::sm80
