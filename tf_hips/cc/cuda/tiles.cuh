// SPDX-License-Identifier: Apache-2.0
// What a kernel needs that takes a tile through several steps: elements that a thread keeps from
// phase to phase, reductions of blocks, and Hadamard transforms of whole tiles.

#ifndef TF_HIPS_CC_CUDA_TILES_CUH_
#define TF_HIPS_CC_CUDA_TILES_CUH_

#include "tf_hips/cc/cuda/eights.cuh"
#include "tf_hips/cc/cuda/hadamard.cuh"
#include "tf_hips/cc/cuda/reduce.cuh"

namespace tf_hips {
namespace cuda {

// Eight floats of each thread that stay from phase to phase: in registers on a GPU. All indexes
// must be known to the compiler once loops are unrolled.
struct Eights {
#ifdef __CUDACC__
  float own[kEach];
  __device__ __forceinline__ float (&of(int))[kEach] { return own; }
#else
  float own[kThreads][kEach];
  float (&of(int t))[kEach] { return own[t]; }
#endif
  __device__ __forceinline__ void keep(int t, const float (&values)[kEach]) {
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) of(t)[u] = values[u];
  }
  // As load8 of what was loaded before.
  __device__ __forceinline__ void again(int t, int64_t, int64_t, float (&out)[kEach]) {
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) out[u] = of(t)[u];
  }
};

// The sum of a row's element and those before it, or what the row does not hold of it.
template <bool is_rest>
__device__ __forceinline__ float summed(float sum, float decoded) {
  return is_rest ? taken(sum, decoded) : sum + decoded;
}

// A tile with room for four words behind each 32: threads that read or write elements 1, 8 or 64
// apart at once, or four neighbours each, use different banks, and a thread's eight are at distances
// that are known.
constexpr int kPaddedTile = kTile + kTile / 8;

TF_HIPS_INLINE int padded(int element) { return element + (element >> 5 << 2); }

__device__ __forceinline__ void keep_padded(const float (&values)[kEach], int t, float* tile) {
  keep8(values, tile + padded(kEach * t));
}

// The stages of strides kApart, 2 * kApart and 4 * kApart of eight elements kApart from each other.
template <int kApart>
__device__ __forceinline__ void stages_of_eight(float (&x)[kEach], int block) {
  TF_HIPS_UNROLL
  for (int width = 1; width < kEach; width *= 2) {
    if (kApart * width >= block) break;
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) {
      if ((u & width) != 0) continue;
      const float a = x[u], b = x[u + width];
      x[u] = a + b;
      x[u + width] = a - b;
    }
  }
}

// hadamard_scale, without a loop.
TF_HIPS_INLINE float scale_of_block(int block) {
#ifdef __CUDA_ARCH__
  const int stages = 31 - __clz(block);
#else
  const int stages = __builtin_ctz(static_cast<unsigned>(block));
#endif
  const float power = bits_float(static_cast<int64_t>(127 - stages / 2) << 23);
  return stages % 2 != 0 ? power * 0.70710678f : power;
}

// The first three stages of the eight elements of thread t, which go to the tile (kPaddedTile).
// `count`: elements that it has.
__device__ __forceinline__ void hadamard_begin(float (&x)[kEach], int t, int count, int block,
                                               float* tile) {
  if (count >= kTile) {
    stages_of_eight<1>(x, block);
    keep_padded(x, t, tile);
  } else {
    hadamard_first(x, t, count, block, tile);
  }
}

// The stages of elements kApart apart, of a whole tile, by a thread whose first one is `first`.
template <int kApart>
__device__ __forceinline__ void hadamard_pass(float* tile, int first, int block) {
  float* const at = tile + padded(first);
  float x[kEach];
  TF_HIPS_UNROLL
  for (int u = 0; u < kEach; ++u) x[u] = at[padded(kApart * u)];
  stages_of_eight<kApart>(x, block);
  TF_HIPS_UNROLL
  for (int u = 0; u < kEach; ++u) at[padded(kApart * u)] = x[u];
}

// All others; each thread gets its own eight. In phases; all threads must call it.
__device__ __forceinline__ void hadamard_end(float* tile, int count, int block, Eights& out) {
  if (count < kTile) {
    hadamard_rest(tile, count, block);
    TF_HIPS_PHASE(t) { hadamard_take(tile, t, count, block, out.of(t)); }
    return;
  }
  TF_HIPS_PHASE(t) { hadamard_pass<8>(tile, t % 8 + t / 8 * 64, block); }
  if (block > 64) {
    TF_HIPS_PHASE(t) { hadamard_pass<64>(tile, t % 64 + t / 64 * 512, block); }
  }
  const float scale = scale_of_block(block);
  TF_HIPS_PHASE(t) {
    float x[kEach];
    if (block <= kTile / 2) {
      take8(tile + padded(kEach * t), x);
    } else {
      // The last stage: the other one of each pair is read, too.
      float y[kEach];
      take8(tile + padded(kEach * (t % 64)), x);
      take8(tile + padded(kEach * (t % 64) + kTile / 2), y);
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) x[u] = t < kThreads / 2 ? x[u] + y[u] : x[u] - y[u];
    }
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) out.of(t)[u] = x[u] * scale;
  }
}

// As fold_lane, of a padded tile.
template <typename Reducer>
TF_HIPS_INLINE float fold_padded(const float* tile, int first, int rows, int lane) {
  const float* const at = tile + padded(kLanes * first + lane);
  float value = at[0];
  if (rows == kTile / kLanes) {
    TF_HIPS_UNROLL
    for (int row = 1; row < kTile / kLanes; ++row) {
      value = Reducer::fold(value, at[padded(kLanes * row)]);
    }
    return value;
  }
  for (int row = 1; row < rows; ++row) value = Reducer::fold(value, at[padded(kLanes * row)]);
  return value;
}

// The reductions of blocks of `block` elements of a padded tile: one thread calls done(k, result)
// for each block k of `count` elements; values behind them are neutral. In phases; all threads must
// call it.
template <typename Reducer, typename Done>
__device__ __forceinline__ void reduce_padded(const float* tile, int count, int block, float init,
                                              const Done& done) {
  const int rows = block / kLanes;
  const int all = static_cast<int>(block_number(count + block - 1, block)) * kLanes;
#ifdef __CUDACC__
  TF_HIPS_PHASE(t) {
    for (int k = t; k - t % 32 < all; k += kThreads) {
      float value = Reducer::neutral();
      if (k < all) value = fold_padded<Reducer>(tile, k / kLanes * rows, rows, k % kLanes);
#ifdef __CUDA_ARCH__
      TF_HIPS_UNROLL
      for (int apart = kLanes / 2; apart > 0; apart /= 2) {
        value = Reducer::fold(value, __shfl_down_sync(~0u, value, apart, kLanes));
      }
#endif
      if (k < all && k % kLanes == 0) done(k / kLanes, Reducer::fold(init, value));
    }
  }
#else
  float lanes[kTile];
  TF_HIPS_PHASE(t) {
    for (int k = t; k < all; k += kThreads) {
      lanes[k] = fold_padded<Reducer>(tile, k / kLanes * rows, rows, k % kLanes);
    }
  }
  TF_HIPS_PHASE(t) {
    for (int k = t; k < all / kLanes; k += kThreads) {
      done(k, Reducer::fold(init, join_lanes<Reducer>(lanes + k * kLanes)));
    }
  }
#endif
}

// The same of what largest_near has found.
template <typename Reducer, typename Done>
__device__ __forceinline__ void reduce_found(const float* found, int count, int block, float init,
                                             const Done& done) {
  const int blocks = static_cast<int>(block_number(count + block - 1, block));
  TF_HIPS_PHASE(t) {
    for (int k = t; k < blocks; k += kThreads) {
      float value = init;
      for (int j = 0; j < block / kEach; j += kNear) {
        value = Reducer::fold(value, found[k * (block / kEach) + j]);
      }
      done(k, value);
    }
  }
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_TILES_CUH_
