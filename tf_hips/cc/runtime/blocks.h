// SPDX-License-Identifier: Apache-2.0
// Reductions of blocks of 16 to 1024 neighbouring elements, a power of two, so that a tile holds
// whole blocks.
//
// Floats: the last block is padded with the reducer's neutral value; lane l of 16 folds elements l,
// l + 16, ... from its first; lanes combine l with l + 8, then + 4, + 2, + 1; the initial value
// comes first of all. That is a block of reduce.h, cut to its length.

#ifndef TF_HIPS_CC_RUNTIME_BLOCKS_H_
#define TF_HIPS_CC_RUNTIME_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "tf_hips/cc/runtime/convert.h"
#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

// Blocks that a tile can hold.
constexpr int64_t kMaxBlocks = kTile / kLanes;

// How many blocks are before element `base`, with which one begins.
TF_HIPS_INLINE int64_t first_block(int64_t base, int64_t block) {
  return base >> __builtin_ctzll(static_cast<uint64_t>(block));
}

// How many blocks `count` elements have; the last one may be shorter.
TF_HIPS_INLINE int64_t num_blocks(int64_t count, int64_t block) {
  return first_block(count + block - 1, block);
}

// Calls step(base, count) for the blocks of a tile: number of the first, and how many.
template <typename Step>
TF_HIPS_INLINE void for_blocks(int64_t base, int64_t count, int64_t block, const Step& step) {
  step(first_block(base, block), num_blocks(count, block));
}

// Whether `block_reduce` can have blocks of that many elements.
inline bool is_block(int64_t block) {
  return block >= kLanes && block <= kTile && (block & (block - 1)) == 0;
}

// Reducers of integers, which wrap, so that their order does not matter.
struct IntSum {
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return int_add(a, b); }
};
struct IntProd {
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return int_mul(a, b); }
};
struct IntMax {
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return maximum<int64_t>(a, b); }
};
struct IntMin {
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return minimum<int64_t>(a, b); }
};
struct IntCount {
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return int_add(a, b != 0 ? 1 : 0); }
};
struct IntAnd {
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return a != 0 && b != 0 ? 1 : 0; }
};
struct IntOr {
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return a != 0 || b != 0 ? 1 : 0; }
};

// Reduces the blocks of a tile of `count` values; out[k] becomes that of block k.
template <typename Reducer>
TF_HIPS_INLINE void reduce_blocks(const float* values, int64_t count, int64_t block, float init,
                                  float* out) {
  const int64_t whole = first_block(count, block);
  int64_t k = blocks_wide<Reducer>(values, whole, block / kLanes, init, out);
  for (; k < whole; ++k) {
    out[k] = init;
    Reducer::fold(out[k], reduce_rows<Reducer>(values + k * block, block / kLanes));
  }
  if (whole * block == count) return;
  float padded[kTile];
  for (int64_t j = 0; j < block; ++j) {
    const int64_t at = whole * block + j;
    padded[j] = at < count ? values[at] : Reducer::identity;
  }
  out[whole] = init;
  Reducer::fold(out[whole], reduce_rows<Reducer>(padded, block / kLanes));
}

template <typename Reducer, typename T>
TF_HIPS_INLINE void reduce_int_blocks(const T* values, int64_t count, int64_t block, int64_t init,
                                      int64_t* out) {
  for (int64_t start = 0, k = 0; start < count; start += block, ++k) {
    const int64_t end = std::min(start + block, count);
    int64_t value = init;
    for (int64_t j = start; j < end; ++j) value = Reducer::fold(value, values[j]);
    out[k] = value;
  }
}

// Gives each of the `count` elements of a tile the value of its block: out[j] = at((base + j) /
// block). A tile begins with a block, or is a part of one.
template <int64_t kRoom, typename At, typename T>
TF_HIPS_INLINE void spread_blocks(const At& at, int64_t base, int64_t block, int64_t count,
                                  T* out) {
  int64_t k = first_block(base, block);
  const int64_t length = std::min(block, kRoom);
  for (int64_t start = 0; start < count; start += length, ++k) {
    const T value = at(k);
    // Beyond the last element there is room.
    for (int64_t row = start; row < start + length; row += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) out[row + l] = value;
    }
  }
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_BLOCKS_H_
