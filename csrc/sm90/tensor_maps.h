// SPDX-License-Identifier: Apache-2.0
// Tensor maps of the KV caches: a page is affine although the list of pages is not, so that the copy engine
// can bring the keys that a page holds of a tile as one box for each 128 bytes of their rows.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace fi::sm90 {

inline constexpr int kBoxBytes = 128;

// One cache [pages, page_size, heads, dim] with any strides, in bytes.
struct Cache {
  const void* data;
  int64_t pages, page_size, heads, dim;
  int64_t page_stride, token_stride, head_stride;
  int item;  // bytes of an element
};

// Keys of a page that one box holds, those of a tile of `tile` keys at most, or 0 where pages do not make up
// tiles.
inline int box_keys(int64_t page_size, int tile) {
  if (page_size % 8 != 0 || (tile % page_size != 0 && page_size % tile != 0)) return 0;
  return int(std::min<int64_t>(page_size, tile));
}

// Whether the heads lie closer together than the tokens: the order of the map's dimensions.
inline bool heads_first(const Cache& c) { return c.head_stride <= c.token_stride; }

// Fills `map`; false where the driver has no such function or refuses, and rows have to be gathered.
inline bool make_map(const Cache& c, int keys, CUtensorMap& map) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found)
                                                                         : nullptr;
  }();
  if (!encode || c.head_stride <= 0 || c.token_stride <= 0 || c.page_stride <= 0) return false;
  cuuint64_t sizes[4] = {cuuint64_t(c.dim), cuuint64_t(c.page_size), cuuint64_t(c.heads),
                         cuuint64_t(c.pages)};
  cuuint64_t strides[3] = {cuuint64_t(c.token_stride), cuuint64_t(c.head_stride), cuuint64_t(c.page_stride)};
  cuuint32_t box[4] = {cuuint32_t(kBoxBytes / c.item), cuuint32_t(keys), 1, 1};
  if (heads_first(c)) {
    std::swap(sizes[1], sizes[2]);
    std::swap(strides[0], strides[1]);
    std::swap(box[1], box[2]);
  }
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type = c.item == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  return encode(&map, type, 4, const_cast<void*>(c.data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace fi::sm90
