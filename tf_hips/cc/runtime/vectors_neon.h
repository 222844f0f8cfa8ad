// SPDX-License-Identifier: Apache-2.0
// The functions of vectors.h for AArch64; included by it.

#ifndef TF_HIPS_CC_RUNTIME_VECTORS_NEON_H_
#define TF_HIPS_CC_RUNTIME_VECTORS_NEON_H_

#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/machine.h"
#include "tf_hips/cc/runtime/philox.h"
#include "tf_hips/cc/runtime/target.h"

#if defined(TF_HIPS_HAS_NEON)
namespace tf_hips {

// Of 64 bytes, of which each has no bit but that of its place among eight, all bits.
TF_HIPS_NEON_INLINE uint64_t join_bits(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
  // Three sums of neighbours make a byte of eight.
  const uint8x16_t sum = vpaddq_u8(vpaddq_u8(a, b), vpaddq_u8(c, d));
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sum, sum)), 0);
}

// Bytes that are 0 or 1, of 64 elements, as bits.
TF_HIPS_NEON_INLINE uint64_t bits_of_bytes(const uint8_t* bytes) {
  const int8x8_t eight = vcreate_s8(0x0706050403020100);
  const int8x16_t places = vcombine_s8(eight, eight);
  return join_bits(vshlq_u8(vld1q_u8(bytes), places), vshlq_u8(vld1q_u8(bytes + 16), places),
                   vshlq_u8(vld1q_u8(bytes + 32), places), vshlq_u8(vld1q_u8(bytes + 48), places));
}

// Four codes of 2 bits in the first byte of each four: neighbours are joined in two steps.
TF_HIPS_NEON_INLINE uint16x8_t join_fours(const uint8_t* codes) {
  uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(codes));
  x = vsraq_n_u16(x, x, 6);
  const uint32x4_t y = vreinterpretq_u32_u16(x);
  return vreinterpretq_u16_u32(vsraq_n_u32(y, y, 12));
}

// Two codes of 4 bits in the first byte of each two.
TF_HIPS_NEON_INLINE uint8x16_t join_twos(const uint8_t* codes) {
  const uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(codes));
  return vreinterpretq_u8_u16(vsraq_n_u16(x, x, 4));
}

// Codes of 1, 2 and 4 bits, 64 at a time.
template <int kBits>
TF_HIPS_NEON inline int64_t pack_neon(const uint8_t* codes, int64_t count, uint8_t* out) {
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
    if constexpr (kBits == 1) {
      const uint64_t bits = bits_of_bytes(codes + k);
      std::memcpy(out + k / 8, &bits, 8);
    } else if constexpr (kBits == 2) {
      const uint16x8_t first = vuzp1q_u16(join_fours(codes + k), join_fours(codes + k + 16));
      const uint16x8_t second = vuzp1q_u16(join_fours(codes + k + 32), join_fours(codes + k + 48));
      vst1q_u8(out + k / 4, vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second)));
    } else {
      for (int64_t l = k; l < k + 64; l += 32) {
        vst1q_u8(out + l / 2, vuzp1q_u8(join_twos(codes + l), join_twos(codes + l + 16)));
      }
    }
  }
  return k;
}

// The codes of 4 bits in 16 bytes, a byte each.
TF_HIPS_NEON_INLINE uint8x16x2_t split_twos(uint8x16_t bytes) {
  const uint8x16_t low = vandq_u8(bytes, vdupq_n_u8(15)), high = vshrq_n_u8(bytes, 4);
  return {{vzip1q_u8(low, high), vzip2q_u8(low, high)}};
}

template <int kBits>
TF_HIPS_NEON inline int64_t unpack_neon(const uint8_t* in, int64_t count, uint8_t* codes) {
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
    if constexpr (kBits == 1) {
      const int8x8_t eight = vcreate_s8(0xF9FAFBFCFDFEFF00);  // 0 .. -7: shifts to the right
      const uint8x16_t bytes = vcombine_u8(vld1_u8(in + k / 8), vcreate_u8(0));
      for (int l = 0; l < 4; ++l) {
        const uint8x16_t first = vcombine_u8(vcreate_u8(0), vcreate_u8(0x0101010101010101));
        const uint8x16_t from = vaddq_u8(first, vdupq_n_u8(static_cast<uint8_t>(2 * l)));
        const uint8x16_t bits = vshlq_u8(vqtbl1q_u8(bytes, from), vcombine_s8(eight, eight));
        vst1q_u8(codes + k + 16 * l, vandq_u8(bits, vdupq_n_u8(1)));
      }
    } else if constexpr (kBits == 2) {
      const uint8x16_t low = vdupq_n_u8(3);
      const uint8x16x2_t pairs = split_twos(vld1q_u8(in + k / 4));
      for (int64_t l = 0; l < 2; ++l) {
        const uint8x16_t first = vandq_u8(pairs.val[l], low), second = vshrq_n_u8(pairs.val[l], 2);
        vst1q_u8(codes + k + 32 * l, vzip1q_u8(first, second));
        vst1q_u8(codes + k + 32 * l + 16, vzip2q_u8(first, second));
      }
    } else {
      for (int64_t l = k; l < k + 64; l += 32) {
        const uint8x16x2_t both = split_twos(vld1q_u8(in + l / 2));
        vst1q_u8(codes + l, both.val[0]);
        vst1q_u8(codes + l + 16, both.val[1]);
      }
    }
  }
  return k;
}

template <int kBits>
constexpr bool kHasNeonCodes = kBits == 1 || kBits == 2 || kBits == 4;

template <int kBits>
TF_HIPS_INLINE int64_t pack_wide(const uint8_t* codes, int64_t count, uint8_t* out) {
  if constexpr (kHasNeonCodes<kBits>) {
    if (machine() == Machine::kNeon) return pack_neon<kBits>(codes, count, out);
  }
  return 0;
}

template <int kBits>
TF_HIPS_INLINE int64_t unpack_wide(const uint8_t* in, int64_t count, uint8_t* codes) {
  if constexpr (kHasNeonCodes<kBits>) {
    if (machine() == Machine::kNeon) return unpack_neon<kBits>(in, count, codes);
  }
  return 0;
}

// Adds codes to *sum, 64 at a time in chains that hide each other's latency.
TF_HIPS_NEON inline int64_t sum_neon(const uint8_t* codes, int64_t count, uint64_t* sum) {
  constexpr int64_t kMost = 8192;  // so many fit the 16 bits of each lane of four registers
  const int64_t whole = count / 64 * 64;
  for (int64_t begin = 0; begin < whole; begin += kMost) {
    const int64_t end = whole - begin < kMost ? whole : begin + kMost;
    uint16x8_t total[4] = {};
    for (int64_t k = begin; k < end; k += 64) {
      for (int l = 0; l < 4; ++l) total[l] = vpadalq_u8(total[l], vld1q_u8(codes + k + 16 * l));
    }
    for (int l = 0; l < 4; ++l) *sum += vaddlvq_u16(total[l]);
  }
  return whole;
}

TF_HIPS_INLINE int64_t sum_wide(const uint8_t* codes, int64_t count, uint64_t* sum) {
  return machine() == Machine::kNeon ? sum_neon(codes, count, sum) : 0;
}

// The halves of four products of one word each and a constant.
struct HalvesOfProducts {
  TF_HIPS_NEON_INLINE HalvesOfProducts(uint32x4_t words, uint32x4_t by) {
    const uint64x2_t first = vmull_u32(vget_low_u32(words), vget_low_u32(by));
    const uint64x2_t second = vmull_high_u32(words, by);
    low = vuzp1q_u32(vreinterpretq_u32_u64(first), vreinterpretq_u32_u64(second));
    high = vuzp2q_u32(vreinterpretq_u32_u64(first), vreinterpretq_u32_u64(second));
  }
  uint32x4_t low, high;
};

TF_HIPS_NEON_INLINE uint32x4_t xor_all(uint32x4_t a, uint32x4_t b, uint32_t key) {
  return veorq_u32(a, veorq_u32(b, vdupq_n_u32(key)));
}

// Blocks of Philox4x32-10, 16 bytes each: four in the lanes of four registers, one for each word.
template <int kAtOnce>
TF_HIPS_NEON_INLINE void noise_group_neon(const PhiloxInput& input, const PhiloxShared& shared,
                                          uint32_t first, uint8_t* words) {
  const uint32x4_t m0 = vdupq_n_u32(0xD2511F53), m1 = vdupq_n_u32(0xCD9E8D57);
  const uint32x4_t lane =
      vcombine_u32(vcreate_u32(uint64_t{1} << 32), vcreate_u32(2 | uint64_t{3} << 32));
  uint32x4_t c0[kAtOnce], c1[kAtOnce], c2[kAtOnce], c3[kAtOnce];
  for (int k = 0; k < kAtOnce; ++k) {
    const uint32x4_t number = vdupq_n_u32(first + static_cast<uint32_t>(4 * k));
    const HalvesOfProducts p0(vaddq_u32(number, lane), m0);
    const HalvesOfProducts p1(veorq_u32(p0.high, vdupq_n_u32(shared.first2)), m1);
    c0[k] = veorq_u32(p1.high, vdupq_n_u32(shared.second0));
    c1[k] = p1.low;
    c2[k] = veorq_u32(p0.low, vdupq_n_u32(shared.second2));
    c3[k] = vdupq_n_u32(shared.second3);
  }
  uint32_t k0 = input.k0 + 2 * 0x9E3779B9u, k1 = input.k1 + 2 * 0xBB67AE85u;
  for (int round = 2; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    for (int k = 0; k < kAtOnce; ++k) {
      const HalvesOfProducts p0(c0[k], m0), p1(c2[k], m1);
      c0[k] = xor_all(p1.high, c1[k], k0);
      c1[k] = p1.low;
      c2[k] = xor_all(p0.high, c3[k], k1);
      c3[k] = p0.low;
    }
  }
  for (int k = 0; k < kAtOnce; ++k) {
    const uint32x4x4_t all = {{c0[k], c1[k], c2[k], c3[k]}};
    vst4q_u32(reinterpret_cast<uint32_t*>(words + 64 * k), all);
  }
}

TF_HIPS_NEON inline int64_t noise_neon(const PhiloxInput& input, int64_t blocks, void* words) {
  const PhiloxShared shared(input);
  const uint32_t first = static_cast<uint32_t>(input.first);
  uint8_t* const buffer = static_cast<uint8_t*>(words);
  blocks = blocks_of_one_word(input, blocks);
  constexpr int kAtOnce = 4;  // chains of multiplications that hide each other's latency
  int64_t b = 0;
  for (; b + 4 * kAtOnce <= blocks; b += 4 * kAtOnce) {
    noise_group_neon<kAtOnce>(input, shared, first + static_cast<uint32_t>(b), buffer + 16 * b);
  }
  for (; b + 4 <= blocks; b += 4) {
    noise_group_neon<1>(input, shared, first + static_cast<uint32_t>(b), buffer + 16 * b);
  }
  return b;
}

TF_HIPS_INLINE int64_t noise_wide(const PhiloxInput& input, int64_t blocks, void* words) {
  return machine() == Machine::kNeon ? noise_neon(input, blocks, words) : 0;
}

}  // namespace tf_hips
#endif  // TF_HIPS_HAS_NEON

#endif  // TF_HIPS_CC_RUNTIME_VECTORS_NEON_H_
