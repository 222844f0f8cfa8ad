// SPDX-License-Identifier: Apache-2.0
// Encodes, decodes and merges whole tensors: the loop over chunks behind api.h and behind the
// TensorFlow kernels.
//
// Every function takes the ParallelFor that runs its chunks; a chunk is one task and shares nothing
// with the others, so the result does not depend on the number of threads. Each task sets its own
// denormal mode. Callers own all buffers; scratch memory (one chunk of floats) belongs to the
// thread. Statuses are those of codec.h and api.h.

#ifndef TF_HIPS_CC_RUNTIME_TENSOR_CODEC_H_
#define TF_HIPS_CC_RUNTIME_TENSOR_CODEC_H_

#include <cstdint>

#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/parallel.h"

namespace tf_hips {

// A codec with the values of its parameters.
struct CodecCall {
  const TfHipsCodec* codec;
  const double* params;
};

// Encodes gradient[0..n). With error feedback (`residual` not null) v = gradient + residual is
// encoded, and new_residual = v - decode(packet), 0 where that is not finite; new_residual may be
// residual. Returns the bytes written, or -status.
int64_t EncodeTensor(const ParallelFor& parallel_for, const CodecCall& call, const TfHipsKey& key,
                     const float* gradient, const float* residual, float* new_residual, int64_t n,
                     uint8_t* out, int64_t capacity);

// Encodes gradient[0..n) with a codec that has state: num_states rows of n floats each, which must
// not overlap new_state. On failure new_state holds nothing of use. Returns the bytes written, or
// -status.
int64_t EncodeStateTensor(const ParallelFor& parallel_for, const CodecCall& call,
                          const TfHipsKey& key, const float* gradient, const float* state,
                          float* new_state, int64_t n, uint8_t* out, int64_t capacity);

// Encodes a running mean of gradients: m, the first n floats of `state`, takes in gradient[0..n),
// as in momentum.h, and is encoded, with error feedback if `feedback`, the residual being the next
// n floats. new_state, which may be state, has both afterwards. Returns the bytes written, or
// -status.
int64_t EncodeMomentumTensor(const ParallelFor& parallel_for, const CodecCall& call,
                             const TfHipsKey& key, const float* gradient, float beta, bool feedback,
                             const float* state, float* new_state, int64_t n, uint8_t* out,
                             int64_t capacity);

// Decodes to out[0..n), or adds to it.
int32_t DecodeTensor(const ParallelFor& parallel_for, const CodecCall& call, const uint8_t* packets,
                     int64_t bytes, float* out, int64_t n, bool add);

// Whether every row begins the packets of n elements, so that it is worth making room for them.
// `bad_row`, here and below, may be null; it becomes the row that a failure is about, -1 for none.
int32_t CheckRows(const CodecCall& call, const uint8_t* const* rows, const int64_t* row_bytes,
                  int32_t num_rows, int64_t n, int32_t* bad_row);

// out = sum of the decoded rows, added in order.
int32_t MergeTensor(const ParallelFor& parallel_for, const CodecCall& call,
                    const uint8_t* const* rows, const int64_t* row_bytes, int32_t num_rows,
                    float* out, int64_t n, int32_t* bad_row = nullptr);

// Encodes residual + sum of the decoded rows, chunk by chunk; residuals as in EncodeTensor.
int64_t MergeEncodeTensor(const ParallelFor& parallel_for, const CodecCall& call,
                          const TfHipsKey& key, const uint8_t* const* rows,
                          const int64_t* row_bytes, int32_t num_rows, const float* residual,
                          float* new_residual, int64_t n, uint8_t* out, int64_t capacity,
                          int32_t* bad_row = nullptr);

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_TENSOR_CODEC_H_
