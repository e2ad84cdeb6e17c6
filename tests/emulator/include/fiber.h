// SPDX-License-Identifier: Apache-2.0
// Switching between stacks: some nanoseconds on x86-64, where ucontext's system calls cost a hundred times as
// much.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <cstdint>

namespace fi::emulator {

#if defined(__x86_64__)

extern "C" void fi_emulator_switch(void** save, void* load);
asm(R"(
.pushsection .text
.hidden fi_emulator_switch
.globl fi_emulator_switch
.type fi_emulator_switch, @function
fi_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.popsection
)");

struct Context {
  void* top = nullptr;

  // `entry` must not return.
  void prepare(char* stack, size_t bytes, void (*entry)()) {
    auto** at = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16);
    *--at = nullptr;  // where entry would return to; aligns its frame
    *--at = reinterpret_cast<void*>(entry);
    at -= 6;
    top = at;
  }
  void switch_to(Context& other) { fi_emulator_switch(&top, other.top); }
};

#else

struct Context {
  ucontext_t state;

  void prepare(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = bytes;
    makecontext(&state, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&state, &other.state); }
};

#endif

}  // namespace fi::emulator
