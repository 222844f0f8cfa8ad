// SPDX-License-Identifier: Apache-2.0
// Rows of a robust aggregation on a GPU: where they are, how a thread reads them, and their sums.
//
// The order of sums is that of tf_hips/cc/runtime/robust.h: blocks of 512 in 16 lanes of float32
// with fused multiply-add, double between the blocks of a task, tasks of a chunk in order. So a
// thread has kW lanes of one block, 32 steps long: it adds up alone, in registers, and neighbours
// read neighbours. Blocks of threads have several blocks at once, and add these to their task in
// order.

#ifndef TF_HIPS_CC_CUDA_ROBUST_ROWS_CUH_
#define TF_HIPS_CC_CUDA_ROBUST_ROWS_CUH_

#include "tf_hips/cc/cuda/device.cuh"
#include "tf_hips/cc/cuda/robust_cuda.h"

#define TF_HIPS_LOCAL __device__ __forceinline__

namespace tf_hips {
namespace cuda {
namespace robust {

constexpr int kLanes = 16;
constexpr int64_t kBlock = 512;
constexpr int kSteps = kBlock / kLanes;
constexpr int64_t kTask = int64_t{1} << 15;
constexpr int kTasks = kChunkElements / kTask;  // of a chunk
constexpr int kBlocks = kTask / kBlock;         // of a task
// Rows of which a kernel takes the addresses along.
constexpr int kFew = 128;
// Rows that a thread has under way where it adds them up with weights.
constexpr int kMixedAtOnce = 4;

struct Rows {
  const float* few[kFew];
  const float* const* many;  // in device memory, where there are more

  TF_HIPS_INLINE const float* at(int i) const { return many == nullptr ? few[i] : many[i]; }
};

// Where thread t has its first element, of blocks of 512 with kW lanes a thread.
template <int kW>
TF_HIPS_INLINE int64_t place_of(int t) {
  return t * kW / kLanes * kBlock + t * kW % kLanes;
}

// Of `steps` elements, `stride` apart, how many are in front of the end.
TF_HIPS_LOCAL int steps_of(int64_t first, int stride, int steps, int64_t d) {
  const int64_t left = d - first;
  if (left >= static_cast<int64_t>(steps) * stride) return steps;
  return left <= 0 ? 0 : (static_cast<int>(left) + stride - 1) / stride;
}

// A float of a row. Lanes of a block of 512 are half a line of the second-level cache: the other
// half, which is read next, is to be fetched from memory with it.
TF_HIPS_LOCAL float load_one(const float* at) {
#ifdef __CUDA_ARCH__
  float value;
  asm("ld.global.nc.L2::128B.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
#else
  return *at;
#endif
}

TF_HIPS_LOCAL float4 load_four(const float* at) {
  float4 all;
#ifdef __CUDA_ARCH__
  asm("ld.global.nc.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
      : "=f"(all.x), "=f"(all.y), "=f"(all.z), "=f"(all.w)
      : "l"(at));
#else
  memcpy(&all, at, sizeof all);
#endif
  return all;
}

// kW neighbours, all of which are in the row.
template <int kW>
TF_HIPS_LOCAL void load_all(const float* at, float (&x)[kW]) {
  if constexpr (kW == 1) {
    x[0] = load_one(at);
  } else {
    static_assert(kW == 4, "one float, or 16 bytes");
    const float4 all = load_four(at);
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
  }
}

// kW neighbours, of which the first is in the row; 0 behind its end.
template <int kW>
TF_HIPS_LOCAL void load_some(const float* row, int64_t at, int64_t d, float (&x)[kW]) {
  if (kW == 1 || at + kW <= d) {
    load_all(row + at, x);
  } else {
    TF_HIPS_UNROLL
    for (int w = 0; w < kW; ++w) x[w] = at + w < d ? row[at + w] : 0.0f;
  }
}

template <int kW>
TF_HIPS_LOCAL void store_some(const float (&x)[kW], int64_t at, int64_t d, float* row) {
  if constexpr (kW == 1) {
    row[at] = x[0];
  } else {
    if (at + kW <= d) {
      *reinterpret_cast<float4*>(row + at) = {x[0], x[1], x[2], x[3]};
    } else {
      TF_HIPS_UNROLL
      for (int w = 0; w < kW; ++w) {
        if (at + w < d) row[at + w] = x[w];
      }
    }
  }
}

// Adds what 8 blocks have found for each of `count` sums, [count][8][16], to [count][16] doubles,
// block by block. What thread t does.
TF_HIPS_LOCAL void add_blocks(const float* parts, int count, int t, double* lanes) {
  for (int k = t; k < count * kLanes; k += kThreads) {
    const float* const part = parts + k / kLanes * kThreads + k % kLanes;
    double sum = lanes[k];
    TF_HIPS_UNROLL
    for (int block = 0; block < kThreads / kLanes; ++block) {
      sum += static_cast<double>(part[block * kLanes]);
    }
    lanes[k] = sum;
  }
}

// 16 lanes to one: l with l + 8, then + 4, + 2, + 1.
TF_HIPS_LOCAL double join_doubles(const double* lanes) {
  double half[kLanes];
  TF_HIPS_UNROLL
  for (int l = 0; l < kLanes; ++l) half[l] = lanes[l];
  // Bounds that do not change, or the compiler leaves the inner loop, and `half` in memory.
  TF_HIPS_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2) {
    TF_HIPS_UNROLL
    for (int l = 0; l < kLanes / 2; ++l) {
      if (l < width) half[l] += half[l + width];
    }
  }
  return half[0];
}

// Rows of which a block of threads adds up a task of `parts`.
constexpr int kRowsAtOnce = kThreads / kLanes;

// What blocks of 512 have found, [blocks][n][16], to sums of tasks, [tasks][n], block by block.
TF_HIPS_KERNEL add_parts(const float* parts, int32_t n, int64_t blocks, double* of_tasks) {
  TF_HIPS_SHARED double lanes[kRowsAtOnce * kLanes];
  const int groups = (n + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t task = blockIdx.x / groups;
  const int first = static_cast<int>(blockIdx.x % groups) * kRowsAtOnce;
  TF_HIPS_PHASE(t) {
    if (first + t / kLanes < n) {
      const int64_t each = static_cast<int64_t>(n) * kLanes;
      const float* const part = parts + task * kBlocks * each + first * kLanes + t;
      const int count = static_cast<int>(least(kBlocks, blocks - task * kBlocks));
      constexpr int kSome = 16;  // under way together
      double sum = 0.0;
      for (int block = 0; block < count; block += kSome) {
        float x[kSome];
        TF_HIPS_UNROLL
        for (int u = 0; u < kSome; ++u) {
          x[u] = block + u < count ? part[(block + u) * each] : 0.0f;
        }
        TF_HIPS_UNROLL
        for (int u = 0; u < kSome; ++u) sum += static_cast<double>(x[u]);
      }
      lanes[t] = sum;
    }
  }
  TF_HIPS_PHASE(t) {
    if (t < kRowsAtOnce && first + t < n) {
      of_tasks[task * n + first + t] = join_doubles(lanes + t * kLanes);
    }
  }
}

// Sums of tasks, [tasks][count], to sums of chunks, in order.
TF_HIPS_KERNEL add_tasks(const double* of_tasks, int64_t tasks, int64_t count, int64_t chunks,
                         double* of_chunks) {
  TF_HIPS_PHASE(t) {
    const int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + t;
    if (k < chunks * count) {
      const int64_t first = k / count * kTasks, last = least(tasks, first + kTasks);
      double sum = 0.0;
      for (int64_t task = first; task < last; ++task) sum += of_tasks[task * count + k % count];
      of_chunks[k] = sum;
    }
  }
}

// Addresses that came with the kernel to device memory.
TF_HIPS_KERNEL put_rows(Rows rows, int32_t first, int32_t count, const float** many) {
  TF_HIPS_PHASE(t) {
    if (t < count) many[first + t] = rows.few[t];
  }
}

}  // namespace robust
}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_ROBUST_ROWS_CUH_
