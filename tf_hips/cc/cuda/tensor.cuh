// SPDX-License-Identifier: Apache-2.0
// Tensors of many chunks: where their packets lie, and what stands before each.

#ifndef TF_HIPS_CC_CUDA_TENSOR_CUH_
#define TF_HIPS_CC_CUDA_TENSOR_CUH_

#include "tf_hips/cc/cuda/bits.cuh"
#include "tf_hips/cc/cuda/device.cuh"
#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/layout.h"

namespace tf_hips {
namespace cuda {

constexpr int64_t kPrefixBytes = 16;
constexpr int64_t kMaxTensorElements = int64_t{1} << 40;
// Packets of which a kernel takes pointers along; more are added up by several kernels.
constexpr int32_t kMaxRows = 64;
static_assert(kMaxRows <= kThreads, "one block of threads checks the packets of a small call");

// Where the packets of a tensor lie, as in packet.h, with the layout of their bodies.
template <typename Layout>
struct Tensor {
  Layout full, last;  // of every chunk but the last, and of that
  int64_t n, chunks, stride, total;
  uint32_t hash;
  int32_t last_chunk, last_elements;

  TF_HIPS_INLINE int64_t elements(int32_t chunk) const {
    return chunk == last_chunk ? last_elements : static_cast<int32_t>(kChunkElements);
  }
  TF_HIPS_INLINE const Layout& layout(int32_t chunk) const {
    return chunk == last_chunk ? last : full;
  }
};

// Pointers to the packets that are to be summed, by their numbers from `first` on.
struct Rows {
  const uint8_t* row[kMaxRows];
  int32_t num, first;
};

inline uint32_t fnv1a(uint32_t hash, uint64_t value, int bytes) {
  for (int k = 0; k < bytes; ++k) {
    hash = (hash ^ static_cast<uint8_t>(value >> (8 * k))) * 16777619u;
  }
  return hash;
}

// The hash that packets carry, as in packet.cc.
inline uint32_t codec_hash(uint32_t spec_hash, const TfHipsParam* params, int32_t num,
                           const double* values) {
  uint32_t hash = fnv1a(2166136261u, spec_hash, 4);
  for (int32_t k = 0; k < num; ++k) {
    const double value = held_value(params[k], values[k]);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    hash = fnv1a(hash, bits, 8);
  }
  return hash;
}

// Lays a tensor of n elements out; `make_layout(n, &layout)` does so for one chunk. 0 or a status.
template <typename Layout, typename MakeLayout>
inline int32_t lay_out(int64_t n, uint32_t hash, const MakeLayout& make_layout,
                       Tensor<Layout>* tensor) {
  if (n < 0 || n > kMaxTensorElements) return TF_HIPS_BAD_ARGUMENT;
  tensor->n = n;
  tensor->hash = hash;
  tensor->chunks = n <= kChunkElements ? 1 : (n - 1) / kChunkElements + 1;
  tensor->last_chunk = static_cast<int32_t>(tensor->chunks - 1);
  tensor->last_elements = static_cast<int32_t>(n - tensor->last_chunk * kChunkElements);
  int32_t status = make_layout(least(n, kChunkElements), &tensor->full);
  if (status != TF_HIPS_OK) return status;
  status = make_layout(tensor->last_elements, &tensor->last);
  if (status != TF_HIPS_OK) return status;
  tensor->stride = kPrefixBytes + tensor->full.bytes;
  tensor->total = (tensor->chunks - 1) * tensor->stride + kPrefixBytes + tensor->last.bytes;
  return TF_HIPS_OK;
}

TF_HIPS_INLINE void write_prefix(uint32_t hash, int64_t elements, uint8_t* packet) {
  store_code(0x53504948u, 32, packet);  // "HIPS"
  store_code(1, 32, packet + 4);        // version 1, no flags
  store_code(hash, 32, packet + 8);
  store_code(static_cast<uint64_t>(elements), 32, packet + 12);
}

// What is wrong with a prefix, as a status.
TF_HIPS_INLINE int32_t check_prefix(uint32_t hash, int64_t elements, const uint8_t* packet) {
  if (load_code(packet, 32) != 0x53504948u) return TF_HIPS_BAD_MAGIC;
  if (load_code(packet + 4, 16) != 1) return TF_HIPS_BAD_VERSION;
  if (load_code(packet + 6, 16) != 0) return TF_HIPS_BAD_FLAGS;
  if (load_code(packet + 8, 32) != hash) return TF_HIPS_BAD_HASH;
  if (load_code(packet + 12, 32) != elements) return TF_HIPS_BAD_COUNT;
  return TF_HIPS_OK;
}

// What one block of threads does of a small call.
enum Alone : int32_t {
  kNotAlone = 0,
  kSteps = 1,  // its kernels
  kOwn = 2,    // of a decode: makes the report of packets that are in order, before
  kAll = 3,    // of a decode: makes the report, and checks the packets, before
};

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_TENSOR_CUH_
