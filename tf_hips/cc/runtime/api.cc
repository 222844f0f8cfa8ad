// SPDX-License-Identifier: Apache-2.0
// The C interface: checks its arguments and hands over to tensor_codec.h with the pool of the
// process.
#include "tf_hips/cc/runtime/api.h"

#include <cstring>
#include <string>

#include "tf_hips/cc/runtime/packet.h"
#include "tf_hips/cc/runtime/parallel.h"
#include "tf_hips/cc/runtime/tensor_codec.h"

namespace {

using tf_hips::CodecCall;
using tf_hips::PoolParallelFor;

// A buffer may be missing only where it has no bytes.
bool Missing(const void* buffer, int64_t size) { return buffer == nullptr && size > 0; }

bool IsCallable(const TfHipsCodec* codec, const double* params, int64_t n) {
  return codec != nullptr && codec->abi_version == TF_HIPS_ABI_VERSION && n >= 0 &&
         n <= tf_hips::kMaxTensorElements && !Missing(params, codec->num_params);
}

bool HasRows(const uint8_t* const* packets, const int64_t* bytes, int32_t num) {
  if (num < 1 || packets == nullptr || bytes == nullptr) return false;
  for (int32_t row = 0; row < num; ++row) {
    if (bytes[row] < 0 || Missing(packets[row], bytes[row])) return false;
  }
  return true;
}

}  // namespace

extern "C" {

int64_t tf_hips_wire_bytes(const TfHipsCodec* codec, const double* params, int64_t n) {
  if (!IsCallable(codec, params, n)) return -TF_HIPS_BAD_ARGUMENT;
  return tf_hips::WireBytes(*codec, params, n);
}

int64_t tf_hips_encode(const TfHipsCodec* codec, const double* params, const TfHipsKey* key,
                       const float* gradient, float* residual, int64_t n, uint8_t* out,
                       int64_t capacity) {
  if (!IsCallable(codec, params, n) || key == nullptr || Missing(gradient, n) || out == nullptr) {
    return -TF_HIPS_BAD_ARGUMENT;
  }
  return tf_hips::EncodeTensor(PoolParallelFor, CodecCall{codec, params}, *key, gradient, residual,
                               residual, n, out, capacity);
}

int64_t tf_hips_encode_state(const TfHipsCodec* codec, const double* params, const TfHipsKey* key,
                             const float* gradient, const float* state, float* new_state, int64_t n,
                             uint8_t* out, int64_t capacity) {
  if (!IsCallable(codec, params, n) || key == nullptr || Missing(gradient, n) ||
      Missing(state, n) || Missing(new_state, n) || out == nullptr) {
    return -TF_HIPS_BAD_ARGUMENT;
  }
  return tf_hips::EncodeStateTensor(PoolParallelFor, CodecCall{codec, params}, *key, gradient,
                                    state, new_state, n, out, capacity);
}

int64_t tf_hips_encode_momentum(const TfHipsCodec* codec, const double* params,
                                const TfHipsKey* key, const float* gradient, float beta,
                                int32_t feedback, const float* state, float* new_state, int64_t n,
                                uint8_t* out, int64_t capacity) {
  if (!IsCallable(codec, params, n) || key == nullptr || Missing(gradient, n) ||
      !(beta >= 0.0f && beta < 1.0f) || Missing(state, n) || Missing(new_state, n) ||
      out == nullptr) {
    return -TF_HIPS_BAD_ARGUMENT;
  }
  return tf_hips::EncodeMomentumTensor(PoolParallelFor, CodecCall{codec, params}, *key, gradient,
                                       beta, feedback != 0, state, new_state, n, out, capacity);
}

int32_t tf_hips_decode(const TfHipsCodec* codec, const double* params, const uint8_t* packets,
                       int64_t bytes, float* out, int64_t n, int32_t add) {
  if (!IsCallable(codec, params, n) || bytes < 0 || Missing(packets, bytes) || Missing(out, n)) {
    return TF_HIPS_BAD_ARGUMENT;
  }
  return tf_hips::DecodeTensor(PoolParallelFor, CodecCall{codec, params}, packets, bytes, out, n,
                               add != 0);
}

int32_t tf_hips_merge(const TfHipsCodec* codec, const double* params, const uint8_t* const* packets,
                      const int64_t* bytes, int32_t num, float* out, int64_t n, int32_t* bad_row) {
  if (bad_row != nullptr) *bad_row = -1;
  if (!IsCallable(codec, params, n) || !HasRows(packets, bytes, num) || Missing(out, n))
    return TF_HIPS_BAD_ARGUMENT;
  return tf_hips::MergeTensor(PoolParallelFor, CodecCall{codec, params}, packets, bytes, num, out,
                              n, bad_row);
}

int64_t tf_hips_merge_encode(const TfHipsCodec* codec, const double* params, const TfHipsKey* key,
                             const uint8_t* const* packets, const int64_t* bytes, int32_t num,
                             float* residual, int64_t n, uint8_t* out, int64_t capacity,
                             int32_t* bad_row) {
  if (bad_row != nullptr) *bad_row = -1;
  if (!IsCallable(codec, params, n) || key == nullptr || !HasRows(packets, bytes, num) ||
      out == nullptr) {
    return -TF_HIPS_BAD_ARGUMENT;
  }
  return tf_hips::MergeEncodeTensor(PoolParallelFor, CodecCall{codec, params}, *key, packets, bytes,
                                    num, residual, residual, n, out, capacity, bad_row);
}

const char* tf_hips_status_text(int32_t status) {
  switch (status) {
    case TF_HIPS_OK:
      return "no error";
    case TF_HIPS_BUFFER_TOO_SMALL:
      return "the output buffer is smaller than the packets";
    case TF_HIPS_BODY_LENGTH:
      return "the body of a packet is shorter or longer than its element count asks for";
    case TF_HIPS_BODY_CONTRADICTS_PARAMS:
      return "the body of a packet contradicts the codec's parameters";
    case TF_HIPS_BAD_PARAMETER:
      return "a codec parameter is out of its range, or not an integer where it must be one, or a "
             "block that is no power of two from 16 to 1024, or a width that is not from 1 to 16";
    case TF_HIPS_NOT_PROVIDED:
      return "the codec's specification has no such function";
    case TF_HIPS_NO_SCRATCH:
      return "there is no memory for a vector that the codec keeps";
    case TF_HIPS_NEEDS_STATE:
      return "the codec has state, which must be given when it encodes";
    case TF_HIPS_BAD_ARGUMENT:
      return "an argument is missing, negative or absurdly large";
    case TF_HIPS_BAD_MAGIC:
      return "a packet does not start with \"HIPS\"";
    case TF_HIPS_BAD_VERSION:
      return "a packet has another version of the format";
    case TF_HIPS_BAD_FLAGS:
      return "a packet carries flags that this version does not know";
    case TF_HIPS_BAD_HASH:
      return "a packet was made by another codec, specification or parameter";
    case TF_HIPS_BAD_COUNT:
      return "a packet holds another number of elements";
    case TF_HIPS_TRUNCATED:
      return "the packets end too early";
    case TF_HIPS_TOO_LONG:
      return "the packets are followed by bytes that belong to none";
    case TF_HIPS_SPLIT_VARIABLE_SIZE:
      return "a codec without a fixed size encodes at most 2^20 elements at a time";
    case TF_HIPS_OUT_OF_MEMORY:
      return "there is no memory for a scratch buffer";
    default:
      return "unknown status";
  }
}

int32_t tf_hips_explain(const TfHipsCodec* codec, const double* params, const uint8_t* packets,
                        int64_t bytes, int64_t n, char* text, int64_t capacity) {
  if (text == nullptr || capacity < 1) return TF_HIPS_BAD_ARGUMENT;
  text[0] = '\0';
  if (!IsCallable(codec, params, n) || bytes < 0 || Missing(packets, bytes))
    return TF_HIPS_BAD_ARGUMENT;
  tf_hips::Layout layout;
  int32_t status = tf_hips::LayoutFor(*codec, params, n, &layout);
  if (status == TF_HIPS_OK) status = tf_hips::CheckPackets(*codec, layout, packets, bytes, n);
  const std::string full = tf_hips::Explain(status, *codec, params, packets, bytes, n);
  std::strncpy(text, full.c_str(), static_cast<size_t>(capacity - 1));
  text[capacity - 1] = '\0';
  return status;
}

uint32_t tf_hips_codec_hash(const TfHipsCodec* codec, const double* params) {
  return IsCallable(codec, params, 0) ? tf_hips::CodecHash(*codec, params) : 0;
}

}  // extern "C"
