// SPDX-License-Identifier: Apache-2.0
// PTX ISA, "Asynchronous warpgroup-level matrix multiply-accumulate": wgmma of 64 rows, sm_90a.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace fi::ptx {

// Orders register writes of this warpgroup before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` of the newest groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared memory that ordinary instructions wrote becomes visible to what the async proxy reads next.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Keeps registers that wgmma works on where they are: the compiler does not know that the products are still
// under way, so a value that is named here, behind the wait, is neither read nor replaced before it.
template <int kRows, int kColumns>
__device__ __forceinline__ void settle(float (&x)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) asm volatile("" : "+f"(x[i][j])::"memory");
}
template <int kRows, int kColumns>
__device__ __forceinline__ void settle(uint32_t (&x)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) asm volatile("" : "+r"(x[i][j])::"memory");
}

// Descriptor of a matrix in rows of 128 bytes under the 128-byte swizzle, at a multiple of 1024 bytes plus an
// offset inside the rows. The lower half holds the address and `leading`, the bytes between columns of rows
// where the rows run along N; the upper half `stride`, the bytes between groups of eight rows.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, int leading) {
  return uint32_t(leading >> 4) << 16 | (address >> 4 & 0x3fff);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low, int stride) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low), "r"(kSwizzle128 | uint32_t(stride >> 4)));
  return whole;
}

#define FI_ACCUMULATORS_8(d)                                                                               \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), \
      "+f"(d[1][3])
#define FI_ACCUMULATORS_16(d) FI_ACCUMULATORS_8(d), FI_ACCUMULATORS_8((d + 2))
#define FI_ACCUMULATORS_32(d) FI_ACCUMULATORS_16(d), FI_ACCUMULATORS_16((d + 4))
#define FI_ACCUMULATORS_64(d) FI_ACCUMULATORS_32(d), FI_ACCUMULATORS_32((d + 8))
#define FI_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FI_NAMES_16 FI_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FI_NAMES_32 FI_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FI_NAMES_64                                                                                       \
  FI_NAMES_32                                                                                             \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
  "%57,%58,%59,%60,%61,%62,%63"
// A0 .. A3, descriptor, scale-d and transpose are operands R, R + 1, .. R + 6.
#define FI_WGMMA_FRAGMENTS(n, r, type, a0, a1, a2, a3, b, s, t)                                   \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #s                                          \
               ", 0;\n"                                                                           \
               " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FI_NAMES_##r \
               "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, %" #t ";\n}"          \
               : FI_ACCUMULATORS_##r(d)                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_matrix), "r"(accumulate),      \
                 "n"(kTransposed))

// d (+)= a * b for 64 rows and 8 kN columns of 16-bit elements T, fragments as mma.sync's m16n8k16 has them:
// warp w of the warpgroup holds rows 16 w .. 16 w + 15. kTransposed: rows of `b_matrix` run along N.
template <typename T, int kN, int kTransposed>
__device__ __forceinline__ void wgmma_m64k16(float (*d)[4], const uint32_t (&a)[4], uint64_t b_matrix,
                                             int accumulate) {
  constexpr bool kBf16 = __is_same(T, __nv_bfloat16);
  static_assert(kN == 2 || kN == 4 || kN == 8 || kN == 16);
  if constexpr (kN == 2 && kBf16) FI_WGMMA_FRAGMENTS(16, 8, "bf16", 8, 9, 10, 11, 12, 13, 14);
  if constexpr (kN == 4 && kBf16) FI_WGMMA_FRAGMENTS(32, 16, "bf16", 16, 17, 18, 19, 20, 21, 22);
  if constexpr (kN == 8 && kBf16) FI_WGMMA_FRAGMENTS(64, 32, "bf16", 32, 33, 34, 35, 36, 37, 38);
  if constexpr (kN == 16 && kBf16) FI_WGMMA_FRAGMENTS(128, 64, "bf16", 64, 65, 66, 67, 68, 69, 70);
  if constexpr (kN == 2 && !kBf16) FI_WGMMA_FRAGMENTS(16, 8, "f16", 8, 9, 10, 11, 12, 13, 14);
  if constexpr (kN == 4 && !kBf16) FI_WGMMA_FRAGMENTS(32, 16, "f16", 16, 17, 18, 19, 20, 21, 22);
  if constexpr (kN == 8 && !kBf16) FI_WGMMA_FRAGMENTS(64, 32, "f16", 32, 33, 34, 35, 36, 37, 38);
  if constexpr (kN == 16 && !kBf16) FI_WGMMA_FRAGMENTS(128, 64, "f16", 64, 65, 66, 67, 68, 69, 70);
}

// Both descriptors and scale-d are operands A, B and S.
#define FI_WGMMA_SHARED(n, r, type, a, b, s)                                                      \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #s                                          \
               ", 0;\n"                                                                           \
               " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FI_NAMES_##r \
               "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}"                                           \
               : FI_ACCUMULATORS_##r(d)                                                           \
               : "l"(a_matrix), "l"(b_matrix), "r"(accumulate))

// The same with both matrices in shared memory, their rows along K.
template <typename T, int kN>
__device__ __forceinline__ void wgmma_m64k16(float (*d)[4], uint64_t a_matrix, uint64_t b_matrix,
                                             int accumulate) {
  constexpr bool kBf16 = __is_same(T, __nv_bfloat16);
  static_assert(kN == 4 || kN == 8);
  if constexpr (kN == 4 && kBf16) FI_WGMMA_SHARED(32, 16, "bf16", 16, 17, 18);
  if constexpr (kN == 8 && kBf16) FI_WGMMA_SHARED(64, 32, "bf16", 32, 33, 34);
  if constexpr (kN == 4 && !kBf16) FI_WGMMA_SHARED(32, 16, "f16", 16, 17, 18);
  if constexpr (kN == 8 && !kBf16) FI_WGMMA_SHARED(64, 32, "f16", 32, 33, 34);
}

#undef FI_WGMMA_SHARED
#undef FI_WGMMA_FRAGMENTS
#undef FI_NAMES_64
#undef FI_NAMES_32
#undef FI_NAMES_16
#undef FI_NAMES_8
#undef FI_ACCUMULATORS_64
#undef FI_ACCUMULATORS_32
#undef FI_ACCUMULATORS_16
#undef FI_ACCUMULATORS_8

}  // namespace fi::ptx
