// SPDX-License-Identifier: Apache-2.0
// The Walsh-Hadamard transform of the blocks of a tile, in the steps of compll/ir/transforms.py: an
// element's stages follow one another in the order of their strides, each rounded.
//
// A thread does three stages at a time of eight elements in registers: of its own neighbours, then
// of elements 8 apart, then 64; the tile lies in shared memory in between.

#ifndef TF_HIPS_CC_CUDA_HADAMARD_CUH_
#define TF_HIPS_CC_CUDA_HADAMARD_CUH_

#include "tf_hips/cc/cuda/eights.cuh"

namespace tf_hips {
namespace cuda {

// Whether element `j` of a tile of `count`, the first of two that are `stride` apart, has that
// stage. A block that is not whole is transformed in segments, the powers of two that it is the sum
// of. The highest bit in which the count and an element's number differ is one of the count that
// the element does not have: its segment is as long as that, or the block if that is shorter.
TF_HIPS_INLINE bool has_stage(int j, int stride, int count, int block) {
  return stride < block && j < count && (count ^ j) >= 2 * stride;
}

// The stages of strides `apart`, 2 * apart and 4 * apart of eight elements `apart` from each other,
// of which the first is number `first` of the tile.
__device__ __forceinline__ void three_stages(float (&x)[8], int first, int apart, int count,
                                             int block) {
  TF_HIPS_UNROLL
  for (int width = 1; width < 8; width *= 2) {
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) {
      if ((u & width) != 0 || !has_stage(first + apart * u, apart * width, count, block)) continue;
      const float a = x[u], b = x[u + width];
      x[u] = a + b;
      x[u + width] = a - b;
    }
  }
}

// What a segment is multiplied by that has `length` elements, 2^k: 2^(-k / 2).
TF_HIPS_INLINE float hadamard_scale(int length) {
  float power = 1.0f;
  for (; length >= 4; length /= 4) power *= 0.5f;
  return length == 2 ? power * 0.70710678f : power;
}

// Elements of the segment that element `j` of a tile of `count` is in.
TF_HIPS_INLINE int segment_of(int j, int count, int block) {
  int length = 1;
  while (length < block && (count ^ j) >= 2 * length) length *= 2;
  return length;
}

// The first three stages of the eight elements of thread t, which go to the tile.
__device__ __forceinline__ void hadamard_first(float (&x)[8], int t, int count, int block,
                                               float* tile) {
  three_stages(x, kEach * t, 1, count, block);
  keep8(x, tile + kEach * t);
}

// All others. In phases; all threads must call it.
__device__ inline void hadamard_rest(float* tile, int count, int block) {
  // Not more than twice: of 1024 elements one stage is left behind these.
  for (int apart = 8; apart < 512 && apart < block; apart *= 8) {
    TF_HIPS_PHASE(t) {
      const int first = t / apart * (8 * apart) + t % apart;
      float x[8];
      TF_HIPS_UNROLL
      for (int u = 0; u < 8; ++u) x[u] = tile[first + apart * u];
      three_stages(x, first, apart, count, block);
      TF_HIPS_UNROLL
      for (int u = 0; u < 8; ++u) tile[first + apart * u] = x[u];
    }
  }
  if (block > kTile / 2) {
    TF_HIPS_PHASE(t) {
      for (int j = t; j < kTile / 2; j += kThreads) {
        if (!has_stage(j, kTile / 2, count, block)) continue;
        const float a = tile[j], b = tile[j + kTile / 2];
        tile[j] = a + b;
        tile[j + kTile / 2] = a - b;
      }
    }
  }
}

// Leaves the eight elements of thread t, scaled.
__device__ __forceinline__ void hadamard_keep(const float* tile, int t, int count, int block,
                                              float* to) {
  float x[8];
  const float scale = hadamard_scale(block);
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    const int j = kEach * t + u;
    const bool is_whole = j < (count & -block);
    x[u] = tile[j] * (is_whole || j >= count ? scale
                                             : hadamard_scale(segment_of(j, count, block)));
  }
  keep8(x, to + kEach * t);
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_HADAMARD_CUH_
