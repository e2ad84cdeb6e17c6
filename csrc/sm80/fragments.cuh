// SPDX-License-Identifier: Apache-2.0
// Operands of mma.sync that a consumer warp makes or reads, and the products that depend on how the cache's
// elements lie in them. Nothing here knows where a warp stands.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "softmax.cuh"

namespace fi::sm80 {

template <class Traits>
struct Fragments {
  using T = typename Traits::T;
  using TKV = typename Traits::TKV;
  using Weight = WeightOf<Traits>;
  static constexpr int kKvTile = Traits::kKvTile;

  // Elements of type U times four of one byte.
  template <typename U>
  __device__ __forceinline__ static void multiply8(float (&d)[4], const uint32_t (&a)[4], uint32_t four) {
    if constexpr (Traits::kFp8)
      ptx::mma_m16n8k16<U>(d, a, ptx::widen2<U, TKV>(four), ptx::widen2<U, TKV>(four >> 16));
  }

  // Weights of 16 keys as an A fragment. Of one row: behind its weights what they are rounded by.
  template <int kRows = 2, int kN>
  __device__ __forceinline__ static void weights_fragment(const float (&s)[kN][4], int step,
                                                          uint32_t (&a)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&f)[4] = s[2 * step + half];
      a[2 * half] = ptx::pack2<Weight>(f[0], f[1]);
      if constexpr (kRows == 2) {
        a[2 * half + 1] = ptx::pack2<Weight>(f[2], f[3]);
      } else if constexpr (Variant::kSoftmax) {
        const float2 rounded = ptx::unpack2<Weight>(a[2 * half]);
        a[2 * half + 1] = ptx::pack2<Weight>(f[0] - rounded.x, f[1] - rounded.y);
      } else {
        a[2 * half + 1] = 0;  // a weight may be infinite
      }
    }
  }

  // 16 columns of V, block `block`, of the 16 keys at `rows`, or of 32 keys of one byte an element.
  __device__ __forceinline__ static void read_values(uint32_t (&b)[4], uint32_t rows, int block, int lane) {
    const int key = Traits::kFp8 ? lane : lane % 16, chunk = Traits::kFp8 ? block : block * 2 + (lane >> 4);
    ptx::ldmatrix_x4_trans(
        b, rows + key * kRowBytes + (chunk >> 3) * (kKvTile * kRowBytes) + (((chunk & 7) ^ (lane & 7)) << 4));
  }

  // Adds the product of 16 keys' weights with what read_values() read of them, kstep j.
  __device__ __forceinline__ static void multiply_values(float (&left)[4], float (&right)[4],
                                                         const uint32_t (&a)[4], const uint32_t (&b)[4],
                                                         int j) {
    if constexpr (Traits::kFp8) {
      // Even and odd columns part: the left fragment holds columns 0, 2, .. 14 of the block.
      multiply8<Weight>(left, a, __byte_perm(b[2 * j], b[2 * j + 1], 0x6420));
      multiply8<Weight>(right, a, __byte_perm(b[2 * j], b[2 * j + 1], 0x7531));
    } else {
      ptx::mma_m16n8k16<T>(left, a, b[0], b[1]);
      ptx::mma_m16n8k16<T>(right, a, b[2], b[3]);
    }
  }
};

}  // namespace fi::sm80
