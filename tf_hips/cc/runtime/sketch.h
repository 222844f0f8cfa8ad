// SPDX-License-Identifier: Apache-2.0
// Sketches of rows: random projections by which servers tell how far rows are from each other.
//
// A row is cut into blocks of `width`. Each element gets a sign, each block a turn, and the blocks
// are added up; where block b is turned by t, its element j goes to sum t + j, so there are
// 2 width sums, of which the caller adds the second half to the first. Sums are of double and in
// the order of elements, so they depend on nothing but the row.
//
// Thread-safe; the caller owns every buffer, and no buffer overlaps another. Values that are not
// finite go through. Returns 0, or a status before anything is written.

#ifndef TF_HIPS_CC_RUNTIME_SKETCH_H_
#define TF_HIPS_CC_RUNTIME_SKETCH_H_

#include <stdint.h>

#include "tf_hips/cc/runtime/api.h"

#ifdef __cplusplus
extern "C" {
#endif

// How one half of a sketch is made.
struct TfHipsSketchHalf {
  const uint64_t*
      signs;             // ceil(d / 64) words: element i is negated where bit i % 64 of i / 64 is 1
  const int64_t* turns;  // ceil(d / width), each in [0, width)
  int64_t width;
  double* sums;  // [n][2 width], to which the rows are added
};

// Adds n rows of d floats to their sums in each half; one pass over memory. Statuses are those of
// robust.h.
TF_HIPS_EXPORT int32_t tf_hips_robust_sketch(const float* const* rows, int32_t n, int64_t d,
                                             const struct TfHipsSketchHalf* halves,
                                             int32_t num_halves);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TF_HIPS_CC_RUNTIME_SKETCH_H_
