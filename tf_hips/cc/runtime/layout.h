// SPDX-License-Identifier: Apache-2.0
// What generated entry points check before they touch a buffer: parameters, and where fields lie.

#ifndef TF_HIPS_CC_RUNTIME_LAYOUT_H_
#define TF_HIPS_CC_RUNTIME_LAYOUT_H_

#include <cmath>
#include <cstdint>
#include <limits>

#include "tf_hips/cc/runtime/codec.h"

namespace tf_hips {

// Longer vectors are refused, so that no sum of sizes can overflow.
constexpr int64_t kMaxElements = int64_t{1} << 40;

// A value as its parameter holds it. What is not an integer is a binary32: attributes of TensorFlow
// and the codec's arithmetic have no more, and the value enters the hash in each packet. Callers
// hold a ScopedExactDenormals.
inline double held_value(const TfHipsParam& param, double value) {
  constexpr double kMax = std::numeric_limits<float>::max();
  // From here on the nearest binary32 would be infinite.
  constexpr double kEnd = kMax + 0x1p103;
  if (param.is_integer != 0 || !(value > -kEnd && value < kEnd)) return value;
  return static_cast<double>(static_cast<float>(std::fmin(std::fmax(value, -kMax), kMax)));
}

// NaN compares false, so it is not allowed.
inline bool is_allowed(const TfHipsParam& param, double value) {
  value = held_value(param, value);
  if (!(value >= param.minimum && value <= param.maximum)) return false;
  return param.is_integer == 0 || std::floor(value) == value;
}

// Puts field `number`, of `size` elements (none when negative) of `bits` bits, behind the others;
// false when it is too long. `Layout` has offset and count per field, and bytes.
template <typename Layout>
inline bool add_field(int64_t size, int64_t bits, int number, Layout* layout) {
  if (size > kMaxElements) return false;
  layout->offset[number] = layout->bytes;
  layout->count[number] = size < 0 ? 0 : size;
  layout->bytes += (layout->count[number] * bits + 7) / 8;
  return true;
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_LAYOUT_H_
