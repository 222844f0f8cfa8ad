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
  uint64_t bits = 0;
#if defined(TF_HIPS_HAS_VECTORS)
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

// Calls put(number, j) for every j whose flag is set, in order; numbers go on from `total`. Returns
// `total` plus the number of flags set. Where few are set, a processor cannot foresee which: so the
// first three of 64 are put whether they are there or not, and up to three numbers beyond the last
// one are put what does not matter.
template <typename Put>
TF_HIPS_INLINE int64_t for_flags(const bool* flags, int64_t count, int64_t total, const Put& put) {
  int64_t j = 0;
  for (; j + 64 <= count; j += 64) {
    uint64_t bits = flag_bits(flags + j);
    const int64_t end = total + __builtin_popcountll(bits);
    for (int k = 0; k < 3; ++k, bits &= bits - 1) {
      put(total + k, j + __builtin_ctzll(bits | uint64_t{1} << 63));
    }
    for (total += 3; total < end; ++total, bits &= bits - 1) put(total, j + __builtin_ctzll(bits));
    total = end;
  }
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

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_FLAGS_H_
