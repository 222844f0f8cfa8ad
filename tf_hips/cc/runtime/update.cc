// SPDX-License-Identifier: Apache-2.0
// Update rules: blocks of each vector on the pool of the process.
#include "tf_hips/cc/runtime/update.h"

#include <atomic>
#include <cstring>

#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/parallel.h"
#include "tf_hips/cc/runtime/target.h"

namespace {

// Elements of a task: large enough that starting one costs nothing beside it.
constexpr int64_t kBlock = int64_t{1} << 18;

// All ones where the exponent is: NaN or an infinity. Compared as integers, which never trap.
constexpr uint32_t kExponent = 0x7f800000u;

struct Rates {
  float rate, beta1, beta2, eps;
};

// 1 where x is not finite.
inline __attribute__((always_inline)) uint32_t Bad(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return (bits & kExponent) == kExponent ? 1u : 0u;
}

TF_HIPS_HOT uint32_t Scale(const float* __restrict x, float factor, float* __restrict out,
                           int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float y = factor * x[i];
    out[i] = y;
    bad |= Bad(y);
  }
  return bad;
}

TF_HIPS_HOT uint32_t AddScaled(const float* __restrict base, const float* __restrict x,
                               float factor, float* __restrict out, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float y = base[i] + factor * x[i];
    out[i] = y;
    bad |= Bad(y);
  }
  return bad;
}

template <bool kNesterov>
inline __attribute__((always_inline)) uint32_t MomentumLoop(const float* __restrict g,
                                                            const float* __restrict m, float rate,
                                                            float beta, float* __restrict new_m,
                                                            float* __restrict step, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float moved = beta * m[i] + g[i];
    const float ahead = kNesterov ? g[i] + beta * moved : moved;
    const float s = rate * ahead;
    new_m[i] = moved;
    step[i] = s;
    bad |= Bad(moved) | Bad(s);
  }
  return bad;
}

TF_HIPS_HOT uint32_t Momentum(const float* g, const float* m, float rate, float beta, float* new_m,
                              float* step, int64_t n) {
  return MomentumLoop<false>(g, m, rate, beta, new_m, step, n);
}

TF_HIPS_HOT uint32_t Nesterov(const float* g, const float* m, float rate, float beta, float* new_m,
                              float* step, int64_t n) {
  return MomentumLoop<true>(g, m, rate, beta, new_m, step, n);
}

TF_HIPS_HOT uint32_t Adam(const float* __restrict g, const float* __restrict m,
                          const float* __restrict v, const Rates rates, float* __restrict new_m,
                          float* __restrict new_v, float* __restrict step, int64_t n) {
  const float rest1 = 1.0f - rates.beta1, rest2 = 1.0f - rates.beta2;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float first = m[i] + (g[i] - m[i]) * rest1;
    const float second = v[i] + (g[i] * g[i] - v[i]) * rest2;
    const float s = (first * rates.rate) / (__builtin_sqrtf(second) + rates.eps);
    new_m[i] = first;
    new_v[i] = second;
    step[i] = s;
    bad |= Bad(first) | Bad(second) | Bad(s);
  }
  return bad;
}

template <int kKind, bool kHasFirst>
inline __attribute__((always_inline)) uint32_t
AdaptiveLoop(const float* __restrict g, const float* __restrict m, const float* __restrict v,
             const Rates rates, float* __restrict new_m, float* __restrict new_v,
             float* __restrict step, int64_t n) {
  const float rest1 = 1.0f - rates.beta1, rest2 = 1.0f - rates.beta2;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float square = g[i] * g[i];
    float first = g[i], second = 0.0f;
    if (kHasFirst) {
      first = rates.beta1 * m[i] + rest1 * g[i];
      new_m[i] = first;
    }
    if (kKind == TF_HIPS_ADAGRAD) {
      second = v[i] + square;
    } else if (kKind == TF_HIPS_ADAM) {
      second = rates.beta2 * v[i] + rest2 * square;
    } else {
      const float over = v[i] - square;
      const float sign = (over > 0.0f ? 1.0f : 0.0f) - (over < 0.0f ? 1.0f : 0.0f);
      second = v[i] - (rest2 * square) * sign;
    }
    const float s = (rates.rate * first) / (__builtin_sqrtf(second) + rates.eps);
    new_v[i] = second;
    step[i] = s;
    bad |= Bad(first) | Bad(second) | Bad(s);
  }
  return bad;
}

#define TF_HIPS_ADAPTIVE(NAME, KIND, HAS_FIRST)                                                \
  TF_HIPS_HOT uint32_t NAME(const float* g, const float* m, const float* v, const Rates rates, \
                            float* new_m, float* new_v, float* step, int64_t n) {              \
    return AdaptiveLoop<KIND, HAS_FIRST>(g, m, v, rates, new_m, new_v, step, n);               \
  }
TF_HIPS_ADAPTIVE(Adagrad, TF_HIPS_ADAGRAD, false)
TF_HIPS_ADAPTIVE(AdagradWithFirst, TF_HIPS_ADAGRAD, true)
TF_HIPS_ADAPTIVE(FedAdam, TF_HIPS_ADAM, false)
TF_HIPS_ADAPTIVE(FedAdamWithFirst, TF_HIPS_ADAM, true)
TF_HIPS_ADAPTIVE(Yogi, TF_HIPS_YOGI, false)
TF_HIPS_ADAPTIVE(YogiWithFirst, TF_HIPS_YOGI, true)
#undef TF_HIPS_ADAPTIVE

using Adaptive = uint32_t (*)(const float*, const float*, const float*, Rates, float*, float*,
                              float*, int64_t);

Adaptive Choose(int32_t kind, bool has_first) {
  switch (kind) {
    case TF_HIPS_ADAGRAD:
      return has_first ? AdagradWithFirst : Adagrad;
    case TF_HIPS_ADAM:
      return has_first ? FedAdamWithFirst : FedAdam;
    case TF_HIPS_YOGI:
      return has_first ? YogiWithFirst : Yogi;
    default:
      return nullptr;
  }
}

TF_HIPS_HOT uint32_t Delayed(const float* __restrict g, const float* __restrict total,
                             const float* __restrict received, float rate, float lambda,
                             float* __restrict new_total, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float drift = received[i] - total[i];
    const float moved = total[i] + rate * (g[i] + ((lambda * g[i]) * g[i]) * drift);
    new_total[i] = moved;
    bad |= Bad(moved);
  }
  return bad;
}

TF_HIPS_HOT uint32_t DelayedAdaptive(const float* __restrict g, const float* __restrict total,
                                     const float* __restrict received,
                                     const float* __restrict square, float rate, float lambda,
                                     float decay, float eps, float* __restrict new_total,
                                     float* __restrict new_square, int64_t n) {
  const float rest = 1.0f - decay;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float mean = decay * square[i] + rest * (g[i] * g[i]);
    const float scaled = lambda / __builtin_sqrtf(mean + eps);
    const float drift = received[i] - total[i];
    const float moved = total[i] + rate * (g[i] + ((scaled * g[i]) * g[i]) * drift);
    new_square[i] = mean;
    new_total[i] = moved;
    bad |= Bad(mean) | Bad(moved);
  }
  return bad;
}

TF_HIPS_HOT uint32_t Mix(const float* __restrict g, const float* __restrict total,
                         const float* __restrict received, float alpha, float* __restrict new_total,
                         int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float moved = total[i] + alpha * (g[i] + (received[i] - total[i]));
    new_total[i] = moved;
    bad |= Bad(moved);
  }
  return bad;
}

// Runs `body(first, count)` over blocks of n elements; 1 where one of them returns not 0.
template <class Body>
int32_t InBlocks(int64_t n, const Body& body) {
  std::atomic<uint32_t> bad{0};
  tf_hips::PoolParallelFor((n + kBlock - 1) / kBlock, [&](int64_t block) {
    const tf_hips::ScopedExactDenormals exact;
    const int64_t first = block * kBlock;
    const int64_t count = n - first < kBlock ? n - first : kBlock;
    bad.fetch_or(body(first, count), std::memory_order_relaxed);
  });
  return bad.load() != 0 ? TF_HIPS_NOT_FINITE : 0;
}

template <class... Buffers>
bool Missing(int64_t n, Buffers... buffers) {
  return n < 0 || (n > 0 && ((buffers == nullptr) || ...));
}

}  // namespace

extern "C" {

int32_t tf_hips_update_scale(const float* x, float factor, float* out, int64_t n) {
  if (Missing(n, x, out)) return TF_HIPS_BAD_UPDATE;
  return InBlocks(
      n, [&](int64_t at, int64_t count) { return Scale(x + at, factor, out + at, count); });
}

int32_t tf_hips_update_add_scaled(const float* base, const float* x, float factor, float* out,
                                  int64_t n) {
  if (Missing(n, base, x, out)) return TF_HIPS_BAD_UPDATE;
  return InBlocks(n, [&](int64_t at, int64_t count) {
    return AddScaled(base + at, x + at, factor, out + at, count);
  });
}

int32_t tf_hips_update_momentum(const float* g, const float* m, float rate, float beta,
                                int32_t nesterov, float* new_m, float* step, int64_t n) {
  if (Missing(n, g, m, new_m, step)) return TF_HIPS_BAD_UPDATE;
  return InBlocks(n, [&](int64_t at, int64_t count) {
    return (nesterov != 0 ? Nesterov : Momentum)(g + at, m + at, rate, beta, new_m + at, step + at,
                                                 count);
  });
}

int32_t tf_hips_update_adam(const float* g, const float* m, const float* v, float rate, float beta1,
                            float beta2, float eps, float* new_m, float* new_v, float* step,
                            int64_t n) {
  if (Missing(n, g, m, v, new_m, new_v, step)) return TF_HIPS_BAD_UPDATE;
  const Rates rates{rate, beta1, beta2, eps};
  return InBlocks(n, [&](int64_t at, int64_t count) {
    return Adam(g + at, m + at, v + at, rates, new_m + at, new_v + at, step + at, count);
  });
}

int32_t tf_hips_update_adaptive(const float* g, const float* m, const float* v, float rate,
                                float beta1, float beta2, float tau, int32_t kind, float* new_m,
                                float* new_v, float* step, int64_t n) {
  const bool has_first = m != nullptr;
  const Adaptive update = Choose(kind, has_first);
  if (Missing(n, g, v, new_v, step) || has_first != (new_m != nullptr) || update == nullptr) {
    return TF_HIPS_BAD_UPDATE;
  }
  const Rates rates{rate, beta1, beta2, tau};
  return InBlocks(n, [&](int64_t at, int64_t count) {
    return update(g + at, has_first ? m + at : nullptr, v + at, rates,
                  has_first ? new_m + at : nullptr, new_v + at, step + at, count);
  });
}

int32_t tf_hips_update_delayed(const float* g, const float* total, const float* received,
                               const float* square, float rate, float lambda, float decay,
                               float eps, float* new_total, float* new_square, int64_t n) {
  if (Missing(n, g, total, received, new_total) || (square != nullptr) != (new_square != nullptr)) {
    return TF_HIPS_BAD_UPDATE;
  }
  return InBlocks(n, [&](int64_t at, int64_t count) {
    if (square == nullptr) {
      return Delayed(g + at, total + at, received + at, rate, lambda, new_total + at, count);
    }
    return DelayedAdaptive(g + at, total + at, received + at, square + at, rate, lambda, decay, eps,
                           new_total + at, new_square + at, count);
  });
}

int32_t tf_hips_update_mix(const float* g, const float* total, const float* received, float alpha,
                           float* new_total, int64_t n) {
  if (Missing(n, g, total, received, new_total)) return TF_HIPS_BAD_UPDATE;
  return InBlocks(n, [&](int64_t at, int64_t count) {
    return Mix(g + at, total + at, received + at, alpha, new_total + at, count);
  });
}

}  // extern "C"
