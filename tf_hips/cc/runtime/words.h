// SPDX-License-Identifier: Apache-2.0
// Codes of 9 to 15 bits, one per 16 bits, to bytes and back: eight codes become `bits` bytes.
//
// Neighbours are joined in two steps, to four codes per 64 bits, and two such halves then. Each
// function returns how many codes it does: with AVX2 a multiple of its step, as long as it can move
// 16 bytes without touching what lies behind the last whole group of eight.

#ifndef TF_HIPS_CC_RUNTIME_WORDS_H_
#define TF_HIPS_CC_RUNTIME_WORDS_H_

#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// Four codes in 64 bits: `low` and `high` are those of two neighbours once they are joined, `pair`
// and `next` those of two pairs.
struct WordSteps {
  TF_HIPS_INLINE explicit WordSteps(int32_t bits) : bits(bits) {
    low = ((uint64_t{1} << bits) - 1) * 0x0000000100000001u;
    high = low << bits;
    pair = (uint64_t{1} << (2 * bits)) - 1;
    next = pair << (2 * bits);
  }

  TF_HIPS_INLINE uint64_t join(uint64_t x) const {
    x = (x & low) | ((x >> (16 - bits)) & high);
    return (x & pair) | ((x >> (32 - 2 * bits)) & next);
  }

  TF_HIPS_INLINE uint64_t split_words(uint64_t x) const {
    x = (x & pair) | ((x & next) << (32 - 2 * bits));
    return (x & low) | ((x & high) << (16 - bits));
  }

  int32_t bits;
  uint64_t low, high, pair, next;
};

#if !defined(TF_HIPS_HAS_AVX)

TF_HIPS_INLINE int64_t pack_many_words(const uint16_t*, int64_t, int32_t, uint8_t*) { return 0; }
TF_HIPS_INLINE int64_t unpack_many_words(const uint8_t*, int64_t, int32_t, uint16_t*) { return 0; }

#else

#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"

// The same steps for sixteen codes, eight in each half of a register.
struct WordStepsAvx2 {
  TF_HIPS_AVX2_INLINE explicit WordStepsAvx2(int32_t bits) {
    const WordSteps steps{bits};
    low = _mm256_set1_epi64x(static_cast<int64_t>(steps.low));
    high = _mm256_set1_epi64x(static_cast<int64_t>(steps.high));
    pair = _mm256_set1_epi64x(static_cast<int64_t>(steps.pair));
    next = _mm256_set1_epi64x(static_cast<int64_t>(steps.next));
    by_one = _mm_cvtsi32_si128(16 - bits);
    by_two = _mm_cvtsi32_si128(32 - 2 * bits);
    // The second four codes begin at a byte, or in the middle of one.
    const int64_t odd = bits % 2 * 4;
    by_half = _mm256_setr_epi64x(0, odd, 0, odd);
    // Byte k comes from byte k of the first half, or byte k - begin of the second; where there is
    // none, the highest bit is set.
    const int64_t begin = bits / 2 * kEachByte;
    const __m128i byte = _mm_set_epi64x(0x0F0E0D0C0B0A0908, 0x0706050403020100);
    const __m128i from = _mm_sub_epi8(byte, _mm_set1_epi64x(begin));
    const __m128i is_there = _mm_add_epi8(from, _mm_set1_epi8(0x78));
    to_second = _mm256_broadcastsi128_si256(_mm_or_si128(is_there, from));
    to_first = _mm256_broadcastsi128_si256(_mm_set_epi64x(-1, 0x0706050403020100));
    to_halves =
        _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0706050403020100 + begin, 0x0706050403020100));
  }

  TF_HIPS_AVX2_INLINE __m256i join(__m256i x) const {
    x = _mm256_or_si256(_mm256_and_si256(x, low),
                        _mm256_and_si256(_mm256_srl_epi64(x, by_one), high));
    x = _mm256_or_si256(_mm256_and_si256(x, pair),
                        _mm256_and_si256(_mm256_srl_epi64(x, by_two), next));
    x = _mm256_sllv_epi64(x, by_half);
    return _mm256_or_si256(_mm256_shuffle_epi8(x, to_first), _mm256_shuffle_epi8(x, to_second));
  }

  TF_HIPS_AVX2_INLINE __m256i split_words(__m256i x) const {
    x = _mm256_srlv_epi64(_mm256_shuffle_epi8(x, to_halves), by_half);
    x = _mm256_or_si256(_mm256_and_si256(x, pair),
                        _mm256_sll_epi64(_mm256_and_si256(x, next), by_two));
    return _mm256_or_si256(_mm256_and_si256(x, low),
                           _mm256_sll_epi64(_mm256_and_si256(x, high), by_one));
  }

  static constexpr int64_t kEachByte = 0x0101010101010101;
  __m256i low, high, pair, next, by_half, to_first, to_second, to_halves;
  __m128i by_one, by_two;
};

TF_HIPS_AVX2 inline int64_t pack_words_avx2(const uint16_t* codes, int64_t count, int32_t bits,
                                            uint8_t* out) {
  const WordStepsAvx2 steps{bits};
  const int64_t end = count / 8 * bits;
  int64_t k = 0;
  for (; k / 8 * bits + bits + 16 <= end; k += 16) {
    __m256i x;
    std::memcpy(&x, codes + k, 32);
    x = steps.join(x);
    uint8_t* const to = out + k / 8 * bits;
    const __m128i first = _mm256_castsi256_si128(x), second = _mm256_extracti128_si256(x, 1);
    std::memcpy(to, &first, 16);
    std::memcpy(to + bits, &second, 16);
  }
  return k;
}

TF_HIPS_AVX2 inline int64_t unpack_words_avx2(const uint8_t* in, int64_t count, int32_t bits,
                                              uint16_t* codes) {
  const WordStepsAvx2 steps{bits};
  const int64_t end = count / 8 * bits;
  int64_t k = 0;
  for (; k / 8 * bits + bits + 16 <= end; k += 16) {
    const uint8_t* const from = in + k / 8 * bits;
    __m128i first, second;
    std::memcpy(&first, from, 16);
    std::memcpy(&second, from + bits, 16);
    const __m256i x = steps.split_words(_mm256_set_m128i(second, first));
    std::memcpy(codes + k, &x, 32);
  }
  return k;
}

// Machines with AVX-512 do as much by instructions of their own (vectors.h).
TF_HIPS_INLINE int64_t pack_many_words(const uint16_t* codes, int64_t count, int32_t bits,
                                       uint8_t* out) {
  return machine() == Machine::kAvx2 ? pack_words_avx2(codes, count, bits, out) : 0;
}

TF_HIPS_INLINE int64_t unpack_many_words(const uint8_t* in, int64_t count, int32_t bits,
                                         uint16_t* codes) {
  return machine() == Machine::kAvx2 ? unpack_words_avx2(in, count, bits, codes) : 0;
}

#pragma GCC diagnostic pop
#endif  // TF_HIPS_HAS_AVX

// The whole groups of `count` codes. Their bytes, of which there are at least 9, are moved as two
// words that overlap.
TF_HIPS_INLINE int64_t pack_words(const uint16_t* codes, int64_t count, int32_t bits,
                                  uint8_t* out) {
  const WordSteps steps{bits};
  int64_t k = pack_many_words(codes, count, bits, out);
  for (; k + 8 <= count; k += 8) {
    uint64_t half[2];
    std::memcpy(half, codes + k, 16);
    const uint64_t first = steps.join(half[0]), second = steps.join(half[1]);
    half[0] = first | second << (4 * bits);
    half[1] = half[0] >> (8 * bits - 64) | second >> (64 - 4 * bits) << (128 - 8 * bits);
    uint8_t* const to = out + k / 8 * bits;
    std::memcpy(to, &half[0], 8);
    std::memcpy(to + bits - 8, &half[1], 8);
  }
  return k;
}

TF_HIPS_INLINE int64_t unpack_words(const uint8_t* in, int64_t count, int32_t bits,
                                    uint16_t* codes) {
  const WordSteps steps{bits};
  int64_t k = unpack_many_words(in, count, bits, codes);
  for (; k + 8 <= count; k += 8) {
    const uint8_t* const from = in + k / 8 * bits;
    uint64_t half[2];
    std::memcpy(&half[0], from, 8);
    std::memcpy(&half[1], from + bits - 8, 8);
    half[1] >>= 128 - 8 * bits;
    half[1] = steps.split_words(half[0] >> (4 * bits) | half[1] << (64 - 4 * bits));
    half[0] = steps.split_words(half[0]);
    std::memcpy(codes + k, half, 16);
  }
  return k;
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_WORDS_H_
