// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/runtime/packet.h"

#include <cstdio>
#include <cstring>
#include <limits>
#include <string>

#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/layout.h"

namespace tf_hips {
namespace {

constexpr uint8_t kMagic[4] = {'H', 'I', 'P', 'S'};

// Bytes are written and read one by one: the format is little-endian on every machine.
void Store(uint8_t* bytes, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
}

uint32_t Load(const uint8_t* bytes, int num_bytes) {
  uint32_t value = 0;
  for (int i = 0; i < num_bytes; ++i) value |= static_cast<uint32_t>(bytes[i]) << (8 * i);
  return value;
}

uint32_t Fnv1a(uint32_t hash, const uint8_t* bytes, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) hash = (hash ^ bytes[i]) * 16777619u;
  return hash;
}

int32_t CheckPrefix(const uint8_t* prefix, uint32_t hash, int64_t num_elements) {
  if (std::memcmp(prefix, kMagic, sizeof(kMagic)) != 0) return TF_HIPS_BAD_MAGIC;
  if (Load(prefix + 4, 2) != kPacketVersion) return TF_HIPS_BAD_VERSION;
  if (Load(prefix + 6, 2) != 0) return TF_HIPS_BAD_FLAGS;
  if (Load(prefix + 8, 4) != hash) return TF_HIPS_BAD_HASH;
  if (Load(prefix + 12, 4) != num_elements) return TF_HIPS_BAD_COUNT;
  return TF_HIPS_OK;
}

std::string Hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", static_cast<unsigned>(value));
  return text;
}

std::string Describe(const TfHipsCodec& codec, const double* params) {
  std::string text = codec.name;
  for (int32_t i = 0; i < codec.num_params; ++i) {
    char value[64];
    std::snprintf(value, sizeof(value), "%.17g", params[i]);
    text += std::string(i == 0 ? "(" : ", ") + codec.params[i].name + "=" + value;
  }
  return codec.num_params > 0 ? text + ")" : text;
}

}  // namespace

int32_t CheckParams(const TfHipsCodec& codec, const double* params) {
  if (codec.num_params > 0 && params == nullptr) return TF_HIPS_BAD_ARGUMENT;
  const ScopedExactDenormals exact;
  for (int32_t i = 0; i < codec.num_params; ++i) {
    if (!is_allowed(codec.params[i], params[i])) return TF_HIPS_BAD_PARAMETER;
  }
  return TF_HIPS_OK;
}

uint32_t CodecHash(const TfHipsCodec& codec, const double* params) {
  // A parameter may be a denormal binary32, and its hash is one number in all threads.
  const ScopedExactDenormals exact;
  uint8_t bytes[8];
  Store(bytes, codec.spec_hash, 4);
  uint32_t hash = Fnv1a(2166136261u, bytes, 4);
  for (int32_t i = 0; i < codec.num_params; ++i) {
    const double value = held_value(codec.params[i], params[i]);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    Store(bytes, bits, 8);
    hash = Fnv1a(hash, bytes, 8);
  }
  return hash;
}

int64_t PacketBytes(const TfHipsCodec& codec, const double* params, int64_t n) {
  const int64_t body = codec.max_body_bytes(params, n);
  return body < 0 ? body : kPrefixBytes + body;
}

int64_t WireBytes(const TfHipsCodec& codec, const double* params, int64_t n) {
  if (n < 0 || n > kMaxTensorElements) return -TF_HIPS_BAD_ARGUMENT;
  if (const int32_t status = CheckParams(codec, params)) return -status;
  const int64_t num_chunks = NumChunks(n);
  const int64_t last = PacketBytes(codec, params, ChunkElements(n, num_chunks - 1));
  if (last < 0 || num_chunks == 1) return last;
  const int64_t full = PacketBytes(codec, params, kChunkElements);
  if (full < 0) return full;
  if (full > (std::numeric_limits<int64_t>::max() - last) / (num_chunks - 1))
    return -TF_HIPS_BAD_ARGUMENT;
  return (num_chunks - 1) * full + last;
}

void WritePrefix(uint8_t* prefix, uint32_t hash, uint32_t num_elements) {
  std::memcpy(prefix, kMagic, sizeof(kMagic));
  Store(prefix + 4, kPacketVersion, 2);
  Store(prefix + 6, 0, 2);
  Store(prefix + 8, hash, 4);
  Store(prefix + 12, num_elements, 4);
}

int32_t LayoutFor(const TfHipsCodec& codec, const double* params, int64_t n, Layout* layout) {
  const int64_t total = WireBytes(codec, params, n);
  if (total < 0) return static_cast<int32_t>(-total);
  layout->num_chunks = NumChunks(n);
  if (layout->num_chunks > 1 && !codec.is_fixed_size) return TF_HIPS_SPLIT_VARIABLE_SIZE;
  layout->hash = CodecHash(codec, params);
  layout->total = total;
  layout->stride = layout->num_chunks == 1 ? total : PacketBytes(codec, params, kChunkElements);
  return TF_HIPS_OK;
}

int32_t CheckPackets(const TfHipsCodec& codec, const Layout& layout, const uint8_t* packets,
                     int64_t bytes, int64_t n, int64_t* chunk) {
  for (int64_t i = 0; i < layout.num_chunks; ++i) {
    if (chunk != nullptr) *chunk = i;
    const int64_t begin = i * layout.stride;
    // Prefixes come first: of a foreign packet, what it is says more than how long it is.
    if (bytes - begin < kPrefixBytes) return TF_HIPS_TRUNCATED;
    if (const int32_t status = CheckPrefix(packets + begin, layout.hash, ChunkElements(n, i)))
      return status;
  }
  if (bytes > layout.total) return TF_HIPS_TOO_LONG;
  if (codec.is_fixed_size && bytes < layout.total) return TF_HIPS_TRUNCATED;
  return TF_HIPS_OK;
}

std::string Explain(int32_t status, const TfHipsCodec& codec, const double* params,
                    const uint8_t* packets, int64_t bytes, int64_t n) {
  Layout layout;
  if (status == TF_HIPS_OK) return "";
  if (LayoutFor(codec, params, n, &layout) != TF_HIPS_OK) return tf_hips_status_text(status);
  int64_t chunk = 0;
  if (CheckPackets(codec, layout, packets, bytes, n, &chunk) != status) {
    return std::string(tf_hips_status_text(status)) + ". Codec: " + Describe(codec, params);
  }
  const uint8_t* prefix = packets + chunk * layout.stride;
  const std::string where =
      "packet " + std::to_string(chunk + 1) + " of " + std::to_string(layout.num_chunks);
  switch (status) {
    case TF_HIPS_BAD_MAGIC:
      return where + " must start with 0x53504948 (\"HIPS\"). Received: " + Hex(Load(prefix, 4));
    case TF_HIPS_BAD_VERSION:
      return where + " must have version " + std::to_string(kPacketVersion) +
             ". Received: " + std::to_string(Load(prefix + 4, 2));
    case TF_HIPS_BAD_FLAGS:
      return where + " must have flags 0. Received: " + std::to_string(Load(prefix + 6, 2));
    case TF_HIPS_BAD_HASH:
      return where + " must be made by " + Describe(codec, params) + ", hash " + Hex(layout.hash) +
             "; another codec, specification or parameter made it. Received: hash " +
             Hex(Load(prefix + 8, 4));
    case TF_HIPS_BAD_COUNT:
      return where + " must hold " + std::to_string(ChunkElements(n, chunk)) +
             " elements. Received: " + std::to_string(Load(prefix + 12, 4));
    default:
      return "the packets of " + std::to_string(n) + " elements under " + Describe(codec, params) +
             " must have " + (codec.is_fixed_size ? "" : "at most ") +
             std::to_string(layout.total) + " bytes. Received: " + std::to_string(bytes);
  }
}

}  // namespace tf_hips
