// SPDX-License-Identifier: Apache-2.0
// Denormal numbers as IEEE 754 has them, for the life of one object.
//
// TensorFlow's threads flush denormals to zero; NumPy and a server process do not. A codec that
// kept its caller's mode would write different packets in the two. The object belongs to one thread
// and restores that thread's mode.

#ifndef TF_HIPS_CC_RUNTIME_DENORMALS_H_
#define TF_HIPS_CC_RUNTIME_DENORMALS_H_

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace tf_hips {

class ScopedExactDenormals {
 public:
  ScopedExactDenormals() : saved_(Read()) { Write(saved_ & ~kFlags); }
  ~ScopedExactDenormals() { Write(saved_); }
  ScopedExactDenormals(const ScopedExactDenormals&) = delete;
  ScopedExactDenormals& operator=(const ScopedExactDenormals&) = delete;

 private:
#if defined(__SSE2__)
  using Word = uint32_t;
  // Flush to zero (bit 15), denormals are zero (bit 6), and the rounding mode (13, 14): 0 is to
  // nearest.
  static constexpr Word kFlags = 0x8040u | 0x6000u;
  static Word Read() { return _mm_getcsr(); }
  static void Write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  // Of FPCR: flush to zero (bit 24), the rounding mode (22, 23), and of processors with Armv8.7
  // also denormals are zero (bit 0) and what x86-64 does instead (bit 1).
  static constexpr Word kFlags = 0x1C00003u;
  static Word Read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
#error "tf_hips knows the denormal mode of x86-64 and AArch64 only."
#endif

  const Word saved_;
};

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_DENORMALS_H_
