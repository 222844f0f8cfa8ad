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
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// Elements of a tile, which is what generated loops work on at a time: one block of a reduction.
constexpr int64_t kTile = 1024;
constexpr int64_t kLanes = 16;
// Elements of a step, for loops that need no whole block at a time. A step is short enough that a
// processor begins the next one while it waits for the last sums, quotients and random bits of this
// one.
constexpr int64_t kStep = 256;

// Four floats, unaligned when read from memory. Wider vectors of this kind are taken apart element
// by element where the machine does not have them; four times four are vector code everywhere.
typedef float FloatVector __attribute__((vector_size(16)));
typedef float FloatVectorInMemory __attribute__((vector_size(16), aligned(4), may_alias));

// `identity` pads; folding any value into `start` gives that value, a sum's sign of zero included.
struct Sum {
  static constexpr float identity = 0.0f;
  static constexpr float start = -0.0f;
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a + b;
  }
};

struct Prod {
  static constexpr float identity = 1.0f;
  static constexpr float start = 1.0f;
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a * b;
  }
};

struct Max {
  static constexpr float identity = -std::numeric_limits<float>::infinity();
  static constexpr float start = -std::numeric_limits<float>::infinity();
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a > b ? a : b;
  }
};

struct Min {
  static constexpr float identity = std::numeric_limits<float>::infinity();
  static constexpr float start = std::numeric_limits<float>::infinity();
  template <typename T>
  static TF_HIPS_INLINE void fold(T& a, const T& b) {
    a = a < b ? a : b;
  }
};

// What the 16 lanes of a block combine to.
template <typename Reducer>
TF_HIPS_INLINE float combine_lanes(const FloatVector* lanes) {
  FloatVector a = lanes[0], b = lanes[1];
  Reducer::fold(a, lanes[2]);
  Reducer::fold(b, lanes[3]);
  Reducer::fold(a, b);
  float lane[4];
  std::memcpy(lane, &a, sizeof lane);
  Reducer::fold(lane[0], lane[2]);
  Reducer::fold(lane[1], lane[3]);
  Reducer::fold(lane[0], lane[1]);
  return lane[0];
}

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
  return combine_lanes<Reducer>(lanes);
}

// Folds rows of 16 values to `lanes` in registers that hold a row; returns how many it did: none on
// machines without them.
#if defined(TF_HIPS_HAS_AVX)
typedef float RowVector __attribute__((vector_size(64)));
typedef float RowVectorInMemory __attribute__((vector_size(64), aligned(4), may_alias));

template <typename Reducer>
TF_HIPS_AVX512 inline int64_t fold_avx512(const float* values, int64_t rows, FloatVector* lanes) {
  const RowVectorInMemory* in = reinterpret_cast<const RowVectorInMemory*>(values);
  RowVectorInMemory* out = reinterpret_cast<RowVectorInMemory*>(lanes);
  RowVector a = *out;
  int64_t row = 0;
  // A step at a time, without a loop: when its end is foreseen, the next work begins meanwhile.
  constexpr int64_t kRows = kStep / kLanes;
  for (; row + kRows <= rows; row += kRows) {
#pragma GCC unroll 16
    for (int64_t k = 0; k < kRows; ++k) {
      const RowVector next = in[row + k];
      Reducer::fold(a, next);
    }
  }
  for (; row < rows; ++row) {
    const RowVector next = in[row];
    Reducer::fold(a, next);
  }
  *out = a;
  return rows;
}

// The same in two registers of half a row.
typedef float HalfVector __attribute__((vector_size(32)));
typedef float HalfVectorInMemory __attribute__((vector_size(32), aligned(4), may_alias));

template <typename Reducer>
TF_HIPS_AVX2 inline int64_t fold_avx2(const float* values, int64_t rows, FloatVector* lanes) {
  const HalfVectorInMemory* in = reinterpret_cast<const HalfVectorInMemory*>(values);
  HalfVectorInMemory* out = reinterpret_cast<HalfVectorInMemory*>(lanes);
  HalfVector a = out[0], b = out[1];
  int64_t row = 0;
  constexpr int64_t kRows = kStep / kLanes;
  for (; row + kRows <= rows; row += kRows) {
#pragma GCC unroll 16
    for (int64_t k = 0; k < kRows; ++k) {
      const HalfVector next[2] = {in[2 * (row + k)], in[2 * (row + k) + 1]};
      Reducer::fold(a, next[0]);
      Reducer::fold(b, next[1]);
    }
  }
  for (; row < rows; ++row) {
    const HalfVector next[2] = {in[2 * row], in[2 * row + 1]};
    Reducer::fold(a, next[0]);
    Reducer::fold(b, next[1]);
  }
  out[0] = a, out[1] = b;
  return rows;
}

template <typename Reducer>
TF_HIPS_INLINE int64_t fold_wide(const float* values, int64_t rows, FloatVector* lanes) {
  switch (machine()) {
    case Machine::kAvx512:
      return fold_avx512<Reducer>(values, rows, lanes);
    case Machine::kAvx2:
      return fold_avx2<Reducer>(values, rows, lanes);
    default:
      return 0;
  }
}

// Blocks of `rows` rows, one after the other: out[k] becomes what the initial value and block k
// give. Returns how many it did.
template <typename Reducer>
TF_HIPS_AVX512 inline int64_t blocks_avx512(const float* values, int64_t blocks, int64_t rows,
                                            float init, float* out) {
  const RowVectorInMemory* in = reinterpret_cast<const RowVectorInMemory*>(values);
  for (int64_t k = 0; k < blocks; ++k, in += rows) {
    RowVector a = in[0];
    for (int64_t row = 1; row < rows; ++row) {
      const RowVector next = in[row];
      Reducer::fold(a, next);
    }
    FloatVector lanes[4];
    std::memcpy(lanes, &a, sizeof lanes);
    float value = init;
    Reducer::fold(value, combine_lanes<Reducer>(lanes));
    out[k] = value;
  }
  return blocks;
}

template <typename Reducer>
TF_HIPS_AVX2 inline int64_t blocks_avx2(const float* values, int64_t blocks, int64_t rows,
                                        float init, float* out) {
  const HalfVectorInMemory* in = reinterpret_cast<const HalfVectorInMemory*>(values);
  for (int64_t k = 0; k < blocks; ++k, in += 2 * rows) {
    HalfVector half[2] = {in[0], in[1]};
    for (int64_t row = 1; row < rows; ++row) {
      const HalfVector next[2] = {in[2 * row], in[2 * row + 1]};
      Reducer::fold(half[0], next[0]);
      Reducer::fold(half[1], next[1]);
    }
    FloatVector lanes[4];
    std::memcpy(lanes, half, sizeof lanes);
    float value = init;
    Reducer::fold(value, combine_lanes<Reducer>(lanes));
    out[k] = value;
  }
  return blocks;
}

template <typename Reducer>
TF_HIPS_INLINE int64_t blocks_wide(const float* values, int64_t blocks, int64_t rows, float init,
                                   float* out) {
  switch (machine()) {
    case Machine::kAvx512:
      return blocks_avx512<Reducer>(values, blocks, rows, init, out);
    case Machine::kAvx2:
      return blocks_avx2<Reducer>(values, blocks, rows, init, out);
    default:
      return 0;
  }
}
#else
template <typename Reducer>
TF_HIPS_INLINE int64_t fold_wide(const float*, int64_t, FloatVector*) {
  return 0;
}
template <typename Reducer>
TF_HIPS_INLINE int64_t blocks_wide(const float*, int64_t, int64_t, float, float*) {
  return 0;
}
#endif

// Folds rows of 16 values as they come, and combines the blocks' results pairwise: level k holds a
// finished subtree of 2^k blocks.
template <typename Reducer>
class Tree {
 public:
  TF_HIPS_INLINE Tree() { start_block(); }

  // The next `count` values; kTile is a multiple of it, but for the last ones.
  TF_HIPS_INLINE void take(const float* values, int64_t count) {
    const int64_t rows = count / kLanes;
    fold_rows(values, rows);
    if (rows * kLanes != count) {
      float padded[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) {
        const int64_t at = rows * kLanes + l;
        padded[l] = at < count ? values[at] : Reducer::identity;
      }
      fold_rows(padded, 1);
    }
    if (rows_ == kRows) end_block();
  }

  // Where the 16 lanes of the present block are, for those that fold rows to them by themselves,
  // and tell of whole rows then.
  TF_HIPS_INLINE float* lanes() { return reinterpret_cast<float*>(lanes_); }
  TF_HIPS_INLINE void taken(int64_t count) {
    rows_ += count / kLanes;
    if (rows_ == kRows) end_block();
  }

  TF_HIPS_INLINE float finish(float init) {
    if (rows_ > 0) {
      // One row of the padding does what all of them do.
      float padded[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) padded[l] = Reducer::identity;
      fold_rows(padded, 1);
      end_block();
    }
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
  static constexpr int64_t kRows = kTile / kLanes;

  TF_HIPS_INLINE void start_block() {
    rows_ = 0;
    float start[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) start[l] = Reducer::start;
    std::memcpy(lanes_, start, sizeof start);
  }

  TF_HIPS_INLINE void fold_rows(const float* values, int64_t rows) {
    const FloatVectorInMemory* in = reinterpret_cast<const FloatVectorInMemory*>(values);
    int64_t row = fold_wide<Reducer>(values, rows, lanes_);
    FloatVector a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
    for (; row < rows; ++row) {
      const FloatVector next[4] = {in[4 * row], in[4 * row + 1], in[4 * row + 2], in[4 * row + 3]};
      Reducer::fold(a, next[0]);
      Reducer::fold(b, next[1]);
      Reducer::fold(c, next[2]);
      Reducer::fold(d, next[3]);
    }
    lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
    rows_ += rows;
  }

  TF_HIPS_INLINE void end_block() {
    add(combine_lanes<Reducer>(lanes_));
    start_block();
  }

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

  FloatVector lanes_[4];
  int64_t rows_;  // of the block that is under way
  uint64_t blocks_ = 0;
  float subtree_[64];
};

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_REDUCE_H_
