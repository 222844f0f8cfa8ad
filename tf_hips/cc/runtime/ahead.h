// SPDX-License-Identifier: Apache-2.0
// What loops ask of memory before they need it.
//
// A processor does so by itself where it sees an order. Most do it not over the ends of pages of
// 1024 floats, and not while they compute for long without reading on: memory would rest meanwhile.
// Zen 4 does (decision 0077). There what is asked for into the first-level cache, of which
// few requests are under way at a time, keeps loads from going on.

#ifndef TF_HIPS_CC_RUNTIME_AHEAD_H_
#define TF_HIPS_CC_RUNTIME_AHEAD_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tf_hips/cc/runtime/processor.h"
#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

// Whether lines are asked for into the second-level cache. TF_HIPS_PREFETCH in the environment,
// "l1" or "l2", says it of a processor that is not known here.
inline bool find_second_level() {
  const char* const wish = std::getenv("TF_HIPS_PREFETCH");
  if (wish != nullptr && std::strcmp(wish, "l1") == 0) return false;
  if (wish != nullptr && std::strcmp(wish, "l2") == 0) return true;
  return is_zen4();
}
inline const bool kIntoSecondLevel = find_second_level();

// Asks for one line, where no order tells a processor which comes next, or too many do.
TF_HIPS_INLINE void prefetch_line(const void* line) {
  if (kIntoSecondLevel) {
    __builtin_prefetch(line, 0, 2);
  } else {
    __builtin_prefetch(line);
  }
}

// Floats ahead of a step that are asked for while it is computed. No multiple of a page, which was
// slower in every loop that was measured.
constexpr int64_t kAhead = kTile + kTile / 2;
// The same of loops that have read their tile once when they ask, measured by themselves.
constexpr int64_t kAheadOfBlocks = kTile + kTile / 8;

template <int64_t kFloats = kAhead>
TF_HIPS_INLINE void prefetch_bytes(const void* begin, int64_t bytes) {
  if (kIntoSecondLevel) return;
  const auto ahead = reinterpret_cast<uintptr_t>(begin) + kFloats * 4;
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + i));
  }
}

// Elements of each packet that a merge adds before it turns to the next one: 16 KiB of sums.
constexpr int64_t kMergeRange = 4096;

// Asks for more of a packet than the `bytes` bytes that `count` elements need. Merges leave a
// packet for others after each range, before a processor sees an order. Zen 4 sees one in whole
// packets, and asks for what the next range needs of a part (`is_part`), one tile's at a time: all
// of a range's at once changes nothing.
TF_HIPS_INLINE void prefetch_packet(const void* begin, int64_t bytes, int64_t count, bool is_part) {
  if (!kIntoSecondLevel) {
    prefetch_bytes(begin, bytes);
    return;
  }
  if (!is_part) return;
  const auto ahead =
      reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes * kMergeRange / count);
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + static_cast<uintptr_t>(i)), 0, 2);
  }
}

// Asks for what lies `kAhead` elements behind a tile; beyond the vector's end nothing happens.
TF_HIPS_INLINE void prefetch_tile(const float* tile, int64_t count) {
  prefetch_bytes(tile, count * 4);
}

// The same for a step of a tile whose blocks are reduced.
TF_HIPS_INLINE void prefetch_blocks(const float* step, int64_t count) {
  prefetch_bytes<kAheadOfBlocks>(step, count * 4);
}

// The same of a loop that forms sums of `a` and `b` in `sum`, and then computes for thousands of
// cycles before it reads on. No processor goes on by itself meanwhile; Zen 4 waits for `sum` too.
TF_HIPS_INLINE void prefetch_sums(const float* a, const float* b, float* sum, int64_t count) {
  if (!kIntoSecondLevel) {
    prefetch_blocks(a, count);
    prefetch_blocks(b, count);
    return;
  }
  for (int64_t i = 0; i < count; i += 16) {
    const auto ahead = static_cast<uintptr_t>(i + kAheadOfBlocks) * sizeof(float);
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(a) + ahead), 0, 2);
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(b) + ahead), 0, 2);
    __builtin_prefetch(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(sum) + ahead), 1, 2);
  }
}

// Asks for the first one of kParts parts of the next page, spread over the tiles of this one: what
// a processor does not do by itself, since it sees an order within a page only. Loops that read,
// and keep up with memory, are slowed down by asking for more: a half of one vector, a quarter of
// two.
template <uintptr_t kParts>
TF_HIPS_INLINE void prefetch_page(const float* tile, int64_t count) {
  if (kIntoSecondLevel) return;
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(tile);
  for (int64_t i = 0; i < count * 4; i += static_cast<int64_t>(64 * kParts)) {
    const uintptr_t at = begin + static_cast<uintptr_t>(i);
    __builtin_prefetch(reinterpret_cast<const void*>((at | (kPage - 1)) + 1 + at % kPage / kParts));
  }
}

// What an encoder reads: from memory, or the sum of gradient and residual, which the caches hold in
// part, or which is formed on the way.
template <bool kIsSum>
TF_HIPS_INLINE void prefetch_again(const float* tile, int64_t count) {
  if constexpr (kIsSum) {
    prefetch_tile(tile, count);
  } else {
    prefetch_page<2>(tile, count);
  }
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_AHEAD_H_
