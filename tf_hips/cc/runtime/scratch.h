// SPDX-License-Identifier: Apache-2.0
// Memory of a thread that is reused by its next call: fresh pages would cost as much as the work.

#ifndef TF_HIPS_CC_RUNTIME_SCRATCH_H_
#define TF_HIPS_CC_RUNTIME_SCRATCH_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

constexpr int64_t kLargePage = int64_t{1} << 21;

// Room for `count` elements, and a tile more: loops write whole tiles. Each slot is a memory of its
// own, which lives as long as its thread. Null when there is no memory, or for more than 2^31.
// Static: else its variables would be one for all libraries of a process, whatever their versions.
template <int slot, typename T>
static __attribute__((noinline)) T* scratch(int64_t count) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t capacity = 0;
  if (count < 0 || count > int64_t{1} << 31) return nullptr;
  const int64_t wanted = (count + kTile) * static_cast<int64_t>(sizeof(T));
  if (wanted > capacity) {
    // Large pages, where the system gives them: else finding pages costs as much as the work.
    const int64_t page = wanted < kLargePage ? 4096 : kLargePage;
    const int64_t bytes = (wanted + page - 1) / page * page;
    capacity = 0;
    memory.reset(std::aligned_alloc(static_cast<size_t>(page), static_cast<size_t>(bytes)));
    if (memory == nullptr) return nullptr;
#ifdef MADV_HUGEPAGE
    if (page == kLargePage) madvise(memory.get(), static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
    capacity = bytes;
  }
  return static_cast<T*>(memory.get());
}

// A copy of n floats of a state, in a slot that nothing else has; null when there is no memory.
template <int number>
inline const float* keep_state(const float* state, int64_t n) {
  constexpr int kFirst = 1 << 16;
  float* copy = scratch<kFirst + number, float>(n);
  if (copy != nullptr) std::copy(state, state + n, copy);
  return copy;
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_SCRATCH_H_
