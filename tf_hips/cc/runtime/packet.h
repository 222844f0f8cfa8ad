// SPDX-License-Identifier: Apache-2.0
// The layout of packets: prefixes, and where the packet of each chunk lies.
//
// Plain functions without state, so thread-safe. Callers own all memory. A status is 0 or a code of
// codec.h or api.h; functions that return a size return -status.

#ifndef TF_HIPS_CC_RUNTIME_PACKET_H_
#define TF_HIPS_CC_RUNTIME_PACKET_H_

#include <cstdint>
#include <string>

#include "tf_hips/cc/runtime/codec.h"

namespace tf_hips {

// Unit of encoding, in elements. Frozen: it decides the bytes of every packet.
constexpr int64_t kChunkElements = int64_t{1} << 20;
constexpr int64_t kPrefixBytes = 16;
constexpr uint16_t kPacketVersion = 1;
// Longer tensors are refused: no number of elements or chunks overflows. Bytes are checked apart.
constexpr int64_t kMaxTensorElements = int64_t{1} << 48;

// Number of packets of n elements: at least one.
inline int64_t NumChunks(int64_t n) {
  return n <= kChunkElements ? 1 : (n - 1) / kChunkElements + 1;
}

// Elements of chunk `index` of n elements.
inline int64_t ChunkElements(int64_t n, int64_t index) {
  const int64_t left = n - index * kChunkElements;
  return left < kChunkElements ? left : kChunkElements;
}

// 0, or TF_HIPS_BAD_PARAMETER when a value is out of its range or not an integer where it must be
// one.
int32_t CheckParams(const TfHipsCodec& codec, const double* params);

uint32_t CodecHash(const TfHipsCodec& codec, const double* params);

// Bytes of the packet of one chunk of n elements (upper bound when not fixed), or -status.
int64_t PacketBytes(const TfHipsCodec& codec, const double* params, int64_t n);

// Bytes of all packets of n elements, or -status. Checks the parameters, n, and that the sum has 63
// bits.
int64_t WireBytes(const TfHipsCodec& codec, const double* params, int64_t n);

void WritePrefix(uint8_t* prefix, uint32_t hash, uint32_t num_elements);

// Where the packets of a tensor lie. Chunk i occupies [i * stride, i * stride + bytes(i)).
struct Layout {
  uint32_t hash = 0;
  int64_t stride = 0;  // bytes of a full chunk's packet; of the only packet when there is one
  int64_t total = 0;   // bytes of all packets
  int64_t num_chunks = 0;
};

// Finds the layout for encoding n elements. Several chunks need a codec of fixed size.
int32_t LayoutFor(const TfHipsCodec& codec, const double* params, int64_t n, Layout* layout);

// Checks length and all prefixes of the packets of n elements, before anything is written. On
// failure `chunk`, when not null, is the index of the offending packet.
int32_t CheckPackets(const TfHipsCodec& codec, const Layout& layout, const uint8_t* packets,
                     int64_t bytes, int64_t n, int64_t* chunk = nullptr);

// One sentence with what was expected and what came, for a status of decoding.
std::string Explain(int32_t status, const TfHipsCodec& codec, const double* params,
                    const uint8_t* packets, int64_t bytes, int64_t n);

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_PACKET_H_
