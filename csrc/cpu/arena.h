// SPDX-License-Identifier: Apache-2.0
// Memory of one thread, kept from launch to launch.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace fi::cpu {

class Arena {
 public:
  // Zeroed memory on 64-byte borders. While build() measures, nothing but the size is noted.
  template <class T>
  T* take(int64_t count) {
    const int64_t at = used_;
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return base_ ? reinterpret_cast<T*>(base_.get() + at) : nullptr;
  }

  // Runs `layout`, which calls take(), once to learn the size and once more to hand out the memory.
  template <class F>
  void build(F layout) {
    base_.reset();
    used_ = 0;
    layout();
    const size_t bytes = size_t(used_);
    base_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t(64))));
    std::memset(base_.get(), 0, bytes);
    used_ = 0;
    layout();
  }

 private:
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<char, Free> base_;
  int64_t used_ = 0;
};

}  // namespace fi::cpu
