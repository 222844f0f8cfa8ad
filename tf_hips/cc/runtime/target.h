// SPDX-License-Identifier: Apache-2.0
// How generated code is compiled: inlining, and clones of hot functions for wider vectors.
//
// All code here computes the same bits whatever the vector width: -ffp-contract=off is required (a
// fused multiply-add rounds once where the reference rounds twice), and fast-math is refused.

#ifndef TF_HIPS_CC_RUNTIME_TARGET_H_
#define TF_HIPS_CC_RUNTIME_TARGET_H_

#if defined(__FAST_MATH__)
#error "tf_hips must be compiled without -ffast-math: packets must be equal bit for bit"
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tf_hips supports little-endian machines only"
#endif

#if defined(__CUDACC__)
#define TF_HIPS_INLINE __host__ __device__ __forceinline__
#else
#define TF_HIPS_INLINE inline __attribute__((always_inline))
#endif
// A function for a whole tile, which is compiled once and not with each loop that calls it.
#define TF_HIPS_APART inline __attribute__((noinline))
#define TF_HIPS_INLINED __attribute__((always_inline))  // of a lambda

// Clones for AVX-512 and for AVX2, which most machines have at best (decision 0052). They are
// chosen when the library is loaded, by a resolver that runs before the sanitizers are ready.
// Functions that are hot stay functions of their own also without clones, so that no arithmetic is
// moved across the scoped denormal mode of the entry point. The loader chooses among them by the
// processor alone: TF_HIPS_CPU caps what `machine()` chooses, and not these. TF_HIPS_ONE_MACHINE:
// the library is compiled for the machine at hand alone.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) &&                   \
    !defined(TF_HIPS_NO_CLONES) && !defined(TF_HIPS_ONE_MACHINE)
#define TF_HIPS_HOT \
  __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TF_HIPS_HOT __attribute__((noinline))
#endif

#endif  // TF_HIPS_CC_RUNTIME_TARGET_H_
