// SPDX-License-Identifier: Apache-2.0
// Distances between up to 8 rows, sums of squares of any number, and weighted sums, on a GPU.
//
// A thread keeps all sums of a group of rows for one lane of one block of 512. More than 8 rows:
// robust_pairs.cuh.

#ifndef TF_HIPS_CC_CUDA_ROBUST_APART_CUH_
#define TF_HIPS_CC_CUDA_ROBUST_APART_CUH_

#include <cmath>

#include "tf_hips/cc/cuda/robust_rows.cuh"

namespace tf_hips {
namespace cuda {
namespace robust {

// What is added up of a group of kRows rows.
enum Tile : int32_t {
  kAlone = 0,  // squares
  kWithin = 1  // those, and the distances of each two of its rows
};

template <int kRows, int32_t kTileOf>
constexpr int kSums = kTileOf == kAlone ? kRows : kRows * (kRows + 1) / 2;

// What a call works on, and where its sums go.
struct Apart {
  Rows rows;          // of up to 8 also, behind the last one, any row
  int32_t n, groups;  // rows, and groups of them that make tiles
  int32_t tasks;      // that one block of threads adds up
  int64_t d;
  double *squares, *distances;  // [d / tasks][n], [d / tasks][n (n - 1) / 2]
};

// Where a group of rows has an element; any row stands for those behind the last one, whose sums
// nobody takes. A loop with its addresses in registers has its loads under way together.
template <int kRows>
TF_HIPS_LOCAL void find_group(const Apart& of, int first, int64_t at, const float* (&x)[kRows]) {
  TF_HIPS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    x[i] = of.rows.at(first + i < of.n ? first + i : of.n - 1) + at;
  }
}

// The next kSome elements of each row, kLanes apart.
template <int kRows, int kSome>
TF_HIPS_LOCAL void load_steps(const float* (&rows)[kRows], float (&x)[kSome][kRows]) {
  TF_HIPS_UNROLL
  for (int u = 0; u < kSome; ++u) {
    TF_HIPS_UNROLL
    for (int i = 0; i < kRows; ++i) x[u][i] = load_one(rows[i] + u * kLanes);
  }
  TF_HIPS_UNROLL
  for (int i = 0; i < kRows; ++i) rows[i] += kSome * kLanes;
}

// Rows of one group, in an order that `sum_within` knows, too; of `sums` those from kFrom on.
template <int32_t kTileOf, int kFrom, int kRows, int kSome, int kCount>
TF_HIPS_LOCAL void add_within(const float (&x)[kSome][kRows], float (&sums)[kCount]) {
  TF_HIPS_UNROLL
  for (int u = 0; u < kSome; ++u) {
    int at = kFrom;
    TF_HIPS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      sums[at] = fmaf(x[u][i], x[u][i], sums[at]);
      ++at;
      TF_HIPS_UNROLL
      for (int j = i + 1; kTileOf == kWithin && j < kRows; ++j) {
        const float apart = x[u][i] - x[u][j];
        sums[at] = fmaf(apart, apart, sums[at]);
        ++at;
      }
    }
  }
}

// The next kSome elements. Up to 8 rows have their addresses in the arguments of the kernel, where
// adding to one costs no more than to one in registers, and those are scarce.
template <int kRows, int32_t kTileOf, int kSome>
TF_HIPS_LOCAL void add_steps(const Apart& of, int64_t& at, const float* (&rows)[kRows],
                             float (&sums)[kSums<kRows, kTileOf>]) {
  if constexpr (kTileOf == kWithin) {
    TF_HIPS_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i] = of.rows.few[i] + at;
    at += kSome * kLanes;
  }
  float x[kSome][kRows];
  load_steps(rows, x);
  add_within<kTileOf, 0>(x, sums);
}

// Steps whose loads are under way together.
template <int32_t kTileOf>
constexpr int kStepsAtOnce = kTileOf == kAlone ? 4 : 2;

// One lane of one block of 512.
template <int kRows, int32_t kTileOf>
TF_HIPS_LOCAL void add_lane(const Apart& of, int first, int64_t at, float* parts) {
  constexpr int kSome = kStepsAtOnce<kTileOf>;
  float sums[kSums<kRows, kTileOf>] = {};
  int steps = steps_of(at, kLanes, kSteps, of.d);
  const float* rows[kRows];
  if constexpr (kTileOf == kAlone) find_group(of, first, at, rows);
  for (; steps >= kSome; steps -= kSome) add_steps<kRows, kTileOf, kSome>(of, at, rows, sums);
  for (; steps > 0; --steps) add_steps<kRows, kTileOf, 1>(of, at, rows, sums);
  TF_HIPS_UNROLL
  for (int k = 0; k < kSums<kRows, kTileOf>; ++k) parts[k * kThreads] = sums[k];
}

// Where the sum of two rows, or of a row, belongs; NULL: to rows that are none.
TF_HIPS_LOCAL double* sum_at(const Apart& of, int64_t row, int64_t other, int64_t which) {
  if (row >= of.n || other >= of.n) return nullptr;
  if (row == other) return of.squares + which * of.n + row;
  const int64_t before = row * (2 * of.n - row - 1) / 2;
  const int64_t pairs = static_cast<int64_t>(of.n) * (of.n - 1) / 2;
  return of.distances + which * pairs + before + other - row - 1;
}

// Where sum number k of a group belongs.
template <int kRows, int32_t kTileOf>
TF_HIPS_LOCAL double* sum_within(const Apart& of, int first, int64_t which, int k) {
  int i = k, j = k;
  if (kTileOf == kWithin) {
    // Row i has its square and what is behind it: kRows - i sums.
    for (i = 0; j >= kRows - i; ++i) j -= kRows - i;
    j += i;
  }
  return sum_at(of, first + i, first + j, which);
}

// A group, and a run of tasks.
template <int kRows, bool kIsAlone>
TF_HIPS_KERNEL within_groups(Apart of) {
  constexpr int32_t kTileOf = kIsAlone ? kAlone : kWithin;
  constexpr int kCount = kSums<kRows, kTileOf>;
  constexpr int64_t kRound = kThreads / kLanes * kBlock;
  TF_HIPS_SHARED float parts[kCount * kThreads];
  TF_HIPS_SHARED double lanes[kCount * kLanes];
  TF_HIPS_SHARED double totals[kCount];
  const int group = static_cast<int>(blockIdx.x % of.groups) * kRows;
  const int64_t which = blockIdx.x / of.groups;
  TF_HIPS_PHASE(t) {
    for (int k = t; k < kCount; k += kThreads) totals[k] = 0.0;
  }
  for (int32_t task = 0; task < of.tasks; ++task) {
    const int64_t begin = (which * of.tasks + task) * kTask;
    if (begin >= of.d) break;
    TF_HIPS_PHASE(t) {
      for (int k = t; k < kCount * kLanes; k += kThreads) lanes[k] = 0.0;
    }
    for (int64_t first = begin; first < least(begin + kTask, of.d); first += kRound) {
      TF_HIPS_PHASE(t) { add_lane<kRows, kTileOf>(of, group, first + place_of<1>(t), parts + t); }
      TF_HIPS_PHASE(t) { add_blocks(parts, kCount, t, lanes); }
    }
    TF_HIPS_PHASE(t) {
      for (int k = t; k < kCount; k += kThreads) totals[k] += join_doubles(lanes + k * kLanes);
    }
  }
  TF_HIPS_PHASE(t) {
    for (int k = t; k < kCount; k += kThreads) {
      double* const to = sum_within<kRows, kTileOf>(of, group, which, k);
      if (to != nullptr) *to = totals[k];
    }
  }
}

template <int kSumsAtOnce, int kW>
TF_HIPS_LOCAL void add_weighted(const float (&x)[kW], const float* weights,
                                float (&sums)[kSumsAtOnce][kW]) {
  TF_HIPS_UNROLL
  for (int k = 0; k < kSumsAtOnce; ++k) {
    TF_HIPS_UNROLL
    for (int w = 0; w < kW; ++w) sums[k][w] = fmaf(weights[k], x[w], sums[k][w]);
  }
}

// kSumsAtOnce weighted sums of kW neighbours; blocks of threads that are neighbours read the same
// rows for other sums. The weights of a row lie together in shared memory: one load for four.
template <int kSumsAtOnce, int kW>
TF_HIPS_KERNEL mixed(Rows rows, int32_t n, int64_t d, const float* weights, int32_t m, Rows out) {
  TF_HIPS_SHARED float by_row[TF_HIPS_ROBUST_MAX_ROWS * kSumsAtOnce];
  const int parts = (m + kSumsAtOnce - 1) / kSumsAtOnce;
  const int first = static_cast<int>(blockIdx.x % parts) * kSumsAtOnce;
  TF_HIPS_PHASE(t) {
    for (int at = t; at < n * kSumsAtOnce; at += kThreads) {
      const int j = at / kSumsAtOnce, k = first + at % kSumsAtOnce;
      by_row[at] = k < m ? weights[k * n + j] : 0.0f;
    }
  }
  TF_HIPS_PHASE(t) {
    const int64_t at = (static_cast<int64_t>(blockIdx.x / parts) * kThreads + t) * kW;
    if (at < d) {
      float sums[kSumsAtOnce][kW];
      TF_HIPS_UNROLL
      for (int k = 0; k < kSumsAtOnce; ++k) {
        TF_HIPS_UNROLL
        for (int w = 0; w < kW; ++w) sums[k][w] = -0.0f;  // the first product stays what it is
      }
      const bool is_whole = at + kW <= d;
      int j = 0;
      for (; is_whole && j + kMixedAtOnce <= n; j += kMixedAtOnce) {
        float x[kMixedAtOnce][kW];
        TF_HIPS_UNROLL
        for (int u = 0; u < kMixedAtOnce; ++u) load_all(rows.at(j + u) + at, x[u]);
        TF_HIPS_UNROLL
        for (int u = 0; u < kMixedAtOnce; ++u) {
          add_weighted(x[u], by_row + (j + u) * kSumsAtOnce, sums);
        }
      }
      for (; j < n; ++j) {
        float x[kW];
        load_some(rows.at(j), at, d, x);
        add_weighted(x, by_row + j * kSumsAtOnce, sums);
      }
      TF_HIPS_UNROLL
      for (int k = 0; k < kSumsAtOnce; ++k) {
        if (first + k < m) store_some<kW>(sums[k], at, d, const_cast<float*>(out.few[first + k]));
      }
    }
  }
}

}  // namespace robust
}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_ROBUST_APART_CUH_
