// SPDX-License-Identifier: Apache-2.0
// Update rules of servers, one pass over memory each: gradients in, steps and new states out.
//
// Children subtract steps: w <- w - step. A server keeps no weights, only what weights moved by:
// `total` is the sum of all steps so far, `received` what one child has subtracted of it, so
// received - total is how far the weights have moved since the child's: w - w_child.
//
// All functions are thread-safe and elementwise, in the order of operations that each comment
// gives, in float32 without contraction: results depend neither on the number of threads nor on the
// width of registers, and equal NumPy's. The caller owns every buffer; buffers of one call do not
// overlap, so that what was there before is whole when a result is refused. Return 0;
// TF_HIPS_NOT_FINITE where something written holds NaN or an infinity; TF_HIPS_BAD_UPDATE for a
// missing buffer or a negative size, before anything is written.

#ifndef TF_HIPS_CC_RUNTIME_UPDATE_H_
#define TF_HIPS_CC_RUNTIME_UPDATE_H_

#include <stdint.h>

#include "tf_hips/cc/runtime/api.h"

#ifdef __cplusplus
extern "C" {
#endif

enum TfHipsUpdateStatus { TF_HIPS_NOT_FINITE = 1, TF_HIPS_BAD_UPDATE = 2 };

// What `second` moments become; g is the gradient.
enum TfHipsSecondMoment {
  TF_HIPS_ADAGRAD = 0,  // v + g g
  TF_HIPS_ADAM = 1,     // beta2 v + (1 - beta2) (g g)
  TF_HIPS_YOGI = 2      // v - ((1 - beta2) (g g)) sign(v - g g)
};

// out = factor x
TF_HIPS_EXPORT int32_t tf_hips_update_scale(const float* x, float factor, float* out, int64_t n);

// out = base + factor x
TF_HIPS_EXPORT int32_t tf_hips_update_add_scaled(const float* base, const float* x, float factor,
                                                 float* out, int64_t n);

// m' = beta m + g; step = rate m', or with `nesterov` rate (g + beta m')
TF_HIPS_EXPORT int32_t tf_hips_update_momentum(const float* g, const float* m, float rate,
                                               float beta, int32_t nesterov, float* new_m,
                                               float* step, int64_t n);

// m' = m + (g - m) (1 - beta1); v' = v + (g g - v) (1 - beta2); step = (m' rate) / (sqrt(v') + eps)
TF_HIPS_EXPORT int32_t tf_hips_update_adam(const float* g, const float* m, const float* v,
                                           float rate, float beta1, float beta2, float eps,
                                           float* new_m, float* new_v, float* step, int64_t n);

// m' = beta1 m + (1 - beta1) g; v' as `kind` says; step = (rate m') / (sqrt(v') + tau). Without
// `m` and `new_m`, both NULL, m' = g.
TF_HIPS_EXPORT int32_t tf_hips_update_adaptive(const float* g, const float* m, const float* v,
                                               float rate, float beta1, float beta2, float tau,
                                               int32_t kind, float* new_m, float* new_v,
                                               float* step, int64_t n);

// new_total = total + rate (g + ((lambda g) g) (received - total)). With `square` and `new_square`,
// else both NULL: s' = decay s + (1 - decay) (g g), and lambda / sqrt(s' + eps) for lambda.
TF_HIPS_EXPORT int32_t tf_hips_update_delayed(const float* g, const float* total,
                                              const float* received, const float* square,
                                              float rate, float lambda, float decay, float eps,
                                              float* new_total, float* new_square, int64_t n);

// new_total = total + alpha (g + (received - total)): weights move by alpha towards the child's.
TF_HIPS_EXPORT int32_t tf_hips_update_mix(const float* g, const float* total, const float* received,
                                          float alpha, float* new_total, int64_t n);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TF_HIPS_CC_RUNTIME_UPDATE_H_
