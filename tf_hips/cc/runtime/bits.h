// SPDX-License-Identifier: Apache-2.0
// Codes of any width to bytes and back, and the other values in the body of a packet.
//
// Code k of width b occupies bits [k b, (k + 1) b) of a stream, LSB first; everything is
// little-endian and starts at a byte. Functions on vectors take at most a tile that starts at a
// multiple of 8 codes, so that it starts at a byte. Nothing is aligned. The caller has checked
// lengths.

#ifndef TF_HIPS_CC_RUNTIME_BITS_H_
#define TF_HIPS_CC_RUNTIME_BITS_H_

#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/convert.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"
#include "tf_hips/cc/runtime/words.h"

namespace tf_hips {

TF_HIPS_INLINE int64_t packed_bytes(int64_t count, int64_t bits) { return (count * bits + 7) / 8; }

// Eight codes of up to 8 bits, one per byte, to 8 * kBits bits and back: neighbours are joined in
// three steps.
template <int kBits>
TF_HIPS_INLINE uint64_t gather_bits(uint64_t x) {
  constexpr uint64_t kOne = (uint64_t{1} << (2 * kBits)) - 1;
  constexpr uint64_t kTwo = (uint64_t{1} << (4 * kBits)) - 1;
  constexpr uint64_t kLow = (uint64_t{1} << kBits) - 1;
  x = (x & (kLow * 0x0001000100010001u)) | ((x & (kLow * 0x0100010001000100u)) >> (8 - kBits));
  x = (x & (kOne * 0x0000000100000001u)) |
      ((x >> (16 - 2 * kBits)) & ((kOne << (2 * kBits)) * 0x0000000100000001u));
  return (x & kTwo) | ((x >> (32 - 4 * kBits)) & (kTwo << (4 * kBits)));
}

template <int kBits>
TF_HIPS_INLINE uint64_t scatter_bits(uint64_t x) {
  constexpr uint64_t kOne = (uint64_t{1} << (2 * kBits)) - 1;
  constexpr uint64_t kTwo = (uint64_t{1} << (4 * kBits)) - 1;
  constexpr uint64_t kLow = (uint64_t{1} << kBits) - 1;
  x = (x & kTwo) | ((x & (kTwo << (4 * kBits))) << (32 - 4 * kBits));
  x = (x & (kOne * 0x0000000100000001u)) |
      ((x & ((kOne << (2 * kBits)) * 0x0000000100000001u)) << (16 - 2 * kBits));
  return (x & (kLow * 0x0001000100010001u)) |
         ((x & ((kLow << kBits) * 0x0001000100010001u)) << (8 - kBits));
}

template <int kBits>
TF_HIPS_INLINE void pack_groups(const uint8_t* codes, int64_t groups, uint8_t* out) {
  for (int64_t k = pack_wide<kBits>(codes, 8 * groups, out) / 8; k < groups; ++k) {
    uint64_t x;
    std::memcpy(&x, codes + 8 * k, 8);
    x = gather_bits<kBits>(x);
    std::memcpy(out + kBits * k, &x, kBits);
  }
}

template <int kBits>
TF_HIPS_INLINE void unpack_groups(const uint8_t* in, int64_t groups, uint8_t* codes) {
  for (int64_t k = unpack_wide<kBits>(in, 8 * groups, codes) / 8; k < groups; ++k) {
    uint64_t x = 0;
    std::memcpy(&x, in + kBits * k, kBits);
    x = scatter_bits<kBits>(x);
    std::memcpy(codes + 8 * k, &x, 8);
  }
}

// Any width up to 32 and any count: the path for the end of a vector.
template <typename Code>
TF_HIPS_INLINE void pack_stream(const Code* codes, int64_t count, int32_t bits, uint8_t* out) {
  uint64_t pending = 0;
  int32_t held = 0;
  for (int64_t k = 0; k < count; ++k) {
    pending |= static_cast<uint64_t>(codes[k]) << held;
    for (held += bits; held >= 8; held -= 8, pending >>= 8) *out++ = static_cast<uint8_t>(pending);
  }
  if (held > 0) *out = static_cast<uint8_t>(pending);
}

template <typename Code>
TF_HIPS_INLINE void unpack_stream(const uint8_t* in, int64_t count, int32_t bits, Code* codes) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint64_t pending = 0;
  int32_t held = 0;
  for (int64_t k = 0; k < count; ++k) {
    for (; held < bits; held += 8) pending |= static_cast<uint64_t>(*in++) << held;
    codes[k] = static_cast<Code>(pending & mask);
    pending >>= bits;
    held -= bits;
  }
}

// Packs `count` codes of `bits` bits (already masked) to packed_bytes(count, bits) bytes.
TF_HIPS_APART void pack_codes(const uint8_t* codes, int64_t count, int32_t bits, uint8_t* out) {
  const int64_t groups = count / 8;
  switch (bits) {
    case 1:
      pack_groups<1>(codes, groups, out);
      break;
    case 2:
      pack_groups<2>(codes, groups, out);
      break;
    case 3:
      pack_groups<3>(codes, groups, out);
      break;
    case 4:
      pack_groups<4>(codes, groups, out);
      break;
    case 5:
      pack_groups<5>(codes, groups, out);
      break;
    case 6:
      pack_groups<6>(codes, groups, out);
      break;
    case 7:
      pack_groups<7>(codes, groups, out);
      break;
    default:
      copy_tile(codes, count, out);
      return;
  }
  pack_stream(codes + 8 * groups, count % 8, bits, out + groups * bits);
}

TF_HIPS_APART void pack_codes(const uint16_t* codes, int64_t count, int32_t bits, uint8_t* out) {
  if (bits == 16) {
    copy_tile(codes, count * 2, out);
    return;
  }
  if (bits > 8) {
    int64_t done = pack_wide(codes, count, bits, out);
    done += pack_words(codes + done, count - done, bits, out + done / 8 * bits);
    pack_stream(codes + done, count - done, bits, out + done / 8 * bits);
    return;
  }
  for (int64_t at = 0; at < count; at += 256) {
    const int64_t part = count - at < 256 ? count - at : 256;
    uint8_t narrow[256];
    for (int64_t k = 0; k < part; ++k) narrow[k] = static_cast<uint8_t>(codes[at + k]);
    pack_codes(narrow, part, bits, out + at / 8 * bits);
  }
}

TF_HIPS_INLINE void pack_codes(const uint32_t* codes, int64_t count, int32_t, uint8_t* out) {
  copy_tile(codes, count * 4, out);
}

// Unpacks the first `count` codes of packed_bytes(count, bits) bytes.
TF_HIPS_APART void unpack_codes(const uint8_t* in, int64_t count, int32_t bits, uint8_t* codes) {
  const int64_t groups = count / 8;
  switch (bits) {
    case 1:
      unpack_groups<1>(in, groups, codes);
      break;
    case 2:
      unpack_groups<2>(in, groups, codes);
      break;
    case 3:
      unpack_groups<3>(in, groups, codes);
      break;
    case 4:
      unpack_groups<4>(in, groups, codes);
      break;
    case 5:
      unpack_groups<5>(in, groups, codes);
      break;
    case 6:
      unpack_groups<6>(in, groups, codes);
      break;
    case 7:
      unpack_groups<7>(in, groups, codes);
      break;
    default:
      copy_tile(in, count, codes);
      return;
  }
  unpack_stream(in + groups * bits, count % 8, bits, codes + 8 * groups);
}

TF_HIPS_APART void unpack_codes(const uint8_t* in, int64_t count, int32_t bits, uint16_t* codes) {
  if (bits == 16) {
    copy_tile(in, count * 2, codes);
    return;
  }
  if (bits > 8) {
    int64_t done = unpack_wide(in, count, bits, codes);
    done += unpack_words(in + done / 8 * bits, count - done, bits, codes + done);
    unpack_stream(in + done / 8 * bits, count - done, bits, codes + done);
    return;
  }
  for (int64_t at = 0; at < count; at += 256) {
    const int64_t part = count - at < 256 ? count - at : 256;
    uint8_t narrow[256];
    unpack_codes(in + at / 8 * bits, part, bits, narrow);
    for (int64_t k = 0; k < part; ++k) codes[at + k] = narrow[k];
  }
}

TF_HIPS_INLINE void unpack_codes(const uint8_t* in, int64_t count, int32_t, uint32_t* codes) {
  copy_tile(in, count * 4, codes);
}

// The sum of a tile of codes.
TF_HIPS_INLINE int64_t sum_codes(const uint8_t* codes, int64_t count) {
  uint64_t sum = 0;
  for (int64_t k = sum_wide(codes, count, &sum); k < count; ++k) sum += codes[k];
  return static_cast<int64_t>(sum);
}

// Element `index` of a vector, 0 where there is none.
template <typename T>
TF_HIPS_INLINE T value_at(const T* values, int64_t count, int64_t index) {
  return index >= 0 && index < count ? values[index] : T{0};
}

// The same, `other` where there is none.
template <typename T>
TF_HIPS_INLINE T value_or(const T* values, int64_t count, int64_t index, T other) {
  return index >= 0 && index < count ? values[index] : other;
}

TF_HIPS_INLINE float float_at(const uint8_t* in, int64_t count, int64_t index) {
  float value = 0.0f;
  if (index >= 0 && index < count) std::memcpy(&value, in + 4 * index, 4);
  return value;
}

TF_HIPS_INLINE uint32_t code_at(const uint8_t* in, int64_t count, int32_t bits, int64_t index) {
  if (index < 0 || index >= count) return 0;
  const int64_t bit = index * bits;
  const int64_t last = (bit + bits - 1) / 8;
  uint64_t pending = 0;
  for (int64_t at = bit / 8; at <= last; ++at)
    pending |= static_cast<uint64_t>(in[at]) << (8 * (at - bit / 8));
  return static_cast<uint32_t>(pending >> (bit % 8) & ((uint64_t{1} << bits) - 1));
}

// Scalars and vectors of floats; all NaNs are written as one.
TF_HIPS_INLINE void store_floats(const float* values, int64_t count, uint8_t* out) {
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t bits = canonical_bits(values[j]);
    std::memcpy(out + 4 * j, &bits, 4);
  }
}

TF_HIPS_INLINE void load_floats(const uint8_t* in, int64_t count, float* values) {
  copy_tile(in, count * 4, values);
}

TF_HIPS_INLINE void store_float(float value, uint8_t* out) { store_floats(&value, 1, out); }

TF_HIPS_INLINE float load_float(const uint8_t* in) { return float_at(in, 1, 0); }

TF_HIPS_INLINE void store_code(uint32_t value, int32_t bits, uint8_t* out) {
  pack_stream(&value, 1, bits, out);
}

TF_HIPS_INLINE uint32_t load_code(const uint8_t* in, int32_t bits) {
  return code_at(in, 1, bits, 0);
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_BITS_H_
