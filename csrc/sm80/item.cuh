// SPDX-License-Identifier: Apache-2.0
// The consumers' walk through an item: tile after tile of the ring, then its result.
#pragma once
#include "epilogue.cuh"

namespace fi::sm80 {

// Folds the state of a finished grid chunk into the state of the chunks before it (batch-invariant mode).
template <class Traits, int kRows>
struct GridState {
  float out[Consumer<Traits, kRows>::kColumns][4];
  float lse[2] = {-INFINITY, -INFINITY};

  __device__ __forceinline__ void fold(Consumer<Traits, kRows>& x) {
    float a[2], b[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float chunk_lse, inverse, next;
      x.state.finish(r, chunk_lse, inverse);
      join(lse[r], chunk_lse, a[r], b[r], next);
      // A chunk is normalised before it is joined, as the merge of stored states finds it.
#pragma unroll
      for (int n = 0; n < Consumer<Traits, kRows>::kColumns; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          const float part = x.out[n][e] * inverse;
          out[n][e] = lse[r] == -INFINITY ? (chunk_lse == -INFINITY ? 0.f : part)
                                          : joined(out[n][e], a[r], part, b[r]);
        }
      lse[r] = next;
    }
    x.clear();
  }
};

// Runs the item whose tiles arrive in the ring; returns with the results stored.
template <class Traits, int kRows>
__device__ __forceinline__ void run_item(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                         const Work& w, int tid, char* shared, uint32_t stages,
                                         Ring<Traits::kStages>& stage) {
  Consumer<Traits, kRows> x(p, c, w, tid, shared);
  x.load_q();
  const int tiles = w.tiles(), kv_begin = w.kv_begin;
  float scale = p.scale;
  if constexpr (Traits::kFp8) scale *= p.k_scale[w.kv_head * p.k_scale_stride];
  [[maybe_unused]] GridState<Traits, kRows> grid;
  [[maybe_unused]] const int grid_tiles =
      Traits::kInvariant
          ? reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header)->invariant_grid / kKvTile
          : 0;
  // The first item of a unit emits one state for all its grid chunks, every other one emits each of them.
  [[maybe_unused]] const bool folds = w.folds;
  [[maybe_unused]] int partial = w.partial;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    if constexpr (Traits::kInvariant) {
      if (i > 0 && (kv_begin / kKvTile + i) % grid_tiles == 0) {
        if (folds) {
          grid.fold(x);
        } else {
          float lse[2], inverse[2];
          for (int r = 0; r < 2; ++r) x.state.finish(r, lse[r], inverse[r]);
          store_partial<Traits, kRows>(x, partial, false, lse, inverse);
          partial += w.planned_rows;
          x.clear();
        }
      }
    }
    ptx::mbarrier_wait(ptx::shared_address(&control.full[stage.at]), stage.parity);
    x.step(stages + stage.at * Traits::kStageBytes, kv_begin + i * kKvTile, i & 1, scale);
    __syncwarp();
    if (x.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.empty[stage.at]));
    stage.advance();
  }
  float lse[2], inverse[2];
  bool normalised = false;
  if constexpr (Traits::kInvariant) {
    if (folds) {
      grid.fold(x);
      normalised = true;
#pragma unroll
      for (int n = 0; n < Consumer<Traits, kRows>::kColumns; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x.out[n][e] = grid.out[n][e];
      lse[0] = grid.lse[0], lse[1] = grid.lse[1];
    }
  }
  if (!normalised) {
#pragma unroll
    for (int r = 0; r < 2; ++r) x.state.finish(r, lse[r], inverse[r]);
  }
  if (w.faults && tid == 0) atomicOr(p.counters + 1, w.faults);
  if (w.partial < 0) {
    store_final<Traits, kRows>(x, normalised, lse, inverse);
  } else {
    if (w.faults) lse[0] = lse[1] = __int_as_float(0x7FC00000);
    store_partial<Traits, kRows>(x, partial, normalised, lse, inverse);
    if constexpr (Traits::kInvariant) {
      // Chunks that the exact lengths left empty.
      const float none[2] = {-INFINITY, -INFINITY};
      for (partial += w.planned_rows; partial < w.partial_end; partial += w.planned_rows)
        store_partial<Traits, kRows>(x, partial, true, none, none);
    }
  }
}

// The last item of a merge unit to arrive folds the unit; counters are left at zero for the next launch.
template <class Traits>
__device__ __forceinline__ void arrive(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                       const Work& w, int tid) {
  __threadfence();
  ptx::named_barrier(1, kConsumers);
  int32_t* counter = p.counters + 2 + w.unit * p.num_kv_heads + w.kv_head;
  if (tid == 0) control.arrived = atomicAdd(counter, 1);
  ptx::named_barrier(1, kConsumers);
  if (*static_cast<volatile int32_t*>(&control.arrived) != w.num_items - 1) return;
  __threadfence();
  if (tid == 0) *counter = 0;
  const auto unit = reinterpret_cast<const MergeUnit*>(p.plan + p.layout.units)[w.unit];
  merge<Traits>(p, c, unit, w.kv_head, tid);
}

template <class Traits>
__device__ __forceinline__ void consume(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                        char* shared, uint32_t stages) {
  const int tid = threadIdx.x;
  Ring<kSlots> slot;
  Ring<Traits::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(ptx::shared_address(&control.slot_full[slot.at]), slot.parity);
    const Work& w = control.slots[slot.at];
    if (w.ticket < 0) return;
    const auto run = [&](auto rows) {
      run_item<Traits, decltype(rows)::value>(p, c, control, w, tid, shared, stages, stage);
    };
    switch (w.tile_log2) {
      case 7:
        if constexpr (Traits::kMaxRows >= 128) run(Rows<128>{});
        break;
      case 6:
        run(Rows<64>{});
        break;
      case 5:
        run(Rows<32>{});
        break;
      default:
        run(Rows<16>{});
        break;
    }
    if (w.unit >= 0) arrive<Traits>(p, c, control, w, tid);
    __syncwarp();
    if (tid % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.slot_empty[slot.at]));
    slot.advance();
  }
}

}  // namespace fi::sm80
