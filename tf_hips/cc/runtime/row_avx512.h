// SPDX-License-Identifier: Apache-2.0
// Rows (row.h) on machines with AVX-512: a register each.

#ifndef TF_HIPS_CC_RUNTIME_ROW_AVX512_H_
#define TF_HIPS_CC_RUNTIME_ROW_AVX512_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/stores.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

#if defined(TF_HIPS_HAS_AVX)
namespace tf_hips::avx512 {

#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"

using Row = __m512;
using RowFlags = __mmask16;
using RowCodes = __m512i;

TF_HIPS_AVX512_INLINE Row row_of(float x) { return _mm512_set1_ps(x); }
TF_HIPS_AVX512_INLINE Row row_at(const float* in) { return _mm512_loadu_ps(in); }
TF_HIPS_AVX512_INLINE void row_store(float* out, Row x) { _mm512_storeu_ps(out, x); }
TF_HIPS_AVX512_INLINE void row_stream(float* line, Row x) { stream_line(line, x); }

// Rows that follow one another, past the caches, from any float on. Their ends share lines with
// what lies around them, which go the ordinary way.
class LateRows {
 public:
  TF_HIPS_AVX512_INLINE LateRows(float* out, int64_t count) {
    past_ = static_cast<int32_t>(reinterpret_cast<uintptr_t>(out) % 64 / sizeof(float));
    line_ = out - past_;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // Lane k of a line is lane 16 + k - past of two rows.
    order_ = _mm512_sub_epi32(lane, _mm512_set1_epi32(past_ - 16));
    // The line that the last row shares must be there when it is written: what is written behind it
    // waits.
    if (past_ != 0) __builtin_prefetch(line_ + count);
  }

  TF_HIPS_AVX512_INLINE void put(Row x) {
    if (past_ == 0) {
      row_stream(line_, x);
    } else {
      const Row line = _mm512_permutex2var_ps(last_, order_, x);
      if (is_first_) {
        _mm512_mask_storeu_ps(line_, static_cast<RowFlags>(0xFFFFu << past_), line);
      } else {
        row_stream(line_, line);
      }
      is_first_ = false;
      last_ = x;
    }
    line_ += 16;
  }

  TF_HIPS_AVX512_INLINE void finish() {
    if (past_ == 0) return;
    const RowFlags shared = static_cast<RowFlags>((1u << past_) - 1u);
    _mm512_mask_storeu_ps(line_, shared, _mm512_permutexvar_ps(order_, last_));
  }

 private:
  float* line_;
  Row last_ = row_of(0.0f);
  __m512i order_;
  int32_t past_;  // lanes of a line that belong to the row before
  bool is_first_ = true;
};

// 16 codes, a byte each, and what they are as floats.
TF_HIPS_AVX512_INLINE RowCodes row_bytes(const uint8_t* codes) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}
// 16 codes of a bit.
TF_HIPS_AVX512_INLINE RowFlags row_bits(const uint8_t* codes) {
  RowFlags flags;
  std::memcpy(&flags, codes, sizeof flags);
  return flags;
}

// 16 codes behind element `at`, a multiple of 16, of a vector in memory; of 1, 2, 4 or 8 bits.
template <int kBits>
TF_HIPS_AVX512_INLINE RowCodes row_packed(const uint8_t* codes, int64_t at) {
  static_assert(kBits == 1 || kBits == 2 || kBits == 4 || kBits == 8, "a width of whole words");
  if constexpr (kBits == 8) {
    return row_bytes(codes + at);
  } else if constexpr (kBits == 4) {
    int32_t words[2];
    std::memcpy(words, codes + at / 2, sizeof words);
    const __m512i shifts =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(words[0]), 0xFF00, words[1]);
    return _mm512_and_si512(_mm512_srlv_epi32(both, shifts), _mm512_set1_epi32(15));
  } else if constexpr (kBits == 2) {
    int32_t word;
    std::memcpy(&word, codes + at / 4, sizeof word);
    const __m512i shifts =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i all = _mm512_set1_epi32(word);
    return _mm512_and_si512(_mm512_srlv_epi32(all, shifts), _mm512_set1_epi32(3));
  } else {
    return _mm512_maskz_set1_epi32(row_bits(codes + at / 8), 1);
  }
}

// Lane j ^ kMirror for lane j.
template <int kMirror>
TF_HIPS_AVX512_INLINE RowCodes row_mirrored(RowCodes row) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_epi32(_mm512_xor_si512(lane, _mm512_set1_epi32(kMirror)), row);
}

// Codes of as many bits have no more values than a row has lanes.
constexpr int kTableBits = 4;
// All codes of kBits, one after the other and then again.
template <int kBits>
TF_HIPS_AVX512_INLINE RowCodes row_every_code() {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_and_si512(lane, _mm512_set1_epi32((1 << kBits) - 1));
}
// A row that has the value of every code, as it is looked up; of one bit two rows to choose from.
template <int kBits, int kMirror>
struct RowTable {
  Row values;
};
template <>
struct RowTable<1, 0> {
  Row first, second;
};
template <int kBits, int kMirror>
TF_HIPS_AVX512_INLINE RowTable<kBits, kMirror> row_table(Row values) {
  if constexpr (kBits == 1 && kMirror == 0) {
    Row first = _mm512_permutexvar_ps(_mm512_setzero_si512(), values);
    Row second = _mm512_permutexvar_ps(_mm512_set1_epi32(1), values);
    // Compilers that know where they come from make them again for each row of elements.
    __asm__("" : "+v"(first), "+v"(second));
    return {first, second};
  } else {
    return {values};
  }
}
// What a table has for the codes that row_mirrored<kMirror>(row_packed<kBits>(codes, at)) are.
template <int kBits, int kMirror>
TF_HIPS_AVX512_INLINE Row row_looked_up(RowTable<kBits, kMirror> table, const uint8_t* codes,
                                        int64_t at) {
  static_assert(kBits <= kTableBits, "a row has all values");
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  if constexpr (kBits == 1 && kMirror == 0) {
    return _mm512_mask_blend_ps(row_bits(codes + at / 8), table.first, table.second);
  } else if constexpr (kBits == 2) {
    // Permutations take 4 bits of an index: what is left of other codes chooses among copies.
    int32_t word;
    std::memcpy(&word, codes + at / 4, sizeof word);
    const __m512i place = _mm512_xor_si512(lane, _mm512_set1_epi32(kMirror));
    const __m512i shifts = _mm512_slli_epi32(place, 1);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(word), shifts), table.values);
  } else {
    return _mm512_permutexvar_ps(row_mirrored<kMirror>(row_packed<kBits>(codes, at)), table.values);
  }
}

// Codes of a bit of a row.
TF_HIPS_AVX512_INLINE void store_bits(RowFlags flags, uint8_t* codes) {
  std::memcpy(codes, &flags, sizeof flags);
}
TF_HIPS_AVX512_INLINE int32_t row_count(RowFlags flags) { return __builtin_popcount(flags); }

TF_HIPS_AVX512_INLINE Row row_of_codes(RowCodes codes) { return _mm512_cvtepi32_ps(codes); }
TF_HIPS_AVX512_INLINE RowFlags row_is_set(RowCodes codes) {
  return _mm512_test_epi32_mask(codes, codes);
}

TF_HIPS_AVX512_INLINE Row row_abs(Row x) { return _mm512_abs_ps(x); }

// The second where one is NaN, as `a > b ? a : b` has it.
TF_HIPS_AVX512_INLINE Row row_maximum(Row a, Row b) { return _mm512_max_ps(a, b); }
TF_HIPS_AVX512_INLINE Row row_minimum(Row a, Row b) { return _mm512_min_ps(a, b); }

// NaN and infinities become +0.
TF_HIPS_AVX512_INLINE Row row_finite(Row x) {
  // The table's places of two kinds of NaN and of two infinities say +0, and all else stays.
  return _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x880088), 0);
}
// The larger one of a and |x|, of numbers of which a is not negative.
TF_HIPS_AVX512_INLINE Row row_largest(Row a, Row x) {
  constexpr int kLarger = 3, kNoSign = 2 << 2;
  return _mm512_range_ps(a, x, kLarger | kNoSign);
}
// From -bound to bound; x is a number, and `bound` above 0.
TF_HIPS_AVX512_INLINE Row row_clamped(Row x, Row bound) {
  constexpr int kSmaller = 2, kSignOfX = 0 << 2;
  return _mm512_range_ps(x, bound, kSmaller | kSignOfX);
}

TF_HIPS_AVX512_INLINE RowFlags row_is_less(Row a, Row b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
TF_HIPS_AVX512_INLINE RowFlags row_is_at_most(Row a, Row b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ);
}
TF_HIPS_AVX512_INLINE RowFlags row_is_more(Row a, Row b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
TF_HIPS_AVX512_INLINE RowFlags row_is_at_least(Row a, Row b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}
TF_HIPS_AVX512_INLINE RowFlags row_is_equal(Row a, Row b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
TF_HIPS_AVX512_INLINE RowFlags row_is_unequal(Row a, Row b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ);
}
TF_HIPS_AVX512_INLINE RowFlags row_both(RowFlags a, RowFlags b) {
  return static_cast<RowFlags>(a & b);
}
TF_HIPS_AVX512_INLINE RowFlags row_either(RowFlags a, RowFlags b) {
  return static_cast<RowFlags>(a | b);
}
TF_HIPS_AVX512_INLINE Row row_select(RowFlags flags, Row yes, Row no) {
  return _mm512_mask_blend_ps(flags, no, yes);
}

// x == x ? x : 0.
TF_HIPS_AVX512_INLINE Row row_number(Row x) {
  // In the table two kinds of NaN become +0, and all else stays.
  return _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x88), 0);
}

TF_HIPS_AVX512_INLINE Row row_whole_noise(const uint16_t* noise) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(noise));
  return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(words));
}
// random_float(0, 1, noise) of 16 elements.
TF_HIPS_AVX512_INLINE Row row_noise(const uint16_t* noise) {
  return row_whole_noise(noise) * _mm512_set1_ps(0x1p-16f);
}
// x + row_noise(noise): the product is exact, so one rounding is what two would be.
TF_HIPS_AVX512_INLINE Row row_plus_noise(Row x, const uint16_t* noise) {
  return _mm512_fmadd_ps(row_whole_noise(noise), _mm512_set1_ps(0x1p-16f), x);
}

// float_to_code but for what is below 0, NaN included: it becomes a negative number, which
// store_codes saturates.
TF_HIPS_AVX512_INLINE RowCodes row_codes(Row x, Row top) {
  return _mm512_cvttps_epi32(_mm512_min_ps(top, x));
}
// The same of what is not above the largest code.
TF_HIPS_AVX512_INLINE RowCodes row_codes(Row x) { return _mm512_cvttps_epi32(x); }

// Numbers of which codes are the low bits.
TF_HIPS_AVX512_INLINE RowCodes row_low_bits(RowCodes numbers, RowCodes low) {
  return _mm512_and_si512(numbers, low);
}
TF_HIPS_AVX512_INLINE RowCodes row_of_number(int32_t x) { return _mm512_set1_epi32(x); }
TF_HIPS_AVX512_INLINE RowCodes row_of_flags(RowFlags flags) {
  return _mm512_maskz_set1_epi32(flags, 1);
}
TF_HIPS_AVX512_INLINE RowCodes row_sum(RowCodes a, RowCodes b) { return _mm512_add_epi32(a, b); }
TF_HIPS_AVX512_INLINE RowCodes row_difference(RowCodes a, RowCodes b) {
  return _mm512_sub_epi32(a, b);
}

TF_HIPS_AVX512_INLINE RowCodes row_number_select(RowFlags flags, RowCodes yes, RowCodes no) {
  return _mm512_mask_blend_epi32(flags, no, yes);
}
TF_HIPS_AVX512_INLINE RowFlags row_number_is_less(RowCodes a, RowCodes b) {
  return _mm512_cmplt_epi32_mask(a, b);
}
TF_HIPS_AVX512_INLINE RowFlags row_number_is_at_most(RowCodes a, RowCodes b) {
  return _mm512_cmple_epi32_mask(a, b);
}
TF_HIPS_AVX512_INLINE RowFlags row_number_is_more(RowCodes a, RowCodes b) {
  return _mm512_cmpgt_epi32_mask(a, b);
}
TF_HIPS_AVX512_INLINE RowFlags row_number_is_at_least(RowCodes a, RowCodes b) {
  return _mm512_cmpge_epi32_mask(a, b);
}
TF_HIPS_AVX512_INLINE RowFlags row_number_is_equal(RowCodes a, RowCodes b) {
  return _mm512_cmpeq_epi32_mask(a, b);
}
TF_HIPS_AVX512_INLINE RowFlags row_number_is_unequal(RowCodes a, RowCodes b) {
  return _mm512_cmpneq_epi32_mask(a, b);
}

// Codes as store_codes stores them.
TF_HIPS_AVX512_INLINE RowCodes row_held(RowCodes codes) {
  return _mm512_max_epi32(codes, _mm512_setzero_si512());
}

// Codes of up to 8 bits of four rows, a byte each.
TF_HIPS_AVX512_INLINE void store_codes(const RowCodes* rows, uint8_t* codes) {
  const __m512i first = _mm512_packus_epi32(rows[0], rows[1]);
  const __m512i second = _mm512_packus_epi32(rows[2], rows[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_packus_epi16(first, second);
  _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, bytes));
}

// What residual_tile leaves of a row.
TF_HIPS_AVX512_INLINE Row row_left(Row sum, Row x) {
  const Row left = sum - x;
  const Row most = row_of(std::numeric_limits<float>::max());
  return _mm512_maskz_mov_ps(row_is_at_most(row_abs(left), most), left);
}
TF_HIPS_AVX512_INLINE Row row_left(const float* sum, Row x) { return row_left(row_at(sum), x); }

// What the lanes of a block and the initial value of its reduction combine to.
template <typename Reducer>
TF_HIPS_AVX512_INLINE float combine_row(float init, Row row) {
  FloatVector lanes[4];
  std::memcpy(lanes, &row, sizeof lanes);
  Reducer::fold(init, combine_lanes<Reducer>(lanes));
  return init;
}

#pragma GCC diagnostic pop

}  // namespace tf_hips::avx512
#endif  // TF_HIPS_HAS_AVX

#endif  // TF_HIPS_CC_RUNTIME_ROW_AVX512_H_
