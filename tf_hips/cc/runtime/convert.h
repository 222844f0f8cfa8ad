// SPDX-License-Identifier: Apache-2.0
// The scalar operators of CompLL where they differ from those of C++: every one is total.
//
// Integers are 64 bits and wrap; x / 0 and x % 0 are 0; shifts count modulo 64. Floats become
// integers by clamping and then truncating, NaN is 0. min and max return their second argument when
// either is NaN.

#ifndef TF_HIPS_CC_RUNTIME_CONVERT_H_
#define TF_HIPS_CC_RUNTIME_CONVERT_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

TF_HIPS_INLINE int64_t int_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

TF_HIPS_INLINE int64_t int_sub(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

TF_HIPS_INLINE int64_t int_mul(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

TF_HIPS_INLINE int64_t int_neg(int64_t a) { return int_sub(0, a); }

TF_HIPS_INLINE int64_t int_abs(int64_t a) { return a < 0 ? int_neg(a) : a; }

TF_HIPS_INLINE int64_t int_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  return b == -1 ? int_neg(a) : a / b;
}

TF_HIPS_INLINE int64_t int_rem(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }

TF_HIPS_INLINE int64_t int_shl(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) << (static_cast<uint64_t>(b) & 63));
}

TF_HIPS_INLINE int64_t int_shr(int64_t a, int64_t b) {
  return a >> (static_cast<uint64_t>(b) & 63);
}

template <typename T>
TF_HIPS_INLINE T maximum(T a, T b) {
  return a > b ? a : b;
}

template <typename T>
TF_HIPS_INLINE T minimum(T a, T b) {
  return a < b ? a : b;
}

// Half away from zero.
TF_HIPS_INLINE float round_half_away(float x) {
  const float whole = std::trunc(x);
  return whole + (std::fabs(x - whole) >= 0.5f ? std::copysign(1.0f, x) : 0.0f);
}

TF_HIPS_INLINE int64_t float_to_int(float x) {
  if (x >= 9223372036854775808.0f) return INT64_MAX;
  if (x <= -9223372036854775808.0f) return INT64_MIN;
  return x == x ? static_cast<int64_t>(x) : 0;
}

// A number that compilers know nothing of. Loops that select by comparing with a known constant
// take two instructions where those with a variable take one, the machine's own minimum or maximum.
// nvcc takes x < 0 ? x : 0 for its own minimum, of which zeros of both signs are not equal.
TF_HIPS_INLINE float hidden(float x) {
#if defined(__CUDA_ARCH__)
  asm("" : "+f"(x));
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
  __asm__("" : "+x"(x));
#endif
  return x;
}

// `top`: the largest code, 2^bits - 1, for bits <= 16. `zero`: 0, which may be hidden.
TF_HIPS_INLINE int32_t float_to_code(float x, float top, float zero = 0.0f) {
#ifdef __CUDA_ARCH__
  // Which makes 0 of NaN and of what is less.
  const uint32_t code = __float2uint_rz(x), most = static_cast<uint32_t>(top);
  return static_cast<int32_t>(code < most ? code : most);
#endif
  const float above = x > zero ? x : zero;
  const float inside = above < top ? above : top;
  return static_cast<int32_t>(inside);
}

TF_HIPS_INLINE uint32_t float_to_uint32(float x) {
  if (!(x > 0.0f)) return 0;
  return x >= 4294967296.0f ? UINT32_MAX : static_cast<uint32_t>(x);
}

// A width that depends on parameters, and the largest code of that width.
struct Width {
  TF_HIPS_INLINE explicit Width(int64_t bits)
      : bits(static_cast<int32_t>(bits)), mask((1 << bits) - 1), top(static_cast<float>(mask)) {}
  int32_t bits;
  int32_t mask;
  float top;
};

// All NaNs leave as one, so that packets do not depend on the order of operands.
TF_HIPS_INLINE uint32_t canonical_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x == x ? bits : 0x7FC00000u;
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_CONVERT_H_
