// SPDX-License-Identifier: Apache-2.0
// What generated loops do with a tile of floats beside computing it.

#ifndef TF_HIPS_CC_RUNTIME_TILES_H_
#define TF_HIPS_CC_RUNTIME_TILES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tf_hips/cc/runtime/ahead.h"
#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/stores.h"
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

// The same for the elements `base` .. `base` + count - 1 of a tile, a step at a time:
// step(base, at, count), `at` being where in the tile a step begins. In the last tile, which is not
// whole, no length is a constant: another copy of the loops would take as long to compile.
template <typename Count, typename Step>
TF_HIPS_INLINE void for_steps(int64_t base, Count count, const Step& step) {
  if constexpr (std::is_same_v<Count, int64_t>) {
    for (int64_t at = 0; at < count; at += kStep) {
      step(base + at, at, count - at < kStep ? count - at : kStep);
    }
  } else {
    for_tiles<kStep>(0, count,
                     [&](int64_t at, auto length) TF_HIPS_INLINED { step(base + at, at, length); });
  }
}

// Calls range(begin, end) for parts of 0 .. n - 1, the last ones first: what was written last is
// still in the second-level cache.
template <typename Range>
TF_HIPS_INLINE void for_ranges_back(int64_t n, const Range& range) {
  constexpr int64_t kRange = 64 * kTile;
  for (int64_t end = n; end > 0;) {
    const int64_t begin = (end - 1) / kRange * kRange;
    range(begin, end);
    end = begin;
  }
}

// A tile with each group of kMirror + 1 elements the other way round: out[j] = in[j ^ kMirror].
// Where `in`, which has `there` elements from here on, has none, it is 0.
template <int64_t kMirror, typename T, typename Count>
TF_HIPS_INLINE void mirror_tile(const T* in, int64_t there, Count count, T* out) {
  constexpr int64_t kGroup = kMirror + 1;
  const int64_t whole = (there < count ? there : static_cast<int64_t>(count)) / kGroup * kGroup;
  for (int64_t j = 0; j < whole; j += kGroup) {
    for (int64_t k = 0; k < kGroup; ++k) out[j + k] = in[j + kMirror - k];
  }
  for (int64_t j = whole; j < count; ++j) out[j] = (j ^ kMirror) < there ? in[j ^ kMirror] : T{0};
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

// Tiles that follow one another, past the caches. A line that two of them share waits for the
// second: written the ordinary way it would first be fetched.
class Stream {
 public:
  TF_HIPS_INLINE Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  TF_HIPS_INLINE ~Stream() { std::memcpy(begin_, line_, static_cast<size_t>(held_) * 4); }

  TF_HIPS_INLINE void put(const float* tile, int64_t count, float* out) {
    if (held_ != 0 && count % kLine == 0) {
#if defined(TF_HIPS_HAS_AVX)
      if (stream_on_wide(tile, count / kLine, held_, line_, begin_) != 0) {
        begin_ += count;
        return;
      }
#endif
    }
    int64_t from = 0;
    if (held_ != 0) {
      from = count < kLine - held_ ? count : kLine - held_;
      std::memcpy(line_ + held_, tile, static_cast<size_t>(from) * 4);
      held_ += from;
      if (held_ < kLine) return;
      stream_tile(line_, kLine, begin_);
    }
    // The first tile may begin within a line. Floats that are not aligned go the ordinary way.
    const uintptr_t past = reinterpret_cast<uintptr_t>(out + from) % 64;
    const int64_t head = past % 4 != 0 ? count : static_cast<int64_t>((64 - past) % 64 / 4);
    const int64_t left = count - from;
    held_ = head < left ? (left - head) % kLine : 0;
    stream_tile(tile + from, left - held_, out + from);
    begin_ = out + count - held_;
    std::memcpy(line_, tile + count - held_, static_cast<size_t>(held_) * 4);
  }

 private:
  static constexpr int64_t kLine = 16;
  alignas(64) float line_[kLine];
  int64_t held_ = 0;
  float* begin_ = line_;  // where the line that waits belongs
};

// A decoded tile to its place, as a TfHipsDecodeMode other than TF_HIPS_ADD asks.
TF_HIPS_INLINE void put_tile(const float* tile, int64_t count, int32_t mode, float* out,
                             Stream* stream) {
  if (mode == TF_HIPS_RESIDUAL) {
    prefetch_tile(out, count);
    residual_tile(tile, count, out);
  } else if (mode == TF_HIPS_STREAM) {
    stream->put(tile, count, out);
  } else {
    copy_tile(tile, count * 4, out);
  }
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_TILES_H_
