// SPDX-License-Identifier: Apache-2.0
// The Walsh-Hadamard transform of blocks of a tile, in the steps of compll/ir/transforms.py: stages
// of strides 1, 2, 4, .., of which each puts a + b and a - b in the place of a and b, and one
// multiplication by the float next to 1 / sqrt(length).
//
// An element takes log2(length) additions, so what costs time is moving them: the four stages in a
// row of 16 floats are made in registers, and the others two at a time.

#ifndef TF_HIPS_CC_RUNTIME_HADAMARD_H_
#define TF_HIPS_CC_RUNTIME_HADAMARD_H_

#include <cstdint>

#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/row.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// 2^(-k / 2), where `length` is 2^k: what its transform is multiplied by.
TF_HIPS_INLINE float hadamard_scale(int64_t length) {
  float power = 1.0f;
  for (; length >= 4; length /= 4) power *= 0.5f;
  return length == 2 ? power * 0.70710678f : power;
}

#if defined(TF_HIPS_HAS_AVX)
namespace avx512 {

#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"

// A stage of a row: each element's partner is in `turned`, and its own part of the sum is negated
// in the second of two. By 1 and -1 a product is exact, so the sum alone is rounded.
TF_HIPS_AVX512_INLINE Row row_stage(Row x, Row turned, __mmask16 seconds) {
  const Row signs = _mm512_mask_blend_ps(seconds, row_of(1.0f), row_of(-1.0f));
  return _mm512_fmadd_ps(x, signs, turned);
}

// The stages of strides 1, 2, 4 and 8.
TF_HIPS_AVX512_INLINE Row row_butterflies(Row x) {
  x = row_stage(x, _mm512_permute_ps(x, 0xB1), 0xAAAA);
  x = row_stage(x, _mm512_permute_ps(x, 0x4E), 0xCCCC);
  x = row_stage(x, _mm512_shuffle_f32x4(x, x, 0xB1), 0xF0F0);
  return row_stage(x, _mm512_shuffle_f32x4(x, x, 0x4E), 0xFF00);
}

#define TF_HIPS_ROWS_INLINE TF_HIPS_AVX512_INLINE
#define TF_HIPS_ROWS_APART TF_HIPS_AVX512 inline
#include "tf_hips/cc/runtime/hadamard_rows.h"
#undef TF_HIPS_ROWS_INLINE
#undef TF_HIPS_ROWS_APART

#pragma GCC diagnostic pop
}  // namespace avx512

namespace avx2 {

TF_HIPS_AVX2_INLINE __m256 half_stage(__m256 x, __m256 turned, __m256 signs) {
  return _mm256_add_ps(turned, _mm256_xor_ps(x, signs));
}

TF_HIPS_AVX2_INLINE __m256 half_butterflies(__m256 x) {
  const float n = -0.0f;
  x = half_stage(x, _mm256_permute_ps(x, 0xB1), _mm256_setr_ps(0, n, 0, n, 0, n, 0, n));
  x = half_stage(x, _mm256_permute_ps(x, 0x4E), _mm256_setr_ps(0, 0, n, n, 0, 0, n, n));
  return half_stage(x, _mm256_permute2f128_ps(x, x, 1), _mm256_setr_ps(0, 0, 0, 0, n, n, n, n));
}

TF_HIPS_AVX2_INLINE Row row_butterflies(Row x) {
  const __m256 low = half_butterflies(x.low), high = half_butterflies(x.high);
  return {_mm256_add_ps(low, high), _mm256_sub_ps(low, high)};
}

#define TF_HIPS_ROWS_INLINE TF_HIPS_AVX2_INLINE
#define TF_HIPS_ROWS_APART TF_HIPS_AVX2 inline
#include "tf_hips/cc/runtime/hadamard_rows.h"
#undef TF_HIPS_ROWS_INLINE
#undef TF_HIPS_ROWS_APART

}  // namespace avx2
#elif defined(TF_HIPS_HAS_NEON)
namespace neon {

// The stages of strides 1 and 2 of two parts of a row. Each addition is of two parts' elements;
// those of one part are together again in the end.
TF_HIPS_NEON_INLINE void pair_butterflies(float32x4_t& a, float32x4_t& b) {
  const float32x4_t even = vtrn1q_f32(a, b), odd = vtrn2q_f32(a, b);
  const float64x2_t sum = vreinterpretq_f64_f32(vaddq_f32(even, odd));
  const float64x2_t rest = vreinterpretq_f64_f32(vsubq_f32(even, odd));
  const float32x4_t first = vreinterpretq_f32_f64(vtrn1q_f64(sum, rest));
  const float32x4_t second = vreinterpretq_f32_f64(vtrn2q_f64(sum, rest));
  const float32x4_t low = vaddq_f32(first, second), high = vsubq_f32(first, second);
  a = vuzp1q_f32(low, high);
  b = vuzp2q_f32(low, high);
}

TF_HIPS_NEON_INLINE Row row_butterflies(Row x) {
  pair_butterflies(x.part[0], x.part[1]);
  pair_butterflies(x.part[2], x.part[3]);
  const float32x4_t a = vaddq_f32(x.part[0], x.part[1]), b = vsubq_f32(x.part[0], x.part[1]);
  const float32x4_t c = vaddq_f32(x.part[2], x.part[3]), d = vsubq_f32(x.part[2], x.part[3]);
  return {{vaddq_f32(a, c), vaddq_f32(b, d), vsubq_f32(a, c), vsubq_f32(b, d)}};
}

#define TF_HIPS_ROWS_INLINE TF_HIPS_NEON_INLINE
#define TF_HIPS_ROWS_APART TF_HIPS_NEON inline
#include "tf_hips/cc/runtime/hadamard_rows.h"
#undef TF_HIPS_ROWS_INLINE
#undef TF_HIPS_ROWS_APART

}  // namespace neon
#endif

// The same one stage after another, of any power of two of elements.
TF_HIPS_APART void hadamard_plain(const float* in, int64_t length, float* out) {
  if (out != in) {
    for (int64_t j = 0; j < length; ++j) out[j] = in[j];
  }
  for (int64_t stride = 1; stride < length; stride *= 2) {
    for (int64_t begin = 0; begin < length; begin += 2 * stride) {
      float* const first = out + begin;
      float* const second = first + stride;
      for (int64_t j = 0; j < stride; ++j) {
        const float a = first[j], b = second[j];
        first[j] = a + b;
        second[j] = a - b;
      }
    }
  }
  const float scale = hadamard_scale(length);
  for (int64_t j = 0; j < length; ++j) out[j] *= scale;
}

// `count` blocks of one length, a power of two, one behind another. `out` may be `in`.
TF_HIPS_INLINE void hadamard_each(const float* in, int64_t count, int64_t length, float* out) {
#if defined(TF_HIPS_HAS_AVX)
  if (length >= kLanes) {
    const float scale = hadamard_scale(length);
    switch (machine()) {
      case Machine::kAvx512:
        avx512::hadamard_blocks(in, count, length / kLanes, scale, out);
        return;
      case Machine::kAvx2:
        avx2::hadamard_blocks(in, count, length / kLanes, scale, out);
        return;
      default:
        break;
    }
  }
#elif defined(TF_HIPS_HAS_NEON)
  if (length >= kLanes && machine() == Machine::kNeon) {
    neon::hadamard_blocks(in, count, length / kLanes, hadamard_scale(length), out);
    return;
  }
#endif
  for (int64_t k = 0; k < count; ++k) hadamard_plain(in + k * length, length, out + k * length);
}

// C of compll/ir/transforms.py: each two elements that are half a block apart, in place.
TF_HIPS_APART void hadamard_pairs(float* x, int64_t length) {
  const int64_t half = length / 2;
  float* const second = x + (length - half);
  for (int64_t j = 0; j < half; ++j) {
    const float a = x[j], b = second[j];
    x[j] = (a + b) * 0.70710678f;
    second[j] = (a - b) * 0.70710678f;
  }
}

// D: negates elements as their numbers say, in place.
TF_HIPS_APART void hadamard_turns(float* x, int64_t length) {
  for (uint32_t j = 0; j < static_cast<uint32_t>(length); ++j) {
    x[j] = (j * j * 2654435769u) >> 31 != 0 ? -x[j] : x[j];
  }
}

// A block of any number of elements, in place: of a power of two as all others, else
// C A D B D B D A C, where A transforms the first `most` elements, the largest power of two, and B
// the last.
TF_HIPS_INLINE void hadamard_last(float* x, int64_t length) {
  int64_t most = 1;
  while (2 * most <= length) most *= 2;
  if (most == length) return hadamard_each(x, 1, length, x);
  float* const last = x + (length - most);
  hadamard_pairs(x, length);
  for (int64_t k = 0; k < 4; ++k) {
    if (k != 0) hadamard_turns(x, length);
    float* const part = k == 1 || k == 2 ? last : x;
    hadamard_each(part, 1, most, part);
  }
  hadamard_pairs(x, length);
}

// The blocks of a tile of `count` values, of which the last may be shorter. `out` may be `in`.
TF_HIPS_INLINE void hadamard_tile(const float* in, int64_t count, int64_t block, float* out) {
  const int64_t whole = count & -block;
  if (whole != 0) hadamard_each(in, whole / block, block, out);
  if (whole == count) return;
  if (out != in) {
    for (int64_t j = whole; j < count; ++j) out[j] = in[j];
  }
  hadamard_last(out + whole, count - whole);
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_HADAMARD_H_
