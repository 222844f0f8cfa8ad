// SPDX-License-Identifier: Apache-2.0
// Robust aggregation of n rows of d floats: what touches all of the rows, one pass over memory
// each.
//
// Rules that look at coordinates are sorting networks, one coordinate in each lane. All other rules
// look at squared distances between rows and end in a weighted sum of rows; a caller has both here
// and decides in between on n x n numbers.
//
// Distances are sums of squared differences, each pair centred on itself: a Gram matrix that is
// centred on any one row loses all digits of rows that are near each other when that row is far
// away, and a peer that lies chooses where its row is.
//
// Results depend neither on the number of threads nor on the width of registers: a row is cut into
// blocks of 512, and these into 16 lanes of float32 with fused multiply-add; blocks are added up in
// double, tasks of 2^15 in order. Sums are given for each chunk of 2^20 elements, so that servers
// that hold different chunks have what one server would have.
//
// All functions are thread-safe; the caller owns every buffer, and no buffer of one call overlaps
// another. Values that are not finite go through: `squares` of their row is then not finite, and
// the caller drops the row. A coordinate of -0 counts as 0, so that the order of rows does not
// matter. Return 0, or a status before anything is written.

#ifndef TF_HIPS_CC_RUNTIME_ROBUST_H_
#define TF_HIPS_CC_RUNTIME_ROBUST_H_

#include <stdint.h>

#include "tf_hips/cc/runtime/api.h"

#ifdef __cplusplus
extern "C" {
#endif

enum TfHipsRobustStatus { TF_HIPS_BAD_ROWS = 2, TF_HIPS_ROBUST_OUT_OF_MEMORY = 25 };

// Rows of one call at most.
enum { TF_HIPS_ROBUST_MAX_ROWS = 1024 };

// What becomes of the sorted values x_0 <= ... <= x_(n-1) of one coordinate.
enum TfHipsCoordinateRule {
  TF_HIPS_MEDIAN = 0,   // the middle one, of an even n the mean of the two; `drop` is 0
  TF_HIPS_TRIMMED = 1,  // the mean of x_drop .. x_(n-1-drop); 2 drop < n
  TF_HIPS_NEAREST = 2,  // the mean of the n - drop values nearest to the median; drop < n
  TF_HIPS_MAJORITY = 3  // -1, 0 or 1: the sign of the sum of their signs; `drop` is 0
};

// Applies a coordinate rule to n rows, or with `weights` [m][n], row-major, to the m rows that are
// weighted sums of them; these are never in memory as a whole. No `weights`: `m` does not
// count. `squares` [chunks][n]: sums of squares of the n rows; NULL: not wanted.
TF_HIPS_EXPORT int32_t tf_hips_robust_coordinate(const float* const* rows, int32_t n, int64_t d,
                                                 const float* weights, int32_t m, int32_t rule,
                                                 int32_t drop, float* out, double* squares);

// `squares`, which must be given: sums of squares of n rows, [chunks][n]. `distances`: those of the
// differences of any two, [chunks][n (n - 1) / 2] in the order (0,1), (0,2), ..., (1,2), ...; NULL:
// not wanted.
TF_HIPS_EXPORT int32_t tf_hips_robust_distances(const float* const* rows, int32_t n, int64_t d,
                                                double* squares, double* distances);

// out[k] = sum over j of weights[k][j] rows[j], for k < m; in the order of rows, the first product
// rounded, then fused.
TF_HIPS_EXPORT int32_t tf_hips_robust_mix(const float* const* rows, int32_t n, int64_t d,
                                          const float* weights, int32_t m, float* const* out);

#ifdef __cplusplus
}  // extern "C"

#include "tf_hips/cc/runtime/parallel.h"

namespace tf_hips {

// The same on the caller's threads.
int32_t RobustCoordinate(const float* const* rows, int32_t n, int64_t d, const float* weights,
                         int32_t m, int32_t rule, int32_t drop, float* out, double* squares,
                         const ParallelFor& parallel);
int32_t RobustDistances(const float* const* rows, int32_t n, int64_t d, double* squares,
                        double* distances, const ParallelFor& parallel);
int32_t RobustMix(const float* const* rows, int32_t n, int64_t d, const float* weights, int32_t m,
                  float* const* out, const ParallelFor& parallel);

}  // namespace tf_hips
#endif

#endif  // TF_HIPS_CC_RUNTIME_ROBUST_H_
