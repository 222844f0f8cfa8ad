// SPDX-License-Identifier: Apache-2.0
// The C interface of one generated codec: what a specification becomes, and all that the rest of
// the system knows of it.
//
// A codec is a constant table of functions that encode and decode ONE chunk (at most 2^20 elements
// of one tensor) to and from the body of one packet. Prefixes, the loop over chunks and threads
// belong to api.h. All functions are thread-safe and reentrant, keep no state, and read
// nothing outside the buffers they are given, whatever these hold.
//
// Parameters travel as double[num_params] in the order of `params`; integers are exact, the others
// are rounded to binary32 before anything else is done with them.

#ifndef TF_HIPS_CC_RUNTIME_CODEC_H_
#define TF_HIPS_CC_RUNTIME_CODEC_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// 2: decode has modes; encode_feedback and merge. 3: codecs with state. 4: which may be
// updated in place. 5: is_sparse.
#define TF_HIPS_ABI_VERSION 5

// The most vectors of state that a codec has.
#define TF_HIPS_MAX_STATES 8

// What a function of a codec returns: 0 or one of these; functions that return a size return
// -status instead. Status codes from 16 on belong to api.h.
enum TfHipsStatus {
  TF_HIPS_OK = 0,
  TF_HIPS_BUFFER_TOO_SMALL = 1,  // the output buffer is smaller than the body
  TF_HIPS_BODY_LENGTH = 2,       // the body is shorter or longer than its element count asks for
  // the body was made with other parameters, or holds a value they rule out, such as an index
  // beyond the gradient
  TF_HIPS_BODY_CONTRADICTS_PARAMS = 3,
  // a parameter or n is out of its range, or not an integer where it must be one; or parameters
  // make a block that is no power of two from 16 to 1024, or a width that is not from 1 to 16
  TF_HIPS_BAD_PARAMETER = 4,
  TF_HIPS_NOT_PROVIDED = 5,  // the specification has no such function
  TF_HIPS_NO_SCRATCH = 6,    // no memory for a vector that is kept between loops
  TF_HIPS_NEEDS_STATE = 7    // the codec has state: encode_state encodes, and nothing else
};

// What decoding does to out[0..n).
enum TfHipsDecodeMode {
  TF_HIPS_SET = 0,
  TF_HIPS_ADD = 1,      // out += value
  TF_HIPS_STREAM = 2,   // out = value, line by line (stores.h): for more than caches hold
  TF_HIPS_RESIDUAL = 3  // out -= value, and 0 where that is not finite
};

// Where the randomness of a call comes from. `offset`: index in its tensor of element 0 of this
// call.
typedef struct {
  uint64_t seed;
  uint32_t step;
  uint32_t tensor_id;
  uint64_t offset;
} TfHipsKey;

typedef struct {
  const char* name;
  int32_t is_integer;
  double default_value, minimum, maximum;  // the bounds are allowed values; no default: NaN
} TfHipsParam;

typedef struct TfHipsCodec {
  int32_t abi_version;  // TF_HIPS_ABI_VERSION
  const char* name;     // stem of the specification's file: "onebit"
  uint32_t spec_hash;   // FNV-1a-32 of the printed typed IR
  int32_t num_params;
  const TfHipsParam* params;
  int32_t is_fixed_size;  // the body's bytes depend on n and the parameters only
  int32_t is_sparse;      // elements of which the body says nothing are decoded as 0

  // Bytes of the body for n elements (an upper bound when not fixed), or -status.
  int64_t (*max_body_bytes)(const double* params, int64_t n);

  // Encodes in[0..n) to `body`; returns the bytes written, or -status and then `body` holds nothing
  // of use.
  int64_t (*encode)(const double* params, const TfHipsKey* key, const float* in, int64_t n,
                    uint8_t* body, int64_t capacity);

  // Decodes `bytes` bytes to out[0..n), as a TfHipsDecodeMode says. Returns 0 or a status; then
  // `out` is as it was.
  int32_t (*decode)(const double* params, const uint8_t* body, int64_t bytes, float* out, int64_t n,
                    int32_t mode);

  // Encodes v = gradient + residual and leaves v - decode(body), 0 where that is not finite, in
  // new_residual, which may be residual. Returns as encode does; when decode refuses the body,
  // new_residual is residual again but for rounding, 0 where v is not finite, and else untouched.
  // NULL: the specification lacks encode or decode.
  int64_t (*encode_feedback)(const double* params, const TfHipsKey* key, const float* gradient,
                             const float* residual, float* new_residual, int64_t n, uint8_t* body,
                             int64_t capacity);

  // out[0..n) = the sum of `num` >= 1 bodies, each element in the order of the rows; `mode`:
  // TF_HIPS_SET or TF_HIPS_STREAM. Returns 0 or a status; then `out` is as it was, and *bad_row the
  // row that it is about, or -1. NULL: the specification has no decode.
  int32_t (*merge)(const double* params, const uint8_t* const* bodies, const int64_t* bytes,
                   int32_t num, float* out, int64_t n, int32_t mode, int32_t* bad_row);

  // Vectors that outlive a call of the encoder, such as momentum: zeros before the first one,
  // always finite. Their number, 0 to TF_HIPS_MAX_STATES, and their names; NULL for none.
  int32_t num_states;
  const char* const* state_names;

  // Encodes in[0..n) as `encode` does. `state`: num_states vectors of n floats, as the call before
  // left them; `new_state`: what they are after it: all of them the same vectors, or none, which
  // then must not overlap. On failure state is as it was, and new_state, where it is another, holds
  // nothing of use. NULL: the codec has no state; one that has some answers `encode` with
  // TF_HIPS_NEEDS_STATE.
  int64_t (*encode_state)(const double* params, const TfHipsKey* key, const float* in,
                          const float* const* state, float* const* new_state, int64_t n,
                          uint8_t* body, int64_t capacity);
} TfHipsCodec;

// Adds a codec to the list that tf_hips_find_codec (api.h) searches. `codec` must live as long as
// the program.
void tf_hips_register_codec(const TfHipsCodec* codec);

#ifdef __cplusplus
}  // extern "C"

namespace tf_hips {

// Registers a codec when the library that holds it is loaded.
struct CodecRegistration {
  explicit CodecRegistration(const TfHipsCodec* codec) { tf_hips_register_codec(codec); }
};

}  // namespace tf_hips

// A codec that is a library of its own (compll run, the JIT) is found by its symbol and links
// against no registry. TF_HIPS_CODEC_ID, "my@0123456789abcdef", is what it says it is: its name,
// and 16 digits of the SHA-256 of its specification.
#if defined(TF_HIPS_STANDALONE_CODEC) && defined(TF_HIPS_CODEC_ID)
#define TF_HIPS_REGISTER_CODEC(getter)                                         \
  extern "C" {                                                                 \
  __attribute__((visibility("default"))) extern const char tf_hips_codec_id[]; \
  }                                                                            \
  const char tf_hips_codec_id[] = TF_HIPS_CODEC_ID
#elif defined(TF_HIPS_STANDALONE_CODEC)
#define TF_HIPS_REGISTER_CODEC(getter) static_assert(true, "")
#else
#define TF_HIPS_REGISTER_CODEC(getter) \
  static const ::tf_hips::CodecRegistration getter##_registration(getter())
#endif

#endif  // __cplusplus

#endif  // TF_HIPS_CC_RUNTIME_CODEC_H_
