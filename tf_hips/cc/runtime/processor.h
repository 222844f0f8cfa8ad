// SPDX-License-Identifier: Apache-2.0
// Which processor this is, where it depends on its kind which of two ways is the faster one.

#ifndef TF_HIPS_CC_RUNTIME_PROCESSOR_H_
#define TF_HIPS_CC_RUNTIME_PROCESSOR_H_

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/sysinfo.h>
#endif

namespace tf_hips {

// Whether this is one with AVX-512 of `maker` (12 characters) and `family`; `*model` is which.
// (<cpuid.h> would take names from specifications by its macros.)
inline bool is_wide_processor([[maybe_unused]] const char* maker, [[maybe_unused]] uint32_t family,
                              [[maybe_unused]] uint32_t* model) {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512f")) return false;
  uint32_t a = 0, words[3] = {}, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(words[0]), "=d"(words[1]), "+c"(words[2]));
  if (std::memcmp(words, maker, sizeof words) != 0) return false;
  a = 1;
  c = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const uint32_t low = a >> 8 & 0xF;
  *model = (a >> 12 & 0xF0) | (a >> 4 & 0xF);
  return (low == 0xF ? low + (a >> 20 & 0xFF) : low) == family;
#else
  return false;
#endif
}

// Of AMD's family 19h those with AVX-512; Zen 3, the others, was not measured.
inline bool is_zen4() {
  uint32_t model = 0;
  return is_wide_processor("AuthenticAMD", 0x19, &model);
}

// Skylake-SP and its kin, Cascade Lake and Cooper Lake, which have one model number.
inline bool is_skylake_server() {
  uint32_t model = 0;
  return is_wide_processor("GenuineIntel", 6, &model) && model == 0x55;
}

// Processors of the machine. (<thread>, which has this too, makes every codec longer to compile.)
inline int num_processors() {
#if defined(__linux__)
  return get_nprocs();
#else
  return 1;
#endif
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_PROCESSOR_H_
