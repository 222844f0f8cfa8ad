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

// `decode(row, to, mode, begin, end)` decodes elements begin .. end - 1 of a row; `range`: how many
// it does at a time, n when it can only do all. `mode`: TF_HIPS_SET or TF_HIPS_STREAM.
template <typename Decode>
inline void merge_rows(int32_t num, int64_t n, int64_t range, int32_t mode, float* out,
                       const Decode& decode) {
  const bool is_streamed = mode == TF_HIPS_STREAM && range <= kMergeRange;
  alignas(64) float sums[kMergeRange];
  for (int64_t begin = 0; begin < n; begin += range) {
    const int64_t end = std::min(begin + range, n);
    float* to = is_streamed ? sums : out + begin;
    for (int32_t row = 0; row < num; ++row) {
      decode(row, to, row == 0 ? TF_HIPS_SET : TF_HIPS_ADD, begin, end);
    }
    if (is_streamed) stream_tile(sums, end - begin, out + begin);
  }
  if (is_streamed) stream_end();
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_MERGE_H_
