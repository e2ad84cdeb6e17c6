// SPDX-License-Identifier: Apache-2.0
// Tiles of 128 packed rows on Hopper: each of two warpgroups holds 64 rows and multiplies them by wgmma. The
// layout of fragments and of shared memory is mma.sync's, so that all else is shared with the sm_80 template.
// Queries are fragments too where heads are no wider than 128, and lie in shared memory otherwise.
#pragma once
#include "../sm80/epilogue.cuh"
#include "ptx/wgmma.cuh"

namespace fi::sm90 {

using sm80::kRowBytes;

template <class Traits>
struct Wide {
  using T = typename Traits::T;
  using Consumer = sm80::Consumer<Traits>;
  using Ring = sm80::Ring<Traits::kStages>;
  static constexpr int kKvTile = Traits::kKvTile;
  static constexpr int kTiles = Consumer::kTiles;           // fragments of a tile's logits
  static constexpr int kColumns = Consumer::kColumns;       // fragments of the output
  static constexpr int kQSteps = Consumer::kQSteps;         // ksteps of Q K^T
  static constexpr int kVSteps = kKvTile / 16;              // ksteps of P V
  static constexpr int kColumnBytes = kKvTile * kRowBytes;  // of 64 elements of every key
  static constexpr int kEightRows = 8 * kRowBytes;
  static_assert(Traits::kQBytes % kEightRows == 0 && Traits::kKBytes % kEightRows == 0 &&
                    Traits::kStageBytes % kEightRows == 0,
                "the swizzle counts rows from multiples of 1024 bytes");
  // Tiles that are taken together: what surrounds the products costs as much for one as for two, but two
  // leave no registers for masks and transforms.
  // While two steps' tiles are read, others must be on their way. In the batch-invariant mode the softmax
  // goes from tile to tile, as in narrower tiles.
  static constexpr int kStep =
      sm80::kTransform || sm80::kMask || Traits::kInvariant || Traits::kStages < 6 ? 1 : 2;
  static_assert(Traits::kStages > 2 * kStep,
                "the next step's tiles are waited for while this one's are still read");

  // The same value in all lanes, and known to be: descriptors are computed once a warp, not in each lane.
  __device__ __forceinline__ static uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

  // The queries times a tile of K.
  __device__ __forceinline__ static void multiply_keys(float (*s)[4], const Consumer& x, uint32_t k_tile) {
    const uint32_t keys = uniform(ptx::descriptor_low(k_tile, 0));
    [[maybe_unused]] uint32_t queries = 0;
    if constexpr (Traits::kReadsQueries)
      queries = uniform(ptx::descriptor_low(ptx::shared_address(x.slice), 0));
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) {
      const uint64_t k = ptx::descriptor(keys + columns_at(kKvTile, step) / 16, kEightRows);
      if constexpr (Traits::kReadsQueries)
        ptx::wgmma_m64k16<T, kTiles>(
            s, ptx::descriptor(queries + columns_at(sm80::kWideRows, step) / 16, kEightRows), k, step > 0);
      else
        ptx::wgmma_m64k16<T, kTiles, 0>(s, x.q[step], k, step > 0);
    }
  }

  // Where kstep `step` begins in a tile of `rows` rows.
  static constexpr int columns_at(int rows, int step) { return step / 4 * rows * kRowBytes + step % 4 * 32; }

  // Weights times a tile of V, output fragments from kFirst on, in pieces that wgmma has: of 16, 8, 4 or 2.
  template <int kFirst>
  __device__ __forceinline__ static void multiply_values(float (&out)[kColumns][4],
                                                         const uint32_t (*weights)[4], uint32_t v_tile) {
    constexpr int kLeft = kColumns - kFirst;
    constexpr int kPiece = kLeft >= 16 ? 16 : kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : 2;
    const uint32_t values = uniform(ptx::descriptor_low(v_tile, kColumnBytes)) +
                            (kFirst / 8 * kColumnBytes + kFirst % 8 * 16) / 16;
#pragma unroll
    for (int step = 0; step < kVSteps; ++step)
      ptx::wgmma_m64k16<typename Consumer::Weight, kPiece, 1>(
          out + kFirst, weights[step], ptx::descriptor(values + step * 2 * kEightRows / 16, kEightRows), 1);
    if constexpr (kLeft > kPiece) multiply_values<kFirst + kPiece>(out, weights, v_tile);
  }

  // Turns logits into weights; returns the factors by which the output so far shrinks.
  template <int kN>
  __device__ __forceinline__ static void weigh(Consumer& x, float scale, float (&s)[kN][4],
                                               float (&shrink)[2]) {
    if constexpr (sm80::Variant::kSoftmax)
      x.state.template update<typename Consumer::Weight>(scale, s, shrink);
  }

  // Weights as A fragments.
  template <int kN>
  __device__ __forceinline__ static void pack(const float (&s)[kN][4], uint32_t (*weights)[4]) {
#pragma unroll
    for (int t = 0; t < kN / 2; ++t) Consumer::weights_fragment(s, t, weights[t]);
  }

  __device__ __forceinline__ static void rescale(Consumer& x, const float (&shrink)[2]) {
    if constexpr (!sm80::Variant::kSoftmax) return;
    // Later tiles rarely hold a new maximum; a factor of 1 changes nothing.
    if (!__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x.out[n][e] *= shrink[e / 2];
  }

  // Keeps the assembler from moving the wait that follows up, in front of the arithmetic that yields `sum`,
  // beside which the products are to run: the two meet in no register, but nothing passes a branch. It is
  // never taken.
  __device__ __forceinline__ static void hold(float sum) {
    if (sum < 0.f) __trap();
  }

  // The keys of an item are one chunk.
  struct OneChunk {
    __device__ __forceinline__ static bool begins(int) { return false; }
    __device__ __forceinline__ static void end(const sm80::RowState&) {}
  };

  // All tiles of an item, the first being at `ring` of the pipeline. The product of a step with V runs beside
  // the softmax of the next one. What whole steps leave over is a step of one tile at the end. `chunks` says
  // at which keys another state begins, and takes the one before from x.
  template <class Chunks = OneChunk>
  __device__ __forceinline__ static void attend(Consumer& x, sm80::Control& control, uint32_t stages,
                                                Ring ring, int tiles, Chunks&& chunks = {}) {
    if (tiles == 0) return;
    Attended<std::remove_reference_t<Chunks>> all{x, control, stages, chunks, x.logit_scale(), x.w.kv_begin};
    uint32_t weights[kStep * kVSteps][4];
    if (kStep > 1 && tiles < kStep) {
      const Step<1> only{ring};
      all.begin(only, weights);
      all.end(only, weights);
      return;
    }
    Step<kStep> step{ring};
    all.begin(step, weights);
    int left = tiles - kStep;
#pragma unroll 1
    for (; left >= kStep; left -= kStep) {
      const Step<kStep> next{step.behind()};
      all.follow(step, next, weights);
      step = next;
    }
    if (kStep > 1 && left > 0) {
      const Step<1> last{step.behind()};
      all.follow(step, last, weights);
      all.end(last, weights);
    } else {
      all.end(step, weights);
    }
  }

 private:
  // Tiles of the pipeline that are taken together, from `ring` on.
  template <int kCount>
  struct Step {
    Ring ring;

    __device__ __forceinline__ Ring at(int i) const {
      Ring found = ring;
      for (int j = 0; j < i; ++j) found.advance();
      return found;
    }

    __device__ __forceinline__ Ring behind() const { return at(kCount); }

    __device__ __forceinline__ uint32_t tile(uint32_t stages, int i) const {
      return stages + at(i).at * Traits::kStageBytes;
    }

    __device__ __forceinline__ void wait(sm80::Control& control) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        ptx::mbarrier_wait(sm80::full_barrier(control, at(i)), at(i).lap >> 1 & 1);
      // The copies went through the generic proxy.
      ptx::fence_async_shared();
    }

    __device__ __forceinline__ void release(sm80::Control& control, int lane) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[at(i).at]), lane);
    }
  };

  // The steps of an item. `weights` are those of the step before, whose product with V has not begun.
  template <class Chunks>
  struct Attended {
    using Weights = uint32_t[kStep * kVSteps][4];
    Consumer& x;
    sm80::Control& control;
    uint32_t stages;
    Chunks& chunks;
    float scale;
    int key;

    template <int kCount>
    __device__ __forceinline__ void begin(const Step<kCount>& step, Weights& weights) {
      float s[kCount * kTiles][4], shrink[2];
      step.wait(control);
      ptx::wgmma_fence();
      start_logits(s, step);
      ptx::wgmma_wait<0>();
      ptx::settle(s);
      weigh_step(s, shrink);
      pack(s, weights);
    }

    template <int kBefore, int kCount>
    __device__ __forceinline__ void follow(const Step<kBefore>& before, const Step<kCount>& step,
                                           Weights& weights) {
      float s[kCount * kTiles][4], shrink[2];
      step.wait(control);
      ptx::wgmma_fence();
      start_logits(s, step);
      start_values(before, weights);
      ptx::wgmma_wait<1>();
      ptx::settle(s);
      // The state before is whole once the product under way has ended.
      const bool begins = chunks.begins(key);
      const sm80::RowState ended = x.state;
      if (begins) x.state = sm80::RowState{};
      weigh_step(s, shrink);
      hold(x.state.sum[0] + x.state.sum[1]);
      ptx::wgmma_wait<0>();
      ptx::settle(x.out);
      ptx::settle(weights);
      before.release(control, x.lane);
      if (begins)
        chunks.end(ended);
      else
        rescale(x, shrink);
      pack(s, weights);
    }

    template <int kCount>
    __device__ __forceinline__ void end(const Step<kCount>& step, const Weights& weights) {
      ptx::wgmma_fence();
      start_values(step, weights);
      ptx::wgmma_wait<0>();
      ptx::settle(x.out);
      step.release(control, x.lane);
    }

   private:
    template <int kN>
    __device__ __forceinline__ void weigh_step(float (&s)[kN][4], float (&shrink)[2]) {
      x.transform(key, scale, s);
      key += kN * 8;
      weigh(x, sm80::kTransform ? 1.f : scale * sm80::kLog2e, s, shrink);
    }

    template <int kCount>
    __device__ __forceinline__ void start_logits(float (&s)[kCount * kTiles][4], const Step<kCount>& step) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) multiply_keys(s + i * kTiles, x, step.tile(stages, i));
      ptx::wgmma_commit();
    }

    template <int kCount>
    __device__ __forceinline__ void start_values(const Step<kCount>& step, const Weights& weights) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        multiply_values<0>(x.out, weights + i * kVSteps, step.tile(stages, i) + Traits::kKBytes);
      ptx::wgmma_commit();
    }
  };
};

}  // namespace fi::sm90
