// SPDX-License-Identifier: Apache-2.0
// The Walsh-Hadamard transform of the blocks of a tile, in the steps of compll/ir/transforms.py: an
// element's stages follow one another in the order of their strides, each rounded.
//
// A thread does three stages at a time of eight elements in registers: of its own neighbours, then
// of elements 8 apart, then 64; the tile lies in shared memory in between. A last block that is not
// whole, of which a chunk has one at most, is transformed a stage at a time. tiles.cuh has a faster
// form for tiles of 1024 elements.

#ifndef TF_HIPS_CC_CUDA_HADAMARD_CUH_
#define TF_HIPS_CC_CUDA_HADAMARD_CUH_

#include "tf_hips/cc/cuda/eights.cuh"

namespace tf_hips {
namespace cuda {

// The stages of strides `apart`, 2 * apart and 4 * apart of eight elements `apart` from each other,
// of which the first is number `first` of the tile. `whole`: elements of its whole blocks.
__device__ __forceinline__ void three_stages(float (&x)[8], int first, int apart, int whole,
                                             int block) {
  TF_HIPS_UNROLL
  for (int width = 1; width < 8; width *= 2) {
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) {
      const bool has_stage = apart * width < block && first + apart * u < whole;
      if ((u & width) != 0 || !has_stage) continue;
      const float a = x[u], b = x[u + width];
      x[u] = a + b;
      x[u + width] = a - b;
    }
  }
}

// What the transform of `length` elements, 2^k, is multiplied by: 2^(-k / 2).
TF_HIPS_INLINE float hadamard_scale(int length) {
  float power = 1.0f;
  for (; length >= 4; length /= 4) power *= 0.5f;
  return length == 2 ? power * 0.70710678f : power;
}

// The transform of `length` elements, a power of two below kTile. In phases; all threads must call
// it.
__device__ inline void hadamard_plain(float* x, int length) {
  for (int stride = 1; stride < length; stride *= 2) {
    TF_HIPS_PHASE(t) {
      for (int k = t; k < length / 2; k += kThreads) {
        float* const at = x + (k / stride * (2 * stride) + k % stride);
        const float a = at[0], b = at[stride];
        at[0] = a + b;
        at[stride] = a - b;
      }
    }
  }
  const float scale = hadamard_scale(length);
  TF_HIPS_PHASE(t) {
    for (int j = t; j < length; j += kThreads) x[j] *= scale;
  }
}

// C of compll/ir/transforms.py: each two elements that are half a block apart. In phases; all
// threads must call it.
__device__ inline void hadamard_pairs(float* x, int length) {
  const int half = length / 2;
  float* const second = x + (length - half);
  TF_HIPS_PHASE(t) {
    for (int j = t; j < half; j += kThreads) {
      const float a = x[j], b = second[j];
      x[j] = (a + b) * 0.70710678f;
      second[j] = (a - b) * 0.70710678f;
    }
  }
}

// D: negates elements as their numbers say. In phases; all threads must call it.
__device__ inline void hadamard_turns(float* x, int length) {
  TF_HIPS_PHASE(t) {
    for (int j = t; j < length; j += kThreads) {
      const uint32_t number = static_cast<uint32_t>(j);
      x[j] = (number * number * 2654435769u) >> 31 != 0 ? -x[j] : x[j];
    }
  }
}

// A block of any number of elements below kTile: of a power of two as all others, else
// C A D B D B D A C, where A transforms the first `most` elements, the largest power of two, and B
// the last. In phases; all threads must call it.
__device__ inline void hadamard_last(float* x, int length) {
  int most = 1;
  while (2 * most <= length) most *= 2;
  if (most == length) {
    hadamard_plain(x, length);
    return;
  }
  hadamard_pairs(x, length);
  for (int k = 0; k < 4; ++k) {
    if (k != 0) hadamard_turns(x, length);
    hadamard_plain(k == 1 || k == 2 ? x + (length - most) : x, most);
  }
  hadamard_pairs(x, length);
}

// The blocks of a tile of `count` elements, in their order. A function of its own: of each chunk
// the last tile needs it, if any. In phases; all threads must call it.
__device__ TF_HIPS_APART void hadamard_tile(float* tile, int count, int block) {
  const int whole = count & -block;
  // Not more than three times: of 1024 elements one stage is left behind these.
  for (int apart = 1; apart < 512 && apart < block; apart *= 8) {
    TF_HIPS_PHASE(t) {
      const int first = t / apart * (8 * apart) + t % apart;
      float x[8];
      TF_HIPS_UNROLL
      for (int u = 0; u < 8; ++u) x[u] = tile[first + apart * u];
      three_stages(x, first, apart, whole, block);
      TF_HIPS_UNROLL
      for (int u = 0; u < 8; ++u) tile[first + apart * u] = x[u];
    }
  }
  const float scale = hadamard_scale(block);
  TF_HIPS_PHASE(t) {
    for (int j = t; j < whole; j += kThreads) tile[j] *= scale;
  }
  if (whole != count) hadamard_last(tile + whole, count - whole);
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_HADAMARD_CUH_
