// SPDX-License-Identifier: Apache-2.0
// The C interface of libtf_hips_native.so: codecs applied to whole tensors.
//
// A tensor of n elements is cut into chunks of 2^20 elements; each chunk becomes one packet: a
// 16-byte prefix (`<4sHHII`: magic "HIPS", version, flags, codec hash, element count), then the
// codec's body. The encoding of a tensor is its packets, concatenated; an empty tensor is one
// packet of zero elements. Chunks share nothing, so results do not depend on the number of threads.
//
// All functions are thread-safe. The caller owns every buffer; buffers of one call must not
// overlap, but for a state in place. Packets may hold any bytes: they are checked before `out` is
// touched, and nothing outside the buffers is read or written.

#ifndef TF_HIPS_CC_RUNTIME_API_H_
#define TF_HIPS_CC_RUNTIME_API_H_

#include <stdint.h>

#include "tf_hips/cc/runtime/codec.h"

#define TF_HIPS_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Continues TfHipsStatus of codec.h, whose codes, below 16, come from the codecs.
enum TfHipsApiStatus {
  TF_HIPS_BAD_ARGUMENT = 16,         // a size is negative or absurd, or a buffer is missing
  TF_HIPS_BAD_MAGIC = 17,            // does not start with "HIPS": not a packet
  TF_HIPS_BAD_VERSION = 18,          // made by another version of the format
  TF_HIPS_BAD_FLAGS = 19,            // a flag this version does not know
  TF_HIPS_BAD_HASH = 20,             // made by another codec, specification or parameter value
  TF_HIPS_BAD_COUNT = 21,            // holds another number of elements
  TF_HIPS_TRUNCATED = 22,            // ends too early
  TF_HIPS_TOO_LONG = 23,             // bytes left over
  TF_HIPS_SPLIT_VARIABLE_SIZE = 24,  // several chunks of a codec whose packets have no fixed size
  TF_HIPS_OUT_OF_MEMORY = 25         // no memory for a scratch buffer
};

TF_HIPS_EXPORT int32_t tf_hips_abi_version(void);
TF_HIPS_EXPORT int32_t tf_hips_num_codecs(void);
// Sorted by name; NULL when out of range.
TF_HIPS_EXPORT const TfHipsCodec* tf_hips_codec_at(int32_t index);
// NULL when unknown.
TF_HIPS_EXPORT const TfHipsCodec* tf_hips_find_codec(const char* name);

// Bytes of all packets of n elements, prefixes included; an upper bound when the codec has no fixed
// size. Or -status.
TF_HIPS_EXPORT int64_t tf_hips_wire_bytes(const TfHipsCodec* codec, const double* params,
                                          int64_t n);

// Encodes gradient[0..n) and returns the bytes written, or -status.
// `residual` NULL: no error feedback. Else v = gradient + residual is encoded, and residual becomes
// v - decode(packet), with 0 for what is not finite. When encoding fails, the residuals of chunks
// already done are new, others old; of a chunk whose packet the codec itself does not decode, old
// but for rounding.
TF_HIPS_EXPORT int64_t tf_hips_encode(const TfHipsCodec* codec, const double* params,
                                      const TfHipsKey* key, const float* gradient, float* residual,
                                      int64_t n, uint8_t* out, int64_t capacity);

// Encodes gradient[0..n) with a codec that has state, and returns the bytes written, or -status.
// `state`: num_states rows of n floats, zeros before the first call; `new_state`, which is `state`
// itself or does not overlap it, becomes what to give the next call. On failure a new_state of its
// own holds nothing of use; in place, the chunks already done are new, others old.
TF_HIPS_EXPORT int64_t tf_hips_encode_state(const TfHipsCodec* codec, const double* params,
                                            const TfHipsKey* key, const float* gradient,
                                            const float* state, float* new_state, int64_t n,
                                            uint8_t* out, int64_t capacity);

// Encodes a running mean of gradients, m' = beta m + (1 - beta) gradient, with beta in [0, 1), and
// returns the bytes written, or -status. `state`: m, n floats, zeros before the first call, and if
// `feedback` is not 0 the residual of what is encoded, n floats more; `new_state` as for
// tf_hips_encode_state. m' is 0 where it would be at most 2^-96 or not finite; where the gradient
// is not finite it is encoded itself.
TF_HIPS_EXPORT int64_t tf_hips_encode_momentum(const TfHipsCodec* codec, const double* params,
                                               const TfHipsKey* key, const float* gradient,
                                               float beta, int32_t feedback, const float* state,
                                               float* new_state, int64_t n, uint8_t* out,
                                               int64_t capacity);

// Decodes to out[0..n), or adds to it. 0 or a status; `out` is untouched unless the status is
// below 16.
TF_HIPS_EXPORT int32_t tf_hips_decode(const TfHipsCodec* codec, const double* params,
                                      const uint8_t* packets, int64_t bytes, float* out, int64_t n,
                                      int32_t add);

// out = sum of the `num` >= 1 decoded tensors, added in the order given. `bad_row` may be NULL; it
// becomes the index of the tensor that a failure is about, -1 for none.
TF_HIPS_EXPORT int32_t tf_hips_merge(const TfHipsCodec* codec, const double* params,
                                     const uint8_t* const* packets, const int64_t* bytes,
                                     int32_t num, float* out, int64_t n, int32_t* bad_row);

// Merges and encodes again, chunk by chunk: v = residual + sum is encoded, residual becomes v -
// decode(packet) as in tf_hips_encode. `residual` NULL: the sum alone is encoded. `bad_row` as for
// tf_hips_merge. Returns the bytes written, or -status.
TF_HIPS_EXPORT int64_t tf_hips_merge_encode(const TfHipsCodec* codec, const double* params,
                                            const TfHipsKey* key, const uint8_t* const* packets,
                                            const int64_t* bytes, int32_t num, float* residual,
                                            int64_t n, uint8_t* out, int64_t capacity,
                                            int32_t* bad_row);

// What a status means, in one sentence without values; never NULL.
TF_HIPS_EXPORT const char* tf_hips_status_text(int32_t status);

// Why these packets do not decode to n elements, with what was expected and what came, as a
// NUL-terminated text of at most `capacity` bytes. Returns the status it describes; 0, and an empty
// text, when the prefixes are in order.
TF_HIPS_EXPORT int32_t tf_hips_explain(const TfHipsCodec* codec, const double* params,
                                       const uint8_t* packets, int64_t bytes, int64_t n, char* text,
                                       int64_t capacity);

// Hash that packets of this codec carry: FNV-1a-32 over the specification's hash and the
// parameters.
TF_HIPS_EXPORT uint32_t tf_hips_codec_hash(const TfHipsCodec* codec, const double* params);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TF_HIPS_CC_RUNTIME_API_H_
