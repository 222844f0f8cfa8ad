// SPDX-License-Identifier: Apache-2.0
// The sum of decoded bodies in one pass over the output: a range of elements at a time, whose sums
// stay in the first-level cache while row after row is added. Every element is added in the order
// of the rows, so the sums are those of decoding row by row.

#ifndef TF_HIPS_CC_RUNTIME_MERGE_H_
#define TF_HIPS_CC_RUNTIME_MERGE_H_

#include <algorithm>
#include <cstdint>

#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// Elements of a range: 16 KiB of sums.
constexpr int64_t kMergeRange = 4096;

// `one(row, to, mode, begin, end)` decodes elements begin .. end - 1 of a row to `to`, and
// `more(row, to, begin, end, late)` those of kRows rows at once, added to it unless the first row
// is 0; sums go to `late`, past the caches, where it is not null: memory takes them while the next
// ones are computed. `mode`: TF_HIPS_SET or TF_HIPS_STREAM.
template <int32_t kRows, typename One, typename More>
inline void merge_ranges(int32_t num, int64_t n, int32_t mode, float* out, const One& one,
                         const More& more) {
  const bool is_streamed = mode == TF_HIPS_STREAM;
  alignas(64) float sums[kMergeRange];
  for (int64_t begin = 0; begin < n; begin += kMergeRange) {
    const int64_t end = std::min(begin + kMergeRange, n);
    float* to = is_streamed ? sums : out + begin;
    int32_t row = 0;
    for (; row < num % kRows; ++row) {
      one(row, to, row == 0 ? TF_HIPS_SET : TF_HIPS_ADD, begin, end);
    }
    for (; row < num; row += kRows) {
      more(row, to, begin, end, is_streamed && row + kRows == num ? out + begin : nullptr);
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
