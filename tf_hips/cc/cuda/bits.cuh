// SPDX-License-Identifier: Apache-2.0
// Codes of any width to bytes and back, on the device; the layout is that of
// tf_hips/cc/runtime/bits.h.
//
// A thread packs its eight codes, which are whole bytes. Where they are 1, 2, 4, 8 or 16 bytes at a
// multiple of that, it writes them, and reads them, at once. Others go to shared memory, from where
// a block writes 16 bytes at a time, wherever a field begins, and are read as aligned words.

#ifndef TF_HIPS_CC_CUDA_BITS_CUH_
#define TF_HIPS_CC_CUDA_BITS_CUH_

#include <type_traits>

#include "tf_hips/cc/cuda/eights.cuh"

namespace tf_hips {
namespace cuda {

// Bytes of a tile that waits to be written; `bits` at most 32. Words, so that it is aligned, and
// one to read beyond.
constexpr int kStagedWords = kTile + 4;

TF_HIPS_INLINE int64_t packed_bytes(int64_t count, int64_t bits) { return (count * bits + 7) / 8; }

// Calls `use` with `bits`, from kBits to kMost, as a constant: shifts by numbers that nvcc knows.
template <int kMost, int kBits = 1, typename Use>
TF_HIPS_INLINE void with_bits(int bits, const Use& use) {
  if constexpr (kBits == kMost) {
    use(std::integral_constant<int, kBits>{});
  } else if (bits == kBits) {
    use(std::integral_constant<int, kBits>{});
  } else {
    with_bits<kMost, kBits + 1>(bits, use);
  }
}

// Eight codes of `bits` bits, at most 16, behind one another.
template <typename Code>
TF_HIPS_INLINE void join8(const Code (&codes)[8], int bits, uint64_t* low, uint64_t* high) {
  if (bits <= 4) {
    uint32_t word = 0;
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) word |= static_cast<uint32_t>(codes[u]) << (u * bits);
    *low = word;
    *high = 0;
    return;
  }
  *low = *high = 0;
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    const int bit = u * bits;
    const uint64_t code = codes[u];
    if (bit < 64) *low |= code << bit;
    if (bit >= 64) {
      *high |= code << (bit - 64);
    } else if (bit + bits > 64) {
      *high |= code >> (64 - bit);
    }
  }
}

// A code that was made of a float from 0 on, as the bits of 2^23 + that float, rounded down: what
// an addition gives, while a conversion takes a GPU eight times as long.
template <typename Code>
struct WholeCode {
  static_assert(sizeof(Code) <= 2, "a code of at most 16 bits");
  uint32_t bits;
};

// The bits of 2^23.
constexpr uint32_t kWhole = 0x4B000000u;

// Of a float from 0 on that is below 2^22.
TF_HIPS_INLINE uint32_t whole_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(__fadd_rd(x, 8388608.0f));
#else
  return kWhole + static_cast<uint32_t>(x);
#endif
}

// `count` such codes from number `begin` on, of 32 bits together. They have no bits in common, so
// that a sum joins them, and what each has besides is taken away from all at once.
template <typename Code>
TF_HIPS_INLINE uint32_t joined_whole(const WholeCode<Code> (&codes)[8], int begin, int count,
                                     int bits) {
  uint32_t word = 0, besides = 0;
  TF_HIPS_UNROLL
  for (int u = 0; u < count; ++u) {
    word += codes[begin + u].bits << (u * bits);
    besides += kWhole << (u * bits);
  }
  return word - besides;
}

template <typename Code>
TF_HIPS_INLINE void join8(const WholeCode<Code> (&codes)[8], int bits, uint64_t* low,
                          uint64_t* high) {
  *high = 0;
  if (bits <= 4) {
    *low = joined_whole(codes, 0, 8, bits);
  } else if (bits == 8) {
    *low = static_cast<uint64_t>(joined_whole(codes, 4, 4, 8)) << 32 | joined_whole(codes, 0, 4, 8);
  } else {
    Code plain[8];
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) plain[u] = static_cast<Code>(codes[u].bits);
    join8(plain, bits, low, high);
  }
}

// The most bits of codes.
template <typename Code>
constexpr int kMostBits = 8 * sizeof(Code);
template <typename Code>
constexpr int kMostBits<WholeCode<Code>> = 8 * sizeof(Code);

// Whether a thread can read and write its eight codes of so many bits at once, where a field, or
// these codes, begin at `at`.
TF_HIPS_INLINE bool is_at_once(int bits, const uint8_t* at) {
  const uintptr_t bytes = bits < 16 ? static_cast<uintptr_t>(bits) : 16;
  return (bits & (bits - 1)) == 0 && (reinterpret_cast<uintptr_t>(at) & (bytes - 1)) == 0;
}

// Writes them so, by all threads of a block.
template <typename Code>
__device__ __forceinline__ void put_codes8(const Code (&codes)[8], int bits, uint8_t* out) {
  uint64_t low, high;
  join8(codes, bits, &low, &high);
  if (bits == 1) *out = static_cast<uint8_t>(low);
  if (bits == 2) *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(low);
  if (bits == 4) *reinterpret_cast<uint32_t*>(out) = static_cast<uint32_t>(low);
  if (bits == 8) *reinterpret_cast<uint64_t*>(out) = low;
  if (bits == 16) {
    *reinterpret_cast<uint4*>(out) = {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                                      static_cast<uint32_t>(high),
                                      static_cast<uint32_t>(high >> 32)};
  }
}

__device__ __forceinline__ void put_codes8(const uint32_t (&codes)[8], int, uint8_t* out) {
  float words[8];
  memcpy(words, codes, sizeof words);
  put8<true>(words, 0, 8, reinterpret_cast<float*>(out));
}

// All NaNs leave as one.
__device__ __forceinline__ void put_codes8(const float (&values)[8], int bits, uint8_t* out) {
  uint32_t codes[8];
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) codes[u] = canonical_bits(values[u]);
  put_codes8(codes, bits, out);
}

// The same where a parameter says how many bits there are: a power of two (is_at_once).
template <typename Code>
__device__ __forceinline__ void put_codes8_by(const Code (&codes)[8], int bits, uint8_t* out) {
  if (bits == 4) {
    put_codes8(codes, 4, out);
  } else if (bits == 2) {
    put_codes8(codes, 2, out);
  } else if (bits == 1) {
    put_codes8(codes, 1, out);
  } else if (bits == 8) {
    put_codes8(codes, 8, out);
  } else if constexpr (kMostBits<Code> > 8) {
    put_codes8(codes, 16, out);
  }
}

// Eight codes of `bits` bits, at most 16, to `bits` bytes; `out`: a multiple of `bits` bytes behind
// an aligned one.
template <typename Code>
TF_HIPS_INLINE void pack8(const Code (&codes)[8], int bits, uint8_t* out) {
  uint64_t low, high;
  join8(codes, bits, &low, &high);
  if (bits == 16) {
    *reinterpret_cast<uint4*>(out) = {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                                      static_cast<uint32_t>(high),
                                      static_cast<uint32_t>(high >> 32)};
  } else if (bits % 8 == 0) {
    *reinterpret_cast<uint64_t*>(out) = low;
  } else if (bits % 4 == 0) {
    TF_HIPS_UNROLL
    for (int k = 0; k < bits / 4; ++k) {
      const uint64_t word = k < 2 ? low >> (32 * k) : high;
      reinterpret_cast<uint32_t*>(out)[k] = static_cast<uint32_t>(word);
    }
  } else if (bits % 2 == 0) {
    TF_HIPS_UNROLL
    for (int k = 0; k < bits / 2; ++k) {
      const uint64_t word = k < 4 ? low >> (16 * k) : high >> (16 * (k - 4));
      reinterpret_cast<uint16_t*>(out)[k] = static_cast<uint16_t>(word);
    }
  } else {
    TF_HIPS_UNROLL
    for (int k = 0; k < bits; ++k) {
      out[k] = static_cast<uint8_t>(k < 8 ? low >> (8 * k) : high >> (8 * (k - 8)));
    }
  }
}

TF_HIPS_INLINE void pack8(const uint32_t (&codes)[8], int, uint8_t* out) {
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) reinterpret_cast<uint32_t*>(out)[u] = codes[u];
}

// All NaNs leave as one.
TF_HIPS_INLINE void pack8(const float (&values)[8], int, uint8_t* out) {
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) reinterpret_cast<uint32_t*>(out)[u] = canonical_bits(values[u]);
}

// The same where a parameter says how many bits there are.
template <typename Code>
TF_HIPS_INLINE void pack8_by(const Code (&codes)[8], int bits, uint8_t* out) {
  with_bits<kMostBits<Code>>(bits, [&](auto known) { pack8(codes, known, out); });
}

// Writes `all` bytes of shared memory, by all threads of a block, 16 at a time.
__device__ inline void write_staged(int t, const uint32_t* staged, int64_t all, uint8_t* out) {
  const uint8_t* from = reinterpret_cast<const uint8_t*>(staged);
  const int bytes = static_cast<int>(all);  // at most four for an element of a tile
  const int skewed = static_cast<int>((16 - reinterpret_cast<uintptr_t>(out) % 16) % 16);
  const int head = skewed < bytes ? skewed : bytes;
  const int vectors = (bytes - head) / 16;
  const int tail = head + 16 * vectors;
  if (t < head) out[t] = from[t];
  if (tail + t < bytes) out[tail + t] = from[tail + t];
  const int shift = head % 4 * 8;
  for (int k = t; k < vectors; k += kThreads) {
    const uint32_t* words = staged + (head + 16 * k) / 4;
    uint32_t word[4];
    TF_HIPS_UNROLL
    for (int w = 0; w < 4; ++w) {
      const uint64_t pair = static_cast<uint64_t>(words[w + 1]) << 32 | words[w];
      word[w] = static_cast<uint32_t>(pair >> shift);
    }
    *reinterpret_cast<uint4*>(out + head + 16 * k) = {word[0], word[1], word[2], word[3]};
  }
}

// The little-endian number in `bytes` bytes, at most kMost, that begin at `from`; none is read from
// `end` on.
template <int kMost>
TF_HIPS_INLINE void fetch(const uint8_t* from, int bytes, const uint8_t* end, uint64_t* low,
                          uint64_t* high) {
  static_assert(kMost == 8 || kMost == 16, "one word of 64 bits, or two");
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 4);
  const int words = (skew + bytes + 3) / 4;
  *low = 0;
  *high = 0;
  if (from - skew + 4 * words > end) {
    for (int k = 0; k < bytes && from + k < end; ++k) {
      const uint64_t byte = from[k];
      (k < 8 ? *low : *high) |= byte << (8 * (k % 8));
    }
    return;
  }
  const uint32_t* at = reinterpret_cast<const uint32_t*>(from - skew);
  uint32_t word[kMost / 4 + 1] = {};
  TF_HIPS_UNROLL
  for (int w = 0; w < kMost / 4 + 1; ++w) {
    if (w < words) word[w] = at[w];
  }
  uint32_t part[4] = {};
  TF_HIPS_UNROLL
  for (int w = 0; w < kMost / 4; ++w) {
    const uint64_t pair = static_cast<uint64_t>(word[w + 1]) << 32 | word[w];
    part[w] = static_cast<uint32_t>(pair >> (8 * skew));
  }
  *low = static_cast<uint64_t>(part[1]) << 32 | part[0];
  *high = static_cast<uint64_t>(part[3]) << 32 | part[2];
}

// The bytes of the eight codes of `bits` bits, at most 8 or 16 as Code has, from number `first`, a
// multiple of 8, on; 0 behind the end. A packet's prefix lies before its fields, so that there are
// words to align to. `is_full`: there are eight.
template <bool is_full, typename Code>
TF_HIPS_INLINE void fetch8(const uint8_t* field, int64_t first, int64_t count, int bits,
                           uint64_t* low, uint64_t* high) {
  *low = 0;
  *high = 0;
  const uint8_t* const at = field + first / 8 * bits;
  if ((is_full || first + 8 <= count) && is_at_once(bits, at)) {
    if (bits == 1) *low = *at;
    if (bits == 2) *low = *reinterpret_cast<const uint16_t*>(at);
    if (bits == 4) *low = *reinterpret_cast<const uint32_t*>(at);
    if (bits == 8) *low = *reinterpret_cast<const uint64_t*>(at);
    if (bits == 16) {
      const uint4 words = *reinterpret_cast<const uint4*>(at);
      *low = static_cast<uint64_t>(words.y) << 32 | words.x;
      *high = static_cast<uint64_t>(words.w) << 32 | words.z;
    }
    return;
  }
  if (first >= count) return;
  fetch<8 * sizeof(Code)>(at, bits, field + packed_bytes(count, bits), low, high);
}

template <typename Code>
TF_HIPS_INLINE void split8(uint64_t low, uint64_t high, int bits, Code (&out)[8]) {
  if (bits <= 4) {
    const uint32_t word = static_cast<uint32_t>(low);
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) {
      out[u] = static_cast<Code>(word >> (u * bits) & ((uint32_t{1} << bits) - 1));
    }
    return;
  }
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    const int bit = u * bits;
    uint64_t code = bit < 64 ? low >> bit : high >> (bit - 64);
    if (bit < 64 && bit + bits > 64) code |= high << (64 - bit);
    out[u] = static_cast<Code>(code & mask);
  }
}

template <bool is_full, typename Code>
TF_HIPS_INLINE void unpack8(const uint8_t* field, int64_t first, int64_t count, int bits,
                            Code (&out)[8]) {
  uint64_t low, high;
  fetch8<is_full, Code>(field, first, count, bits, &low, &high);
  split8(low, high, bits, out);
}

// The same where a parameter says how many bits there are.
template <bool is_full, typename Code>
TF_HIPS_INLINE void unpack8_by(const uint8_t* field, int64_t first, int64_t count, int bits,
                               Code (&out)[8]) {
  with_bits<8 * sizeof(Code)>(
      bits, [&](auto known) { unpack8<is_full>(field, first, count, known, out); });
}

TF_HIPS_INLINE uint32_t code_at(const uint8_t* in, int64_t count, int bits, int64_t index) {
  if (index < 0 || index >= count) return 0;
  const int64_t bit = index * bits;
  const int64_t last = (bit + bits - 1) / 8;
  uint64_t pending = 0;
  for (int64_t at = bit / 8; at <= last; ++at) {
    pending |= static_cast<uint64_t>(in[at]) << (8 * (at - bit / 8));
  }
  return static_cast<uint32_t>(pending >> (bit % 8) & ((uint64_t{1} << bits) - 1));
}

TF_HIPS_INLINE uint32_t load_code(const uint8_t* in, int bits) { return code_at(in, 1, bits, 0); }

TF_HIPS_INLINE uint32_t load_word(const uint8_t* in) {
  if (is_aligned(in, 4)) return *reinterpret_cast<const uint32_t*>(in);
  return static_cast<uint32_t>(in[0]) | static_cast<uint32_t>(in[1]) << 8 |
         static_cast<uint32_t>(in[2]) << 16 | static_cast<uint32_t>(in[3]) << 24;
}

TF_HIPS_INLINE float load_float(const uint8_t* in) {
  return bits_float(static_cast<int64_t>(load_word(in)));
}

TF_HIPS_INLINE float float_at(const uint8_t* in, int64_t count, int64_t index) {
  return index >= 0 && index < count ? load_float(in + 4 * index) : 0.0f;
}

// Of 32 bits: as load8, from wherever a field begins.
template <bool is_full>
__device__ inline void unpack8(const uint8_t* field, int64_t first, int64_t count, int,
                               float (&out)[8]) {
  if (is_aligned(field, is_full ? 16 : 4)) {
    load8<is_full>(reinterpret_cast<const float*>(field), first, count, out);
    return;
  }
  if (first + 8 < count) {
    // Aligned words, the last of which ends in the next float: loads that wait for none.
    const uint8_t* const at = field + 4 * first;
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(at) % 4);
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(at - skew);
    uint32_t word[9];
    TF_HIPS_UNROLL
    for (int w = 0; w < 9; ++w) word[w] = words[w];
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) {
      const uint64_t pair = static_cast<uint64_t>(word[u + 1]) << 32 | word[u];
      out[u] = bits_float(static_cast<int64_t>(static_cast<uint32_t>(pair >> (8 * skew))));
    }
    return;
  }
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) out[u] = float_at(field, count, first + u);
}

template <bool is_full>
__device__ inline void unpack8(const uint8_t* field, int64_t first, int64_t count, int bits,
                               uint32_t (&out)[8]) {
  float words[8];
  unpack8<is_full>(field, first, count, bits, words);
  memcpy(out, words, sizeof words);
}

// Scalars of a header, by one thread.
TF_HIPS_INLINE void store_code(uint64_t value, int bits, uint8_t* out) {
  for (int k = 0; 8 * k < bits; ++k) out[k] = static_cast<uint8_t>(value >> (8 * k));
}

TF_HIPS_INLINE void store_float(float value, uint8_t* out) {
  const uint32_t word = canonical_bits(value);
  if (is_aligned(out, 4)) {
    *reinterpret_cast<uint32_t*>(out) = word;
  } else {
    store_code(word, 32, out);
  }
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_BITS_CUH_
