// SPDX-License-Identifier: Apache-2.0
// Coordinate rules on a GPU: up to 64 rows in registers, one coordinate after another in each
// thread; more of them in shared memory, layer by layer of the network.
//
// There is a network for each number of rows up to 16, and for some above; fewer rows take the next
// one of the same parity, with as many -Inf as +Inf beside them, so that the median stays in the
// middle. What is sorted is finite, or of no use, so any network gives the same values.

#ifndef TF_HIPS_CC_CUDA_ROBUST_SORT_CUH_
#define TF_HIPS_CC_CUDA_ROBUST_SORT_CUH_

#include <cmath>
#include <type_traits>
#include <utility>

#include "tf_hips/cc/cuda/robust_rows.cuh"
#include "tf_hips/cc/runtime/sorting.h"

// A test that compiles them for a CPU has fewer.
#ifndef TF_HIPS_ROBUST_SIZES
#define TF_HIPS_ROBUST_SIZES                                                                     \
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 19, 20, 23, 24, 31, 32, 39, 40, 47, 48, \
      63, 64
#endif

namespace tf_hips {
namespace cuda {
namespace robust {

using Sizes = std::integer_sequence<int, TF_HIPS_ROBUST_SIZES>;

// The most values of which registers hold all.
constexpr int kMost = 64;

// Of the networks for an even or odd number, the smallest for at least n values; 0: there is none.
template <int... kNs>
constexpr int size_for(int n, std::integer_sequence<int, kNs...>) {
  int found = 0;
  for (const int size : {kNs...}) {
    if (found == 0 && size >= n && size % 2 == n % 2) found = size;
  }
  return found;
}

// The most -Inf that the network of n can have in front of the values.
template <int... kNs>
constexpr int most_before(int n, std::integer_sequence<int, kNs...> sizes) {
  int least = n;
  while (least > 2 && size_for(least - 2, sizes) == n) least -= 2;
  return (n - least) / 2;
}

// What is sorted: rows, or weighted sums of them.
struct Source {
  // Without weights, of few: row i is number `before` + i, and around them is any row.
  Rows rows;
  int32_t n;               // rows
  int32_t sorted, before;  // values of a coordinate, and -Inf before them
  int64_t d;
  const float* weights;  // [sorted][n]; NULL: the rows are sorted
  const float* mixing;   // for the registers: [n][a multiple of 4], with zeros for what is no value
};

struct Ending {
  int32_t rule, drop;
};

template <int kN>
struct NetworkOf {
  static constexpr Network<kN> value{};
};

template <int kN, int kAt>
struct ComparatorOf {
  static constexpr int low = NetworkOf<kN>::value.at[kAt].low;
  static constexpr int high = NetworkOf<kN>::value.at[kAt].high;
};

TF_HIPS_LOCAL void exchange(float& low, float& high) {
  const float a = low, b = high;
  low = fminf(a, b);
  high = fmaxf(a, b);
}

template <int kFirst, int kN, int... kAts>
TF_HIPS_LOCAL void exchange_some(float (&x)[kN], std::integer_sequence<int, kAts...>) {
  (exchange(x[ComparatorOf<kN, kFirst + kAts>::low], x[ComparatorOf<kN, kFirst + kAts>::high]),
   ...);
}

// In runs: one fold of all would be nested too deeply for compilers.
template <int kFirst = 0, int kN>
TF_HIPS_LOCAL void sort_all(float (&x)[kN]) {
  constexpr int kLeft = NumComparators(kN) - kFirst;
  if constexpr (kLeft > 0) {
    constexpr int kNow = kLeft < 32 ? kLeft : 32;
    exchange_some<kFirst>(x, std::make_integer_sequence<int, kNow>());
    sort_all<kFirst + kNow>(x);
  }
}

TF_HIPS_LOCAL float sign_of(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }

TF_HIPS_LOCAL float median_of(const float* sorted, int stride, int n) {
  const float high = sorted[n / 2 * stride];
  return n % 2 != 0 ? high : (sorted[(n / 2 - 1) * stride] + high) * 0.5f;
}

TF_HIPS_LOCAL float trimmed_mean(const float* sorted, int stride, int n, int drop) {
  float sum = sorted[drop * stride];
  for (int i = drop + 1; i < n - drop; ++i) sum += sorted[i * stride];
  return sum / static_cast<float>(n - 2 * drop);
}

// As NearestMean of robust_loops.h.
TF_HIPS_LOCAL float nearest_mean(const float* sorted, int stride, int n, int drop) {
  const int keep = n - drop;
  const float median = median_of(sorted, stride, n);
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) {
    const float value = sorted[i * stride];
    bool is_kept = true;
    if (i < drop) is_kept = !(median - value > sorted[(i + keep) * stride] - median);
    if (i >= keep) {
      is_kept = is_kept && median - sorted[(i - keep) * stride] > value - median;
    }
    sum += is_kept ? value : 0.0f;
  }
  return sum / static_cast<float>(keep);
}

TF_HIPS_LOCAL float majority_of(const float* values, int stride, int n) {
  float votes = 0.0f;
  for (int i = 0; i < n; ++i) votes += sign_of(values[i * stride]);
  return sign_of(votes);
}

// Of values that are sorted, but for a majority.
TF_HIPS_LOCAL float finished(const float* values, int stride, int n, const Ending& ending) {
  switch (ending.rule) {
    case TF_HIPS_MEDIAN:
      return median_of(values, stride, n);
    case TF_HIPS_TRIMMED:
      return trimmed_mean(values, stride, n, ending.drop);
    case TF_HIPS_NEAREST:
      return nearest_mean(values, stride, n, ending.drop);
    default:
      return majority_of(values, stride, n);
  }
}

// Bits of numbers up to kN.
template <int kN>
using Bits = std::conditional_t<(kN <= 32), uint32_t, uint64_t>;

// x[w] = kW coordinates of the rows. All loads come first, so that they are under way together: one
// behind a condition would be waited for.
template <int kN, int kW>
TF_HIPS_LOCAL void take_rows(const Source& source, int64_t at, float (&x)[kW][kN]) {
  if (kW == 1 || at + kW <= source.d) {
    float rows[kN][kW];
    TF_HIPS_UNROLL
    for (int i = 0; i < kN; ++i) load_all(source.rows.few[i] + at, rows[i]);
    TF_HIPS_UNROLL
    for (int i = 0; i < kN; ++i) {
      TF_HIPS_UNROLL
      for (int w = 0; w < kW; ++w) x[w][i] = rows[i][w];
    }
  } else {
    TF_HIPS_UNROLL
    for (int i = 0; i < kN; ++i) {
      TF_HIPS_UNROLL
      for (int w = 0; w < kW; ++w) {
        x[w][i] = at + w < source.d ? source.rows.few[i][at + w] : 0.0f;
      }
    }
  }
}

// x = a coordinate of the weighted sums.
template <int kN>
TF_HIPS_LOCAL void take_sums(const Source& source, int64_t at, float (&x)[kN]) {
  constexpr int kPadded = (kN + 3) / 4 * 4;
  TF_HIPS_UNROLL
  for (int i = 0; i < kN; ++i) x[i] = -0.0f;  // the first product stays what it is
  for (int first = 0; first < source.n; first += kMixedAtOnce) {
    float rows[kMixedAtOnce];
    TF_HIPS_UNROLL
    for (int u = 0; u < kMixedAtOnce; ++u) {
      const int j = first + u < source.n ? first + u : source.n - 1;
      rows[u] = load_one(source.rows.at(j) + at);
    }
    TF_HIPS_UNROLL
    for (int u = 0; u < kMixedAtOnce; ++u) {
      if (first + u >= source.n) continue;
      const float* const weights = source.mixing + (first + u) * kPadded;
      TF_HIPS_UNROLL
      for (int quarter = 0; quarter < kPadded; quarter += 4) {
        const float4 some = *reinterpret_cast<const float4*>(weights + quarter);
        const float each[4] = {some.x, some.y, some.z, some.w};
        TF_HIPS_UNROLL
        for (int k = 0; k < 4; ++k) {
          if (quarter + k < kN) x[quarter + k] = fmaf(each[k], rows[u], x[quarter + k]);
        }
      }
    }
  }
}

// Inf of both signs around the values, where the network is larger.
template <int kN, int kW>
TF_HIPS_LOCAL void put_ends(const Source& source, float (&x)[kW][kN]) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr int kEnds = most_before(kN, Sizes());
  TF_HIPS_UNROLL
  for (int i = 0; i < kEnds; ++i) {
    if (i < source.before) {
      TF_HIPS_UNROLL
      for (int w = 0; w < kW; ++w) x[w][i] = -kInfinity, x[w][kN - 1 - i] = kInfinity;
    }
  }
}

template <int kN>
TF_HIPS_LOCAL float sum_of(const float (&x)[kN], Bits<kN> which, float sum = 0.0f) {
  TF_HIPS_UNROLL
  for (int i = 0; i < kN; ++i) {
    if ((which >> i & 1) != 0) sum += x[i];
  }
  return sum;
}

// The rule of the values of one coordinate; `column`: room for kN floats, `stride` apart. Zeros of
// both signs are equal, and how they are sorted does not show: a sum that begins with 0 is not -0.
template <int kN, bool kIsMedian>
TF_HIPS_LOCAL float rule_of(float (&x)[kN], const Source& source, const Ending& ending, int stride,
                            float* column) {
  if (!kIsMedian && ending.rule == TF_HIPS_MAJORITY) {
    int votes = 0;  // Inf of both signs are as many
    TF_HIPS_UNROLL
    for (int i = 0; i < kN; ++i) votes += (x[i] > 0.0f) - (x[i] < 0.0f);
    return static_cast<float>((votes > 0) - (votes < 0));
  }
  sort_all(x);  // of a median the compiler drops what the middle does not need
  const float low = x[(kN - 1) / 2], high = x[kN / 2];
  const float median = kN % 2 != 0 ? high + 0.0f : (low + high + 0.0f) * 0.5f;
  if constexpr (kIsMedian) return median;
  const int drop = ending.drop, keep = source.sorted - drop;
  const Bits<kN> all = ~Bits<kN>{0};
  const int beside = static_cast<int>(8 * sizeof all) - source.sorted;
  if (ending.rule == TF_HIPS_TRIMMED) {
    const Bits<kN> kept = all << (beside + 2 * drop) >> (beside + drop - source.before);
    return sum_of(x, kept) / static_cast<float>(keep - drop);
  }
  // Which values are compared depends on `drop`: registers have no numbers at run time.
  TF_HIPS_UNROLL
  for (int i = 0; i < kN; ++i) column[i * stride] = x[i];
  Bits<kN> lost = 0;
  for (int i = source.before; i < source.before + drop; ++i) {
    const bool is_left = median - column[i * stride] > column[(i + keep) * stride] - median;
    lost |= Bits<kN>{1} << (is_left ? i : i + keep);
  }
  return sum_of(x, (all << beside >> (beside - source.before)) & ~lost) / static_cast<float>(keep);
}

// Up to 64 values in registers. A thread has `steps` coordinates of kW neighbours: lanes of a block
// of 512 if sums are wanted, all 32 steps of them; else threads read neighbours. Weighted sums are
// sorted one by one.
// `parts`, [blocks of 512][n][16]: sums of squares of the rows, if the source has no weights; NULL:
// not wanted. Adding them up here would leave so few blocks of threads that memory is waited for.
template <int kN, bool kIsMedian, int kW>
TF_HIPS_KERNEL sorted_few(Source source, Ending ending, int32_t steps, float* out, float* parts) {
  constexpr int kAll = kThreads * kW;
  TF_HIPS_SHARED float columns[kIsMedian ? 1 : kN * kAll];
  const int stride = parts != nullptr ? kLanes : kAll;
  TF_HIPS_PHASE(t) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * steps * kAll +
                          (parts != nullptr ? place_of<kW>(t) : t * kW);
    float sums[kN][kW] = {};
    float* const mine = columns + (kIsMedian ? 0 : t * kW);
    int64_t at = first;
    for (int left = steps_of(at, stride, steps, source.d); left > 0; --left, at += stride) {
      float x[kW][kN], result[kW];
      if (kW > 1 || source.mixing == nullptr) {
        take_rows(source, at, x);
      } else {
        take_sums(source, at, x[0]);
      }
      if (parts != nullptr) {
        TF_HIPS_UNROLL
        for (int i = 0; i < kN; ++i) {
          TF_HIPS_UNROLL
          for (int w = 0; w < kW; ++w) sums[i][w] = fmaf(x[w][i], x[w][i], sums[i][w]);
        }
      }
      put_ends(source, x);
      TF_HIPS_UNROLL
      for (int w = 0; w < kW; ++w) {
        result[w] = rule_of<kN, kIsMedian>(x[w], source, ending, kAll, mine + w);
      }
      store_some<kW>(result, at, source.d, out);
    }
    const int64_t block = first / kBlock;
    if (parts != nullptr && block * kBlock < source.d) {
      const int64_t row = block * source.n - source.before;
      float* const to = parts + row * kLanes + first % kLanes;
      TF_HIPS_UNROLL
      for (int i = 0; i < kN; ++i) {
        if (i < source.before || i >= source.before + source.n) continue;
        TF_HIPS_UNROLL
        for (int w = 0; w < kW; ++w) to[i * kLanes + w] = sums[i][w];
      }
    }
  }
}

// Floats that `sorted_many` keeps in shared memory.
constexpr int kSortedFloats = 8192;

// Value i of a coordinate, where registers do not hold all.
TF_HIPS_LOCAL float value_of(const Source& source, int i, int64_t at) {
  if (source.weights == nullptr) return source.rows.at(i)[at] + 0.0f;
  const float* const weights = source.weights + static_cast<int64_t>(i) * source.n;
  float sum = weights[0] * source.rows.at(0)[at];
  for (int j = 1; j < source.n; ++j) sum = fmaf(weights[j], source.rows.at(j)[at], sum);
  return sum + 0.0f;
}

// Any number of values; a block of threads has 2^shift coordinates of all of them.
TF_HIPS_KERNEL sorted_many(Source source, Ending ending, int32_t shift, float* out) {
  TF_HIPS_SHARED float values[kSortedFloats];
  const int width = 1 << shift, n = source.sorted;
  const int64_t first = static_cast<int64_t>(blockIdx.x) << shift;
  TF_HIPS_PHASE(t) {
    for (int k = t; k < n << shift; k += kThreads) {
      const int64_t at = first + (k & (width - 1));
      values[k] = at < source.d ? value_of(source, k >> shift, at) : 0.0f;
    }
  }
  int top = 1;
  while (2 * top < n) top *= 2;
  // The layers of ForComparators in sorting.h.
  for (int p = ending.rule == TF_HIPS_MAJORITY ? 0 : top; p > 0; p /= 2) {
    for (int q = top, r = 0, apart = p;; apart = q - p, q /= 2, r = p) {
      TF_HIPS_PHASE(t) {
        for (int k = t; k < (n - apart) << shift; k += kThreads) {
          if (((k >> shift) & p) == r) exchange(values[k], values[k + (apart << shift)]);
        }
      }
      if (q == p) break;
    }
  }
  TF_HIPS_PHASE(t) {
    for (int k = t; k < width; k += kThreads) {
      if (first + k < source.d) out[first + k] = finished(values + k, width, n, ending);
    }
  }
}

// weights [m][n] to [n][padded], row k to column before + k.
TF_HIPS_KERNEL spread_weights(const float* weights, int32_t n, int32_t m, int32_t before,
                              int32_t padded, float* mixing) {
  TF_HIPS_PHASE(t) {
    const int place = static_cast<int>(blockIdx.x) * kThreads + t;
    if (place < n * padded) {
      const int j = place / padded, k = place % padded - before;
      mixing[place] = k >= 0 && k < m ? weights[k * n + j] : 0.0f;
    }
  }
}

using SortedFew = void (*)(Source, Ending, int32_t, float*, float*);

// Up to how many rows 16-byte accesses are worth it: of more rows enough loads are under way.
constexpr int kWideRows = 8;

template <int kN, bool kIsMedian, int kW>
SortedFew sorted_few_or_none() {
  if constexpr (kW == 1 || kN <= kWideRows) {
    return sorted_few<kN, kIsMedian, kW>;
  } else {
    return nullptr;
  }
}

template <bool kIsMedian, int kW, int... kNs>
SortedFew few_of(int size, std::integer_sequence<int, kNs...>) {
  SortedFew found = nullptr;
  ((found = size == kNs ? sorted_few_or_none<kNs, kIsMedian, kW>() : found), ...);
  return found;
}

}  // namespace robust
}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_ROBUST_SORT_CUH_
