// SPDX-License-Identifier: Apache-2.0
// Counts what emulated kernels read and write: a tool of tests.
//
// The kernels are compiled with -fsanitize=thread, which calls a function for each access to
// memory; these are ours, in place of the sanitizer's. Of the vectors that were named, the sectors
// of 32 bytes that a kernel touches are counted, once for reading, unless it has written them
// before, and once for writing: what a GPU must fetch and write back if its caches keep what one
// kernel uses again, and nothing between kernels.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr uintptr_t kSector = 32;

struct Vector {
  uintptr_t begin, end;
  std::vector<bool> is_read, is_written;
};

struct Count {
  int64_t read = 0, written = 0;
};

std::vector<Vector> vectors;
std::vector<std::pair<std::string, Count>> kernels;

void touch(uintptr_t at, uintptr_t bytes, bool is_write) {
  if (kernels.empty()) return;
  for (Vector& vector : vectors) {
    if (at < vector.begin || at >= vector.end) continue;
    Count& count = kernels.back().second;
    std::vector<bool>& seen = is_write ? vector.is_written : vector.is_read;
    for (uintptr_t k = at / kSector; k <= (at + bytes - 1) / kSector; ++k) {
      const size_t sector = k - vector.begin / kSector;
      if (vector.is_written[sector]) continue;
      if (seen[sector]) continue;
      seen[sector] = true;
      (is_write ? count.written : count.read) += kSector;
    }
    return;
  }
}

}  // namespace

// Called by the emulation before each kernel.
void trace_kernel(const char* name) {
  for (Vector& vector : vectors) {
    std::fill(vector.is_read.begin(), vector.is_read.end(), false);
    std::fill(vector.is_written.begin(), vector.is_written.end(), false);
  }
  kernels.push_back({name, {}});
}

// Forgets what was counted, and all vectors.
EXPORT void trace_clear() {
  vectors.clear();
  kernels.clear();
}

EXPORT void trace_vector(const void* begin, int64_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  const size_t sectors = (at + bytes) / kSector - at / kSector + 1;
  vectors.push_back({at, at + bytes, std::vector<bool>(sectors), std::vector<bool>(sectors)});
}

// Lines of "name read written", in bytes, of the kernels so far.
EXPORT const char* trace_text() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : kernels) {
    text += name + ' ' + std::to_string(count.read) + ' ' + std::to_string(count.written) + '\n';
  }
  return text.c_str();
}

// What the compiler calls.
#define ACCESS(bytes)                                                                        \
  EXPORT void __tsan_read##bytes(void* at) { touch(uintptr_t(at), bytes, false); }           \
  EXPORT void __tsan_write##bytes(void* at) { touch(uintptr_t(at), bytes, true); }           \
  EXPORT void __tsan_unaligned_read##bytes(void* at) { touch(uintptr_t(at), bytes, false); } \
  EXPORT void __tsan_unaligned_write##bytes(void* at) { touch(uintptr_t(at), bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
EXPORT void __tsan_read_range(void* at, uintptr_t bytes) { touch(uintptr_t(at), bytes, false); }
EXPORT void __tsan_write_range(void* at, uintptr_t bytes) { touch(uintptr_t(at), bytes, true); }
EXPORT void __tsan_vptr_read(void**) {}
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_init() {}
