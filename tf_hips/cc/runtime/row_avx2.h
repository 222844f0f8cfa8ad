// SPDX-License-Identifier: Apache-2.0
// Rows (row.h) on machines with AVX2: two registers each, `low` with elements 0 .. 7. Names and
// results are those of row_avx512.h, also where the text is: a function that is inlined must be for
// the machine of its caller.

#ifndef TF_HIPS_CC_RUNTIME_ROW_AVX2_H_
#define TF_HIPS_CC_RUNTIME_ROW_AVX2_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/stores.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

#if defined(TF_HIPS_HAS_AVX)
namespace tf_hips::avx2 {

struct Row {
  __m256 low, high;
};
// The sign bit of an element says it.
struct RowFlags {
  __m256i low, high;
};
struct RowCodes {
  __m256i low, high;
};

TF_HIPS_AVX2_INLINE Row row_of(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TF_HIPS_AVX2_INLINE Row row_at(const float* in) {
  return {_mm256_loadu_ps(in), _mm256_loadu_ps(in + 8)};
}
TF_HIPS_AVX2_INLINE void row_store(float* out, Row x) {
  _mm256_storeu_ps(out, x.low);
  _mm256_storeu_ps(out + 8, x.high);
}
TF_HIPS_AVX2_INLINE void row_stream(float* line, Row x) {
  stream_half(line, x.low);
  stream_half(line + 8, x.high);
}

TF_HIPS_AVX2_INLINE Row operator+(Row a, Row b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE Row operator-(Row a, Row b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE Row operator*(Row a, Row b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE Row operator/(Row a, Row b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE Row operator-(Row x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(x.low, sign), _mm256_xor_ps(x.high, sign)};
}

TF_HIPS_AVX2_INLINE RowFlags flags_of(__m256 low, __m256 high) {
  return {_mm256_castps_si256(low), _mm256_castps_si256(high)};
}
// `flags`: of a comparison, which sets all bits of an element or none.
TF_HIPS_AVX2_INLINE Row keep_where(RowFlags flags, Row x) {
  return {_mm256_and_ps(_mm256_castsi256_ps(flags.low), x.low),
          _mm256_and_ps(_mm256_castsi256_ps(flags.high), x.high)};
}
TF_HIPS_AVX2_INLINE RowFlags unless(RowFlags flags) {
  const __m256i all = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(flags.low, all), _mm256_xor_si256(flags.high, all)};
}
TF_HIPS_AVX2_INLINE __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

// Rows that follow one another, past the caches, from any float on, half a line at a time. Lines
// that they share with what lies around them go the ordinary way, both halves: a line that is
// written in both ways is fetched and written twice.
class LateRows {
 public:
  TF_HIPS_AVX2_INLINE LateRows(float* out, int64_t count) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(out);
    past_ = static_cast<int32_t>(start % 32 / sizeof(float));
    half_ = out - past_;
    const __m256i past = _mm256_set1_epi32(past_);
    // Lane k of half a line is lane k - past of what comes, or the same lane of what was before.
    order_ = _mm256_sub_epi32(lanes(), past);
    is_held_ = _mm256_castsi256_ps(_mm256_cmpgt_epi32(past, lanes()));
    whole_ = (start + 63) / 64 * 64;
    whole_bytes_ = (start + static_cast<uintptr_t>(count) * sizeof(float)) / 64 * 64 - whole_;
    // The line that the last row shares must be there when it is written: what is written behind it
    // waits.
    if (past_ != 0) __builtin_prefetch(half_ + count);
  }

  TF_HIPS_AVX2_INLINE void put(Row x) {
    put_half(x.low);
    put_half(x.high);
  }

  TF_HIPS_AVX2_INLINE void finish() {
    if (past_ == 0) return;
    _mm256_maskstore_ps(half_, _mm256_castps_si256(is_held_), held_);
  }

 private:
  TF_HIPS_AVX2_INLINE void put_half(__m256 x) {
    if (past_ == 0) {
      stream_half(half_, x);
    } else {
      const __m256 turned = _mm256_permutevar8x32_ps(x, order_);
      const __m256 joined = _mm256_blendv_ps(turned, held_, is_held_);
      if (reinterpret_cast<uintptr_t>(half_) - whole_ < whole_bytes_) {
        stream_half(half_, joined);
      } else if (is_first_) {
        const __m256i is_own =
            _mm256_xor_si256(_mm256_castps_si256(is_held_), _mm256_set1_epi32(-1));
        _mm256_maskstore_ps(half_, is_own, turned);
      } else {
        _mm256_store_ps(half_, joined);
      }
      is_first_ = false;
      held_ = turned;
    }
    half_ += 8;
  }

  float* half_;
  __m256 held_ = _mm256_setzero_ps();
  __m256i order_;
  __m256 is_held_;
  uintptr_t whole_;        // where the lines begin that are only theirs
  uintptr_t whole_bytes_;  // of these lines
  int32_t past_;           // lanes of half a line that belong to what was before
  bool is_first_ = true;
};

// 16 codes, a byte each, and what they are as floats.
TF_HIPS_AVX2_INLINE RowCodes row_bytes(const uint8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}

TF_HIPS_AVX2_INLINE RowFlags flags_of_bits(int32_t bits) {
  const __m256i all = _mm256_set1_epi32(bits);
  const __m256i low = _mm256_sub_epi32(_mm256_set1_epi32(31), lanes());
  const __m256i high = _mm256_sub_epi32(_mm256_set1_epi32(23), lanes());
  return {_mm256_sllv_epi32(all, low), _mm256_sllv_epi32(all, high)};
}
// 16 codes of a bit.
TF_HIPS_AVX2_INLINE RowFlags row_bits(const uint8_t* codes) {
  uint16_t bits;
  std::memcpy(&bits, codes, sizeof bits);
  return flags_of_bits(bits);
}

// 16 codes behind element `at`, a multiple of 16, of a vector in memory; of 1, 2, 4 or 8 bits.
template <int kBits>
TF_HIPS_AVX2_INLINE RowCodes row_packed(const uint8_t* codes, int64_t at) {
  static_assert(kBits == 1 || kBits == 2 || kBits == 4 || kBits == 8, "a width of whole words");
  if constexpr (kBits == 8) {
    return row_bytes(codes + at);
  } else if constexpr (kBits == 4) {
    int32_t words[2];
    std::memcpy(words, codes + at / 2, sizeof words);
    const __m256i shifts = _mm256_slli_epi32(lanes(), 2), mask = _mm256_set1_epi32(15);
    return {_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(words[0]), shifts), mask),
            _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(words[1]), shifts), mask)};
  } else {
    uint32_t word = 0;
    std::memcpy(&word, codes + at * kBits / 8, 2 * kBits);
    const __m256i all = _mm256_set1_epi32(static_cast<int32_t>(word));
    const __m256i shifts = _mm256_slli_epi32(lanes(), kBits - 1);
    const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
    const __m256i high = _mm256_srli_epi32(all, 8 * kBits);
    return {_mm256_and_si256(_mm256_srlv_epi32(all, shifts), mask),
            _mm256_and_si256(_mm256_srlv_epi32(high, shifts), mask)};
  }
}

// Lane j ^ kMirror for lane j.
template <int kMirror>
TF_HIPS_AVX2_INLINE RowCodes row_mirrored(RowCodes row) {
  const __m256i order = _mm256_xor_si256(lanes(), _mm256_set1_epi32(kMirror & 7));
  const __m256i low = _mm256_permutevar8x32_epi32(row.low, order);
  const __m256i high = _mm256_permutevar8x32_epi32(row.high, order);
  if constexpr ((kMirror & 8) != 0) return {high, low};
  return {low, high};
}

// Codes of as many bits have no more values than a register has lanes.
constexpr int kTableBits = 2;
// All codes of kBits, one after the other and then again.
template <int kBits>
TF_HIPS_AVX2_INLINE RowCodes row_every_code() {
  const __m256i low = _mm256_and_si256(lanes(), _mm256_set1_epi32((1 << kBits) - 1));
  return {low, low};
}
// A row that has the value of every code, as it is looked up.
template <int kBits, int kMirror>
struct RowTable {
  Row values;
};
template <int kBits, int kMirror>
TF_HIPS_AVX2_INLINE RowTable<kBits, kMirror> row_table(Row values) {
  return {values};
}
// What a table has for the codes that row_mirrored<kMirror>(row_packed<kBits>(codes, at)) are.
template <int kBits, int kMirror>
TF_HIPS_AVX2_INLINE Row row_looked_up(RowTable<kBits, kMirror> table, const uint8_t* codes,
                                      int64_t at) {
  if constexpr (kBits > kTableBits) {
    return table.values;  // it is never asked for
  } else {
    // Permutations take 3 bits of an index: what is left of other codes chooses among copies.
    const __m256i place = _mm256_xor_si256(lanes(), _mm256_set1_epi32(kMirror & 7));
    const __m256i shifts = _mm256_slli_epi32(place, kBits - 1);
    __m256i all, later;
    if constexpr (kBits == 1) {
      uint16_t word;
      std::memcpy(&word, codes + at / 8, sizeof word);
      all = _mm256_set1_epi16(static_cast<int16_t>(word));
      later = _mm256_srli_epi32(all, 8);
    } else {
      uint32_t word;
      std::memcpy(&word, codes + at / 4, sizeof word);
      all = _mm256_set1_epi32(static_cast<int32_t>(word));
      later = _mm256_srli_epi32(all, 16);
    }
    const __m256 low = _mm256_permutevar8x32_ps(table.values.low, _mm256_srlv_epi32(all, shifts));
    const __m256 high =
        _mm256_permutevar8x32_ps(table.values.low, _mm256_srlv_epi32(later, shifts));
    if constexpr ((kMirror & 8) != 0) return {high, low};
    return {low, high};
  }
}

// Codes of a bit of a row.
TF_HIPS_AVX2_INLINE uint32_t bits_of_flags(RowFlags flags) {
  const int low = _mm256_movemask_ps(_mm256_castsi256_ps(flags.low));
  const int high = _mm256_movemask_ps(_mm256_castsi256_ps(flags.high));
  return static_cast<uint32_t>(low | high << 8);
}
TF_HIPS_AVX2_INLINE void store_bits(RowFlags flags, uint8_t* codes) {
  const uint16_t bits = static_cast<uint16_t>(bits_of_flags(flags));
  std::memcpy(codes, &bits, sizeof bits);
}
TF_HIPS_AVX2_INLINE int32_t row_count(RowFlags flags) {
  return __builtin_popcount(bits_of_flags(flags));
}

TF_HIPS_AVX2_INLINE Row row_of_codes(RowCodes codes) {
  return {_mm256_cvtepi32_ps(codes.low), _mm256_cvtepi32_ps(codes.high)};
}
TF_HIPS_AVX2_INLINE RowFlags row_is_set(RowCodes codes) {
  const __m256i zero = _mm256_setzero_si256();
  return unless({_mm256_cmpeq_epi32(codes.low, zero), _mm256_cmpeq_epi32(codes.high, zero)});
}

TF_HIPS_AVX2_INLINE Row row_abs(Row x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}

// The second where one is NaN, as `a > b ? a : b` has it.
TF_HIPS_AVX2_INLINE Row row_maximum(Row a, Row b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE Row row_minimum(Row a, Row b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

template <int kHow>
TF_HIPS_AVX2_INLINE RowFlags row_compared(Row a, Row b) {
  return flags_of(_mm256_cmp_ps(a.low, b.low, kHow), _mm256_cmp_ps(a.high, b.high, kHow));
}
TF_HIPS_AVX2_INLINE RowFlags row_is_less(Row a, Row b) { return row_compared<_CMP_LT_OQ>(a, b); }
TF_HIPS_AVX2_INLINE RowFlags row_is_at_most(Row a, Row b) { return row_compared<_CMP_LE_OQ>(a, b); }
TF_HIPS_AVX2_INLINE RowFlags row_is_more(Row a, Row b) { return row_compared<_CMP_GT_OQ>(a, b); }
TF_HIPS_AVX2_INLINE RowFlags row_is_at_least(Row a, Row b) {
  return row_compared<_CMP_GE_OQ>(a, b);
}
TF_HIPS_AVX2_INLINE RowFlags row_is_equal(Row a, Row b) { return row_compared<_CMP_EQ_OQ>(a, b); }
TF_HIPS_AVX2_INLINE RowFlags row_is_unequal(Row a, Row b) {
  return row_compared<_CMP_NEQ_UQ>(a, b);
}
TF_HIPS_AVX2_INLINE RowFlags row_both(RowFlags a, RowFlags b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE RowFlags row_either(RowFlags a, RowFlags b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE Row row_select(RowFlags flags, Row yes, Row no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(flags.low)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(flags.high))};
}

// NaN and infinities become +0.
TF_HIPS_AVX2_INLINE Row row_finite(Row x) {
  return keep_where(row_is_at_most(row_abs(x), row_of(std::numeric_limits<float>::max())), x);
}
// The larger one of a and |x|, of numbers of which a is not negative.
TF_HIPS_AVX2_INLINE Row row_largest(Row a, Row x) { return row_maximum(a, row_abs(x)); }
// From -bound to bound; x is a number, and `bound` above 0.
TF_HIPS_AVX2_INLINE Row row_clamped(Row x, Row bound) {
  return row_minimum(row_maximum(x, -bound), bound);
}

// x == x ? x : 0.
TF_HIPS_AVX2_INLINE Row row_number(Row x) { return keep_where(row_compared<_CMP_ORD_Q>(x, x), x); }

TF_HIPS_AVX2_INLINE Row row_whole_noise(const uint16_t* noise) {
  const __m128i* const words = reinterpret_cast<const __m128i*>(noise);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(words))),
          _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(words + 1)))};
}
// random_float(0, 1, noise) of 16 elements.
TF_HIPS_AVX2_INLINE Row row_noise(const uint16_t* noise) {
  return row_whole_noise(noise) * row_of(0x1p-16f);
}
TF_HIPS_AVX2_INLINE Row row_plus_noise(Row x, const uint16_t* noise) {
  return x + row_noise(noise);
}

// float_to_code, of what is not above the largest code, but for what is below 0, NaN included: it
// becomes a negative number, which store_codes saturates.
TF_HIPS_AVX2_INLINE RowCodes row_codes(Row x) {
  return {_mm256_cvttps_epi32(x.low), _mm256_cvttps_epi32(x.high)};
}
// The same of any numbers.
TF_HIPS_AVX2_INLINE RowCodes row_codes(Row x, Row top) { return row_codes(row_minimum(top, x)); }

// Numbers of which codes are the low bits.
TF_HIPS_AVX2_INLINE RowCodes row_low_bits(RowCodes numbers, RowCodes low) {
  return {_mm256_and_si256(numbers.low, low.low), _mm256_and_si256(numbers.high, low.high)};
}
TF_HIPS_AVX2_INLINE RowCodes row_of_number(int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
TF_HIPS_AVX2_INLINE RowCodes row_of_flags(RowFlags flags) {
  return {_mm256_srli_epi32(flags.low, 31), _mm256_srli_epi32(flags.high, 31)};
}
TF_HIPS_AVX2_INLINE RowCodes row_sum(RowCodes a, RowCodes b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE RowCodes row_difference(RowCodes a, RowCodes b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}

TF_HIPS_AVX2_INLINE Row numbers_as_row(RowCodes x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
TF_HIPS_AVX2_INLINE RowCodes row_number_select(RowFlags flags, RowCodes yes, RowCodes no) {
  const Row chosen = row_select(flags, numbers_as_row(yes), numbers_as_row(no));
  return {_mm256_castps_si256(chosen.low), _mm256_castps_si256(chosen.high)};
}
TF_HIPS_AVX2_INLINE RowFlags row_number_is_more(RowCodes a, RowCodes b) {
  return {_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE RowFlags row_number_is_less(RowCodes a, RowCodes b) {
  return row_number_is_more(b, a);
}
TF_HIPS_AVX2_INLINE RowFlags row_number_is_at_most(RowCodes a, RowCodes b) {
  return unless(row_number_is_more(a, b));
}
TF_HIPS_AVX2_INLINE RowFlags row_number_is_at_least(RowCodes a, RowCodes b) {
  return unless(row_number_is_more(b, a));
}
TF_HIPS_AVX2_INLINE RowFlags row_number_is_equal(RowCodes a, RowCodes b) {
  return {_mm256_cmpeq_epi32(a.low, b.low), _mm256_cmpeq_epi32(a.high, b.high)};
}
TF_HIPS_AVX2_INLINE RowFlags row_number_is_unequal(RowCodes a, RowCodes b) {
  return unless(row_number_is_equal(a, b));
}

// Codes as store_codes stores them.
TF_HIPS_AVX2_INLINE RowCodes row_held(RowCodes codes) {
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_max_epi32(codes.low, zero), _mm256_max_epi32(codes.high, zero)};
}

// Codes of up to 8 bits of two rows, a byte each.
TF_HIPS_AVX2_INLINE __m256i bytes_of_rows(const RowCodes* rows) {
  const __m256i first = _mm256_packus_epi32(rows[0].low, rows[0].high);
  const __m256i second = _mm256_packus_epi32(rows[1].low, rows[1].high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
}
// The same of four rows, stored.
TF_HIPS_AVX2_INLINE void store_codes(const RowCodes* rows, uint8_t* codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes_of_rows(rows));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32), bytes_of_rows(rows + 2));
}

// What residual_tile leaves of a row.
TF_HIPS_AVX2_INLINE Row row_left(Row sum, Row x) {
  const Row left = sum - x;
  const Row most = row_of(std::numeric_limits<float>::max());
  return keep_where(row_is_at_most(row_abs(left), most), left);
}
TF_HIPS_AVX2_INLINE Row row_left(const float* sum, Row x) { return row_left(row_at(sum), x); }

// What the lanes of a block and the initial value of its reduction combine to.
template <typename Reducer>
TF_HIPS_AVX2_INLINE float combine_row(float init, Row row) {
  FloatVector lanes[4];
  std::memcpy(lanes, &row, sizeof lanes);
  Reducer::fold(init, combine_lanes<Reducer>(lanes));
  return init;
}

}  // namespace tf_hips::avx2
#endif  // TF_HIPS_HAS_AVX

#endif  // TF_HIPS_CC_RUNTIME_ROW_AVX2_H_
