// SPDX-License-Identifier: Apache-2.0
// A message of bytes is a polynomial over GF(2), and its checksum the remainder of a division.
//
// Where the processor has carry-less products, 64 bytes at a time are folded: what is so far,
// times x^512 modulo the polynomial, joins the next 64 bytes without changing the remainder. What
// is left are 16 bytes of the same remainder, which tables divide, as they do all bytes of other
// processors. AArch64 has instructions that divide by this polynomial. After V. Gopal et al., "Fast
// CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009, which derives
// the constants.
#include "tf_hips/cc/runtime/checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__) && !defined(__clang__)
#define TF_HIPS_DIVIDES 1
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;  // reflected
constexpr int kSlices = 8;

// of[k][b]: the remainder of byte b with k bytes of 0 after it.
struct Tables {
  uint32_t of[kSlices][256];
  constexpr Tables() : of() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t remainder = byte;
      for (int bit = 0; bit < 8; ++bit) {
        remainder = (remainder >> 1) ^ (remainder & 1 ? kPolynomial : 0);
      }
      of[0][byte] = remainder;
    }
    for (int slice = 1; slice < kSlices; ++slice) {
      for (uint32_t byte = 0; byte < 256; ++byte) {
        const uint32_t before = of[slice - 1][byte];
        of[slice][byte] = (before >> 8) ^ of[0][before & 0xff];
      }
    }
  }
};
constexpr Tables kTables;

// `state` is a checksum with its bits inverted, here and below.
uint32_t Divide(uint32_t state, const uint8_t* data, int64_t n) {
  const auto& of = kTables.of;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; n >= kSlices; n -= kSlices, data += kSlices) {
    uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= state;
    state = of[7][low & 0xff] ^ of[6][(low >> 8) & 0xff] ^ of[5][(low >> 16) & 0xff] ^
            of[4][low >> 24] ^ of[3][high & 0xff] ^ of[2][(high >> 8) & 0xff] ^
            of[1][(high >> 16) & 0xff] ^ of[0][high >> 24];
  }
#endif
  for (; n > 0; --n, ++data) state = (state >> 8) ^ of[0][(state ^ *data) & 0xff];
  return state;
}

#if defined(__x86_64__)
#define TF_HIPS_FOLDS __attribute__((target("pclmul,sse4.1")))

TF_HIPS_FOLDS inline __m128i Load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// `so_far` moved by as many bits as `by` stands for, joined with `next`.
TF_HIPS_FOLDS inline __m128i Fold(__m128i so_far, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(so_far, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(so_far, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// n is at least 64.
TF_HIPS_FOLDS uint32_t DivideFolding(uint32_t state, const uint8_t* data, int64_t n) {
  // x^(4*128+32) and x^(4*128-32), x^(128+32) and x^(128-32) modulo the polynomial, reflected.
  const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
  const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i lanes[4];
  for (int k = 0; k < 4; ++k) lanes[k] = Load(data + 16 * k);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (data += 64, n -= 64; n >= 64; data += 64, n -= 64) {
    for (int k = 0; k < 4; ++k) lanes[k] = Fold(lanes[k], by_512, Load(data + 16 * k));
  }
  __m128i left = lanes[0];
  for (int k = 1; k < 4; ++k) left = Fold(left, by_128, lanes[k]);
  for (; n >= 16; data += 16, n -= 16) left = Fold(left, by_128, Load(data));
  uint8_t bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), left);
  return Divide(Divide(0, bytes, sizeof(bytes)), data, n);
}
#elif defined(TF_HIPS_DIVIDES)
// By instructions that divide by this very polynomial.
__attribute__((target("+crc"))) uint32_t DivideByWords(uint32_t state, const uint8_t* data,
                                                       int64_t n) {
  for (; n >= 8; n -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    state = __crc32d(state, word);
  }
  for (; n > 0; --n, ++data) state = __crc32b(state, *data);
  return state;
}
#endif

}  // namespace

uint32_t tf_hips_crc32(uint32_t crc, const void* data, int64_t n) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  const uint32_t state = ~crc;
#if defined(__x86_64__)
  // Asked each time: it is one load, and there is no moment before which it must be known.
  if (n >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
    return ~DivideFolding(state, bytes, n);
  }
#elif defined(TF_HIPS_DIVIDES)
  if ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0) return ~DivideByWords(state, bytes, n);
#endif
  return ~Divide(state, bytes, n);
}
