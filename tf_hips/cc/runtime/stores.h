// SPDX-License-Identifier: Apache-2.0
// How large tensors are written: a line of memory after the other, each as a whole.
//
// Past the caches, which then need not fetch first what is overwritten; or through them, each line
// asked for before it is written (decision 0088).

#ifndef TF_HIPS_CC_RUNTIME_STORES_H_
#define TF_HIPS_CC_RUNTIME_STORES_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tf_hips/cc/runtime/processor.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// A core of Skylake-SP and its kin has too few writes past the caches under way to keep memory
// busy. It is faster through them while cores are few; many share what memory can do, and half of
// that would be fetches. TF_HIPS_STORES in the environment, "past" or "through", says it of other
// processors.
inline bool find_past_caches() {
  constexpr int kFew = 4;
  const char* const wish = std::getenv("TF_HIPS_STORES");
  if (wish != nullptr && std::strcmp(wish, "past") == 0) return true;
  if (wish != nullptr && std::strcmp(wish, "through") == 0) return false;
  return !is_skylake_server() || num_processors() > kFew;
}
inline const bool kPastCaches = find_past_caches();

#if defined(TF_HIPS_HAS_AVX)
// Floats ahead of a line that are asked for when it is written through the caches. Beyond the
// vector's end nothing happens.
constexpr int64_t kAheadOfStores = 1152;

TF_HIPS_INLINE void prefetch_store(const float* line) {
  const auto ahead = reinterpret_cast<uintptr_t>(line) + kAheadOfStores * sizeof(float);
  __builtin_prefetch(reinterpret_cast<const void*>(ahead), 1);
}

// GCC 12 takes the undefined registers of its own header for an oversight.
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"

// A line of memory.
TF_HIPS_AVX512_INLINE void stream_line(float* line, __m512 x) {
  if (kPastCaches) {
    _mm512_stream_ps(line, x);
  } else {
    prefetch_store(line);
    _mm512_store_ps(line, x);
  }
}

// A half of one.
TF_HIPS_AVX2_INLINE void stream_half(float* half, __m256 x) {
  if (kPastCaches) {
    _mm256_stream_ps(half, x);
  } else {
    prefetch_store(half);
    _mm256_store_ps(half, x);
  }
}

// Lines of 16 floats; `out` is aligned to one.
TF_HIPS_AVX512 inline int64_t stream_avx512(const float* tile, int64_t lines, float* out) {
  for (int64_t k = 0; k < lines; ++k) stream_line(out + 16 * k, _mm512_loadu_ps(tile + 16 * k));
  return lines;
}

// Rows of 16 floats, of which each line of memory has parts of two: `line` holds the first `held`
// of the line at `out`, and is left with those of the line that comes next. The rows are read as
// they were written: loads that are not would wait until the stores before them are in the cache.
TF_HIPS_AVX512 inline int64_t stream_on_avx512(const float* tile, int64_t rows, int64_t held,
                                               float* line, float* out) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i past = _mm512_set1_epi32(static_cast<int32_t>(held));
  // Lane k of a line is lane k of what is held, then lane k - held of the row.
  const __mmask16 is_held = static_cast<__mmask16>((1u << held) - 1u);
  const __m512i order = _mm512_sub_epi32(lane, past);
  __m512 kept = _mm512_loadu_ps(line);
  for (int64_t k = 0; k < rows; ++k) {
    const __m512 row = _mm512_permutexvar_ps(order, _mm512_loadu_ps(tile + 16 * k));
    stream_line(out + 16 * k, _mm512_mask_mov_ps(row, is_held, kept));
    kept = row;
  }
  _mm512_storeu_ps(line, kept);
  return rows;
}

TF_HIPS_INLINE int64_t stream_on_wide(const float* tile, int64_t rows, int64_t held, float* line,
                                      float* out) {
  return machine() == Machine::kAvx512 ? stream_on_avx512(tile, rows, held, line, out) : 0;
}

TF_HIPS_INLINE int64_t stream_wide(const float* tile, int64_t lines, float* out) {
  return machine() == Machine::kAvx512 ? stream_avx512(tile, lines, out) : 0;
}

#pragma GCC diagnostic pop
#endif  // TF_HIPS_HAS_AVX

// Copies a tile to memory. Lines at the ends, which the tile shares, go the ordinary way. Before
// others read: stream_end().
TF_HIPS_INLINE void stream_tile(const float* tile, int64_t count, float* out) {
#if defined(TF_HIPS_HAS_AVX)
  constexpr int64_t kLine = 16;
  const uintptr_t past = reinterpret_cast<uintptr_t>(out) % 64;
  const int64_t head = past % 4 != 0 ? count : static_cast<int64_t>((64 - past) % 64 / 4);
  int64_t j = head < count ? head : count;
  std::memcpy(out, tile, static_cast<size_t>(j) * 4);
  j += kLine * stream_wide(tile + j, (count - j) / kLine, out + j);
  for (; j + kLine <= count; j += kLine) {
    if (kPastCaches) {
      for (int64_t k = 0; k < kLine; k += 4) _mm_stream_ps(out + j + k, _mm_loadu_ps(tile + j + k));
    } else {
      prefetch_store(out + j);
      std::memcpy(out + j, tile + j, kLine * 4);
    }
  }
  std::memcpy(out + j, tile + j, static_cast<size_t>(count - j) * 4);
#else
  std::memcpy(out, tile, static_cast<size_t>(count) * 4);
#endif
}

TF_HIPS_INLINE void stream_end() {
#if defined(TF_HIPS_HAS_AVX)
  if (kPastCaches) _mm_sfence();
#endif
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_STORES_H_
