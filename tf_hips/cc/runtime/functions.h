// SPDX-License-Identifier: Apache-2.0
// Functions of CompLL that no standard fixes to the last bit, and what looks at the bits of floats.
//
// compll/ir/functions.py defines them; this is the same, step by step. Nothing branches, so loops
// over them become vector code.

#ifndef TF_HIPS_CC_RUNTIME_FUNCTIONS_H_
#define TF_HIPS_CC_RUNTIME_FUNCTIONS_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "tf_hips/cc/runtime/convert.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

// The bits of a float, every NaN as one.
TF_HIPS_INLINE uint32_t float_bits(float x) { return canonical_bits(x); }

// The float with these bits, of which the low 32 count.
TF_HIPS_INLINE float bits_float(int64_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits);
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// 1, -1 or 0; 0 for NaN.
template <typename T>
TF_HIPS_INLINE T sign_of(T x) {
  return x > T{0} ? T{1} : x < T{0} ? T{-1} : T{0};
}

TF_HIPS_INLINE float power_of_two(int32_t k) {
  return bits_float(static_cast<int64_t>(static_cast<uint32_t>(k + 127) << 23));
}

TF_HIPS_INLINE float exp2_exact(float x) {
  const float above = x > -151.0f ? x : -151.0f;
  const float held = above < 129.0f ? above : 129.0f;
  const int32_t k = static_cast<int32_t>(held + (held < 0.0f ? -0.5f : 0.5f));
  // Of -k, because g++ makes one truncation of a conversion there and back, and then no vector code
  // where this is one side of a choice.
  const float rest = held + static_cast<float>(-k);
  float power = 1.535336188319500e-4f;
  power = power * rest + 1.339887440266574e-3f;
  power = power * rest + 9.618437357674640e-3f;
  power = power * rest + 5.550332471162809e-2f;
  power = power * rest + 2.402264791363012e-1f;
  power = power * rest + 6.931472028550421e-1f;
  power = power * rest + 1.0f;
  const int32_t first = k >> 1;
  const float scaled = power * power_of_two(first) * power_of_two(k - first);
  // Of NaN, which goes the way of the lower end, `scaled` is 0. A choice between floats would be a
  // branch around all of the above, and no vector code, to g++ 12.
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  return bits_float(bits | (x == x ? 0u : 0x7FC00000u));
}

TF_HIPS_INLINE float log2_exact(float x) {
  constexpr uint32_t kSqrtHalf = 0x3F3504F3u;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool is_tiny = x < 0x1p-126f;
  const float normal = is_tiny ? x * 0x1p24f : x;
  uint32_t bits;
  std::memcpy(&bits, &normal, sizeof bits);
  const int32_t shifted = static_cast<int32_t>(bits - kSqrtHalf);
  const int32_t e = (shifted >> 23) - (is_tiny ? 24 : 0);
  const float m =
      bits_float(static_cast<int64_t>((static_cast<uint32_t>(shifted) & 0x007FFFFFu) + kSqrtHalf));
  const float over = m - 1.0f;
  const float s = over / (over + 2.0f);
  const float square = s * s;
  float value = 0.32059889797532524f;
  value = value * square + 0.4121985831111324f;
  value = value * square + 0.5770780163555854f;
  value = value * square + 0.9617966939259757f;
  value = value * square + 2.885390081777927f;
  value = static_cast<float>(e) + value * s;
  value = x == kInfinity ? x : value;
  value = x == 0.0f ? -kInfinity : value;
  return x >= 0.0f ? value : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_FUNCTIONS_H_
