// SPDX-License-Identifier: Apache-2.0
// The loops of robust.cc over one task; included once for each width of registers, in a namespace
// that has `V`, a register of V::kWidth floats, `kInRegisters`, and `kTile` and `kGroup`, the rows
// of a tile and of a group: of one tile, or of two where registers hold the sums of both.
//
// No include guard: that is the point. A row is read in blocks of kBlock elements, in 16 lanes of
// which V holds a part: `part` is which one.

// One block of the rows of a call: pointers to kBlock floats each, of a last, shorter block copies
// that end with zeros.
struct Block {
  const float* const* rows;
  int n;
};

constexpr int kParts = kLanes / V::kWidth;

// Adds sums of squares of kN rows to lanes of double, 16 a row.
template <int kN>
inline __attribute__((always_inline)) void AddSquaresOf(const float* const* rows, double* lanes) {
  for (int part = 0; part < kParts; ++part) {
    V sums[kN];
    for (int i = 0; i < kN; ++i) sums[i] = V::Zero();
    for (int64_t at = part * V::kWidth; at < kBlock; at += kLanes) {
      for (int i = 0; i < kN; ++i) {
        const V value = V::Load(rows[i] + at);
        sums[i] = V::Fma(value, value, sums[i]);
      }
    }
    for (int i = 0; i < kN; ++i) sums[i].AddTo(lanes + i * kLanes + part * V::kWidth);
  }
}

void AddSquares(const Block& block, double* lanes) {
  // One sum waits for itself; of some the processor has always one to go on with.
  int i = 0;
  for (; i + 4 <= block.n; i += 4) AddSquaresOf<4>(block.rows + i, lanes + i * kLanes);
  for (; i < block.n; ++i) AddSquaresOf<1>(block.rows + i, lanes + i * kLanes);
}

#include "tf_hips/cc/runtime/robust_pairs.h"

// out[k] = sum of weights[k][j] rows[j], for kK values of k. `is_first`: the next block is asked
// for.
template <int kK>
inline __attribute__((always_inline)) void MixSome(const Block& block, const float* weights,
                                                   float* const* out, bool is_first) {
  constexpr int kAtOnce = 2;
  for (int64_t at = 0; at < kBlock; at += kAtOnce * V::kWidth) {
    V sums[kK][kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      const V x = V::Load(block.rows[0] + at + v * V::kWidth);
      for (int k = 0; k < kK; ++k) sums[k][v] = V::Mul(V::Set(weights[k * block.n]), x);
    }
    for (int j = 1; j < block.n; ++j) {
      for (int v = 0; v < kAtOnce; ++v) {
        const V x = V::Load(block.rows[j] + at + v * V::kWidth);
        if (is_first) prefetch_line(block.rows[j] + at + v * V::kWidth + kBlock);
#pragma GCC unroll 4
        for (int k = 0; k < kK; ++k) {
          sums[k][v] = V::Fma(V::Set(weights[k * block.n + j]), x, sums[k][v]);
        }
      }
    }
    for (int k = 0; k < kK; ++k) {
      for (int v = 0; v < kAtOnce; ++v) sums[k][v].Store(out[k] + at + v * V::kWidth);
    }
  }
}

void Mix(const Block& block, const float* weights, int m, float* const* out) {
  int k = 0;
  for (; k + 4 <= m; k += 4) MixSome<4>(block, weights + k * block.n, out + k, k == 0);
  for (; k < m; ++k) MixSome<1>(block, weights + k * block.n, out + k, k == 0);
}

// The mean of what a rule keeps of `stride`-spaced sorted registers.
inline V TrimmedMean(const float* sorted, int64_t stride, int n, int drop) {
  V sum = V::Load(sorted + drop * stride);
  for (int i = drop + 1; i < n - drop; ++i) sum = V::Add(sum, V::Load(sorted + i * stride));
  return V::Div(sum, V::Set(static_cast<float>(n - 2 * drop)));
}

inline V MedianOf(const float* sorted, int64_t stride, int n) {
  const V high = V::Load(sorted + (n / 2) * stride);
  if (n % 2 != 0) return high;
  return V::Mul(V::Add(V::Load(sorted + (n / 2 - 1) * stride), high), V::Set(0.5f));
}

// The `keep` = n - drop nearest values to the median are neighbours: x_k .. x_(k + keep - 1), with
// the largest k for which x_(k - 1) is farther from it than x_(k - 1 + keep). That is so for all
// smaller k, too. Values outside are never part of a sum: what a peer that lies sends may be huge.
inline V NearestMean(const float* sorted, int64_t stride, int n, int drop) {
  const int keep = n - drop;
  const V median = MedianOf(sorted, stride, n);
  const auto is_left = [&](int i) {  // whether x_i is before the window
    return V::Greater(V::Sub(median, V::Load(sorted + i * stride)),
                      V::Sub(V::Load(sorted + (i + keep) * stride), median));
  };
  V sum = V::Zero();
  for (int i = 0; i < n; ++i) {
    V value = V::Load(sorted + i * stride);
    if (i < drop) value = V::ZeroWhere(is_left(i), value);
    if (i >= keep) value = V::ZeroUnless(is_left(i - keep), value);
    sum = V::Add(sum, value);
  }
  return V::Div(sum, V::Set(static_cast<float>(keep)));
}

inline V Finish(const float* sorted, int64_t stride, int n, const CoordinatePlan& plan) {
  switch (plan.rule) {
    case TF_HIPS_MEDIAN:
      return MedianOf(sorted, stride, n);
    case TF_HIPS_TRIMMED:
      return TrimmedMean(sorted, stride, n, plan.drop);
    default:
      return NearestMean(sorted, stride, n, plan.drop);
  }
}

template <int kN, size_t... kAt>
inline __attribute__((always_inline)) void Exchange(V (&x)[kN], std::index_sequence<kAt...>) {
  constexpr Network<kN> network;
  (V::Exchange(x[network.at[kAt].low], x[network.at[kAt].high]), ...);
}

// Floats ahead that are asked for while rows are sorted: processors do so by themselves, but not of
// so many rows, and not over the ends of pages. What is under way must fit the first-level cache.
constexpr int64_t Ahead(int n) { return n <= 8 ? kBlock : n <= 16 ? kBlock / 2 : kBlock / 4; }

#if defined(__GNUC__) && !defined(__clang__)
// Compiled for AVX2 alone, GCC does not see that `drop` stays below half of the rows, and warns
// that `sorted` may be read where nothing was stored.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// All rows of a coordinate in registers. Of a median the compiler drops what it does not need.
// Sums of squares are added up beside the network, which leaves time for them, and for reading.
template <int kN, bool kIsMedian>
__attribute__((noinline)) void Sorted(const Block& block, const CoordinatePlan& plan, float* out,
                                      double* lanes) {
  float sorted[kIsMedian ? 1 : kN * V::kWidth];
  V sums[kParts][kN];
  for (int part = 0; lanes != nullptr && part < kParts; ++part) {
    for (int i = 0; i < kN; ++i) sums[part][i] = V::Zero();
  }
  for (int64_t at = 0; at < kBlock; at += V::kWidth) {
    V x[kN];
#pragma GCC unroll 32
    for (int i = 0; i < kN; ++i) x[i] = V::Add(V::Load(block.rows[i] + at), V::Zero());
    if (at % kLanes == 0) {
#pragma GCC unroll 32
      for (int i = 0; i < kN; ++i) prefetch_line(block.rows[i] + at + Ahead(kN));
    }
    if (lanes != nullptr) {
      V* const sum = sums[at / V::kWidth % kParts];
#pragma GCC unroll 32
      for (int i = 0; i < kN; ++i) sum[i] = V::Fma(x[i], x[i], sum[i]);
    }
    Exchange<kN>(x, std::make_index_sequence<static_cast<size_t>(NumComparators(kN))>());
    if constexpr (kIsMedian) {
      V middle = x[kN / 2];
      if (kN % 2 == 0) middle = V::Mul(V::Add(x[(kN - 1) / 2], middle), V::Set(0.5f));
      middle.Store(out + at);
    } else {
#pragma GCC unroll 32
      for (int i = 0; i < kN; ++i) x[i].Store(sorted + i * V::kWidth);
      Finish(sorted, V::kWidth, kN, plan).Store(out + at);
    }
  }
  for (int part = 0; lanes != nullptr && part < kParts; ++part) {
    for (int i = 0; i < kN; ++i) sums[part][i].AddTo(lanes + i * kLanes + part * V::kWidth);
  }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

// Rows of a run that is sorted in registers where these do not hold all: a power of two, for the
// merges. A few values of the longest run are put aside; a shorter one costs more, in merges.
constexpr int RunOf(int rows) { return rows < 4 ? 2 : 2 * RunOf(rows / 2); }
constexpr int kRun = RunOf(kInRegisters);

// Sorts kSlice coordinates of kN rows to `scratch`, and asks for what comes next of them.
template <int kN>
__attribute__((noinline)) void SortRun(const float* const* rows, int64_t at, float* scratch) {
  for (int64_t s = 0; s < kSlice; s += V::kWidth) {
    V x[kN];
#pragma GCC unroll 32
    for (int i = 0; i < kN; ++i) x[i] = V::Add(V::Load(rows[i] + at + s), V::Zero());
    if (s % kLanes == 0) {
#pragma GCC unroll 32
      for (int i = 0; i < kN; ++i) prefetch_line(rows[i] + at + s + Ahead(kInRegisters + 1));
    }
    Exchange<kN>(x, std::make_index_sequence<static_cast<size_t>(NumComparators(kN))>());
#pragma GCC unroll 32
    for (int i = 0; i < kN; ++i) x[i].Store(scratch + i * kSlice + s);
  }
}

using RunSorter = void (*)(const float* const*, int64_t, float*);

template <int... kNs>
RunSorter FindRunSorter(int n, std::integer_sequence<int, kNs...>) {
  static constexpr RunSorter all[] = {SortRun<kNs + 1>...};
  return all[n - 1];
}

// More rows than there are registers: runs of them are sorted there, and merged in memory, where
// `scratch` holds kSlice coordinates of each row.
void SortedInMemory(const Block& block, const CoordinatePlan& plan, float* scratch, float* out) {
  constexpr std::make_integer_sequence<int, kRun> counts;
  const RunSorter sort_rest = block.n % kRun == 0 ? nullptr : FindRunSorter(block.n % kRun, counts);
  for (int64_t at = 0; at < kBlock; at += kSlice) {
    int i = 0;
    for (; i + kRun <= block.n; i += kRun) {
      SortRun<kRun>(block.rows + i, at, scratch + i * kSlice);
    }
    if (sort_rest != nullptr) sort_rest(block.rows + i, at, scratch + i * kSlice);
    for (const Comparator& one : plan.network) {
      float* const low = scratch + one.low * kSlice;
      float* const high = scratch + one.high * kSlice;
      for (int64_t s = 0; s < kSlice; s += V::kWidth) {
        const V a = V::Load(low + s), b = V::Load(high + s);
        if (one.keeps_low) V::Min(a, b).Store(low + s);
        if (one.keeps_high) V::Max(a, b).Store(high + s);
      }
    }
    for (int64_t s = 0; s < kSlice; s += V::kWidth) {
      Finish(scratch + s, kSlice, block.n, plan).Store(out + at + s);
    }
  }
}

// No sorting: -1, 0 or 1 of each value, added up.
void Majority(const Block& block, float* out) {
  const V zero = V::Zero(), one = V::Set(1.0f);
  const auto sign = [&](V x) {
    return V::Sub(V::ZeroUnless(V::Greater(x, zero), one), V::ZeroUnless(V::Greater(zero, x), one));
  };
  for (int64_t at = 0; at < kBlock; at += V::kWidth) {
    V votes = zero;
    for (int i = 0; i < block.n; ++i) votes = V::Add(votes, sign(V::Load(block.rows[i] + at)));
    sign(votes).Store(out + at);
  }
}

using Sorter = void (*)(const Block&, const CoordinatePlan&, float*, double*);

template <bool kIsMedian, int... kNs>
Sorter FindSorter(int n, std::integer_sequence<int, kNs...>) {
  static constexpr Sorter all[] = {Sorted<kNs + 1, kIsMedian>...};
  return all[n - 1];
}

// Writes kBlock results, and adds sums of squares to `lanes`, unless that is NULL.
void Coordinate(const Block& block, const CoordinatePlan& plan, float* scratch, float* out,
                double* lanes) {
  const bool is_majority = plan.rule == TF_HIPS_MAJORITY;
  if (is_majority || block.n > kInRegisters) {
    if (lanes != nullptr) AddSquares(block, lanes);
    if (is_majority) {
      Majority(block, out);
    } else {
      SortedInMemory(block, plan, scratch, out);
    }
    return;
  }
  constexpr std::make_integer_sequence<int, kInRegisters> counts;
  const Sorter sorter = plan.rule == TF_HIPS_MEDIAN ? FindSorter<true>(block.n, counts)
                                                    : FindSorter<false>(block.n, counts);
  sorter(block, plan, out, lanes);
}

constexpr Loops kLoops = {
    kInRegisters,
    kRun,
    [](const float* const* rows, int n, double* lanes) { AddSquares({rows, n}, lanes); },
    [](const float* const* rows, int n, double* squares, double* distances) {
      AddDistances({rows, n}, squares, distances);
    },
    [](const float* const* rows, int n, const float* weights, int m, float* const* out) {
      Mix({rows, n}, weights, m, out);
    },
    [](const float* const* rows, int n, const CoordinatePlan& plan, float* scratch, float* out,
       double* lanes) { Coordinate({rows, n}, plan, scratch, out, lanes); },
};
