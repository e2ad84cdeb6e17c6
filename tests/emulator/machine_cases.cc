// SPDX-License-Identifier: Apache-2.0
// Small kernels, right and wrong, to see that the emulated machine tells them apart.
#include <tvm/ffi/tvm_ffi.h>

#include "builtins.h"
//
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace fi::emulator {
namespace {

constexpr int kThreads = 64;
constexpr size_t kShared = 8192;

void run(int64_t seed, const std::function<void()>& kernel) {
  try {
    machine().run(2, kThreads, kShared, uint64_t(seed), kernel);
  } catch (const std::runtime_error& e) {
    TVM_FFI_THROW(RuntimeError) << e.what();
  }
}

void missing_thread(int64_t seed) {
  run(seed, [] {
    if (threadIdx.x != 5) __syncthreads();
  });
}

void other_instruction(int64_t seed) {
  run(seed, [] { threadIdx.x == 5 ? (void)__any_sync(~0u, true) : __syncwarp(); });
}

void outside(int64_t seed) {
  run(seed, [] { ptx::cp_async_16(kSharedBase + kShared, machine().block->shared, 16); });
}

void uninitialised(int64_t seed) {
  run(seed, [] { ptx::mbarrier_arrive(kSharedBase); });
}

void unreadable(int64_t seed) {
  static const int words[2] = {};
  const struct Reset {
    ~Reset() { machine().readable.clear(); }
  } reset;
  machine().readable = {{words, 4}};
  run(seed, [] { __ldg(words + (threadIdx.x == 5)); });
}

// The first warp stores matrices, which its first lane copies.
template <bool kFences, bool kCommits, bool kWaits>
void bulk(int64_t seed) {
  alignas(16) static char to[512];
  run(seed, [] {
    if (threadIdx.x >= kWarpSize) return;
    FI_DYNAMIC_SHARED(shared);
    const uint32_t from = ptx::shared_address(shared);
    for (int turn = 0; turn < 2; ++turn) {
      ptx::stmatrix_x4(from + threadIdx.x * 16, {});
      if (kFences) ptx::fence_async_shared();
      __syncwarp();
      if (threadIdx.x == 0) ptx::bulk_store(to, from, sizeof(to));
      if (kCommits) ptx::bulk_commit();
      if (kWaits) ptx::bulk_wait_read();
    }
  });
}

// Each thread writes a word that the thread of the other warp reads.
template <bool kWaits>
bool barrier(int64_t seed) {
  bool right = true;
  run(seed, [&] {
    FI_DYNAMIC_SHARED(shared);
    auto* words = reinterpret_cast<unsigned*>(shared);
    words[threadIdx.x] = threadIdx.x;
    if (kWaits) __syncthreads();
    const unsigned other = kThreads - 1 - threadIdx.x;
    right = right && words[other] == other;
  });
  return right;
}

// In every third round nobody says so, in the others one thread.
bool vote(int64_t seed) {
  bool right = true;
  run(seed, [&] {
    for (unsigned round = 0; round < 9; ++round) {
      const bool said = round % 3 > 0 && threadIdx.x == round * 7 % kThreads;
      right = right && ptx::named_barrier_or(1, kThreads, said) == (round % 3 > 0);
    }
  });
  return right;
}

template <bool kWaits>
bool copy(int64_t seed) {
  alignas(16) static const int source[4] = {1, 2, 3, 4};
  bool right = true;
  run(seed, [&] {
    FI_DYNAMIC_SHARED(shared);
    const uint32_t full = ptx::shared_address(shared + 4096);
    if (threadIdx.x == 0) ptx::mbarrier_init(full, kThreads);
    __syncthreads();
    ptx::cp_async_16(ptx::shared_address(shared) + threadIdx.x * 16, source, 16);
    ptx::mbarrier_arrive_after_copies(full);
    if (kWaits) ptx::mbarrier_wait(full, 0);
    right = right && reinterpret_cast<int*>(shared)[4 * (kThreads - 1 - threadIdx.x) + 3] == 4;
  });
  return right;
}

void unfenced_product(int64_t seed) {
  run(seed, [] {
    FI_DYNAMIC_SHARED(shared);
    const uint32_t full = ptx::shared_address(shared + 4096);
    if (threadIdx.x == 0) ptx::mbarrier_init(full, 1);
    __syncthreads();
    if (threadIdx.x == 0) ptx::mbarrier_arrive(full);
    ptx::mbarrier_wait(full, 0);
    const uint32_t a[4] = {};
    float d[2][4];
    const uint64_t matrix = ptx::descriptor(ptx::descriptor_low(ptx::shared_address(shared), 0), 1024);
    ptx::wgmma_m64k16<__nv_bfloat16, 2, 0>(d, a, matrix, 0);
  });
}

// Ones times ones, of which shared memory is cleared behind the product.
template <bool kWaits>
bool product(int64_t seed) {
  bool right = true;
  run(seed, [&] {
    FI_DYNAMIC_SHARED(shared);
    auto* b = reinterpret_cast<__nv_bfloat16*>(shared);
    for (size_t i = threadIdx.x; i < 1024; i += kThreads) b[i] = __nv_bfloat16(1.f);
    __syncthreads();
    const uint32_t ones = ptx::pack2<__nv_bfloat16>(1.f, 1.f), a[4] = {ones, ones, ones, ones};
    float d[2][4] = {};
    const uint64_t matrix = ptx::descriptor(ptx::descriptor_low(ptx::shared_address(shared), 0), 1024);
    ptx::wgmma_m64k16<__nv_bfloat16, 2, 0>(d, a, matrix, 0);
    ptx::wgmma_commit();
    if (kWaits) ptx::wgmma_wait<0>();
    __syncthreads();
    for (size_t i = threadIdx.x; i < 1024; i += kThreads) b[i] = __nv_bfloat16(0.f);
    __syncthreads();
    ptx::wgmma_wait<0>();
    right = right && d[1][3] == 16.f;
  });
  return right;
}

}  // namespace
}  // namespace fi::emulator

TVM_FFI_DLL_EXPORT_TYPED_FUNC(missing_thread, fi::emulator::missing_thread);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(other_instruction, fi::emulator::other_instruction);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(outside, fi::emulator::outside);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(uninitialised, fi::emulator::uninitialised);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unreadable, fi::emulator::unreadable);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bulk_copy, (fi::emulator::bulk<true, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unfenced, (fi::emulator::bulk<false, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unfenced_product, fi::emulator::unfenced_product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(uncommitted, (fi::emulator::bulk<true, false, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(left_behind, (fi::emulator::bulk<true, true, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(barrier_with_wait, fi::emulator::barrier<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(barrier_without_wait, fi::emulator::barrier<false>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(vote, fi::emulator::vote);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_with_wait, fi::emulator::copy<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_without_wait, fi::emulator::copy<false>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(product_with_wait, fi::emulator::product<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(product_without_wait, fi::emulator::product<false>);
