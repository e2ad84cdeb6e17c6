// SPDX-License-Identifier: Apache-2.0
// Keys and values of new tokens into their slots. A thread owns one run of a token's row, of the key or of
// the value, for up to kTokens tokens: their loads are in flight together, and the row is divided into heads
// once.
#include "append.h"

#include <initializer_list>

#include "divide.cuh"
#include "elements.cuh"

namespace fi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 2;
// Enough to fill a GPU; beyond it a thread takes more tokens.
constexpr int64_t kBlocks = 1024;
constexpr int kRun = 8;  // 16 bytes of the usual 16-bit elements

// Strides in bytes.
struct Side {
  const char* from;
  char* to;
  int64_t from_stride_token, from_stride_head;
  int64_t to_stride_page, to_stride_token, to_stride_head;
  const float* scale;
  int64_t scale_stride;
  FastDivide runs;  // of a head
  int32_t row_runs;
};

struct Arguments {
  Side side[2];
  const int64_t* slots;
  int64_t num_slots, capacity;
  IndexDivide page;
};

template <Dtype From, Dtype To, int N>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ Arguments a) {
  using FromRun = Run<From, N>;
  using ToRun = Run<To, N>;
  const Side& s = a.side[blockIdx.z];
  const int run = blockIdx.y * blockDim.x + threadIdx.x;
  if (run >= s.row_runs) return;
  const int head = s.runs.divide(run), run_of_head = run - head * s.runs.divisor;
  const char* from = s.from + head * s.from_stride_head + int64_t(run_of_head) * FromRun::kSize;
  char* to = s.to + head * s.to_stride_head + int64_t(run_of_head) * ToRun::kSize;

  const int64_t first = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  FromRun x[kTokens];
  int64_t slot[kTokens];
#pragma unroll
  for (int k = 0; k < kTokens; ++k) {
    const int64_t token = first + k * step;
    slot[k] = -1;
    if (token < a.num_slots) {
      slot[k] = a.slots[token];
      x[k] = *reinterpret_cast<const FromRun*>(from + token * s.from_stride_token);
    }
  }
  const ScaleDivide scale(s.scale[head * s.scale_stride]);
#pragma unroll
  for (int k = 0; k < kTokens; ++k) {
    if (uint64_t(slot[k]) >= uint64_t(a.capacity)) continue;
    const int64_t page = a.page.divide(slot[k]);
    const int64_t offset = slot[k] - page * a.page.divisor;
    auto* target = reinterpret_cast<ToRun*>(to + page * s.to_stride_page + offset * s.to_stride_token);
    if constexpr (From == To) {
      if (scale.by_one()) {
        *target = x[k];
        continue;
      }
    }
    float values[N];
    to_floats<From, N>(x[k], values);
    scale.divide(values);
    *target = from_floats<To, N>(values);
  }
}

Side side_of(const AppendSide& s, int from_bytes, int to_bytes, int64_t num_heads, int n) {
  Side r{};
  r.from = static_cast<const char*>(s.from);
  r.to = static_cast<char*>(s.to);
  r.from_stride_token = s.from_stride_token * from_bytes;
  r.from_stride_head = s.from_stride_head * from_bytes;
  r.to_stride_page = s.to_stride_page * to_bytes;
  r.to_stride_token = s.to_stride_token * to_bytes;
  r.to_stride_head = s.to_stride_head * to_bytes;
  r.scale = s.scale;
  r.scale_stride = s.scale_stride;
  r.runs = FastDivide(int32_t(s.dim / n));
  r.row_runs = int32_t(num_heads * (s.dim / n));
  return r;
}

// Whether every row of the side consists of aligned runs of kRun elements.
bool has_runs(const AppendSide& s, const AppendParams& p, int from_bytes, int to_bytes) {
  const auto aligned = [](const void* base, int bytes, std::initializer_list<int64_t> strides) {
    const int64_t alignment = ::min(kRun * bytes, 16);
    int64_t all = int64_t(reinterpret_cast<uintptr_t>(base));
    for (int64_t stride : strides) all |= stride * bytes;
    return all % alignment == 0;
  };
  // The stride of a dimension of one element is arbitrary and multiplies nothing.
  const auto used = [](int64_t size, int64_t stride) { return size > 1 ? stride : 0; };
  return s.dim % kRun == 0 &&
         aligned(s.from, from_bytes,
                 {used(p.num_slots, s.from_stride_token), used(p.num_heads, s.from_stride_head)}) &&
         aligned(s.to, to_bytes,
                 {used(p.num_pages, s.to_stride_page), used(p.page_size, s.to_stride_token),
                  used(p.num_heads, s.to_stride_head)});
}

template <Dtype From, Dtype To, int N>
cudaError_t launch(const AppendParams& p, const AppendSide* sides, int num_sides, cudaStream_t stream) {
  Arguments a{};
  int64_t row_runs = 0;
  for (int i = 0; i < num_sides; ++i) {
    const int64_t runs = p.num_heads * (sides[i].dim / N);
    if (runs > int64_t(kThreads) * 65535) return cudaErrorInvalidValue;
    a.side[i] = side_of(sides[i], kBytes<From>, kBytes<To>, p.num_heads, N);
    row_runs = ::max(row_runs, runs);
  }
  a.slots = p.slots;
  a.num_slots = p.num_slots;
  a.capacity = p.num_pages * p.page_size;
  a.page = IndexDivide(p.page_size, a.capacity);
  const int64_t parts = (row_runs + kThreads - 1) / kThreads;  // of a row, each of whole warps
  const int64_t width = parts == 1 ? row_runs : ((row_runs + parts - 1) / parts + 31) / 32 * 32;
  const int64_t height = ::min(p.num_slots, kThreads / width);
  const int64_t columns = (p.num_slots + height - 1) / height;
  const int64_t blocks =
      ::min(columns, ::max((columns + kTokens - 1) / kTokens, kBlocks / (parts * num_sides)));
  const dim3 grid{unsigned(blocks), unsigned(parts), unsigned(num_sides)};
  const dim3 block{unsigned(width), unsigned(height)};
  append_kernel<From, To, N><<<grid, block, 0, stream>>>(a);
  return cudaGetLastError();
}

template <Dtype From, Dtype To>
cudaError_t launch_runs(const AppendParams& p, const AppendSide* sides, int num_sides, cudaStream_t stream) {
  bool runs = true;
  for (int i = 0; i < num_sides; ++i) runs = runs && has_runs(sides[i], p, kBytes<From>, kBytes<To>);
  return runs ? launch<From, To, kRun>(p, sides, num_sides, stream)
              : launch<From, To, 1>(p, sides, num_sides, stream);
}

template <Dtype From>
cudaError_t launch_from(const AppendParams& p, const AppendSide* sides, int num_sides, cudaStream_t stream) {
  switch (sides->to_dtype) {
    case Dtype::float32:
      return launch_runs<From, Dtype::float32>(p, sides, num_sides, stream);
    case Dtype::float16:
      return launch_runs<From, Dtype::float16>(p, sides, num_sides, stream);
    case Dtype::bfloat16:
      return launch_runs<From, Dtype::bfloat16>(p, sides, num_sides, stream);
    case Dtype::float8_e4m3fn:
      return launch_runs<From, Dtype::float8_e4m3fn>(p, sides, num_sides, stream);
    case Dtype::float8_e5m2:
      return launch_runs<From, Dtype::float8_e5m2>(p, sides, num_sides, stream);
  }
  return cudaErrorInvalidValue;
}

// Sides of the same dtypes go into one launch.
cudaError_t launch_sides(const AppendParams& p, const AppendSide* sides, int num_sides, cudaStream_t stream) {
  if (sides->from_dtype == Dtype::float32) return launch_from<Dtype::float32>(p, sides, num_sides, stream);
  if (sides->from_dtype == Dtype::float16) return launch_from<Dtype::float16>(p, sides, num_sides, stream);
  return launch_from<Dtype::bfloat16>(p, sides, num_sides, stream);
}

}  // namespace

cudaError_t append_kv(const AppendParams& p, cudaStream_t stream) {
  AppendSide sides[2];
  int count = 0;
  for (const AppendSide& s : p.side)
    if (s.dim > 0) sides[count++] = s;
  if (p.num_slots == 0 || p.num_heads == 0 || count == 0) return cudaSuccess;
  if (count == 2 && (sides[0].from_dtype != sides[1].from_dtype || sides[0].to_dtype != sides[1].to_dtype)) {
    const cudaError_t error = launch_sides(p, sides, 1, stream);
    return error == cudaSuccess ? launch_sides(p, sides + 1, 1, stream) : error;
  }
  return launch_sides(p, sides, count, stream);
}

}  // namespace fi::cuda
