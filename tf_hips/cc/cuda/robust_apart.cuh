// SPDX-License-Identifier: Apache-2.0
// Distances between rows and weighted sums of them, on a GPU.
//
// A block of threads has a tile of pairs: rows of one group with each other, or with those of
// another. A thread keeps the sums of all pairs of the tile for one lane of one block of 512.

#ifndef TF_HIPS_CC_CUDA_ROBUST_APART_CUH_
#define TF_HIPS_CC_CUDA_ROBUST_APART_CUH_

#include <cmath>

#include "tf_hips/cc/cuda/robust_rows.cuh"

namespace tf_hips {
namespace cuda {
namespace robust {

// What a tile of kRows rows is asked for.
enum Tile : int32_t {
  kAlone = 0,   // sums of squares
  kWithin = 1,  // those, and the distances of each two of its rows
  kBetween = 2  // the distances of its rows to those of another tile
};

template <int kRows, int32_t kTileOf>
constexpr int kSums = kTileOf == kAlone    ? kRows
                      : kTileOf == kWithin ? kRows * (kRows + 1) / 2
                                           : kRows * kRows;

// What a call works on, and where its sums go.
struct Apart {
  Rows rows;
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
  for (int i = 0; i < kRows; ++i) x[i] = of.rows.at(first + i < of.n ? first + i : first) + at;
}

// kSome elements of each row, kLanes apart, to the sums of a tile, in an order that `sum_at` knows,
// too.
template <int kRows, int32_t kTileOf, int kSome>
TF_HIPS_LOCAL void add_steps(const float* (&left)[kRows], const float* (&right)[kRows],
                             float (&sums)[kSums<kRows, kTileOf>]) {
  float x[kSome][kRows], y[kSome][kRows];
  TF_HIPS_UNROLL
  for (int u = 0; u < kSome; ++u) {
    TF_HIPS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      x[u][i] = load_one(left[i] + u * kLanes);
      if constexpr (kTileOf == kBetween) y[u][i] = load_one(right[i] + u * kLanes);
    }
  }
  TF_HIPS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    left[i] += kSome * kLanes;
    if constexpr (kTileOf == kBetween) right[i] += kSome * kLanes;
  }
  TF_HIPS_UNROLL
  for (int u = 0; u < kSome; ++u) {
    int at = 0;
    TF_HIPS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kTileOf != kBetween) {
        sums[at] = fmaf(x[u][i], x[u][i], sums[at]);
        ++at;
      }
      TF_HIPS_UNROLL
      for (int j = kTileOf == kWithin ? i + 1 : 0; kTileOf != kAlone && j < kRows; ++j) {
        const float apart = x[u][i] - (kTileOf == kWithin ? x[u][j] : y[u][j]);
        sums[at] = fmaf(apart, apart, sums[at]);
        ++at;
      }
    }
  }
}

// Steps whose loads are under way together.
template <int kRows, int32_t kTileOf>
constexpr int kStepsAtOnce = kTileOf == kBetween ? 2 : 4;

// One lane of one block of 512.
template <int kRows, int32_t kTileOf>
TF_HIPS_LOCAL void add_lane(const Apart& of, int left, int right, int64_t first, float* parts) {
  constexpr int kSome = kStepsAtOnce<kRows, kTileOf>;
  float sums[kSums<kRows, kTileOf>] = {};
  int steps = steps_of(first, kLanes, kSteps, of.d);
  const float *x[kRows], *y[kRows];
  find_group(of, left, first, x);
  if constexpr (kTileOf == kBetween) find_group(of, right, first, y);
  for (; steps >= kSome; steps -= kSome) add_steps<kRows, kTileOf, kSome>(x, y, sums);
  for (; steps > 0; --steps) add_steps<kRows, kTileOf, 1>(x, y, sums);
  TF_HIPS_UNROLL
  for (int k = 0; k < kSums<kRows, kTileOf>; ++k) parts[k * kThreads] = sums[k];
}

// Where sum number k of a tile belongs; NULL: to rows that are none.
template <int kRows, int32_t kTileOf>
TF_HIPS_LOCAL double* sum_at(const Apart& of, int left, int right, int64_t which, int k) {
  int i = 0, j = 0;
  if (kTileOf == kBetween) {
    i = k / kRows, j = k % kRows;
  } else if (kTileOf == kAlone) {
    i = j = k;
  } else {
    // Row i has its square and what is behind it: kRows - i sums.
    for (j = k; j >= kRows - i; ++i) j -= kRows - i;
    j += i;
  }
  const int64_t row = left + i, other = (kTileOf == kBetween ? right : left) + j;
  if (row >= of.n || other >= of.n) return nullptr;
  if (row == other) return of.squares + which * of.n + row;
  const int64_t before = row * (2 * of.n - row - 1) / 2;
  const int64_t pairs = static_cast<int64_t>(of.n) * (of.n - 1) / 2;
  return of.distances + which * pairs + before + other - row - 1;
}

// A tile of run `which` of tasks. In phases; all threads must call it.
template <int kRows, int32_t kTileOf>
__device__ void add_tile(const Apart& of, int left, int right, int64_t which, float* parts,
                         double* lanes, double* totals) {
  constexpr int kCount = kSums<kRows, kTileOf>;
  constexpr int64_t kRound = kAtOnce<1> * kBlock;
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
      TF_HIPS_PHASE(t) {
        add_lane<kRows, kTileOf>(of, left, right, first + place_of<1>(t), parts + t);
      }
      TF_HIPS_PHASE(t) { add_blocks<kThreads>(parts, kCount, t, lanes); }
    }
    TF_HIPS_PHASE(t) {
      for (int k = t; k < kCount; k += kThreads) totals[k] += join_doubles(lanes + k * kLanes);
    }
  }
  TF_HIPS_PHASE(t) {
    for (int k = t; k < kCount; k += kThreads) {
      double* const to = sum_at<kRows, kTileOf>(of, left, right, which, k);
      if (to != nullptr) *to = totals[k];
    }
  }
}

// All that can be asked for of one group; kIsAlone: only sums of squares, of any number of groups.
template <int kRows, bool kIsAlone>
TF_HIPS_KERNEL within_groups(Apart of) {
  constexpr int32_t kTileOf = kIsAlone ? kAlone : kWithin;
  TF_HIPS_SHARED float parts[kSums<kRows, kTileOf> * kThreads];
  TF_HIPS_SHARED double lanes[kSums<kRows, kTileOf> * kLanes];
  TF_HIPS_SHARED double totals[kSums<kRows, kTileOf>];
  const int left = static_cast<int>(blockIdx.x % of.groups) * kRows;
  add_tile<kRows, kTileOf>(of, left, left, blockIdx.x / of.groups, parts, lanes, totals);
}

// Several groups: neighbours among blocks of threads read the same rows.
template <int kRows>
TF_HIPS_KERNEL among_groups(Apart of) {
  constexpr int kMost = kSums<kRows, kBetween>;
  TF_HIPS_SHARED float parts[kMost * kThreads];
  TF_HIPS_SHARED double lanes[kMost * kLanes];
  TF_HIPS_SHARED double totals[kMost];
  const int tiles = of.groups * (of.groups + 1) / 2;
  int left = 0, right = static_cast<int>(blockIdx.x % tiles);
  while (right >= of.groups - left) {
    right -= of.groups - left;
    ++left;
  }
  right += left;
  const int64_t which = blockIdx.x / tiles;
  if (left == right) {
    add_tile<kRows, kWithin>(of, left * kRows, right * kRows, which, parts, lanes, totals);
  } else {
    add_tile<kRows, kBetween>(of, left * kRows, right * kRows, which, parts, lanes, totals);
  }
}

// kSumsAtOnce weighted sums of kW neighbours; blocks of threads that are neighbours read the same
// rows for other sums.
template <int kSumsAtOnce, int kW>
TF_HIPS_KERNEL mixed(Rows rows, int32_t n, int64_t d, const float* weights, int32_t m, Rows out) {
  const int parts = (m + kSumsAtOnce - 1) / kSumsAtOnce;
  const int first = static_cast<int>(blockIdx.x % parts) * kSumsAtOnce;
  TF_HIPS_PHASE(t) {
    const int64_t at = (static_cast<int64_t>(blockIdx.x / parts) * kThreads + t) * kW;
    if (at < d) {
      float sums[kSumsAtOnce][kW] = {};
      for (int j = 0; j < n; ++j) {
        float x[kW];
        load_some<kW>(rows.at(j), at, d, x);
        TF_HIPS_UNROLL
        for (int k = 0; k < kSumsAtOnce; ++k) {
          const float weight = first + k < m ? weights[(first + k) * n + j] : 0.0f;
          TF_HIPS_UNROLL
          for (int w = 0; w < kW; ++w) {
            sums[k][w] = j == 0 ? weight * x[w] : fmaf(weight, x[w], sums[k][w]);
          }
        }
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
