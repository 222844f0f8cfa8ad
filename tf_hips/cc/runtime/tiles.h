// SPDX-License-Identifier: Apache-2.0
// What generated loops do with a tile of floats beside computing it.

#ifndef TF_HIPS_CC_RUNTIME_TILES_H_
#define TF_HIPS_CC_RUNTIME_TILES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// Calls step(base, count) for one tile of [begin, end) after the other. The length of all but the
// last is a constant, so that compilers make loops without ends and remainders of them.
template <int64_t kSize, typename Step>
TF_HIPS_INLINE void for_tiles(int64_t begin, int64_t end, const Step& step) {
  int64_t base = begin;
  for (; base + kSize <= end; base += kSize) step(base, std::integral_constant<int64_t, kSize>());
  if (base < end) step(base, end - base);
}

// Floats ahead of a tile that are asked for while it is computed. A processor does so by itself,
// but not over the ends of pages of 1024 floats: where each tile is a part of a page, computing
// then waits for memory. Tiles of a page and more gain nothing by it.
constexpr int64_t kAhead = 2 * kTile;

// Asks for what lies `kAhead` elements behind a tile; beyond the vector's end nothing happens.
TF_HIPS_INLINE void prefetch_tile(const float* tile, int64_t count) {
  const auto ahead = reinterpret_cast<uintptr_t>(tile) + kAhead * 4;
  for (int64_t i = 0; i < count * 4; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + i));
  }
}

// sum[j] = a[j] + b[j]; `sum` may be b.
template <typename Count>
TF_HIPS_INLINE void add_tile(const float* a, const float* b, Count count, float* sum) {
  if constexpr (std::is_same_v<Count, std::integral_constant<int64_t, kStep>>) {
    prefetch_tile(a, count);
    prefetch_tile(b, count);
  }
  for (int64_t j = 0; j < count; ++j) sum[j] = a[j] + b[j];
}

TF_HIPS_INLINE void add_all(const float* a, const float* b, int64_t n, float* sum) {
  add_tile(a, b, n, sum);
}

TF_HIPS_INLINE bool is_finite(float value) {
  return std::fabs(value) <= std::numeric_limits<float>::max();
}

// The same as add_tile; returns whether all sums are finite.
template <typename Count>
TF_HIPS_INLINE bool sum_tile(const float* a, const float* b, Count count, float* sum) {
  uint32_t wrong = 0;
  for (int64_t j = 0; j < count; ++j) {
    const float value = a[j] + b[j];
    sum[j] = value;
    wrong |= is_finite(value) ? 0u : 1u;
  }
  return wrong == 0;
}

// TF_HIPS_RESIDUAL where `out` is known to be finite, so that only what is taken from must be
// looked at: of decoders that write a few elements, when their own encoder calls them.
constexpr int32_t kResidualOfFinite = 16;

// out[j] = out[j] - tile[j], 0 where that is not finite: what a NaN or an overflow broke must not
// stay.
TF_HIPS_INLINE void residual_tile(const float* tile, int64_t count, float* out) {
  for (int64_t j = 0; j < count; ++j) {
    const float left = out[j] - tile[j];
    out[j] = is_finite(left) ? left : 0.0f;
  }
}

// What is left of a sum when a part of its elements has been subtracted. Reads only, where all is
// finite.
TF_HIPS_INLINE void keep_finite(int64_t n, float* out) {
  for_tiles<kStep>(0, n, [&](int64_t base, auto count) TF_HIPS_INLINED {
    float* const tile = out + base;
    int32_t num = 0;
    for (int64_t j = 0; j < count; ++j) num += is_finite(tile[j]) ? 0 : 1;
    if (num == 0) return;
    for (int64_t j = 0; j < count; ++j) tile[j] = is_finite(tile[j]) ? tile[j] : 0.0f;
  });
}

// A decoded tile to its place, as a TfHipsDecodeMode other than TF_HIPS_ADD asks.
TF_HIPS_INLINE void put_tile(const float* tile, int64_t count, int32_t mode, float* out) {
  if (mode == TF_HIPS_RESIDUAL) {
    residual_tile(tile, count, out);
  } else if (mode == TF_HIPS_STREAM) {
    stream_tile(tile, count, out);
  } else {
    std::memcpy(out, tile, static_cast<size_t>(count) * 4);
  }
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_TILES_H_
