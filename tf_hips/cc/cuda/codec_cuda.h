// SPDX-License-Identifier: Apache-2.0
// The C interface of one generated codec on a GPU: whole tensors, from device memory to device
// memory, in the order of a stream.
//
// The packets are those of api.h, prefixes included, byte for byte. Nothing waits for the GPU: what
// depends on data (scales, counts, the state of a packet) stays there. Pointers to floats must be
// aligned to 4 bytes, reports to 8, scratch to 16; packets may lie anywhere. Buffers of one call
// must not overlap, and stay as they are until the stream has passed. The current device of the
// calling thread must be that of the stream.
//
// A function returns a TfHipsStatus or TfHipsApiStatus for what can be told from its arguments, or
// TF_HIPS_CUDA_FAILED; then nothing was done, or not all of it.

#ifndef TF_HIPS_CC_CUDA_CODEC_CUDA_H_
#define TF_HIPS_CC_CUDA_CODEC_CUDA_H_

#include <stdint.h>

#include "tf_hips/cc/runtime/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TF_HIPS_CUDA_ABI_VERSION 3

// A kernel could not be launched; `error_text` says why.
#define TF_HIPS_CUDA_FAILED 32

// A report on packets that are in order. Any other is row << 40 | chunk << 8 | status, of the first
// row, and in it the first chunk, that is at fault.
#define TF_HIPS_CUDA_FINE UINT64_MAX

// The most tensors of one `decode`: a report has room for no larger number of a row.
#define TF_HIPS_CUDA_MAX_ROWS (1 << 23)

typedef struct TfHipsCudaCodec {
  int32_t abi_version;  // TF_HIPS_CUDA_ABI_VERSION
  const char* name;     // stem of the specification's file
  uint32_t spec_hash;
  int32_t num_params;
  const TfHipsParam* params;

  // Bytes of all packets of n elements, or -status.
  int64_t (*wire_bytes)(const double* params, int64_t n);

  // Bytes of scratch memory that any function needs for n elements, or -status.
  int64_t (*scratch_bytes)(const double* params, int64_t n);

  // Encodes gradient[0..n) to `packets`. With a residual: encodes v = gradient + residual, and
  // leaves v - decode(packets), 0 where that is not finite, in new_residual, which may be residual.
  // `report`, in device memory, becomes TF_HIPS_CUDA_FINE, or says, with row 0, why decode refuses
  // these packets; new_residual is then v, and neither it nor the packets are of use. NULL: nobody
  // asks, as where own_may_fail is 0 or there is no residual.
  int32_t (*encode)(const double* params, const TfHipsKey* key, const float* gradient,
                    const float* residual, float* new_residual, uint64_t* report, int64_t n,
                    uint8_t* packets, int64_t capacity, void* scratch, int64_t scratch_bytes,
                    void* stream);

  // Decodes 1 <= `num` <= TF_HIPS_CUDA_MAX_ROWS tensors of n elements, of `bytes` bytes each, and
  // sums them in their order; `packets`: pointers to device memory, in host memory. `mode`:
  // TF_HIPS_SET, TF_HIPS_ADD or, for one tensor, TF_HIPS_RESIDUAL. `report`, in device memory,
  // becomes TF_HIPS_CUDA_FINE, or says what is wrong with which packet; then `out` is untouched
  // where the status is 16 or more, else of no use.
  int32_t (*decode)(const double* params, const uint8_t* const* packets, int64_t bytes, int32_t num,
                    float* out, int64_t n, int32_t mode, uint64_t* report, void* scratch,
                    int64_t scratch_bytes, void* stream);

  // Vectors that outlive a call of the encoder, as in codec.h: their number, and names.
  int32_t num_states;
  const char* const* state_names;

  // Encodes as `encode` does. `state`: num_states vectors of n floats, one behind another, as the
  // call before left them, zeros at first; `new_state`: what they are after it, which must not
  // overlap them. NULL: the codec has no state; one that has some answers `encode` with
  // TF_HIPS_NEEDS_STATE.
  int32_t (*encode_state)(const double* params, const TfHipsKey* key, const float* gradient,
                          const float* state, float* new_state, int64_t n, uint8_t* packets,
                          int64_t capacity, void* scratch, int64_t scratch_bytes, void* stream);

  // What CUDA said when a function of this library last returned TF_HIPS_CUDA_FAILED to this
  // thread; "" before.
  const char* (*error_text)(void);

  // 0: decode never refuses what `encode` or `encode_state` made.
  int32_t own_may_fail;
} TfHipsCudaCodec;

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TF_HIPS_CC_CUDA_CODEC_CUDA_H_
