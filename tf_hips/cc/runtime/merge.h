// SPDX-License-Identifier: Apache-2.0
// The sum of decoded bodies in one pass over the output: a range of elements at a time, whose sums
// stay in the first-level cache while row after row is added. Every element is added in the order
// of the rows, so the sums are those of decoding row by row.

#ifndef TF_HIPS_CC_RUNTIME_MERGE_H_
#define TF_HIPS_CC_RUNTIME_MERGE_H_

#include <algorithm>
#include <cstdint>

#include "tf_hips/cc/runtime/ahead.h"
#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/stores.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// `one(row, to, mode, begin, end)` decodes elements begin .. end - 1 of a row to `to`, and
// `more(row, to, begin, end, late)` those of kRows rows at once, `most` those of kMost, on machines
// with as many registers as that takes, added to it unless the first row is 0; sums go to `late`,
// past the caches, where it is not null: memory takes them while the next ones are computed.
// `mode`: TF_HIPS_SET or TF_HIPS_STREAM.
template <int32_t kRows, int32_t kMost, typename One, typename More, typename Most>
inline void merge_ranges(int32_t num, int64_t n, int32_t mode, float* out, const One& one,
                         const More& more, const Most& most) {
#if defined(TF_HIPS_HAS_AVX)
  // What AVX-512 keeps in its 32 registers takes a tenth longer in AVX2's 16.
  const int32_t at_most = machine() == Machine::kAvx512 ? kMost : kRows;
#else
  constexpr int32_t at_most = kRows;
#endif
  const bool is_streamed = mode == TF_HIPS_STREAM;
  alignas(64) float sums[kMergeRange];
  for (int64_t begin = 0; begin < n; begin += kMergeRange) {
    const int64_t end = std::min(begin + kMergeRange, n);
    float* to = is_streamed ? sums : out + begin;
    int32_t row = 0;
    for (; row < num % kRows; ++row) {
      one(row, to, row == 0 ? TF_HIPS_SET : TF_HIPS_ADD, begin, end);
    }
    for (; (num - row) % at_most != 0; row += kRows) {
      more(row, to, begin, end, is_streamed && row + kRows == num ? out + begin : nullptr);
    }
    for (; row < num; row += at_most) {
      float* const late = is_streamed && row + at_most == num ? out + begin : nullptr;
      if (at_most == kMost) {
        most(row, to, begin, end, late);
      } else {
        more(row, to, begin, end, late);
      }
    }
    if (is_streamed && num < kRows) stream_tile(sums, end - begin, out + begin);
  }
  if (is_streamed) stream_end();
}

// The same for decoders that do one row at a time.
template <typename One>
inline void merge_ranges(int32_t num, int64_t n, int32_t mode, float* out, const One& one) {
  const bool is_streamed = mode == TF_HIPS_STREAM;
  alignas(64) float sums[kMergeRange];
  for (int64_t begin = 0; begin < n; begin += kMergeRange) {
    const int64_t end = std::min(begin + kMergeRange, n);
    float* to = is_streamed ? sums : out + begin;
    for (int32_t row = 0; row < num; ++row) {
      one(row, to, row == 0 ? TF_HIPS_SET : TF_HIPS_ADD, begin, end);
    }
    if (is_streamed) stream_tile(sums, end - begin, out + begin);
  }
  if (is_streamed) stream_end();
}

// The same for decoders that can only do all elements.
template <typename One>
inline void merge_rows(int32_t num, int64_t n, float* out, const One& one) {
  for (int32_t row = 0; row < num; ++row) one(row, out, row == 0 ? TF_HIPS_SET : TF_HIPS_ADD, 0, n);
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_MERGE_H_
