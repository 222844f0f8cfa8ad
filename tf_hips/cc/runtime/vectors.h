// SPDX-License-Identifier: Apache-2.0
// Wider registers for what compilers do not turn into good vector code: packing codes, and noise.
//
// A call works on a tile, so that asking for the machine costs nothing. Each function does the
// multiple of its step that it can, and returns how much: the portable loops of bits.h and rng.h,
// which define the result, do the rest, or everything on other machines.

#ifndef TF_HIPS_CC_RUNTIME_VECTORS_H_
#define TF_HIPS_CC_RUNTIME_VECTORS_H_

#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/machine.h"
#include "tf_hips/cc/runtime/philox.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors_neon.h"
#include "tf_hips/cc/runtime/vectors_x86.h"

namespace tf_hips {

// Copies a tile by a call. Of a length that they know compilers make string instructions, and these
// wait for everything that is on its way past the caches.
TF_HIPS_INLINE void copy_tile(const void* in, int64_t bytes, void* out) {
#if defined(__GNUC__) && !defined(__CUDACC__)
  __asm__("" : "+r"(bytes));
#endif
  std::memcpy(out, in, static_cast<size_t>(bytes));
}

#if !defined(TF_HIPS_HAS_AVX)
TF_HIPS_INLINE int64_t pack_wide(const uint16_t*, int64_t, int32_t, uint8_t*) { return 0; }
TF_HIPS_INLINE int64_t unpack_wide(const uint8_t*, int64_t, int32_t, uint16_t*) { return 0; }
#if !defined(TF_HIPS_HAS_NEON)
template <int kBits>
TF_HIPS_INLINE int64_t pack_wide(const uint8_t*, int64_t, uint8_t*) {
  return 0;
}
template <int kBits>
TF_HIPS_INLINE int64_t unpack_wide(const uint8_t*, int64_t, uint8_t*) {
  return 0;
}
TF_HIPS_INLINE int64_t noise_wide(const PhiloxInput&, int64_t, void*) { return 0; }
TF_HIPS_INLINE int64_t sum_wide(const uint8_t*, int64_t, uint64_t*) { return 0; }
#endif
#endif

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_VECTORS_H_
