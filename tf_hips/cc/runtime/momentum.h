// SPDX-License-Identifier: Apache-2.0
// A running mean of gradients, which is sent instead of them: m <- beta m + (1 - beta) g.
//
// The bits are those of `moved` in tf_hips/ops/smoothing.py: two products and a sum, each rounded;
// 0 for what is at most 2^-96; 0 in m for what is not finite. The caller owns all buffers; new_m
// may be m, and no others overlap. Thread-safe and elementwise. The caller sets the denormal mode.

#ifndef TF_HIPS_CC_RUNTIME_MOMENTUM_H_
#define TF_HIPS_CC_RUNTIME_MOMENTUM_H_

#include <cstdint>

namespace tf_hips {

// Writes the next m, and says whether it is finite: then it is what is sent. Where it is not,
// SendNonFinite must follow.
bool MoveMomentum(const float* g, const float* m, float beta, float* new_m, int64_t n);

// What is sent: g where that is not finite, elsewhere new_m, which becomes 0 where it is not
// finite. `sent` null: only that.
void SendNonFinite(const float* g, float* new_m, float* sent, int64_t n);

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_MOMENTUM_H_
