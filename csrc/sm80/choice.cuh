// SPDX-License-Identifier: Apache-2.0
// The variant that this module was compiled for, and the mathematics its functors are given.
#pragma once
#include "../core/variant.h"
#include "ptx/mma.cuh"

// A variant of the user: FI_VARIANT names it, and a generated header defines it.
#if defined(FI_VARIANT)
#include "user_variant.h"
#else
#define FI_VARIANT StandardVariant
#endif
// Programmatic dependent launch: the grid starts while the kernel before it ends (sm_90).
#if !defined(FI_PDL)
#define FI_PDL FI_SM90A
#endif
#if !defined(FI_LOGITS_TRANSFORM)
#define FI_LOGITS_TRANSFORM 0
#endif
#if !defined(FI_LOGITS_MASK)
#define FI_LOGITS_MASK 0
#endif

namespace fi::sm80 {

using Variant = FI_VARIANT;
inline constexpr bool kTransform = FI_LOGITS_TRANSFORM || Variant::kTransformsLogits || !Variant::kSoftmax;
inline constexpr bool kPackedMask = FI_LOGITS_MASK;
inline constexpr bool kMask = kPackedMask || Variant::kMasks;
// wgmma reads keys and values as they lie in shared memory.
inline constexpr bool kTransformsTiles = Variant::kTransformsKey || Variant::kTransformsValue;
// Whether states of a shared prefix serve the rows of all who share it.
inline constexpr bool kSharesPrefixes = !kMask && Variant::kShares;

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

struct DeviceMath {
  // 1 - 2 / (e^2x + 1): within a few units in the last place of 1, which tanh.approx (2^-11) is not.
  __device__ __forceinline__ static float tanh(float x) {
    return 1.f - __fdividef(2.f, ptx::exp2_approx(x * (2.f * kLog2e)) + 1.f);
  }
  __device__ __forceinline__ static float to_float(int32_t x) { return float(x); }
};

}  // namespace fi::sm80
