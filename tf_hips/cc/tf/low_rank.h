// SPDX-License-Identifier: Apache-2.0
// What every rank computes on its own from sums of matrices: orthonormal columns, and products of
// low rank. The ranks must agree to the last bit, whatever their processors, so each sum has one
// order: no library for matrices promises that.
//
// Matrices are float, row-major, and may have no elements. Thread-safe; tasks run on the given
// ParallelFor, and their number changes no bit.

#ifndef TF_HIPS_CC_TF_LOW_RANK_H_
#define TF_HIPS_CC_TF_LOW_RANK_H_

#include <cstdint>

#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/parallel.h"

namespace tf_hips {

// Orthonormal columns that span those of `matrix` [rows, rank] and more: a column that is not
// finite, or that adds to those before it less than 2^-20 of the largest one, gives way to noise of
// `key`, so that there are always min(rows, rank) of them. Further ones are 0. Gram-Schmidt, twice,
// in double.
void Orthonormalize(const float* matrix, int64_t rows, int64_t rank, const TfHipsKey& key,
                    const ParallelFor& parallel, float* basis);

// left [rows, rank] and right [columns, rank]: the factors of a matrix [rows, columns], left times
// right transposed.
struct LowRank {
  const float* left;
  const float* right;
  int64_t rows, columns, rank;
};

// matrix [rows, columns] times right [columns, rank], and matrix transposed times left [rows,
// rank]: what general products take several times as long for, as they are made for wide factors.
void LeftFactor(const float* matrix, const float* right, int64_t rows, int64_t columns,
                int64_t rank, const ParallelFor& parallel, float* left);
void RightFactor(const float* matrix, const float* left, int64_t rows, int64_t columns,
                 int64_t rank, const ParallelFor& parallel, float* right);

// The matrix itself: rank products, added in order.
void LowRankProduct(const LowRank& factors, const ParallelFor& parallel, float* product);

// `matrix` without it; what is not finite is 0. `rest` may be `matrix`.
void LowRankRest(const LowRank& factors, const float* matrix, const ParallelFor& parallel,
                 float* rest);

}  // namespace tf_hips

#endif  // TF_HIPS_CC_TF_LOW_RANK_H_
