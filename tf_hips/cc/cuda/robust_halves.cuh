// SPDX-License-Identifier: Apache-2.0
// Medians and trimmed means of up to 128 rows on a GPU: two halves of 64, each sorted in registers.
//
// As for fewer rows there are as many -Inf in front as the middle needs. Of two sorted halves the
// lesser ones of the first with the second turned round are the lower half of all (Batcher,
// "Sorting networks and their applications", 1968). A median needs its greatest, and the least of
// the others.

#ifndef TF_HIPS_CC_CUDA_ROBUST_HALVES_CUH_
#define TF_HIPS_CC_CUDA_ROBUST_HALVES_CUH_

#include "tf_hips/cc/cuda/robust_sort.cuh"

namespace tf_hips {
namespace cuda {
namespace robust {

constexpr int kHalf = 64;
static_assert(2 * kHalf == kFew, "a kernel takes the addresses of both along");

// -Inf in front of n values, so that the lower half ends with the middle, or the lower one of two.
constexpr int before_halves(int n) { return kHalf - (n + 1) / 2; }

// Numbers kFirst on of a coordinate, sorted.
template <int kFirst>
TF_HIPS_LOCAL void take_half(const Source& source, int64_t at, float (&x)[kHalf]) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  TF_HIPS_UNROLL
  for (int i = 0; i < kHalf; ++i) x[i] = load_one(source.rows.few[kFirst + i] + at);
  TF_HIPS_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    if (kFirst == 0 && i < source.before) x[i] = -kInfinity;
    if (kFirst != 0 && kFirst + i >= source.before + source.sorted) x[i] = kInfinity;
  }
  sort_all(x);
}

// Sorts what rises and then falls, or the other way round.
TF_HIPS_LOCAL void sort_half(float (&x)[kHalf]) {
  TF_HIPS_UNROLL
  for (int apart = kHalf / 2; apart > 0; apart /= 2) {
    TF_HIPS_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      if ((i & apart) == 0) exchange(x[i], x[i + apart]);
    }
  }
}

// Bits of numbers below k, up to 64 of them.
TF_HIPS_LOCAL uint64_t bits_below(int k) {
  return k <= 0 ? 0 : k >= kHalf ? ~uint64_t{0} : (uint64_t{1} << k) - 1;
}

template <bool kIsMedian>
TF_HIPS_KERNEL sorted_halves(Source source, Ending ending, float* out) {
  TF_HIPS_SHARED float columns[kHalf * kThreads];
  TF_HIPS_PHASE(t) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + t;
    if (at < source.d) {
      float* const column = columns + t;
      float x[kHalf];
      take_half<0>(source, at, x);
      TF_HIPS_UNROLL
      for (int i = 0; i < kHalf; ++i) column[i * kThreads] = x[i];
      take_half<kHalf>(source, at, x);
      if constexpr (kIsMedian) {
        float low = fminf(column[0], x[kHalf - 1]), high = fmaxf(column[0], x[kHalf - 1]);
        TF_HIPS_UNROLL
        for (int i = 1; i < kHalf; ++i) {
          const float left = column[i * kThreads], right = x[kHalf - 1 - i];
          low = fmaxf(low, fminf(left, right));
          high = fminf(high, fmaxf(left, right));
        }
        out[at] = source.sorted % 2 != 0 ? low + 0.0f : (low + high + 0.0f) * 0.5f;
      } else {
        TF_HIPS_UNROLL
        for (int i = 0; i < kHalf; ++i) {
          float low = x[kHalf - 1 - i], high = column[i * kThreads];
          exchange(low, high);
          x[kHalf - 1 - i] = low;
          column[i * kThreads] = high;
        }
        const int first = source.before + ending.drop;
        const int last = source.before + source.sorted - ending.drop;
        sort_half(x);
        float sum = sum_of(x, bits_below(last) & ~bits_below(first));
        TF_HIPS_UNROLL
        for (int i = 0; i < kHalf; ++i) x[i] = column[i * kThreads];
        sort_half(x);
        sum = sum_of(x, bits_below(last - kHalf) & ~bits_below(first - kHalf), sum);
        out[at] = sum / static_cast<float>(last - first);
      }
    }
  }
}

}  // namespace robust
}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_ROBUST_HALVES_CUH_
