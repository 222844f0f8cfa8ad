// SPDX-License-Identifier: Apache-2.0
// Vectors whose elements cannot be computed one by one: sort and scatter (filter: flags.h, top_k:
// top_k.h). Loops hand in a tile at a time; what is kept between loops lies in scratch.h's memory.

#ifndef TF_HIPS_CC_RUNTIME_SELECT_H_
#define TF_HIPS_CC_RUNTIME_SELECT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "tf_hips/cc/runtime/ahead.h"
#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/flags.h"
#include "tf_hips/cc/runtime/late.h"
#include "tf_hips/cc/runtime/scratch.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/tiles.h"
#include "tf_hips/cc/runtime/top_k.h"

namespace tf_hips {

// Sorts words in place, a byte at a time. `spare`: as many words.
inline __attribute__((noinline)) void sort_keys(uint32_t* keys, int64_t count, uint32_t* spare) {
  constexpr int64_t kFew = 256;
  if (count < kFew) {
    std::sort(keys, keys + count);
    return;
  }
  uint32_t ends[4][256] = {};
  for (int64_t j = 0; j < count; ++j) {
    for (int byte = 0; byte < 4; ++byte) ++ends[byte][keys[j] >> (8 * byte) & 255];
  }
  uint32_t* from = keys;
  uint32_t* to = spare;
  for (int byte = 0; byte < 4; ++byte) {
    uint32_t* const begins = ends[byte];
    for (uint32_t value = 0, sum = 0; value < 256; ++value) {
      const uint32_t number = begins[value];
      begins[value] = sum;
      sum += number;
    }
    for (int64_t j = 0; j < count; ++j) to[begins[from[j] >> (8 * byte) & 255]++] = from[j];
    std::swap(from, to);
  }
}

// Sorts in place. NaNs become one and come last, -0 is less than 0. `spare`: as many words; the
// floats are moved there and back as words.
inline void sort_values(float* values, int64_t count, bool is_descending, uint32_t* keys,
                        uint32_t* spare) {
  int64_t numbers = 0;
  for (int64_t j = 0; j < count; ++j) {
    if (values[j] == values[j]) keys[numbers++] = float_key(values[j]);
  }
  sort_keys(keys, numbers, spare);
  for (int64_t j = 0; j < numbers; ++j) {
    values[j] = key_float(keys[is_descending ? numbers - 1 - j : j]);
  }
  for (int64_t j = numbers; j < count; ++j) {
    const uint32_t bits = 0x7FC00000u;
    std::memcpy(values + j, &bits, sizeof bits);
  }
}

template <typename T>
inline void sort_values(T* values, int64_t count, bool is_descending) {
  std::sort(values, values + count);
  if (is_descending) std::reverse(values, values + count);
}

// Places are kept as 32 bits.
constexpr int64_t kMaxScatter = int64_t{1} << 32;

// Appends a tile of indices to `out`, which holds `total`. False unless all ascend strictly and are
// less than n; `last`: the one before, -1 at first.
TF_HIPS_INLINE bool take_indices(const int64_t* tile, int64_t count, int64_t n, int64_t* last,
                                 uint32_t* out) {
  if (count == 0) return true;
  // A negative index is below the one before, or below -1 at first.
  bool is_good = tile[0] > *last;
  for (int64_t j = 1; j < count; ++j) is_good &= tile[j] > tile[j - 1];
  for (int64_t j = 0; j < count; ++j) out[j] = static_cast<uint32_t>(tile[j]);
  *last = tile[count - 1];
  return is_good & (*last < n);
}

// Writes a vector of n floats that is zero but for a few, in the way that a TfHipsDecodeMode asks
// for. Past the caches, where that can be; otherwise zeros are written first: a range at a time is
// slower there.
class Scattered {
 public:
  TF_HIPS_INLINE Scattered(float* out, int64_t n, int32_t mode)
      : out_(out), n_(n), mode_(how(out, mode)), late_(out, n, mode_ == TF_HIPS_STREAM) {
    if (mode_ == TF_HIPS_SET && n > 0) std::memset(out, 0, static_cast<size_t>(n) * 4);
  }

  // The next ones; behind the indices lies memory that may be read.
  TF_HIPS_INLINE void put(const uint32_t* indices, const float* values, int64_t count) {
    if (mode_ == TF_HIPS_STREAM) {
      late_.put(indices, values, count);
    } else if (mode_ == TF_HIPS_SET) {
      each(indices, count, [&](float* to, int64_t j) { *to = 0.0f + values[j]; });
    } else if (mode_ == TF_HIPS_ADD) {
      each(indices, count, [&](float* to, int64_t j) { *to += values[j]; });
    } else {
      each(indices, count, [&](float* to, int64_t j) {
        const float left = *to - (0.0f + values[j]);
        *to = is_finite(left) ? left : 0.0f;
      });
    }
  }

  // Does what is left.
  TF_HIPS_INLINE void finish() {
    if (mode_ == TF_HIPS_STREAM) late_.finish();
    if (mode_ == TF_HIPS_RESIDUAL) keep_finite(n_, out_);
  }

 private:
  // Elements that are asked for ahead of time; less than a tile.
  static TF_HIPS_INLINE int64_t num_fetched() { return kIntoSecondLevel ? 64 : 32; }

  static TF_HIPS_INLINE int32_t how(const float* out, int32_t mode) {
    return mode == TF_HIPS_STREAM && !LateTiles::can_write(out) ? TF_HIPS_SET : mode;
  }

  template <typename Change>
  TF_HIPS_INLINE void each(const uint32_t* indices, int64_t count, const Change& change) {
    const uint32_t* const next = indices + num_fetched();
    for (int64_t j = 0; j < count; ++j) {
      prefetch_line(out_ + next[j]);
      change(out_ + indices[j], j);
    }
  }

  float* const out_;
  const int64_t n_;
  const int32_t mode_;
  LateTiles late_;
};

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_SELECT_H_
