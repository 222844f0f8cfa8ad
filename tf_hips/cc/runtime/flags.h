// SPDX-License-Identifier: Apache-2.0
// What is done for the elements of a tile whose flag is set.

#ifndef TF_HIPS_CC_RUNTIME_FLAGS_H_
#define TF_HIPS_CC_RUNTIME_FLAGS_H_

#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// The flags of 64 elements as bits.
TF_HIPS_INLINE uint64_t flag_bits(const bool* flags) {
#if defined(TF_HIPS_HAS_NEON)
  if (machine() == Machine::kNeon) return bits_of_bytes(reinterpret_cast<const uint8_t*>(flags));
#endif
  uint64_t bits = 0;
#if defined(TF_HIPS_HAS_AVX)
  for (int k = 0; k < 64; k += 16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + k));
    const int found = _mm_movemask_epi8(_mm_slli_epi16(x, 7));
    bits |= static_cast<uint64_t>(static_cast<uint32_t>(found)) << k;
  }
#else
  for (int k = 0; k < 64; ++k) bits |= static_cast<uint64_t>(flags[k]) << k;
#endif
  return bits;
}

#if defined(TF_HIPS_HAS_AVX)
// Where the lanes of a register come from that holds, of eight lanes, those whose bit is set, in
// order: a byte each.
struct KeptLanes {
  constexpr KeptLanes() : lanes() {
    for (int bits = 0; bits < 256; ++bits) {
      for (int lane = 0, found = 0; lane < 8; ++lane) {
        if ((bits >> lane & 1) != 0) lanes[bits][found++] = static_cast<uint8_t>(lane);
      }
    }
  }
  uint8_t lanes[256][8];
};
inline constexpr KeptLanes kKeptLanes;

// The order that brings lanes whose bit is set to the front.
TF_HIPS_AVX2_INLINE __m256i order_of_kept(uint32_t bits) {
  int64_t lanes;
  std::memcpy(&lanes, kKeptLanes.lanes[bits], sizeof lanes);
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(lanes));
}

// What eight comparisons of eight lanes say, as bits.
TF_HIPS_AVX2_INLINE uint64_t bits_of_lanes(const __m256i* flags) {
  uint64_t bits = 0;
  for (int k = 0; k < 8; k += 4) {
    const __m256i first = _mm256_packs_epi32(flags[k], flags[k + 1]);
    const __m256i second = _mm256_packs_epi32(flags[k + 2], flags[k + 3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
    const uint32_t found = static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
    bits |= static_cast<uint64_t>(found) << (8 * k);
  }
  return bits;
}
#endif

// Calls put(number, j) for the bits that are set of 64, in order; numbers go on from `total`, and j
// from `base`. Returns `total` plus their number. Where few are set, a processor cannot foresee
// which: so the first three are put whether they are there or not, and up to three numbers beyond
// the last one are put what does not matter.
template <typename Put>
TF_HIPS_INLINE int64_t for_bits(uint64_t bits, int64_t base, int64_t total, const Put& put) {
  const int64_t end = total + __builtin_popcountll(bits);
  for (int k = 0; k < 3; ++k, bits &= bits - 1) {
    put(total + k, base + __builtin_ctzll(bits | uint64_t{1} << 63));
  }
  for (total += 3; total < end; ++total, bits &= bits - 1) put(total, base + __builtin_ctzll(bits));
  return end;
}

// The same for every j whose flag is set.
template <typename Put>
TF_HIPS_INLINE int64_t for_flags(const bool* flags, int64_t count, int64_t total, const Put& put) {
  int64_t j = 0;
  for (; j + 64 <= count; j += 64) total = for_bits(flag_bits(flags + j), j, total, put);
  for (; j < count; ++j) {
    if (flags[j]) put(total++, j);
  }
  return total;
}

// Appends the values whose flag is set to `out`, which holds `total` of them; returns their number.
template <typename T>
TF_HIPS_INLINE int64_t keep_values(const bool* flags, const T* values, int64_t count, int64_t total,
                                   T* out) {
  return for_flags(flags, count, total, [&](int64_t at, int64_t j) { out[at] = values[j]; });
}

// The same for the values base, base + 1, ...
template <typename T>
TF_HIPS_INLINE int64_t keep_range(const bool* flags, int64_t base, int64_t count, int64_t total,
                                  T* out) {
  return for_flags(flags, count, total,
                   [&](int64_t at, int64_t j) { out[at] = static_cast<T>(base + j); });
}

// The same; the floats that a tile has there are appended to `beside`.
template <typename T>
TF_HIPS_INLINE int64_t keep_range(const bool* flags, int64_t base, int64_t count, int64_t total,
                                  T* out, const float* values, float* beside) {
  return for_flags(flags, count, total, [&](int64_t at, int64_t j) {
    out[at] = static_cast<T>(base + j);
    beside[at] = values[j];
  });
}

// The same for flags that are bits: a word for each 64 of `count`, which is a multiple of that.
template <typename T>
TF_HIPS_INLINE int64_t keep_bits(const uint64_t* bits, int64_t base, int64_t count, int64_t total,
                                 T* out) {
  for (int64_t j = 0; j < count; j += 64) {
    total = for_bits(bits[j / 64], j, total,
                     [&](int64_t at, int64_t i) { out[at] = static_cast<T>(base + i); });
  }
  return total;
}

template <typename T>
TF_HIPS_INLINE int64_t keep_bits(const uint64_t* bits, int64_t base, int64_t count, int64_t total,
                                 T* out, const float* values, float* beside) {
  for (int64_t j = 0; j < count; j += 64) {
    total = for_bits(bits[j / 64], j, total, [&](int64_t at, int64_t i) {
      out[at] = static_cast<T>(base + i);
      beside[at] = values[i];
    });
  }
  return total;
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_FLAGS_H_
