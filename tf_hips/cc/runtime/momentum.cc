// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/runtime/momentum.h"

#include <cstring>

#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {
namespace {

// Of what is at most so large a denormal mode could change bits: it becomes 0.
constexpr float kTiny = 0x1p-96f;

// As integers: comparisons never trap, and a NaN keeps its bits.
TF_HIPS_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

TF_HIPS_INLINE bool IsFinite(float x) { return (BitsOf(x) & 0x7f800000u) != 0x7f800000u; }

TF_HIPS_HOT uint32_t Move(const float* g, const float* m, float beta, float* new_m, int64_t n) {
  const float rest = 1.0f - beta;
  uint32_t bad = 0;
  // Else the compiler would ask whether new_m overlaps m, and take the slow loop where it is m.
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < n; ++i) {
    const float sum = m[i] * beta + g[i] * rest;
    const float moved = __builtin_fabsf(sum) <= kTiny ? 0.0f : sum;
    new_m[i] = moved;
    bad |= IsFinite(moved) ? 0u : 1u;
  }
  return bad;
}

}  // namespace

bool MoveMomentum(const float* g, const float* m, float beta, float* new_m, int64_t n) {
  return Move(g, m, beta, new_m, n) == 0;
}

void SendNonFinite(const float* g, float* new_m, float* sent, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (sent != nullptr) std::memcpy(sent + i, IsFinite(g[i]) ? new_m + i : g + i, sizeof(float));
    if (!IsFinite(new_m[i])) new_m[i] = 0.0f;
  }
}

}  // namespace tf_hips
