// SPDX-License-Identifier: Apache-2.0
// Rows (row.h) on AArch64: four registers each, the first with elements 0 .. 3. Names and results
// are those of row_avx512.h.

#ifndef TF_HIPS_CC_RUNTIME_ROW_NEON_H_
#define TF_HIPS_CC_RUNTIME_ROW_NEON_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

#if defined(TF_HIPS_HAS_NEON)
namespace tf_hips::neon {

constexpr int kParts = 4;

struct Row {
  float32x4_t part[kParts];
};
// All bits of an element or none.
struct RowFlags {
  uint32x4_t part[kParts];
};
struct RowCodes {
  int32x4_t part[kParts];
};

// What `call(k)` gives for each part.
template <typename Parts, typename Call>
TF_HIPS_NEON_INLINE Parts of_parts(const Call& call) {
  return {{call(0), call(1), call(2), call(3)}};
}
#define TF_HIPS_PART [&](int k) TF_HIPS_INLINED

TF_HIPS_NEON_INLINE Row row_of(float x) {
  return of_parts<Row>([&](int) TF_HIPS_INLINED { return vdupq_n_f32(x); });
}
TF_HIPS_NEON_INLINE Row row_at(const float* in) {
  return of_parts<Row>(TF_HIPS_PART { return vld1q_f32(in + 4 * k); });
}
TF_HIPS_NEON_INLINE void row_store(float* out, Row x) {
  for (int k = 0; k < kParts; ++k) vst1q_f32(out + 4 * k, x.part[k]);
}
// Through the caches: to store a line past them is no more than a wish here.
TF_HIPS_NEON_INLINE void row_stream(float* line, Row x) { row_store(line, x); }

TF_HIPS_NEON_INLINE Row operator+(Row a, Row b) {
  return of_parts<Row>(TF_HIPS_PART { return vaddq_f32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE Row operator-(Row a, Row b) {
  return of_parts<Row>(TF_HIPS_PART { return vsubq_f32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE Row operator*(Row a, Row b) {
  return of_parts<Row>(TF_HIPS_PART { return vmulq_f32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE Row operator/(Row a, Row b) {
  return of_parts<Row>(TF_HIPS_PART { return vdivq_f32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE Row operator-(Row x) {
  return of_parts<Row>(TF_HIPS_PART { return vnegq_f32(x.part[k]); });
}

TF_HIPS_NEON_INLINE float32x4_t keep_where(uint32x4_t flags, float32x4_t x) {
  return vreinterpretq_f32_u32(vandq_u32(flags, vreinterpretq_u32_f32(x)));
}

// Rows that follow one another, from any float on.
class LateRows {
 public:
  TF_HIPS_NEON_INLINE LateRows(float* out, int64_t) : out_(out) {}
  TF_HIPS_NEON_INLINE void put(Row x) {
    row_store(out_, x);
    out_ += 16;
  }
  TF_HIPS_NEON_INLINE void finish() {}

 private:
  float* out_;
};

// 16 bytes, one for each element.
TF_HIPS_NEON_INLINE RowCodes codes_of_bytes(uint8x16_t bytes) {
  return of_parts<RowCodes>(TF_HIPS_PART {
    // Byte 4 k + l for lane l, and 0 where there is no such byte.
    const uint32x4_t first = {0xFFFFFF00u, 0xFFFFFF01u, 0xFFFFFF02u, 0xFFFFFF03u};
    const uint32x4_t from = vaddq_u32(first, vdupq_n_u32(4 * static_cast<uint32_t>(k)));
    return vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_u32(from)));
  });
}
// 16 codes, a byte each, and what they are as floats.
TF_HIPS_NEON_INLINE RowCodes row_bytes(const uint8_t* codes) {
  return codes_of_bytes(vld1q_u8(codes));
}

// Places of the elements of a part, or of those whose number differs in the bits of kMirror.
template <int kMirror = 0>
TF_HIPS_NEON_INLINE int32x4_t lanes(int k) {
  const int32x4_t lane = {0, 1, 2, 3};
  return veorq_s32(vaddq_s32(lane, vdupq_n_s32(4 * k)), vdupq_n_s32(kMirror));
}

// The bits of a word as flags.
template <int kMirror = 0>
TF_HIPS_NEON_INLINE RowFlags flags_of_bits(uint32_t bits) {
  const uint32x4_t all = vdupq_n_u32(bits), one = vdupq_n_u32(1);
  return of_parts<RowFlags>(
      TF_HIPS_PART { return vtstq_u32(all, vshlq_u32(one, lanes<kMirror>(k))); });
}
// 16 codes of a bit.
TF_HIPS_NEON_INLINE RowFlags row_bits(const uint8_t* codes) {
  uint16_t bits;
  std::memcpy(&bits, codes, sizeof bits);
  return flags_of_bits(bits);
}

// 16 codes behind element `at`, a multiple of 16, of a vector in memory; of 1, 2, 4 or 8 bits.
template <int kBits>
TF_HIPS_NEON_INLINE RowCodes row_packed(const uint8_t* codes, int64_t at) {
  static_assert(kBits == 1 || kBits == 2 || kBits == 4 || kBits == 8, "a width of whole words");
  if constexpr (kBits == 8) {
    return row_bytes(codes + at);
  } else if constexpr (kBits == 4) {
    const uint8x8_t bytes = vld1_u8(codes + at / 2);
    const uint8x8_t low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
    return codes_of_bytes(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)));
  } else {
    uint32_t word = 0;
    std::memcpy(&word, codes + at * kBits / 8, 2 * kBits);
    const uint32x4_t all = vdupq_n_u32(word), mask = vdupq_n_u32((1 << kBits) - 1);
    return of_parts<RowCodes>(TF_HIPS_PART {
      // Negative: a shift to the right.
      const uint32x4_t shifted = vshlq_u32(all, vmulq_n_s32(lanes(k), -kBits));
      return vreinterpretq_s32_u32(vandq_u32(shifted, mask));
    });
  }
}

// Lane j ^ kMirror for lane j.
template <int kMirror>
TF_HIPS_NEON_INLINE RowCodes row_mirrored(RowCodes row) {
  return of_parts<RowCodes>(TF_HIPS_PART {
    int32x4_t x = row.part[k ^ (kMirror >> 2)];
    if constexpr ((kMirror & 1) != 0) x = vrev64q_s32(x);
    if constexpr ((kMirror & 2) != 0) x = vextq_s32(x, x, 2);
    return x;
  });
}

// Codes of as many bits have no more values than a register has lanes.
constexpr int kTableBits = 2;
// All codes of kBits, one after the other and then again.
template <int kBits>
TF_HIPS_NEON_INLINE RowCodes row_every_code() {
  return of_parts<RowCodes>(
      TF_HIPS_PART { return vandq_s32(lanes(k), vdupq_n_s32((1 << kBits) - 1)); });
}
// A register that has the value of every code, as it is looked up.
template <int kBits, int kMirror>
struct RowTable {
  float32x4_t values;
};
template <int kBits, int kMirror>
TF_HIPS_NEON_INLINE RowTable<kBits, kMirror> row_table(Row values) {
  return {values.part[0]};
}
// What a table has for the codes that row_mirrored<kMirror>(row_packed<kBits>(codes, at)) are.
template <int kBits, int kMirror>
TF_HIPS_NEON_INLINE Row row_looked_up(RowTable<kBits, kMirror> table, const uint8_t* codes,
                                      int64_t at) {
  if constexpr (kBits > kTableBits) {
    return row_of(0.0f);  // it is never asked for
  } else if constexpr (kBits == 1) {
    const float32x4_t first = vdupq_laneq_f32(table.values, 0);
    const float32x4_t second = vdupq_laneq_f32(table.values, 1);
    uint16_t bits;
    std::memcpy(&bits, codes + at / 8, sizeof bits);
    const RowFlags flags = flags_of_bits<kMirror>(bits);
    return of_parts<Row>(TF_HIPS_PART { return vbslq_f32(flags.part[k], second, first); });
  } else {
    // Where the bytes of a value begin: four times a code, in the byte of its element.
    const uint32x4_t fours = {0u, 0x01010101u, 0x02020202u, 0x03030303u};
    const int8x8_t half = vcreate_s8(static_cast<uint64_t>(0xFCFE0002FCFE0002));  // 2, 0, -2, -4
    uint32_t word;
    std::memcpy(&word, codes + at / 4, sizeof word);
    const uint8x16_t bytes =
        vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(word)), vreinterpretq_u8_u32(fours));
    const uint8x16_t begins =
        vandq_u8(vshlq_u8(bytes, vcombine_s8(half, half)), vdupq_n_u8(3 << 2));
    return of_parts<Row>(TF_HIPS_PART {
      const uint32x4_t places = vreinterpretq_u32_s32(lanes<kMirror>(k));
      const uint8x16_t from = vreinterpretq_u8_u32(vmulq_n_u32(places, 0x01010101u));
      const uint32x4_t begin = vreinterpretq_u32_u8(vqtbl1q_u8(begins, from));
      const uint32x4_t each = vorrq_u32(begin, vdupq_n_u32(0x03020100u));
      return vreinterpretq_f32_u8(
          vqtbl1q_u8(vreinterpretq_u8_f32(table.values), vreinterpretq_u8_u32(each)));
    });
  }
}

// Codes of a bit of a row.
TF_HIPS_NEON_INLINE void store_bits(RowFlags flags, uint8_t* codes) {
  const auto word_of = [&](int k) TF_HIPS_INLINED { return vreinterpretq_u16_u32(flags.part[k]); };
  const uint16x8_t first = vuzp1q_u16(word_of(0), word_of(1)),
                   second = vuzp1q_u16(word_of(2), word_of(3));
  const uint8x8_t bit = vcreate_u8(0x8040201008040201);
  uint8x16_t bits = vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
  bits = vandq_u8(bits, vcombine_u8(bit, bit));
  // Three sums of neighbours make a byte of eight.
  for (int k = 0; k < 3; ++k) bits = vpaddq_u8(bits, bits);
  const uint16_t two = vgetq_lane_u16(vreinterpretq_u16_u8(bits), 0);
  std::memcpy(codes, &two, sizeof two);
}
TF_HIPS_NEON_INLINE int32_t row_count(RowFlags flags) {
  const auto lane_of = [&](int k) TF_HIPS_INLINED { return vreinterpretq_s32_u32(flags.part[k]); };
  // Each one that is set is -1.
  const int32x4_t first = vaddq_s32(lane_of(0), lane_of(1)),
                  second = vaddq_s32(lane_of(2), lane_of(3));
  return -vaddvq_s32(vaddq_s32(first, second));
}

TF_HIPS_NEON_INLINE Row row_of_codes(RowCodes codes) {
  return of_parts<Row>(TF_HIPS_PART { return vcvtq_f32_s32(codes.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_is_set(RowCodes codes) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vtstq_s32(codes.part[k], codes.part[k]); });
}

TF_HIPS_NEON_INLINE Row row_abs(Row x) {
  return of_parts<Row>(TF_HIPS_PART { return vabsq_f32(x.part[k]); });
}

// The second where one is NaN, as `a > b ? a : b` has it.
TF_HIPS_NEON_INLINE Row row_maximum(Row a, Row b) {
  return of_parts<Row>(
      TF_HIPS_PART { return vbslq_f32(vcgtq_f32(a.part[k], b.part[k]), a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE Row row_minimum(Row a, Row b) {
  return of_parts<Row>(
      TF_HIPS_PART { return vbslq_f32(vcltq_f32(a.part[k], b.part[k]), a.part[k], b.part[k]); });
}

// NaN and infinities become +0.
TF_HIPS_NEON_INLINE Row row_finite(Row x) {
  const float32x4_t most = vdupq_n_f32(std::numeric_limits<float>::max());
  return of_parts<Row>(TF_HIPS_PART { return keep_where(vcaleq_f32(x.part[k], most), x.part[k]); });
}
// The larger one of a and |x|, of numbers of which a is not negative.
TF_HIPS_NEON_INLINE Row row_largest(Row a, Row x) {
  return of_parts<Row>(TF_HIPS_PART { return vmaxq_f32(a.part[k], vabsq_f32(x.part[k])); });
}
// From -bound to bound; x is a number, and `bound` above 0.
TF_HIPS_NEON_INLINE Row row_clamped(Row x, Row bound) {
  return of_parts<Row>(TF_HIPS_PART {
    return vminq_f32(vmaxq_f32(x.part[k], vnegq_f32(bound.part[k])), bound.part[k]);
  });
}

TF_HIPS_NEON_INLINE RowFlags row_is_less(Row a, Row b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vcltq_f32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_is_at_most(Row a, Row b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vcleq_f32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_is_more(Row a, Row b) { return row_is_less(b, a); }
TF_HIPS_NEON_INLINE RowFlags row_is_at_least(Row a, Row b) { return row_is_at_most(b, a); }
TF_HIPS_NEON_INLINE RowFlags row_is_equal(Row a, Row b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vceqq_f32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags unless(RowFlags flags) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vmvnq_u32(flags.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_is_unequal(Row a, Row b) { return unless(row_is_equal(a, b)); }
TF_HIPS_NEON_INLINE RowFlags row_both(RowFlags a, RowFlags b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vandq_u32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_either(RowFlags a, RowFlags b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vorrq_u32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE Row row_select(RowFlags flags, Row yes, Row no) {
  return of_parts<Row>(TF_HIPS_PART { return vbslq_f32(flags.part[k], yes.part[k], no.part[k]); });
}

// x == x ? x : 0.
TF_HIPS_NEON_INLINE Row row_number(Row x) {
  return of_parts<Row>(
      TF_HIPS_PART { return keep_where(vceqq_f32(x.part[k], x.part[k]), x.part[k]); });
}

// The noise of a part, and its conversion, of which kScale bits are behind the point.
TF_HIPS_NEON_INLINE uint32x4_t words_of_noise(const uint16_t* noise, int k) {
  return vmovl_u16(vld1_u16(noise + 4 * k));
}
TF_HIPS_NEON_INLINE Row row_whole_noise(const uint16_t* noise) {
  return of_parts<Row>(TF_HIPS_PART { return vcvtq_f32_u32(words_of_noise(noise, k)); });
}
// random_float(0, 1, noise) of 16 elements.
TF_HIPS_NEON_INLINE Row row_noise(const uint16_t* noise) {
  return of_parts<Row>(TF_HIPS_PART { return vcvtq_n_f32_u32(words_of_noise(noise, k), 16); });
}
TF_HIPS_NEON_INLINE Row row_plus_noise(Row x, const uint16_t* noise) {
  return x + row_noise(noise);
}

// float_to_code of what is not above the largest code. The instruction makes 0 of what is below 0,
// NaN included.
TF_HIPS_NEON_INLINE RowCodes row_codes(Row x) {
  return of_parts<RowCodes>(
      TF_HIPS_PART { return vreinterpretq_s32_u32(vcvtq_u32_f32(x.part[k])); });
}
// The same of any numbers. This minimum of NaN is NaN.
TF_HIPS_NEON_INLINE RowCodes row_codes(Row x, Row top) {
  return row_codes(of_parts<Row>(TF_HIPS_PART { return vminq_f32(x.part[k], top.part[k]); }));
}

// Numbers of which codes are the low bits.
TF_HIPS_NEON_INLINE RowCodes row_low_bits(RowCodes numbers, RowCodes low) {
  return of_parts<RowCodes>(TF_HIPS_PART { return vandq_s32(numbers.part[k], low.part[k]); });
}
TF_HIPS_NEON_INLINE RowCodes row_of_number(int32_t x) {
  return of_parts<RowCodes>([&](int) TF_HIPS_INLINED { return vdupq_n_s32(x); });
}
TF_HIPS_NEON_INLINE RowCodes row_of_flags(RowFlags flags) {
  return of_parts<RowCodes>(
      TF_HIPS_PART { return vandq_s32(vreinterpretq_s32_u32(flags.part[k]), vdupq_n_s32(1)); });
}
TF_HIPS_NEON_INLINE RowCodes row_sum(RowCodes a, RowCodes b) {
  return of_parts<RowCodes>(TF_HIPS_PART { return vaddq_s32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowCodes row_difference(RowCodes a, RowCodes b) {
  return of_parts<RowCodes>(TF_HIPS_PART { return vsubq_s32(a.part[k], b.part[k]); });
}

TF_HIPS_NEON_INLINE RowCodes row_number_select(RowFlags flags, RowCodes yes, RowCodes no) {
  return of_parts<RowCodes>(
      TF_HIPS_PART { return vbslq_s32(flags.part[k], yes.part[k], no.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_number_is_less(RowCodes a, RowCodes b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vcltq_s32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_number_is_at_most(RowCodes a, RowCodes b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vcleq_s32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_number_is_more(RowCodes a, RowCodes b) {
  return row_number_is_less(b, a);
}
TF_HIPS_NEON_INLINE RowFlags row_number_is_at_least(RowCodes a, RowCodes b) {
  return row_number_is_at_most(b, a);
}
TF_HIPS_NEON_INLINE RowFlags row_number_is_equal(RowCodes a, RowCodes b) {
  return of_parts<RowFlags>(TF_HIPS_PART { return vceqq_s32(a.part[k], b.part[k]); });
}
TF_HIPS_NEON_INLINE RowFlags row_number_is_unequal(RowCodes a, RowCodes b) {
  return unless(row_number_is_equal(a, b));
}

// Codes as store_codes stores them.
TF_HIPS_NEON_INLINE RowCodes row_held(RowCodes codes) { return codes; }

// Codes of up to 8 bits of four rows, a byte each.
TF_HIPS_NEON_INLINE void store_codes(const RowCodes* rows, uint8_t* codes) {
  for (int r = 0; r < 4; ++r) {
    const auto word_of = [&](int k)
                             TF_HIPS_INLINED { return vreinterpretq_u16_s32(rows[r].part[k]); };
    const uint8x16_t low = vreinterpretq_u8_u16(vuzp1q_u16(word_of(0), word_of(1)));
    const uint8x16_t high = vreinterpretq_u8_u16(vuzp1q_u16(word_of(2), word_of(3)));
    vst1q_u8(codes + 16 * r, vuzp1q_u8(low, high));
  }
}

// What residual_tile leaves of a row.
TF_HIPS_NEON_INLINE Row row_left(Row sum, Row x) { return row_finite(sum - x); }
TF_HIPS_NEON_INLINE Row row_left(const float* sum, Row x) { return row_left(row_at(sum), x); }

// What the lanes of a block and the initial value of its reduction combine to.
template <typename Reducer>
TF_HIPS_NEON_INLINE float combine_row(float init, Row row) {
  FloatVector lanes[4];
  std::memcpy(lanes, &row, sizeof lanes);
  Reducer::fold(init, combine_lanes<Reducer>(lanes));
  return init;
}

#undef TF_HIPS_PART
}  // namespace tf_hips::neon
#endif  // TF_HIPS_HAS_NEON

#endif  // TF_HIPS_CC_RUNTIME_ROW_NEON_H_
