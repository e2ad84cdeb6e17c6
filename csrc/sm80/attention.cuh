// SPDX-License-Identifier: Apache-2.0
// The persistent kernel: one CTA an SM, warps specialised. Nobody waits for another CTA.
#pragma once
#include "item.cuh"
#include "producer.cuh"

namespace fi::sm80 {

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ LaunchConstants c) {
  extern __shared__ __align__(128) char shared[];
  static_assert(sizeof(Control) <= Traits::kControlBytes);
  Control& control = *reinterpret_cast<Control*>(shared + Traits::kSharedBytes - Traits::kControlBytes);
  const uint32_t stages = ptx::shared_address(shared) + Traits::kQBytes + 2 * Traits::kLogitBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&control.full[i]), kProducers);
      ptx::mbarrier_init(ptx::shared_address(&control.empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&control.slot_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&control.slot_empty[i]), kConsumerWarps + kProducerWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&control.draw), 1);
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < kConsumerWarps)
    consume<Traits>(p, c, control, shared, stages);
  else if (warp == kSchedulerWarp)
    schedule(p, c, control, Traits::kInvariant);
  else if (p.level.indices != nullptr)
    produce<Traits, true>(p, c, control, stages);
  else
    produce<Traits, false>(p, c, control, stages);
}

}  // namespace fi::sm80
