// SPDX-License-Identifier: Apache-2.0
// Distances between more than 8 rows on a GPU.
//
// A band is four groups of rows, up to 16. A block of threads has the pairs of one band or those
// between two, and a task of each row: 16 lanes of one block of 512 after another, and for each
// lane eight threads, each of which has some groups. So the eight read the same elements at about
// the same time, and all but the first find them in the cache of the multiprocessor. What a thread
// adds up is its own: there is no barrier between the blocks of a task.

#ifndef TF_HIPS_CC_CUDA_ROBUST_PAIRS_CUH_
#define TF_HIPS_CC_CUDA_ROBUST_PAIRS_CUH_

#include "tf_hips/cc/cuda/robust_apart.cuh"

namespace tf_hips {
namespace cuda {
namespace robust {

constexpr int kGroups = 4;                 // of a band
constexpr int kTeams = kThreads / kLanes;  // threads of a lane

// What a thread has.
enum Work : int32_t {
  kTwoAlone = 0,  // two groups, each with itself
  kOneOther = 1,  // a group with another: as many differences and sums
  kTwoOthers = 2  // a group with two of another band
};

template <int kRows, int32_t kWork>
constexpr int kWorkSums = kWork == kTwoAlone ? kRows * (kRows + 1) : kWork * kRows * kRows;

// Sums that a thread has room for, where there is only one band, and where there are several.
template <int kRows, bool kIsOne>
constexpr int kRoom = kWorkSums<kRows, static_cast<int32_t>(kIsOne ? kTwoAlone : kTwoOthers)>;

// Work of a team, and the groups of it, counted through all bands.
struct Task {
  int32_t work;
  int first, second, third;
};

TF_HIPS_LOCAL Task task_of(int left, int right, int team) {
  const int a = left * kGroups, b = right * kGroups;
  if (left != right) return {kTwoOthers, a + team / 2, b + team % 2 * 2, b + team % 2 * 2 + 1};
  if (team >= 6) return {kTwoAlone, a + (team - 6) * 2, a + (team - 6) * 2 + 1, 0};
  if (team >= 3) return {kOneOther, a + (team == 5 ? 2 : 1), a + (team == 3 ? 2 : 3), 0};
  return {kOneOther, a, a + team + 1, 0};
}

// The rows of two groups, in an order that `sum_of_team` knows, too; of `sums` those from kFrom on.
template <int kFrom, int kRows, int kSome, int kCount>
TF_HIPS_LOCAL void add_between(const float (&x)[kSome][kRows], const float (&y)[kSome][kRows],
                               float (&sums)[kCount]) {
  TF_HIPS_UNROLL
  for (int u = 0; u < kSome; ++u) {
    TF_HIPS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      TF_HIPS_UNROLL
      for (int j = 0; j < kRows; ++j) {
        const float apart = x[u][i] - y[u][j];
        float& sum = sums[kFrom + i * kRows + j];
        sum = fmaf(apart, apart, sum);
      }
    }
  }
}

// The next kSome elements of the rows of a task.
template <int kRows, int32_t kWork, int kSome>
TF_HIPS_LOCAL void add_some(const float* (&first)[kRows], const float* (&second)[kRows],
                            const float* (&third)[kRows], float (&sums)[kWorkSums<kRows, kWork>]) {
  float x[kSome][kRows], y[kSome][kRows];
  load_steps(first, x);
  load_steps(second, y);
  if constexpr (kWork == kTwoOthers) {
    float z[kSome][kRows];
    load_steps(third, z);
    add_between<0>(x, y, sums);
    add_between<kRows * kRows>(x, z, sums);
  } else if constexpr (kWork == kOneOther) {
    add_between<0>(x, y, sums);
  } else {
    add_within<kWithin, 0>(x, sums);
    add_within<kWithin, kRows*(kRows + 1) / 2>(y, sums);
  }
}

// A lane of all blocks of 512 of a task, from element `at` of the rows on. `lanes`: of the sums of
// this thread, kLanes apart.
template <int kRows, int32_t kWork>
TF_HIPS_LOCAL void add_blocks_of(const Apart& of, const Task& task, int64_t at, double* lanes) {
  constexpr int kCount = kWorkSums<kRows, kWork>;
  constexpr int kSome = 4;
  const float *first[kRows], *second[kRows], *third[kRows];
  find_group(of, task.first * kRows, at, first);
  find_group(of, task.second * kRows, at, second);
  if constexpr (kWork == kTwoOthers) find_group(of, task.third * kRows, at, third);
  TF_HIPS_UNROLL
  for (int k = 0; k < kCount; ++k) lanes[k * kLanes] = 0.0;
  for (int block = 0; block < kBlocks && at < of.d; ++block, at += kBlock) {
    float sums[kCount] = {};
    int steps = steps_of(at, kLanes, kSteps, of.d);
    for (; steps >= kSome; steps -= kSome) {
      add_some<kRows, kWork, kSome>(first, second, third, sums);
    }
    for (; steps > 0; --steps) add_some<kRows, kWork, 1>(first, second, third, sums);
    TF_HIPS_UNROLL
    for (int k = 0; k < kCount; ++k) lanes[k * kLanes] += static_cast<double>(sums[k]);
  }
}

// Where sum number k of a team belongs; NULL: to rows that are none, or the team has fewer.
template <int kRows>
TF_HIPS_LOCAL double* sum_of_team(const Apart& of, const Task& task, int64_t which, int k) {
  constexpr int kPairs = kRows * kRows, kTriangle = kRows * (kRows + 1) / 2;
  if (task.work == kTwoAlone) {
    if (k >= 2 * kTriangle) return nullptr;
    const int group = k < kTriangle ? task.first : task.second;
    return sum_within<kRows, kWithin>(of, group * kRows, which, k % kTriangle);
  }
  if (k >= task.work * kPairs) return nullptr;
  const int other = k < kPairs ? task.second : task.third;
  return sum_at(of, task.first * kRows + k % kPairs / kRows, other * kRows + k % kRows, which);
}

// Blocks of threads that a multiprocessor is to have registers for at once.
template <int kRows, bool kIsOne>
constexpr int kBandsAtOnce = kIsOne ? (kRows < 4 ? 6 : 4) : (kRows < 4 ? 4 : 3);

#ifdef __CUDACC__
#define TF_HIPS_KERNEL_OF_BANDS                                                        \
  [[maybe_unused]] static __global__ void __launch_bounds__(::tf_hips::cuda::kThreads, \
                                                            (kBandsAtOnce<kRows, kIsOne>))
#else
#define TF_HIPS_KERNEL_OF_BANDS TF_HIPS_KERNEL
#endif

// Two bands, or one with itself, and a task of the rows. Blocks of threads that are neighbours read
// the same elements.
template <int kRows, bool kIsOne>
TF_HIPS_KERNEL_OF_BANDS among_bands(Apart of) {
  constexpr int kCount = kRoom<kRows, kIsOne>;
  TF_HIPS_SHARED double lanes[kTeams * kCount * kLanes];
  const int tiles = of.groups * (of.groups + 1) / 2;
  int left = 0, right = static_cast<int>(blockIdx.x % tiles);
  while (right >= of.groups - left) {
    right -= of.groups - left;
    ++left;
  }
  right += left;
  const int64_t which = blockIdx.x / tiles;
  TF_HIPS_PHASE(t) {
    const int team = t / kLanes, lane = t % kLanes;
    const Task task = task_of(left, right, team);
    double* const mine = lanes + team * kCount * kLanes + lane;
    const int64_t at = which * kTask + lane;
    if (task.work == kTwoAlone) {
      add_blocks_of<kRows, kTwoAlone>(of, task, at, mine);
    } else if (kIsOne || task.work == kOneOther) {
      add_blocks_of<kRows, kOneOther>(of, task, at, mine);
    } else if constexpr (!kIsOne) {
      add_blocks_of<kRows, kTwoOthers>(of, task, at, mine);
    }
  }
  TF_HIPS_PHASE(t) {
    for (int k = t; k < kTeams * kCount; k += kThreads) {
      const Task task = task_of(left, right, k / kCount);
      double* const to = sum_of_team<kRows>(of, task, which, k % kCount);
      if (to != nullptr) *to = join_doubles(lanes + k * kLanes);
    }
  }
}

}  // namespace robust
}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_ROBUST_PAIRS_CUH_
