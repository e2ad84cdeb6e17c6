// SPDX-License-Identifier: Apache-2.0
// Keys and values that a variant transforms on their way from shared memory to fragments. Nothing here is
// inlined: a tile has hundreds of places that ask, and a functor of some length in each of them takes a
// minute to compile.
#pragma once
#include "ptx/mma.cuh"
#include "work.cuh"

namespace fi::sm80 {

// Gives element d of a key or a value of a tile, dequantised.
template <class Traits>
__device__ __forceinline__ auto element_loader(uint32_t tile, int key, float scale) {
  using TKV = typename Traits::TKV;
  const char* first = static_cast<const char*>(__cvta_shared_to_generic(tile));
  return [=](int d) {
    const char* at =
        first + swizzled(Traits::kKvTile, key, d * int(sizeof(TKV)) / 16) + d * int(sizeof(TKV)) % 16;
    if constexpr (Traits::kFp8) {
      const uint32_t wide = ptx::widen2<__half, TKV>(*reinterpret_cast<const uint8_t*>(at));
      return scale * __half2float(__low2half(reinterpret_cast<const __half2&>(wide)));
    } else {
      return scale * float(*reinterpret_cast<const typename Traits::T*>(at));
    }
  };
}

// Elements d and d + 1 of a key of the tile.
template <class Traits>
__device__ __noinline__ uint32_t transformed_keys(const AttentionParams& p, uint32_t k_tile, int request,
                                                  int position, int kv_head, int key, int d, float whole) {
  const auto load = element_loader<Traits>(k_tile, key, p.k_scale[kv_head * p.k_scale_stride]);
  const KeyIndexOf<int> index{request, position, kv_head};
  return ptx::pack2<typename Traits::T>(Variant::template key_transform<float>(p, load, d, index, whole),
                                        Variant::template key_transform<float>(p, load, d + 1, index, whole));
}

// This lane's part of 16 keys and 16 columns, step `step` and block `block` of the tile, whose first key is
// at `key_begin`: B fragments of the block's left and right columns, or of its even and odd ones (fp8). Keys
// that do not exist stay zeros: their weight is 0, which infinity in their place would turn into NaN.
template <class Traits>
__device__ __noinline__ uint4 transformed_values(const AttentionParams& p, const Work& w, uint32_t v_tile,
                                                 int kv_head, int key_begin, int step, int block) {
  const float scale = p.v_scale[kv_head * p.v_scale_stride];
  const int lane = threadIdx.x % 32, begin = max(w.lo, w.kv_begin), end = w.kv_end;
  const int column = block * 16 + lane / 4 * (Traits::kFp8 ? 2 : 1);
  uint32_t pairs[2][2];
#pragma unroll
  for (int right = 0; right < 2; ++right)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = step * 16 + half * 8 + lane % 4 * 2 + e;
        const KeyIndexOf<int> index{w.request, key_begin + key, kv_head};
        x[e] = 0.f;
        if (index.kv_pos >= begin && index.kv_pos < end)
          x[e] = Variant::template value_transform<float>(p, element_loader<Traits>(v_tile, key, scale),
                                                          column + right * (Traits::kFp8 ? 1 : 8), index);
      }
      pairs[right][half] = ptx::pack2<typename Traits::T>(x[0], x[1]);
    }
  return make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
}

}  // namespace fi::sm80
