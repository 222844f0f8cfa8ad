// SPDX-License-Identifier: Apache-2.0
// The indices of the k largest elements of a vector, which is read once.
//
// A few groups of elements say which key probably k elements reach and few more do. The sweep that
// follows keeps the elements that reach it, and their places; whenever there are too many, the k
// largest of them stay, and what comes later must be larger than all of these (of equal elements
// the first ones count). So neither equal elements nor ascending ones make it keep much. Should the
// groups have misled, and less than k elements reach their key, a second sweep starts without one.

#ifndef TF_HIPS_CC_RUNTIME_TOP_K_H_
#define TF_HIPS_CC_RUNTIME_TOP_K_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

#include "tf_hips/cc/runtime/flags.h"
#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/scratch.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// Words in the order of floats, -0 before 0.
TF_HIPS_INLINE uint32_t float_key(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits ^ (0x80000000u | (0u - (bits >> 31)));
}

TF_HIPS_INLINE float key_float(uint32_t key) {
  const uint32_t bits = key ^ (0x80000000u | ((key >> 31) - 1u));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The same with -0 equal to 0, and NaN below all.
TF_HIPS_INLINE uint32_t rank_key(float value) {
  return value == value ? float_key(value + 0.0f) : 0u;
}

// The `rank`-th largest, from 1, of `count` >= rank keys: by counting leading bits, of those that
// are left in question. Keys in a row are counted apart: where they are equal, as in sorted
// vectors, each count would wait for the one before. Few that are left are taken out: to clear and
// add up counts would cost more.
inline __attribute__((noinline)) uint32_t kth_largest(const uint32_t* keys, int64_t count,
                                                      int64_t rank) {
  constexpr int kBits = 10;
  constexpr int64_t kApart = 4;
  constexpr int64_t kFew = 256;
  uint32_t low = 0, high = UINT32_MAX;
  int64_t left = count;
  if (count > kFew) {
    low = high = keys[0];
    for (int64_t j = 1; j < count; ++j) {
      low = std::min(low, keys[j]);
      high = std::max(high, keys[j]);
    }
  }
  while (low != high) {
    const uint32_t span = high - low;
    if (left <= kFew) {
      uint32_t few[kFew + 1];
      for (int64_t j = 0, found = 0; j < count; ++j) {
        few[found] = keys[j];
        found += keys[j] - low <= span ? 1 : 0;
      }
      std::nth_element(few, few + rank - 1, few + left, std::greater<uint32_t>());
      return few[rank - 1];
    }
    const int shift = std::max(0, 32 - __builtin_clz(span) - kBits);
    uint32_t apart[kApart][1 << kBits] = {};
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t above = keys[j] - low;
      if (above <= span) ++apart[j % kApart][above >> shift];
    }
    uint32_t* const bins = apart[0];
    for (int64_t k = 1; k < kApart; ++k) {
      for (uint32_t b = 0; b <= span >> shift; ++b) bins[b] += apart[k][b];
    }
    uint32_t bin = span >> shift;
    for (; rank > bins[bin]; --bin) rank -= bins[bin];
    left = bins[bin];
    low += bin << shift;
    high = low + std::min(high - low, (uint32_t{1} << shift) - 1);
  }
  return low;
}

// What is ranked of an element: itself, or its size.
template <bool kSize>
TF_HIPS_INLINE float ranked(float value) {
  return kSize ? std::fabs(value) : value;
}

// Keys of elements, and their places.
struct Candidates {
  uint32_t* keys;
  uint32_t* places;
};

// The float that the numbers of which keys are at least `least`, which is not 0, are at least.
TF_HIPS_INLINE float least_float(uint32_t least) {
  const float low = -std::numeric_limits<float>::infinity();
  return least <= float_key(low) ? low : key_float(least);
}

// Appends to `found` candidates the elements of a tile, the first of them at `base`, whose keys are
// at least `least`. Writes up to 16 words behind the last one. Return how many there are then.
#if defined(TF_HIPS_HAS_AVX)
template <bool kSize>
TF_HIPS_AVX512 inline int64_t take_avx512(const float* tile, int64_t base, int64_t count,
                                          uint32_t least, const Candidates& to, int64_t found) {
  const __m512i bottom = _mm512_set1_epi32(static_cast<int32_t>(least));
  const __m512i top_bit = _mm512_set1_epi32(INT32_MIN), step = _mm512_set1_epi32(16);
  const __m512 zero = _mm512_setzero_ps();
  __m512i place =
      _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(base)),
                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  for (int64_t j = 0; j < count; j += 16) {
    const __mmask16 inside =
        count - j >= 16 ? __mmask16{0xFFFF} : static_cast<__mmask16>((1u << (count - j)) - 1u);
    const __m512 loaded = _mm512_maskz_loadu_ps(inside, tile + j);
    const __m512 value = kSize ? _mm512_abs_ps(loaded) : _mm512_add_ps(loaded, zero);
    const __m512i bits = _mm512_castps_si512(value);
    // The words of sizes are in their order as they are.
    const __m512i sign = kSize ? top_bit : _mm512_or_si512(_mm512_srai_epi32(bits, 31), top_bit);
    const __mmask16 is_number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
    const __m512i key = _mm512_maskz_xor_epi32(is_number, bits, sign);
    const __mmask16 is_taken = _mm512_mask_cmpge_epu32_mask(inside, key, bottom);
    _mm512_storeu_si512(to.keys + found, _mm512_maskz_compress_epi32(is_taken, key));
    _mm512_storeu_si512(to.places + found, _mm512_maskz_compress_epi32(is_taken, place));
    found += __builtin_popcount(is_taken);
    place = _mm512_add_epi32(place, step);
  }
  return found;
}

// Of `found` candidates, leaves those whose key is more than `last`, and the first `equal` of those
// for which it is `last`. Returns how many there are then.
TF_HIPS_AVX512 inline int64_t keep_avx512(const Candidates& in, int64_t found, uint32_t last,
                                          int64_t equal) {
  const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(last));
  int64_t kept = 0;
  for (int64_t j = 0; j < found; j += 16) {
    const __mmask16 inside =
        found - j >= 16 ? __mmask16{0xFFFF} : static_cast<__mmask16>((1u << (found - j)) - 1u);
    const __m512i key = _mm512_maskz_loadu_epi32(inside, in.keys + j);
    const __m512i place = _mm512_maskz_loadu_epi32(inside, in.places + j);
    uint32_t same = _mm512_mask_cmpeq_epu32_mask(inside, key, limit);
    for (; static_cast<int64_t>(__builtin_popcount(same)) > equal;) {
      same &= ~(0x80000000u >> __builtin_clz(same));
    }
    equal -= __builtin_popcount(same);
    const __mmask16 is_kept = static_cast<__mmask16>(
        same | static_cast<uint32_t>(_mm512_mask_cmpgt_epu32_mask(inside, key, limit)));
    // What lies from `kept` to `j` is no longer needed.
    _mm512_storeu_si512(in.keys + kept, _mm512_maskz_compress_epi32(is_kept, key));
    _mm512_storeu_si512(in.places + kept, _mm512_maskz_compress_epi32(is_kept, place));
    kept += __builtin_popcount(is_kept);
  }
  return kept;
}

TF_HIPS_INLINE bool has_compression() { return machine() == Machine::kAvx512; }

constexpr int64_t kTaken = 64;  // elements that take_avx2 looks at together

// The same as take_avx512, for a multiple of kTaken elements. First all are compared, then those
// found are moved: one by one if they are few, and so without looking at the others again.
template <bool kSize>
TF_HIPS_AVX2 inline int64_t take_avx2(const float* tile, int64_t base, int64_t count,
                                      uint32_t least, const Candidates& to, int64_t found) {
  const __m256 bottom = _mm256_set1_ps(least_float(least)), sign_bit = _mm256_set1_ps(-0.0f);
  const uint64_t all = least == 0 ? ~uint64_t{0} : 0;
  uint64_t taken[kTile / kTaken];
  int64_t number = 0;
  for (int64_t k = 0; k < count / kTaken; ++k) {
    __m256i flags[8];
    for (int64_t l = 0; l < 8; ++l) {
      __m256 value = _mm256_loadu_ps(tile + k * kTaken + l * 8);
      if (kSize) value = _mm256_andnot_ps(sign_bit, value);
      flags[l] = _mm256_castps_si256(_mm256_cmp_ps(value, bottom, _CMP_GE_OQ));
    }
    taken[k] = bits_of_lanes(flags) | all;
    number += __builtin_popcountll(taken[k]);
  }
  if (number < count / 16) {
    for (int64_t k = 0; k < count / kTaken; ++k) {
      found = for_bits(taken[k], k * kTaken, found, [&](int64_t at, int64_t j) TF_HIPS_INLINED {
        // What reaches a key is a number.
        to.keys[at] = float_key(ranked<kSize>(tile[j]) + 0.0f);
        to.places[at] = static_cast<uint32_t>(base + j);
      });
    }
    return found;
  }
  const __m256i top_bit = _mm256_set1_epi32(INT32_MIN), step = _mm256_set1_epi32(8);
  __m256i place = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(base)),
                                   _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  for (int64_t j = 0; j < count; j += 8) {
    const __m256 loaded = _mm256_loadu_ps(tile + j);
    const __m256 value =
        kSize ? _mm256_andnot_ps(sign_bit, loaded) : _mm256_add_ps(loaded, _mm256_setzero_ps());
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i sign = kSize ? top_bit : _mm256_or_si256(_mm256_srai_epi32(bits, 31), top_bit);
    const __m256i is_number = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_ORD_Q));
    const __m256i key = _mm256_and_si256(is_number, _mm256_xor_si256(bits, sign));
    const uint32_t is_taken = taken[j / kTaken] >> (j % kTaken) & 255;
    const __m256i order = order_of_kept(is_taken);
    const __m256i keys = _mm256_permutevar8x32_epi32(key, order);
    const __m256i places = _mm256_permutevar8x32_epi32(place, order);
    std::memcpy(to.keys + found, &keys, sizeof keys);
    std::memcpy(to.places + found, &places, sizeof places);
    found += __builtin_popcount(is_taken);
    place = _mm256_add_epi32(place, step);
  }
  return found;
}

// The same as keep_avx512.
TF_HIPS_AVX2 inline int64_t keep_avx2(const Candidates& in, int64_t found, uint32_t last,
                                      int64_t equal) {
  const __m256i limit = _mm256_set1_epi32(static_cast<int32_t>(last));
  const __m256i top_bit = _mm256_set1_epi32(INT32_MIN), low = _mm256_xor_si256(limit, top_bit);
  int64_t kept = 0;
  for (int64_t j = 0; j < found; j += 8) {
    const uint32_t inside = found - j >= 8 ? 0xFF : (1u << (found - j)) - 1u;
    // Behind the last one there is room.
    __m256i key, place;
    std::memcpy(&key, in.keys + j, sizeof key);
    std::memcpy(&place, in.places + j, sizeof place);
    const __m256 is_same = _mm256_castsi256_ps(_mm256_cmpeq_epi32(key, limit));
    const __m256i is_above = _mm256_cmpgt_epi32(_mm256_xor_si256(key, top_bit), low);
    const uint32_t above = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(is_above)));
    uint32_t same = static_cast<uint32_t>(_mm256_movemask_ps(is_same)) & inside;
    for (; static_cast<int64_t>(__builtin_popcount(same)) > equal;) {
      same &= ~(0x80000000u >> __builtin_clz(same));
    }
    equal -= __builtin_popcount(same);
    const uint32_t is_kept = same | (above & inside);
    const __m256i order = order_of_kept(is_kept);
    key = _mm256_permutevar8x32_epi32(key, order);
    place = _mm256_permutevar8x32_epi32(place, order);
    // What lies from `kept` to `j` is no longer needed.
    std::memcpy(in.keys + kept, &key, sizeof key);
    std::memcpy(in.places + kept, &place, sizeof place);
    kept += __builtin_popcount(is_kept);
  }
  return kept;
}

TF_HIPS_INLINE bool has_half_compression() { return machine() == Machine::kAvx2; }
#else
#if defined(TF_HIPS_HAS_NEON)
// Of words that have all bits or none, of 16 elements, in bytes.
TF_HIPS_NEON_INLINE uint8x16_t bytes_of_words(const uint32x4_t* words) {
  const uint16x8_t first =
      vuzp1q_u16(vreinterpretq_u16_u32(words[0]), vreinterpretq_u16_u32(words[1]));
  const uint16x8_t second =
      vuzp1q_u16(vreinterpretq_u16_u32(words[2]), vreinterpretq_u16_u32(words[3]));
  return vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
}

// For a multiple of 64 elements, of a `least` that is not 0.
template <bool kSize>
TF_HIPS_NEON inline int64_t take_neon(const float* tile, int64_t base, int64_t count,
                                      uint32_t least, const Candidates& to, int64_t found) {
  const float limit = least_float(least);
  // This comparison of sizes is one of both sides' sizes.
  const float32x4_t bottom = vdupq_n_f32(kSize ? std::max(limit, 0.0f) : limit);
  const uint8x8_t bit = vcreate_u8(0x8040201008040201);
  for (int64_t k = 0; k < count; k += 64) {
    uint8x16_t bytes[4];
    for (int64_t l = 0; l < 4; ++l) {
      uint32x4_t flags[4];
      for (int64_t m = 0; m < 4; ++m) {
        const float32x4_t value = vld1q_f32(tile + k + 16 * l + 4 * m);
        flags[m] = kSize ? vcageq_f32(value, bottom) : vcgeq_f32(value, bottom);
      }
      bytes[l] = vandq_u8(bytes_of_words(flags), vcombine_u8(bit, bit));
    }
    const uint64_t taken = join_bits(bytes[0], bytes[1], bytes[2], bytes[3]);
    found = for_bits(taken, k, found, [&](int64_t at, int64_t j) TF_HIPS_INLINED {
      // What reaches a key is a number.
      to.keys[at] = float_key(ranked<kSize>(tile[j]) + 0.0f);
      to.places[at] = static_cast<uint32_t>(base + j);
    });
  }
  return found;
}
#endif
constexpr int64_t kTaken = 64;
template <bool kSize>
inline int64_t take_avx2(const float*, int64_t, int64_t, uint32_t, const Candidates&, int64_t) {
  return 0;
}
inline int64_t keep_avx2(const Candidates&, int64_t, uint32_t, int64_t) { return 0; }
TF_HIPS_INLINE bool has_half_compression() { return false; }
template <bool kSize>
inline int64_t take_avx512(const float*, int64_t, int64_t, uint32_t, const Candidates&, int64_t) {
  return 0;
}
inline int64_t keep_avx512(const Candidates&, int64_t, uint32_t, int64_t) { return 0; }
TF_HIPS_INLINE bool has_compression() { return false; }
#endif

// The same on every machine. `count`: at most kTile.
template <bool kSize>
TF_HIPS_INLINE int64_t take_tile(const float* tile, int64_t base, int64_t count, uint32_t least,
                                 const Candidates& to, int64_t found) {
  if (has_compression()) return take_avx512<kSize>(tile, base, count, least, to, found);
  if (has_half_compression()) {
    const int64_t whole = count / kTaken * kTaken;
    found = take_avx2<kSize>(tile, base, whole, least, to, found);
    tile += whole, base += whole, count -= whole;
    if (count == 0) return found;
  }
#if defined(TF_HIPS_HAS_NEON)
  if (machine() == Machine::kNeon && least != 0) {
    const int64_t whole = count / 64 * 64;
    found = take_neon<kSize>(tile, base, whole, least, to, found);
    tile += whole, base += whole, count -= whole;
  }
#endif
  alignas(64) uint32_t keys[kTile];
  alignas(64) bool flags[kTile];
  for (int64_t j = 0; j < count; ++j) keys[j] = rank_key(ranked<kSize>(tile[j]));
  for (int64_t j = 0; j < count; ++j) flags[j] = keys[j] >= least;
  return for_flags(flags, count, found, [&](int64_t at, int64_t j) {
    to.keys[at] = keys[j];
    to.places[at] = static_cast<uint32_t>(base + j);
  });
}

inline __attribute__((noinline)) int64_t keep_candidates(const Candidates& in, int64_t found,
                                                         uint32_t last, int64_t equal) {
  if (has_compression()) return keep_avx512(in, found, last, equal);
  if (has_half_compression()) return keep_avx2(in, found, last, equal);
  int64_t kept = 0;
  for (int64_t j = 0; j < found; ++j) {
    const uint32_t key = in.keys[j];
    const int64_t is_equal = (key == last) & (equal > 0);
    in.keys[kept] = key;
    in.places[kept] = in.places[j];
    kept += (key > last) | is_equal;
    equal -= is_equal;
  }
  return kept;
}

// The indices of the k largest of n floats, ascending: the first of equal ones, -0 equal to 0, NaN
// below all. Says which elements it wants to see, run by run:
//
//     for (TopRun run = top.first(); run.count > 0; run = top.next()) top.add(tile, run);
//
// Uses slots slot .. slot + 2.
struct TopRun {
  int64_t base, count;
  bool is_sample;  // a group before the first sweep, of at most kTopGroup elements
  bool is_again;   // of a second sweep
};

constexpr int64_t kTopGroup = 16;

template <int slot>
class TopK {
 public:
  // Finds the memory for vectors of at most n elements. False when there is none.
  static bool reserve(int64_t n) {
    return n <= kMost && scratch<slot, uint32_t>(n + kSlack) != nullptr &&
           scratch<slot + 1, uint32_t>(n + kSlack) != nullptr &&
           scratch<slot + 2, int64_t>(n) != nullptr;
  }

  // False when there is no memory.
  bool start(int64_t n, int64_t k) {
    n_ = n;
    wanted_ = std::max<int64_t>(0, std::min(k, n));
    most_ = std::min(n, std::max(4 * wanted_, wanted_ + kFew));
    least_ = wanted_ > 0 ? 0 : UINT32_MAX;
    if (n > kMost) return false;
    found_.keys = scratch<slot, uint32_t>(most_ + kSlack);
    found_.places = scratch<slot + 1, uint32_t>(most_ + kSlack);
    out_ = scratch<slot + 2, int64_t>(wanted_);
    return found_.keys != nullptr && found_.places != nullptr && out_ != nullptr;
  }

  TF_HIPS_INLINE TopRun first() {
    // The candidates' memory, empty as yet, holds the keys of the sample.
    is_sample_ = n_ >= kSampled && wanted_ > 0 && 2 * wanted_ <= n_;
    return is_sample_ ? TopRun{0, kTopGroup, true, false} : sweep();
  }

  // The next run; its `count` is 0 when all is known.
  TF_HIPS_INLINE TopRun next() {
    if (is_sample_) {
      if (++group_ < kGroups) return {group_base(), kTopGroup, true, false};
      is_sample_ = false;
      least_ = guess();
      return sweep();
    }
    base_ += kTile;
    if (base_ < n_ || reached_ >= wanted_) return run();
    // A second sweep of all that there is.
    is_again_ = true;
    least_ = 0;
    return sweep();
  }

  // Takes a run of elements; with `kSize`, of whose sizes the largest are wanted.
  template <bool kSize = false>
  TF_HIPS_INLINE void add(const float* tile, const TopRun& run) {
    if (run.is_sample) {
      uint32_t* keys = found_.keys + group_ * kTopGroup;
      for (int64_t j = 0; j < run.count; ++j) keys[j] = rank_key(ranked<kSize>(tile[j]));
      return;
    }
    number_ = take_tile<kSize>(tile, run.base, run.count, least_, found_, number_);
    reached_ = std::max(reached_, number_);
    if (number_ > most_) cut();
  }

  // Returns the indices of the `chosen` = min(k, n) largest.
  int64_t* finish(int64_t* chosen) {
    *chosen = wanted_;
    if (number_ > wanted_) cut();
    for (int64_t j = 0; j < wanted_; ++j) out_[j] = found_.places[j];
    return out_;
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 31;
  // More candidates than are wanted before they are cut down.
  static constexpr int64_t kFew = 16384;
  // A tile is added before they are; and words are written sixteen at a time.
  static constexpr int64_t kSlack = kTile + 16;
  static constexpr int64_t kGroups = 512;
  static constexpr int64_t kSample = kGroups * kTopGroup;
  // A vector that is sampled: of fewer elements all are looked at.
  static constexpr int64_t kSampled = 1 << 16;

  // Where a group lies in its part of the vector differs from part to part: elements at the same
  // place of parts that are as long as rows of a matrix would be a column of it. At a line of 64
  // bytes, if the vector begins at one.
  TF_HIPS_INLINE int64_t group_base() const {
    const int64_t part = n_ / kGroups;
    const int64_t shift = static_cast<uint32_t>(group_) * 0x9E3779B9u >> 8;
    return (part * group_ + shift % (part - kTopGroup)) / kTopGroup * kTopGroup;
  }

  TF_HIPS_INLINE TopRun sweep() {
    base_ = number_ = reached_ = 0;
    return run();
  }

  TF_HIPS_INLINE TopRun run() const {
    return {base_, std::max<int64_t>(0, std::min(kTile, n_ - base_)), false, is_again_};
  }

  // A key that probably at least `wanted_` ones reach, and not many more.
  uint32_t guess() const {
    const double expected = static_cast<double>(wanted_) * kSample / static_cast<double>(n_);
    // Eight standard deviations, because neighbours are alike: they count for fewer.
    const int64_t rank = static_cast<int64_t>(expected + 8 * std::sqrt(expected)) + 8;
    return rank > kSample ? 0 : kth_largest(found_.keys, kSample, rank);
  }

  // Leaves the `wanted_` largest of more candidates.
  __attribute__((noinline)) void cut() {
    const uint32_t last = kth_largest(found_.keys, number_, wanted_);
    int64_t above = 0;
    for (int64_t j = 0; j < number_; ++j) above += found_.keys[j] > last ? 1 : 0;
    number_ = keep_candidates(found_, number_, last, wanted_ - above);
    // No key is the largest word, so this is more than `last`.
    least_ = last + 1;
  }

  int64_t n_ = 0, wanted_ = 0, most_ = 0;
  int64_t group_ = 0, base_ = 0;
  // Candidates, and the most that there have been: less than wanted when the sample misled.
  int64_t number_ = 0, reached_ = 0;
  uint32_t least_ = 0;
  bool is_sample_ = false, is_again_ = false;
  Candidates found_ = {nullptr, nullptr};
  int64_t* out_ = nullptr;
};

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_TOP_K_H_
