// SPDX-License-Identifier: Apache-2.0
// Vectors that are zero but for a few elements, past the caches.

#ifndef TF_HIPS_CC_RUNTIME_LATE_H_
#define TF_HIPS_CC_RUNTIME_LATE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/stores.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// A vector of n floats, made a tile at a time, whose lines are those of memory: nobody reads first
// what is overwritten whole. A tile is zeros again when what was put there is taken away, so a
// tile costs a store for each of its lines, and none of them depends on where elements are.
class LateTiles {
 public:
  // `is_used`: else nothing may be put, and there are no zeros.
  TF_HIPS_INLINE LateTiles(float* out, int64_t n, bool is_used)
      : past_(static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % 64 / sizeof(float))),
        out_(out),
        end_(n + past_) {
    if (is_used) std::memset(tile_, 0, sizeof tile_);
  }

  // Whether lines can be written so.
  static TF_HIPS_INLINE bool can_write([[maybe_unused]] const float* out) {
#if defined(TF_HIPS_HAS_AVX)
    return reinterpret_cast<uintptr_t>(out) % sizeof(float) == 0;
#else
    return false;
#endif
  }

  // The next elements that are not zero; indices ascend.
  TF_HIPS_INLINE void put(const uint32_t* indices, const float* values, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      const int64_t place = indices[j] + past_;
      if (place - begin_ >= kTile) write_until(place / kTile * kTile);
      const int64_t at = place - begin_;
      tile_[at] = 0.0f + values[j];
      touched_[num_touched_++] = static_cast<uint16_t>(at);
    }
  }

  TF_HIPS_INLINE void finish() {
    if (end_ > past_) write_until(end_);
  }

 private:
  // Writes the tile that is made, and zeros up to the one that begins at `next`.
  TF_HIPS_INLINE void write_until(int64_t next) {
    write();
    for (int64_t k = 0; k < num_touched_; ++k) tile_[touched_[k]] = 0.0f;
    num_touched_ = 0;
    for (begin_ += kTile; begin_ < next; begin_ += kTile) write();
  }

  TF_HIPS_INLINE void write() {
    const int64_t first = begin_ == 0 ? past_ : 0;
    const int64_t last = std::min(kTile, end_ - begin_);
    stream_tile(tile_ + first, last - first, out_ + (begin_ + first - past_));
  }

  alignas(64) float tile_[kTile];
  uint16_t touched_[kTile];
  int64_t num_touched_ = 0;
  const int64_t past_;  // floats of others in the first line
  float* const out_;
  const int64_t end_;
  int64_t begin_ = 0;  // of the tile that is made
};

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_LATE_H_
