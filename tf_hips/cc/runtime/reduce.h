// SPDX-License-Identifier: Apache-2.0
// Reductions of floats in one fixed tree, so that their results do not depend on machine, vector
// width or threads.
//
// Blocks of 1024 elements, the last one padded with the reducer's neutral value; in a block, lane l
// of 16 folds elements l, l + 16, ... from its first; lanes combine l with l + 8, then + 4, + 2, +
// 1; blocks combine pairwise, an odd one being carried up; the initial value comes first of all. No
// elements: the initial value.

#ifndef TF_HIPS_CC_RUNTIME_REDUCE_H_
#define TF_HIPS_CC_RUNTIME_REDUCE_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

// Elements of a tile, which is what generated loops work on at a time: one block of a reduction.
constexpr int64_t kTile = 1024;
constexpr int64_t kLanes = 16;

// Four floats, unaligned when read from memory. Wider vectors of this kind are taken apart element
// by element where the machine does not have them; four times four are vector code everywhere.
typedef float FloatVector __attribute__((vector_size(16)));
typedef float FloatVectorInMemory __attribute__((vector_size(16), aligned(4), may_alias));

struct Sum {
  static constexpr float identity = 0.0f;
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a + b;
  }
};

struct Prod {
  static constexpr float identity = 1.0f;
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a * b;
  }
};

struct Max {
  static constexpr float identity = -std::numeric_limits<float>::infinity();
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a > b ? a : b;
  }
};

struct Min {
  static constexpr float identity = std::numeric_limits<float>::infinity();
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a < b ? a : b;
  }
};

// `rows` times 16 values, at least 16, in the order of a block.
template <typename Reducer>
TF_HIPS_INLINE float reduce_rows(const float* values, int64_t rows) {
  const FloatVectorInMemory* in = reinterpret_cast<const FloatVectorInMemory*>(values);
  FloatVector a = in[0], b = in[1], c = in[2], d = in[3];
  for (int64_t row = 1; row < rows; ++row) {
    const FloatVector next[4] = {in[4 * row], in[4 * row + 1], in[4 * row + 2], in[4 * row + 3]};
    Reducer::fold(a, next[0]);
    Reducer::fold(b, next[1]);
    Reducer::fold(c, next[2]);
    Reducer::fold(d, next[3]);
  }
  const FloatVector lanes[4] = {a, b, c, d};
  float lane[kLanes];
  std::memcpy(lane, lanes, sizeof lane);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t l = 0; l < width; ++l) Reducer::fold(lane[l], lane[l + width]);
  }
  return lane[0];
}

// One block of kTile values.
template <typename Reducer>
TF_HIPS_INLINE float reduce_block(const float* values) {
  return reduce_rows<Reducer>(values, kTile / kLanes);
}

// One block of `count` values, 1 <= count <= kTile.
template <typename Reducer>
TF_HIPS_INLINE float reduce_tile(const float* values, int64_t count) {
  if (count == kTile) return reduce_block<Reducer>(values);
  float padded[kTile];
  for (int64_t j = 0; j < count; ++j) padded[j] = values[j];
  for (int64_t j = count; j < kTile; ++j) padded[j] = Reducer::identity;
  return reduce_block<Reducer>(padded);
}

// Combines the blocks' results pairwise as they come: level k holds a finished subtree of 2^k
// blocks.
template <typename Reducer>
class Tree {
 public:
  TF_HIPS_INLINE void add(float value) {
    int level = 0;
    for (uint64_t blocks = blocks_; blocks & 1; blocks >>= 1, ++level) {
      float joined = subtree_[level];
      Reducer::fold(joined, value);
      value = joined;
    }
    subtree_[level] = value;
    ++blocks_;
  }

  TF_HIPS_INLINE float finish(float init) const {
    if (blocks_ == 0) return init;
    bool has_value = false;
    float value = 0.0f;
    int level = 0;
    for (uint64_t blocks = blocks_; blocks != 0; blocks >>= 1, ++level) {
      if ((blocks & 1) == 0) continue;
      float joined = subtree_[level];
      if (has_value) Reducer::fold(joined, value);
      value = joined;
      has_value = true;
    }
    Reducer::fold(init, value);
    return init;
  }

 private:
  uint64_t blocks_ = 0;
  float subtree_[64];
};

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_REDUCE_H_
