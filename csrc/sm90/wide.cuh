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
  // leave no registers for masks and transforms, and while two steps' tiles are read, others must be on their
  // way. In the batch-invariant mode the softmax goes from tile to tile, as in narrower tiles.
  static constexpr int kStep =
      sm80::kTransform || sm80::kMask || Traits::kInvariant || Traits::kStages < 6 ? 1 : 2;
  static_assert(Traits::kStages > 2 * kStep,
                "the next step's tiles are waited for while this one's are still read");

  // Whether logits become weights by the maximum so far. Halfs leave no room for weights above that of a
  // maximum, and in the batch-invariant mode weights follow from the same maxima as in narrower tiles.
  static constexpr bool kPlain = sm80::Variant::kSoftmax && !sm80::kMask && !Traits::kInvariant &&
                                 sm80::kWeightBits<typename Consumer::Weight> == 0.f;

  // The same value in all lanes, and known to be: descriptors are computed once a warp, not in each lane.
  __device__ __forceinline__ static uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

  // The queries times a tile of K, whose descriptor begins with `keys`.
  __device__ __forceinline__ static void multiply_keys(float (*s)[4], const Consumer& x, uint32_t keys) {
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

  // How the descriptor of a tile of K begins, and that of the values behind keys.
  __device__ __forceinline__ static uint32_t keys_at(uint32_t tile) { return ptx::descriptor_low(tile, 0); }
  static constexpr uint32_t kValuesBehindKeys =
      uint32_t(kColumnBytes >> 4) << 16 | uint32_t(Traits::kKBytes >> 4);

  // Where kstep `step` begins in a tile of `rows` rows.
  static constexpr int columns_at(int rows, int step) { return step / 4 * rows * kRowBytes + step % 4 * 32; }

  // Weights times a tile of V, output fragments from kFirst on, in pieces that wgmma has: of 16, 8, 4 or 2.
  template <int kFirst>
  __device__ __forceinline__ static void multiply_values(float (&out)[kColumns][4],
                                                         const uint32_t (*weights)[4], uint32_t tile) {
    constexpr int kLeft = kColumns - kFirst;
    constexpr int kPiece = kLeft >= 16 ? 16 : kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : 2;
    const uint32_t values = tile + (kFirst / 8 * kColumnBytes + kFirst % 8 * 16) / 16;
#pragma unroll
    for (int step = 0; step < kVSteps; ++step)
      ptx::wgmma_m64k16<typename Consumer::Weight, kPiece, 1>(
          out + kFirst, weights[step], ptx::descriptor(values + step * 2 * kEightRows / 16, kEightRows), 1);
    if constexpr (kLeft > kPiece) multiply_values<kFirst + kPiece>(out, weights, tile);
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
  //
  // The inner loop is left for what few steps need, so that its instructions lie side by side. All warps of a
  // warpgroup come back to the same products, whichever of them left it.
  template <class Chunks = OneChunk>
  __device__ __forceinline__ static void attend(Consumer& x, sm80::Control& control, uint32_t stages,
                                                Ring ring, int tiles, Chunks&& chunks = {}) {
    if (tiles == 0) return;
    Attended<std::remove_reference_t<Chunks>> all{x, chunks, x.logit_scale(), x.w.kv_begin};
    if (kStep > 1 && tiles < kStep) {
      const Step<1> only(ring, control, stages);
      all.begin(only);
      all.end(only);
      return;
    }
    Step<kStep> step(ring, control, stages), next(step.behind(), control, stages);
    all.begin(step);
    int left = tiles - kStep;
    while (left >= kStep) {
      bool plain = true;
#pragma unroll 1
      do {
        all.start_products(step, next, all.logits);
        Step<kStep> after(next.behind(), control, stages);
        after.settle();
        all.wait_for_logits(all.logits);
        plain = all.weigh_plainly();
        if (!plain) break;
        all.finish(step);
        step = next;
        next = after;
        left -= kStep;
      } while (left >= kStep);
      if (!plain) {
        all.weigh_fully(all.logits, all.s, all.is_plain());
        step.release(x.lane);
        step = next;
        next = Step<kStep>(next.behind(), control, stages);
        left -= kStep;
      }
    }
    if (kStep > 1 && left > 0) {
      const Step<1> last(step.behind(), control, stages);
      all.follow(step, last);
      all.end(last);
    } else {
      all.end(step);
    }
  }

 private:
  // Tiles of the pipeline that are taken together, and what is worked out of their place ahead of time.
  template <int kCount>
  struct Step {
    Ring ring;                                           // the first tile's
    uint32_t keys[kCount], full[kCount], empty[kCount];  // descriptors' lower halves, barriers
    uint32_t parity[kCount];

    __device__ __forceinline__ Step(Ring ring_, sm80::Control& control, uint32_t stages) : ring(ring_) {
      Ring at = ring;
#pragma unroll
      for (int i = 0; i < kCount; ++i, at.advance()) {
        keys[i] = ptx::descriptor_low(stages, 0) + at.at * (Traits::kStageBytes / 16);
        full[i] = sm80::full_barrier(control, at);
        empty[i] = ptx::shared_address(&control.empty[at.at]);
        parity[i] = at.lap >> 1 & 1;
      }
    }

    // The step of as many tiles behind this one.
    __device__ __forceinline__ Ring behind() const {
      Ring found = ring;
#pragma unroll
      for (int i = 0; i < kCount; ++i) found.advance();
      return found;
    }

    // Has the places worked out before what follows.
    __device__ __forceinline__ void settle() {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        asm volatile("" : "+r"(keys[i]), "+r"(full[i]), "+r"(empty[i]), "+r"(parity[i])::"memory");
    }

    __device__ __forceinline__ void wait() const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) ptx::mbarrier_wait(full[i], parity[i]);
      // The copies went through the generic proxy.
      ptx::fence_async_shared();
    }

    __device__ __forceinline__ void release(int lane) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) ptx::mbarrier_arrive_warp(empty[i], lane);
    }
  };

  // The steps of an item.
  template <class Chunks>
  struct Attended {
    Consumer& x;
    Chunks& chunks;
    float scale;
    int key;
    bool rising = false;  // logits rise from step to step, as behind a bias of positions
    // Weights of the step before, whose product with V has not begun. They become operands when the next step
    // begins, while its descriptors are on their way to the uniform registers.
    float s[kStep * kTiles][4];
    float logits[kStep * kTiles][4];       // of the step whose keys are multiplied
    uint32_t weights[kStep * kVSteps][4];  // operands

    template <int kCount>
    using Logits = float[kCount * kTiles][4];

    template <int kCount>
    __device__ __forceinline__ void begin(const Step<kCount>& step) {
      float shrink[2];
      step.wait();
      ptx::wgmma_fence();
      auto& logits = reinterpret_cast<Logits<kCount>&>(s);
      start_logits(logits, step);
      ptx::wgmma_wait<0>();
      ptx::settle(logits);
      x.transform(key, scale, logits);
      key += kCount * kKvTile;
      weigh(x, factor(), logits, shrink);
    }

    template <int kN>
    __device__ __forceinline__ static void wait_for_logits(float (&few)[kN][4]) {
      ptx::wgmma_wait<1>();
      ptx::settle(few);
    }

    // Whether no mask meets the logits of a step, and they may be weighed by the maximum so far.
    __device__ __forceinline__ bool is_plain() const {
      return kPlain && !(sm80::kTransform && rising) && x.sees_all(key, kStep * kKvTile);
    }

    // Weights of such logits, which are transformed, by the maximum so far; false where that cannot be.
    __device__ __forceinline__ bool weigh_plainly() {
      if (!is_plain()) return false;
      x.template transform<2, false>(key, scale, logits);
      return x.state.weigh_below(factor(), logits, s);
    }

    __device__ __forceinline__ void finish(const Step<kStep>& step) {
      key += kStep * kKvTile;
      ptx::wgmma_wait<0>();
      ptx::settle(x.out);
      ptx::settle(weights);
      step.release(x.lane);
    }

    // A step of fewer tiles.
    template <int kBefore, int kCount>
    __device__ __forceinline__ void follow(const Step<kBefore>& before, const Step<kCount>& step) {
      auto& few = reinterpret_cast<Logits<kCount>&>(logits);
      start_products(before, step, few);
      wait_for_logits(few);
      weigh_fully(few, reinterpret_cast<Logits<kCount>&>(s), false);
      before.release(x.lane);
    }

    // Masks logits, turns them into weights by a maximum of their own, and ends the product under way. plain:
    // they are transformed, and no mask meets them.
    template <int kN>
    __device__ __forceinline__ void weigh_fully(float (&few)[kN][4], float (&weighed)[kN][4], bool plain) {
      float shrink[2];
      // The state before is whole once the product under way has ended.
      const bool begins = chunks.begins(key);
      const sm80::RowState ended = x.state;
      if (begins) x.state = sm80::RowState{};
      if (!plain) x.transform(key, scale, few);
      key += kN * 8;
      weigh(x, factor(), few, shrink);
      if constexpr (sm80::kTransform) rising = __any_sync(~0u, fminf(shrink[0], shrink[1]) < 0x1p-16f);
      copy(weighed, few);
      hold(x.state.sum[0] + x.state.sum[1]);
      ptx::wgmma_wait<0>();
      ptx::settle(x.out);
      ptx::settle(weights);
      if (begins)
        chunks.end(ended);
      else
        rescale(x, shrink);
    }

    // Starts the products of a step's keys, and of the values of the one before, whose weights are s.
    template <int kBefore, int kCount>
    __device__ __forceinline__ void start_products(const Step<kBefore>& before, const Step<kCount>& step,
                                                   Logits<kCount>& few) {
      uint32_t keys[kCount], values[kBefore];
      step.wait();
#pragma unroll
      for (int i = 0; i < kCount; ++i) keys[i] = uniform(step.keys[i]);
#pragma unroll
      for (int i = 0; i < kBefore; ++i) values[i] = uniform(before.keys[i]) + kValuesBehindKeys;
      pack(reinterpret_cast<Logits<kBefore>&>(s), weights);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kCount; ++i) multiply_keys(few + i * kTiles, x, keys[i]);
      ptx::wgmma_commit();
#pragma unroll
      for (int i = 0; i < kBefore; ++i) multiply_values<0>(x.out, weights + i * kVSteps, values[i]);
      ptx::wgmma_commit();
    }

    template <int kCount>
    __device__ __forceinline__ void end(const Step<kCount>& step) {
      pack(reinterpret_cast<Logits<kCount>&>(s), weights);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        multiply_values<0>(x.out, weights + i * kVSteps, uniform(step.keys[i]) + kValuesBehindKeys);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::settle(x.out);
      step.release(x.lane);
    }

   private:
    template <int kN>
    __device__ __forceinline__ static void copy(float (&to)[kN][4], const float (&from)[kN][4]) {
#pragma unroll
      for (int t = 0; t < kN; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[t][e] = from[t][e];
    }

    __device__ __forceinline__ float factor() const { return sm80::kTransform ? 1.f : scale * sm80::kLog2e; }

    template <int kCount>
    __device__ __forceinline__ void start_logits(float (&logits)[kCount * kTiles][4],
                                                 const Step<kCount>& step) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) multiply_keys(logits + i * kTiles, x, uniform(step.keys[i]));
      ptx::wgmma_commit();
    }
  };
};

}  // namespace fi::sm90
