// SPDX-License-Identifier: Apache-2.0
// The passes of tf_hips/cc/runtime/robust.h on a GPU, in the order of a stream: the same results,
// bit for bit, where all rows are finite. A row that is not finite has a sum of squares that is
// not, here as there; what else comes out is then of no use.
//
// Vectors and matrices lie in device memory; arrays of pointers to rows lie in host memory and are
// read before a function returns. Nothing waits for the GPU. Pointers to floats must be aligned to
// 4 bytes (those of all rows to 16: fewer, wider loads), scratch to 16, doubles to 8. Buffers of
// one call must not overlap, and stay as they are until the stream has passed. The current device
// of the calling thread must be that of the stream.
//
// A function returns 0, TF_HIPS_BAD_ROWS or TF_HIPS_ROBUST_OUT_OF_MEMORY (less scratch than it
// needs) before anything is done, or TF_HIPS_CUDA_FAILED; then nothing was done, or not all of it.

#ifndef TF_HIPS_CC_CUDA_ROBUST_CUDA_H_
#define TF_HIPS_CC_CUDA_ROBUST_CUDA_H_

#include <stdint.h>

#include "tf_hips/cc/cuda/codec_cuda.h"
#include "tf_hips/cc/runtime/robust.h"

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of scratch memory that any function needs for n rows of d floats, or -TF_HIPS_BAD_ROWS.
TF_HIPS_EXPORT int64_t tf_hips_cuda_robust_scratch_bytes(int32_t n, int64_t d);

// tf_hips_robust_coordinate. With `weights`, or more than 64 rows, wanted `squares` are a pass of
// their own.
TF_HIPS_EXPORT int32_t tf_hips_cuda_robust_coordinate(const float* const* rows, int32_t n,
                                                      int64_t d, const float* weights, int32_t m,
                                                      int32_t rule, int32_t drop, float* out,
                                                      double* squares, void* scratch,
                                                      int64_t scratch_bytes, void* stream);

// tf_hips_robust_distances.
TF_HIPS_EXPORT int32_t tf_hips_cuda_robust_distances(const float* const* rows, int32_t n, int64_t d,
                                                     double* squares, double* distances,
                                                     void* scratch, int64_t scratch_bytes,
                                                     void* stream);

// tf_hips_robust_mix.
TF_HIPS_EXPORT int32_t tf_hips_cuda_robust_mix(const float* const* rows, int32_t n, int64_t d,
                                               const float* weights, int32_t m, float* const* out,
                                               void* scratch, int64_t scratch_bytes, void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TF_HIPS_CC_CUDA_ROBUST_CUDA_H_
