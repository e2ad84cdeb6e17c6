// SPDX-License-Identifier: Apache-2.0
// The device planner's source on an emulated thread block.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "bind/device_plan_args.h"
#include "fiber_block.h"

namespace fi::test {
namespace {

using bind::Optional;
using bind::TensorView;

template <int kThreads>
void plan(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView workspace,
          TensorView buffer, int64_t seed) {
  using Block = FiberBlock<kThreads>;
  using Memory = typename DevicePlanner<typename Block::Thread>::Memory;
  const DevicePlanArgs args =
      bind::device_plan_args(config, qo_indptr, kv_lens, workspace, buffer, bind::kHost);
  static const auto block = std::make_unique<Block>();
  static const auto memory = std::make_unique<Memory>();
  // What shared memory holds when a kernel starts is arbitrary.
  std::memset(static_cast<void*>(memory.get()), int(seed % 251), sizeof(Memory));
  try {
    block->run(
        [&](typename Block::Thread& thread) {
          DevicePlanner<typename Block::Thread>(thread, args, *memory).run();
        },
        uint64_t(seed));
  } catch (const std::runtime_error& e) {
    TVM_FFI_THROW(RuntimeError) << e.what();
  }
}

// others: int32 as indices, the table that all blocks but the first see, or none; counts: int64 [4], the
// fields of BlockCounts.
template <int kThreads, int kCtas>
void plan_shared(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView indices,
                 TensorView row_begin, TensorView row_end, int64_t step, int64_t page_size,
                 Optional<TensorView> limits, Optional<TensorView> tally, TensorView workspace,
                 TensorView buffer, int64_t seed, Optional<TensorView> others, TensorView counts) {
  using Block = FiberBlock<kThreads, kCtas>;
  using Thread = typename Block::Thread;
  using Memory = DeviceShareMemory<Thread, (kCtas > 1)>;
  const DeviceShareArgs args =
      bind::device_share_args(config, qo_indptr, kv_lens, indices, row_begin, row_end, step, page_size,
                              limits, tally, workspace, buffer, bind::kHost);
  DeviceShareArgs of_others = args;
  if (others.has_value()) of_others.forest.rows.indices = bind::data<const int32_t>(others.value());
  static const auto block = std::make_unique<Block>();
  static std::vector<std::byte> memory(kCtas * sizeof(Memory));
  std::memset(memory.data(), int(seed % 251), memory.size());
  try {
    block->run(
        [&](Thread& thread) {
          auto* own = reinterpret_cast<Memory*>(memory.data()) + thread.cta();
          fi::plan_shared(thread, thread.cta() == 0 ? args : of_others, *own);
        },
        uint64_t(seed));
  } catch (const std::runtime_error& e) {
    TVM_FFI_THROW(RuntimeError) << e.what();
  }
  const BlockCounts& c = block->counts();
  const int64_t values[] = {c.block_barriers, c.cluster_barriers, c.warp_steps, c.atomics};
  std::copy(std::begin(values), std::end(values), bind::data<int64_t>(counts));
}

}  // namespace
}  // namespace fi::test

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_128, fi::test::plan<128>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_512, fi::test::plan<512>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_shared_128_3, (fi::test::plan_shared<128, 3>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_shared_512_1, (fi::test::plan_shared<512, 1>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_shared_512_8, (fi::test::plan_shared<512, 8>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_words, fi::bind::device_workspace_words);
