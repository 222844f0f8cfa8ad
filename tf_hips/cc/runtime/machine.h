// SPDX-License-Identifier: Apache-2.0
// Which registers this processor has, and how functions that use them are compiled.

#ifndef TF_HIPS_CC_RUNTIME_MACHINE_H_
#define TF_HIPS_CC_RUNTIME_MACHINE_H_

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
// GCC 12 takes the undefined registers of its own header for an oversight.
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#define TF_HIPS_HAS_AVX 1
// Whether rows (row.h) are compiled for AVX-512 and for AVX2: in a library for one machine, which
// is compiled with the instructions that it has, for the better of the two.
#if !defined(TF_HIPS_ONE_MACHINE) || defined(__AVX512BW__)
#define TF_HIPS_ROWS_AVX512 1
#endif
#if !defined(TF_HIPS_ONE_MACHINE) || !defined(__AVX512BW__)
#define TF_HIPS_ROWS_AVX2 1
#endif
#define TF_HIPS_AVX512 __attribute__((noinline, target("avx512f,avx512bw,avx512dq,avx512vl,bmi2")))
#define TF_HIPS_AVX2 __attribute__((noinline, target("avx2")))
// Parts of such functions.
#define TF_HIPS_AVX512_INLINE \
  inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,bmi2")))
#define TF_HIPS_AVX2_INLINE inline __attribute__((always_inline, target("avx2")))
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(__CUDACC__)
#include <arm_neon.h>
// Every processor of this kind has these registers.
#define TF_HIPS_HAS_NEON 1
#define TF_HIPS_ROWS_NEON 1
#define TF_HIPS_NEON __attribute__((noinline))
#define TF_HIPS_NEON_INLINE inline __attribute__((always_inline))
#endif

namespace tf_hips {

enum class Machine { kBase, kAvx2, kAvx512, kNeon };

// TF_HIPS_CPU in the environment, "avx2" or "base", caps what is used, to find out whether a wrong
// result is the fault of wider registers, or of NEON.
inline Machine find_machine() {
  const char* const cap = std::getenv("TF_HIPS_CPU");
  if (cap != nullptr && std::strcmp(cap, "base") == 0) return Machine::kBase;
#if defined(TF_HIPS_HAS_AVX)
  __builtin_cpu_init();
  const bool is_capped = cap != nullptr && std::strcmp(cap, "avx2") == 0;
  if (!is_capped && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("bmi2")) {
    return Machine::kAvx512;
  }
  return __builtin_cpu_supports("avx2") ? Machine::kAvx2 : Machine::kBase;
#elif defined(TF_HIPS_HAS_NEON)
  return Machine::kNeon;
#else
  return Machine::kBase;
#endif
}

inline Machine machine() {
  static const Machine found = find_machine();
  return found;
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_MACHINE_H_
