// SPDX-License-Identifier: Apache-2.0
// Tensor maps as the emulated copy engine reads them (CUDA driver API, "Tensor Map Object Management").
#pragma once
#include <cstdint>
#include <cstring>

using CUresult = int;
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
inline constexpr CUresult CUDA_SUCCESS = 0;

enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  const char* data;
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
  int item;
};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                       void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                                       const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  map->item = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  map->data = static_cast<const char*>(data);
  std::memcpy(map->sizes, sizes, sizeof(map->sizes));
  std::memcpy(map->strides, strides, sizeof(map->strides));
  std::memcpy(map->box, box, sizeof(map->box));
  bool legal =
      rank == 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * uint32_t(map->item) == 128;
  for (int i = 0; i < 4; ++i) legal = legal && sizes[i] > 0 && box[i] > 0 && box[i] <= 256;
  for (int i = 0; i < 3; ++i) legal = legal && strides[i] % 16 == 0 && strides[i] < uint64_t(1) << 40;
  return legal ? CUDA_SUCCESS : 1;
}
