// SPDX-License-Identifier: Apache-2.0
// The functions of vectors.h for x86-64, with AVX-512 and with AVX2; included by it.

#ifndef TF_HIPS_CC_RUNTIME_VECTORS_X86_H_
#define TF_HIPS_CC_RUNTIME_VECTORS_X86_H_

#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/machine.h"
#include "tf_hips/cc/runtime/philox.h"
#include "tf_hips/cc/runtime/target.h"

#if defined(TF_HIPS_HAS_AVX)
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace tf_hips {

// Codes of 1, 2 and 4 bits, 64 at a time; of other widths 8 at a time, while whole words can be
// moved without touching what lies behind.
template <int kBits>
TF_HIPS_AVX512 inline int64_t pack_avx512(const uint8_t* codes, int64_t count, uint8_t* out) {
  int64_t k = 0;
  if constexpr (kBits == 1) {
    for (; k + 64 <= count; k += 64) {
      const __m512i x = _mm512_loadu_si512(codes + k);
      const uint64_t bits = _mm512_test_epi8_mask(x, x);
      std::memcpy(out + k / 8, &bits, 8);
    }
  } else if constexpr (kBits == 2) {
    const __m512i pairs = _mm512_set1_epi16(0x0401), fours = _mm512_set1_epi32(0x00100001);
    for (; k + 64 <= count; k += 64) {
      __m512i x = _mm512_loadu_si512(codes + k);
      x = _mm512_madd_epi16(_mm512_maddubs_epi16(x, pairs), fours);
      const __m128i bytes = _mm512_cvtepi32_epi8(x);
      std::memcpy(out + k / 4, &bytes, 16);
    }
  } else if constexpr (kBits == 4) {
    const __m512i pairs = _mm512_set1_epi16(0x1001);
    for (; k + 64 <= count; k += 64) {
      const __m512i x = _mm512_maddubs_epi16(_mm512_loadu_si512(codes + k), pairs);
      const __m256i bytes = _mm512_cvtepi16_epi8(x);
      std::memcpy(out + k / 2, &bytes, 32);
    }
  } else {
    constexpr uint64_t kMask = ((uint64_t{1} << kBits) - 1) * 0x0101010101010101u;
    for (; k / 8 * kBits + 8 <= count / 8 * kBits; k += 8) {
      uint64_t x;
      std::memcpy(&x, codes + k, 8);
      x = _pext_u64(x, kMask);
      std::memcpy(out + k / 8 * kBits, &x, 8);
    }
  }
  return k;
}

template <int kBits>
TF_HIPS_AVX512 inline int64_t unpack_avx512(const uint8_t* in, int64_t count, uint8_t* codes) {
  int64_t k = 0;
  if constexpr (kBits == 1) {
    for (; k + 64 <= count; k += 64) {
      uint64_t bits;
      std::memcpy(&bits, in + k / 8, 8);
      _mm512_storeu_si512(codes + k, _mm512_maskz_set1_epi8(bits, 1));
    }
  } else if constexpr (kBits == 2) {
    const __m512i nibbles = _mm512_set1_epi32(0x000F000F), pairs = _mm512_set1_epi32(0x03030303);
    for (; k + 64 <= count; k += 64) {
      __m128i bytes;
      std::memcpy(&bytes, in + k / 4, 16);
      __m512i x = _mm512_cvtepu8_epi32(bytes);
      x = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)), nibbles);
      x = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 6)), pairs);
      _mm512_storeu_si512(codes + k, x);
    }
  } else if constexpr (kBits == 4) {
    const __m512i nibbles = _mm512_set1_epi16(0x0F0F);
    for (; k + 64 <= count; k += 64) {
      __m256i bytes;
      std::memcpy(&bytes, in + k / 2, 32);
      const __m512i x = _mm512_cvtepu8_epi16(bytes);
      _mm512_storeu_si512(codes + k,
                          _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi16(x, 4)), nibbles));
    }
  } else {
    constexpr uint64_t kMask = ((uint64_t{1} << kBits) - 1) * 0x0101010101010101u;
    for (; k / 8 * kBits + 8 <= count / 8 * kBits; k += 8) {
      uint64_t x;
      std::memcpy(&x, in + k / 8 * kBits, 8);
      x = _pdep_u64(x, kMask);
      std::memcpy(codes + k, &x, 8);
    }
  }
  return k;
}

template <int kBits>
TF_HIPS_AVX2 inline int64_t pack_avx2(const uint8_t* codes, int64_t count, uint8_t* out) {
  int64_t k = 0;
  if constexpr (kBits == 1) {
    for (; k + 32 <= count; k += 32) {
      __m256i x;
      std::memcpy(&x, codes + k, 32);
      const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(x, 7));
      std::memcpy(out + k / 8, &bits, 4);
    }
  } else if constexpr (kBits == 2) {
    const __m256i pairs = _mm256_set1_epi16(0x0401), fours = _mm256_set1_epi32(0x00100001);
    for (; k + 32 <= count; k += 32) {
      __m256i x;
      std::memcpy(&x, codes + k, 32);
      x = _mm256_madd_epi16(_mm256_maddubs_epi16(x, pairs), fours);
      const __m128i words =
          _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
      const int64_t bytes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words));
      std::memcpy(out + k / 4, &bytes, 8);
    }
  } else if constexpr (kBits == 4) {
    const __m256i pairs = _mm256_set1_epi16(0x1001);
    for (; k + 32 <= count; k += 32) {
      __m256i x;
      std::memcpy(&x, codes + k, 32);
      x = _mm256_maddubs_epi16(x, pairs);
      const __m128i bytes =
          _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
      std::memcpy(out + k / 2, &bytes, 16);
    }
  }
  return k;
}

template <int kBits>
TF_HIPS_AVX2 inline int64_t unpack_avx2(const uint8_t* in, int64_t count, uint8_t* codes) {
  int64_t k = 0;
  if constexpr (kBits == 1) {
    const __m256i spread =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    for (; k + 32 <= count; k += 32) {
      int bits;
      std::memcpy(&bits, in + k / 8, 4);
      __m256i x = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread);
      x = _mm256_cmpeq_epi8(_mm256_and_si256(x, bit), bit);
      x = _mm256_and_si256(x, _mm256_set1_epi8(1));
      std::memcpy(codes + k, &x, 32);
    }
  } else if constexpr (kBits == 2) {
    const __m256i nibbles = _mm256_set1_epi32(0x000F000F), pairs = _mm256_set1_epi32(0x03030303);
    for (; k + 32 <= count; k += 32) {
      int64_t bytes;
      std::memcpy(&bytes, in + k / 4, 8);
      __m256i x = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
      x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 12)), nibbles);
      x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 6)), pairs);
      std::memcpy(codes + k, &x, 32);
    }
  } else if constexpr (kBits == 4) {
    const __m256i nibbles = _mm256_set1_epi16(0x0F0F);
    for (; k + 32 <= count; k += 32) {
      __m128i bytes;
      std::memcpy(&bytes, in + k / 2, 16);
      __m256i x = _mm256_cvtepu8_epi16(bytes);
      x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi16(x, 4)), nibbles);
      std::memcpy(codes + k, &x, 32);
    }
  }
  return k;
}

// Codes of 9 to 15 bits, eight at a time: two halves of four codes, joined to `bits` bytes.
TF_HIPS_AVX512 inline int64_t pack_avx512(const uint16_t* codes, int64_t count, int32_t bits,
                                          uint8_t* out) {
  const uint64_t mask = ((uint64_t{1} << bits) - 1) * 0x0001000100010001u;
  const int64_t end = count / 8 * bits;
  int64_t k = 0;
  for (; k / 8 * bits + 16 <= end; k += 8) {
    uint64_t half[2];
    std::memcpy(half, codes + k, 16);
    const uint64_t low = _pext_u64(half[0], mask), high = _pext_u64(half[1], mask);
    half[0] = low | high << (4 * bits);
    half[1] = high >> (64 - 4 * bits);
    std::memcpy(out + k / 8 * bits, half, 16);
  }
  return k;
}

TF_HIPS_AVX512 inline int64_t unpack_avx512(const uint8_t* in, int64_t count, int32_t bits,
                                            uint16_t* codes) {
  const uint64_t mask = ((uint64_t{1} << bits) - 1) * 0x0001000100010001u;
  const int64_t end = count / 8 * bits;
  int64_t k = 0;
  for (; k / 8 * bits + 16 <= end; k += 8) {
    uint64_t half[2];
    std::memcpy(half, in + k / 8 * bits, 16);
    const uint64_t high = half[0] >> (4 * bits) | half[1] << (64 - 4 * bits);
    half[0] = _pdep_u64(half[0], mask);
    half[1] = _pdep_u64(high, mask);
    std::memcpy(codes + k, half, 16);
  }
  return k;
}

template <int kBits>
TF_HIPS_INLINE int64_t pack_wide(const uint8_t* codes, int64_t count, uint8_t* out) {
  switch (machine()) {
    case Machine::kAvx512:
      return pack_avx512<kBits>(codes, count, out);
    case Machine::kAvx2:
      return pack_avx2<kBits>(codes, count, out);
    default:
      return 0;
  }
}

template <int kBits>
TF_HIPS_INLINE int64_t unpack_wide(const uint8_t* in, int64_t count, uint8_t* codes) {
  switch (machine()) {
    case Machine::kAvx512:
      return unpack_avx512<kBits>(in, count, codes);
    case Machine::kAvx2:
      return unpack_avx2<kBits>(in, count, codes);
    default:
      return 0;
  }
}

TF_HIPS_INLINE int64_t pack_wide(const uint16_t* codes, int64_t count, int32_t bits, uint8_t* out) {
  const bool is_odd = bits > 8 && bits < 16;
  return is_odd && machine() == Machine::kAvx512 ? pack_avx512(codes, count, bits, out) : 0;
}

TF_HIPS_INLINE int64_t unpack_wide(const uint8_t* in, int64_t count, int32_t bits,
                                   uint16_t* codes) {
  const bool is_odd = bits > 8 && bits < 16;
  return is_odd && machine() == Machine::kAvx512 ? unpack_avx512(in, count, bits, codes) : 0;
}

// Adds codes to *sum.
TF_HIPS_AVX512 inline int64_t sum_avx512(const uint8_t* codes, int64_t count, uint64_t* sum) {
  const __m512i zero = _mm512_setzero_si512();
  __m512i total = zero;
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
    total = _mm512_add_epi64(total, _mm512_sad_epu8(_mm512_loadu_si512(codes + k), zero));
  }
  *sum += static_cast<uint64_t>(_mm512_reduce_add_epi64(total));
  return k;
}

TF_HIPS_AVX2 inline int64_t sum_avx2(const uint8_t* codes, int64_t count, uint64_t* sum) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i total = zero;
  int64_t k = 0;
  for (; k + 32 <= count; k += 32) {
    __m256i x;
    std::memcpy(&x, codes + k, 32);
    total = _mm256_add_epi64(total, _mm256_sad_epu8(x, zero));
  }
  uint64_t part[4];
  std::memcpy(part, &total, sizeof part);
  *sum += part[0] + part[1] + part[2] + part[3];
  return k;
}

TF_HIPS_INLINE int64_t sum_wide(const uint8_t* codes, int64_t count, uint64_t* sum) {
  switch (machine()) {
    case Machine::kAvx512:
      return sum_avx512(codes, count, sum);
    case Machine::kAvx2:
      return sum_avx2(codes, count, sum);
    default:
      return 0;
  }
}

// Blocks of Philox4x32-10, 16 bytes each. A lane of 64 bits holds a word of the counter in its low
// half; what is in the high half does not matter, because products are of low halves. The last
// round leaves its products' halves where the words belong.

// Brings the high halves of products to where words are.
TF_HIPS_AVX512_INLINE __m512i high_halves(__m512i p) {
  return _mm512_shuffle_epi32(p, _MM_PERM_CDAB);
}
TF_HIPS_AVX2_INLINE __m256i high_halves(__m256i p) { return _mm256_shuffle_epi32(p, 0xB1); }
// The same where what is in the high half then does not matter: a shift is quicker on some
// machines.
TF_HIPS_AVX2_INLINE __m256i shifted(__m256i p) { return _mm256_srli_epi64(p, 32); }

TF_HIPS_AVX2_INLINE __m256i xor_all(__m256i a, __m256i b, __m256i c) {
  return _mm256_xor_si256(_mm256_xor_si256(b, c), a);
}

template <int kAtOnce>
TF_HIPS_AVX512_INLINE void noise_group_avx512(const PhiloxInput& input, const PhiloxShared& shared,
                                              uint32_t first, uint8_t* words) {
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  __m512i c0[kAtOnce], c1[kAtOnce], c2[kAtOnce], c3[kAtOnce];
  for (int k = 0; k < kAtOnce; ++k) {
    const __m512i number = _mm512_set1_epi64(first + static_cast<uint32_t>(8 * k));
    const __m512i p0 = _mm512_mul_epu32(_mm512_add_epi64(number, lane), m0);
    const __m512i joined = _mm512_xor_si512(high_halves(p0), _mm512_set1_epi64(shared.first2));
    const __m512i p1 = _mm512_mul_epu32(joined, m1);
    c0[k] = _mm512_xor_si512(high_halves(p1), _mm512_set1_epi64(shared.second0));
    c1[k] = p1;
    c2[k] = _mm512_xor_si512(p0, _mm512_set1_epi64(shared.second2));
    c3[k] = _mm512_set1_epi64(shared.second3);
  }
  uint32_t k0 = input.k0 + 2 * 0x9E3779B9u, k1 = input.k1 + 2 * 0xBB67AE85u;
  for (int round = 2; round < 9; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const __m512i r0 = _mm512_set1_epi64(k0), r1 = _mm512_set1_epi64(k1);
    for (int k = 0; k < kAtOnce; ++k) {
      const __m512i p0 = _mm512_mul_epu32(c0[k], m0), p1 = _mm512_mul_epu32(c2[k], m1);
      c0[k] = _mm512_ternarylogic_epi64(high_halves(p1), c1[k], r0, 0x96);
      c1[k] = p1;
      c2[k] = _mm512_ternarylogic_epi64(high_halves(p0), c3[k], r1, 0x96);
      c3[k] = p0;
    }
  }
  const __m512i front = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i back = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  const __m512i r0 = _mm512_set1_epi64(k0), r1 = _mm512_set1_epi64(k1);
  constexpr __mmask16 kLowHalves = 0x5555;
  for (int k = 0; k < kAtOnce; ++k) {
    const __m512i p0 = _mm512_mul_epu32(c0[k], m0), p1 = _mm512_mul_epu32(c2[k], m1);
    const __m512i w01 =
        _mm512_mask_ternarylogic_epi32(high_halves(p1), kLowHalves, c1[k], r0, 0x96);
    const __m512i w23 =
        _mm512_mask_ternarylogic_epi32(high_halves(p0), kLowHalves, c3[k], r1, 0x96);
    _mm512_storeu_si512(words + 128 * k, _mm512_permutex2var_epi64(w01, front, w23));
    _mm512_storeu_si512(words + 128 * k + 64, _mm512_permutex2var_epi64(w01, back, w23));
  }
}

TF_HIPS_AVX512 inline int64_t noise_avx512(const PhiloxInput& input, int64_t blocks, void* words) {
  const PhiloxShared shared(input);
  const uint32_t first = static_cast<uint32_t>(input.first);
  uint8_t* const buffer = static_cast<uint8_t*>(words);
  blocks = blocks_of_one_word(input, blocks);
  constexpr int kAtOnce = 4;  // chains of multiplications that hide each other's latency
  int64_t b = 0;
  for (; b + 8 * kAtOnce <= blocks; b += 8 * kAtOnce) {
    noise_group_avx512<kAtOnce>(input, shared, first + static_cast<uint32_t>(b), buffer + 16 * b);
  }
  for (; b + 8 <= blocks; b += 8) {
    noise_group_avx512<1>(input, shared, first + static_cast<uint32_t>(b), buffer + 16 * b);
  }
  return b;
}

template <int kAtOnce>
TF_HIPS_AVX2_INLINE void noise_group_avx2(const PhiloxInput& input, const PhiloxShared& shared,
                                          uint32_t first, uint8_t* words) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  const __m256i lane = _mm256_setr_epi64x(0, 1, 2, 3);
  __m256i c0[kAtOnce], c1[kAtOnce], c2[kAtOnce], c3[kAtOnce];
  for (int k = 0; k < kAtOnce; ++k) {
    const __m256i number = _mm256_set1_epi64x(first + static_cast<uint32_t>(4 * k));
    const __m256i p0 = _mm256_mul_epu32(_mm256_add_epi64(number, lane), m0);
    const __m256i joined = _mm256_xor_si256(shifted(p0), _mm256_set1_epi64x(shared.first2));
    const __m256i p1 = _mm256_mul_epu32(joined, m1);
    c0[k] = _mm256_xor_si256(shifted(p1), _mm256_set1_epi64x(shared.second0));
    c1[k] = p1;
    c2[k] = _mm256_xor_si256(p0, _mm256_set1_epi64x(shared.second2));
    c3[k] = _mm256_set1_epi64x(shared.second3);
  }
  uint32_t k0 = input.k0 + 2 * 0x9E3779B9u, k1 = input.k1 + 2 * 0xBB67AE85u;
  // Without a loop: the keys of a round are there before its words.
#pragma GCC unroll 8
  for (int round = 2; round < 9; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const __m256i r0 = _mm256_set1_epi64x(k0), r1 = _mm256_set1_epi64x(k1);
    for (int k = 0; k < kAtOnce; ++k) {
      const __m256i p0 = _mm256_mul_epu32(c0[k], m0), p1 = _mm256_mul_epu32(c2[k], m1);
      c0[k] = xor_all(shifted(p1), c1[k], r0);
      c1[k] = p1;
      c2[k] = xor_all(shifted(p0), c3[k], r1);
      c3[k] = p0;
    }
  }
  const __m256i r0 = _mm256_set1_epi64x(k0), r1 = _mm256_set1_epi64x(k1);
  const __m256i none = _mm256_setzero_si256();
  for (int k = 0; k < kAtOnce; ++k) {
    const __m256i p0 = _mm256_mul_epu32(c0[k], m0), p1 = _mm256_mul_epu32(c2[k], m1);
    const __m256i w01 = xor_all(high_halves(p1), _mm256_blend_epi32(none, c1[k], 0x55), r0);
    const __m256i w23 = xor_all(high_halves(p0), _mm256_blend_epi32(none, c3[k], 0x55), r1);
    const __m256i even = _mm256_unpacklo_epi64(w01, w23), odd = _mm256_unpackhi_epi64(w01, w23);
    const __m256i front = _mm256_permute2x128_si256(even, odd, 0x20);
    const __m256i back = _mm256_permute2x128_si256(even, odd, 0x31);
    std::memcpy(words + 64 * k, &front, 32);
    std::memcpy(words + 64 * k + 32, &back, 32);
  }
}

TF_HIPS_AVX2 inline int64_t noise_avx2(const PhiloxInput& input, int64_t blocks, void* words) {
  const PhiloxShared shared(input);
  const uint32_t first = static_cast<uint32_t>(input.first);
  uint8_t* const buffer = static_cast<uint8_t*>(words);
  blocks = blocks_of_one_word(input, blocks);
  constexpr int kAtOnce = 4;
  int64_t b = 0;
  for (; b + 4 * kAtOnce <= blocks; b += 4 * kAtOnce) {
    noise_group_avx2<kAtOnce>(input, shared, first + static_cast<uint32_t>(b), buffer + 16 * b);
  }
  for (; b + 4 <= blocks; b += 4) {
    noise_group_avx2<1>(input, shared, first + static_cast<uint32_t>(b), buffer + 16 * b);
  }
  return b;
}

TF_HIPS_INLINE int64_t noise_wide(const PhiloxInput& input, int64_t blocks, void* words) {
  switch (machine()) {
    case Machine::kAvx512:
      return noise_avx512(input, blocks, words);
    case Machine::kAvx2:
      return noise_avx2(input, blocks, words);
    default:
      return 0;
  }
}

}  // namespace tf_hips

#pragma GCC diagnostic pop
#endif  // TF_HIPS_HAS_AVX

#endif  // TF_HIPS_CC_RUNTIME_VECTORS_X86_H_
