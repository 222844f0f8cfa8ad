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

// Of a loop that has few turns.
#ifdef __CUDACC__
#define TF_HIPS_ROLLED _Pragma("unroll 1")
#else
#define TF_HIPS_ROLLED
#endif

// A kernel of a chain, which waits at many barriers: so many blocks of threads at a time hide that.
#define TF_HIPS_TILE_KERNEL(blocks) \
  [[maybe_unused]] static __global__ void __launch_bounds__(::tf_hips::cuda::kThreads, blocks)

// A phase without a barrier: what it leaves is read behind that of a later one. And one of which
// each warp reads what its own threads have left.
#ifdef __CUDACC__
#define TF_HIPS_BARRIER() __syncthreads()
#define TF_HIPS_WARP_PHASE(t)                                              \
  for (int t = static_cast<int>(threadIdx.x), t##_left = 1; t##_left != 0; \
       t##_left = 0, __syncwarp())
#define TF_HIPS_OPEN_PHASE(t) \
  for (int t = static_cast<int>(threadIdx.x), t##_left = 1; t##_left != 0; t##_left = 0)
#else
#define TF_HIPS_BARRIER() static_cast<void>(0)
#define TF_HIPS_WARP_PHASE TF_HIPS_PHASE
#define TF_HIPS_OPEN_PHASE TF_HIPS_PHASE
#endif

// Eight floats of each thread that stay from phase to phase: in registers on a GPU. All indexes
// must be known to the compiler once loops are unrolled.
struct Eights {
#ifdef __CUDACC__
  float own[kEach];
  __device__ __forceinline__ float (&eight_of(int)) [kEach] { return own; }
#else
  float own[kThreads][kEach];
  float (&eight_of(int t)) [kEach] { return own[t]; }
#endif
  __device__ __forceinline__ void keep_eight(int t, const float (&values)[kEach]) {
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) eight_of(t)[u] = values[u];
  }
  // As load8 of what was loaded before.
  __device__ __forceinline__ void load_eight(int t, int64_t, int64_t, float (&out)[kEach]) {
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) out[u] = eight_of(t)[u];
  }
};

// The sum of a row's element and those before it, or what the row does not hold of it.
template <bool is_rest>
__device__ __forceinline__ float summed(float sum, float decoded) {
  return is_rest ? taken(sum, decoded) : sum + decoded;
}

// Of kernels that are compiled for each value of a parameter: it is not known.
constexpr int kAnyWidth = 0;

// What a function makes of codes below 32: each thread of a warp computes it for one of them, and
// all ask for what they need. `kBits`: of codes; kAnyWidth, if it is not known.
template <int kBits, typename Function>
struct Table {
#ifdef __CUDA_ARCH__
  float low, high;
  __device__ __forceinline__ explicit Table(const Function& made_by) {
    low = made_by(kBits == 1 ? 0 : threadIdx.x % 32);
    high = kBits == 1 ? made_by(1) : 0.0f;
  }
  // All threads of a warp must call it.
  __device__ __forceinline__ float operator()(uint32_t code) const {
    if constexpr (kBits == 1) return code != 0 ? high : low;
    return __shfl_sync(~0u, low, static_cast<int>(code));
  }
#else
  const Function& made_by;
  __device__ explicit Table(const Function& made) : made_by(made) {}
  __device__ float operator()(uint32_t code) const { return made_by(code); }
#endif
};

template <int kBits, typename Function>
__device__ __forceinline__ Table<kBits, Function> table_of(const Function& made_by) {
  return Table<kBits, Function>(made_by);
}

// The number of a thread, of which nvcc does not know that it is that everywhere: in a loop it
// would keep every address that follows from it in a register, until none is left for the loop.
__device__ __forceinline__ int not_kept(int t) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(t));
#endif
  return t;
}

__device__ __forceinline__ Spot not_kept(const Spot& spot) {
  return {spot.chunk, not_kept(spot.base)};
}

// A tile with room for four words behind each 32: threads that read or write elements 1, 8 or 64
// apart at once, or four neighbours each, use different banks, and a thread's eight are at
// distances that are known.
constexpr int kPaddedTile = kTile + kTile / 8;

TF_HIPS_INLINE int padded(int element) { return element + (element >> 5 << 2); }

__device__ __forceinline__ void keep_padded(const float (&values)[kEach], int t, float* tile) {
  keep8(values, tile + padded(kEach * t));
}

// One stage of eight elements, of which those that are `width` places apart are a pair.
__device__ __forceinline__ void stage_of_eight(float (&x)[kEach], int width) {
  TF_HIPS_UNROLL
  for (int u = 0; u < kEach; ++u) {
    if ((u & width) != 0) continue;
    const float a = x[u], b = x[u + width];
    x[u] = a + b;
    x[u + width] = a - b;
  }
}

// The stages of strides kApart, 2 * kApart and 4 * kApart of eight elements kApart from each other,
// as far as blocks have them. All of them without a question in between, where values would have to
// be where the next stage, or none, finds them.
template <int kApart>
__device__ __forceinline__ void stages_of_eight(float (&x)[kEach], int block) {
  if (kApart == 1 || block >= 8 * kApart) {  // they have 16 elements at least
    TF_HIPS_UNROLL
    for (int width = 1; width < kEach; width *= 2) stage_of_eight(x, width);
  } else {
    if (block > kApart) stage_of_eight(x, 1);
    if (block > 2 * kApart) stage_of_eight(x, 2);
  }
}

// a + b, or a - b; `sign`: 1 or -1. One instruction: the product is exact, and the sum is rounded.
TF_HIPS_INLINE float add_signed(float a, float b, float sign) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(b, sign, a);
#else
  return sign > 0.0f ? a + b : a - b;
#endif
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
// `count`: elements that it has. In a warp's phase.
__device__ __forceinline__ void hadamard_begin(float (&x)[kEach], int t, int count, int block,
                                               float* tile) {
  if (count >= kTile) {
    stages_of_eight<1>(x, block);
    keep_padded(x, not_kept(t), tile);
  } else {
    keep8(x, tile + kEach * t);
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

// All others; each thread gets its own eight. In phases; all threads must call it. `is_open`:
// without a barrier at the end.
template <bool is_open>
__device__ __forceinline__ void hadamard_end(float* tile, int count, int block, Eights& out) {
  if (count < kTile) {
    TF_HIPS_BARRIER();
    hadamard_tile(tile, count, block);
    TF_HIPS_PHASE(t) { take8(tile + kEach * t, out.eight_of(t)); }
    return;
  }
  TF_HIPS_PHASE(t) {
    const int k = not_kept(t);
    hadamard_pass<8>(tile, (k & 7) | k >> 3 << 6, block);
  }
  if (block > 64) {
    TF_HIPS_PHASE(t) {
      const int k = not_kept(t);
      hadamard_pass<64>(tile, (k & 63) | k >> 6 << 9, block);
    }
  }
  const float scale = scale_of_block(block);
  TF_HIPS_OPEN_PHASE(t) {
    const int k = not_kept(t);
    float x[kEach];
    if (block <= kTile / 2) {
      take8(tile + padded(kEach * k), x);
    } else {
      // The last stage: the other one of each pair is read, too.
      float y[kEach];
      const float* const first = tile + padded(kEach * (k & 63));
      take8(first, x);
      take8(first + padded(kTile / 2), y);
      const float sign = t < kThreads / 2 ? 1.0f : -1.0f;
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) x[u] = add_signed(x[u], y[u], sign);
    }
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) out.eight_of(t)[u] = x[u] * scale;
  }
  if constexpr (!is_open) TF_HIPS_BARRIER();
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
  TF_HIPS_ROLLED
  for (int row = 1; row < rows; ++row) value = Reducer::fold(value, at[padded(kLanes * row)]);
  return value;
}

// The reductions of blocks of `block` elements of a padded tile: one thread calls end_of_block(k,
// result) for each block k of `count` elements; values behind them are neutral. In phases; all
// threads must call it. `is_open`: without a barrier at the end.
template <typename Reducer, bool is_open, typename Done>
__device__ __forceinline__ void reduce_padded(const float* tile, int count, int block, float init,
                                              const Done& end_of_block) {
  const int rows = block >> 4;  // of 16 lanes
  const int all = static_cast<int>(block_number(count + block - 1, block)) * kLanes;
#ifdef __CUDACC__
  TF_HIPS_OPEN_PHASE(t) {
    TF_HIPS_ROLLED
    for (int k = t; (k & ~31) < all; k += kThreads) {
      float value = Reducer::neutral();
      if (k < all) value = fold_padded<Reducer>(tile, (k >> 4) * rows, rows, k & 15);
#ifdef __CUDA_ARCH__
      TF_HIPS_UNROLL
      for (int apart = kLanes / 2; apart > 0; apart /= 2) {
        value = Reducer::fold(value, __shfl_down_sync(~0u, value, apart, kLanes));
      }
#endif
      if (k < all && (k & 15) == 0) end_of_block(k >> 4, Reducer::fold(init, value));
    }
  }
  if constexpr (!is_open) TF_HIPS_BARRIER();
#else
  float lanes[kTile];
  TF_HIPS_PHASE(t) {
    for (int k = t; k < all; k += kThreads) {
      lanes[k] = fold_padded<Reducer>(tile, k / kLanes * rows, rows, k % kLanes);
    }
  }
  TF_HIPS_PHASE(t) {
    for (int k = t; k < all / kLanes; k += kThreads) {
      end_of_block(k, Reducer::fold(init, join_lanes<Reducer>(lanes + k * kLanes)));
    }
  }
#endif
}

// As largest_near, with fewer questions.
TF_HIPS_INLINE float largest_of(const float (&values)[kEach], [[maybe_unused]] int block) {
  float largest = values[0];
  TF_HIPS_UNROLL
  for (int u = 1; u < kEach; ++u) largest = bounded_max(largest, values[u]);
#ifdef __CUDA_ARCH__
  const int apart = block < kNear * kEach ? block / kEach : kNear;
  if (apart == kNear) {
    TF_HIPS_UNROLL
    for (int k = 1; k < kNear; k *= 2) {
      largest = bounded_max(largest, __shfl_xor_sync(~0u, largest, k));
    }
  } else {
    TF_HIPS_ROLLED
    for (int k = 1; k < apart; k *= 2) {
      largest = bounded_max(largest, __shfl_xor_sync(~0u, largest, k));
    }
  }
#endif
  return largest;
}

// The same of what largest_of has found.
template <typename Reducer, bool is_open, typename Done>
__device__ __forceinline__ void reduce_found(const float* found, int count, int block, float init,
                                             const Done& end_of_block) {
  const int blocks = static_cast<int>(block_number(count + block - 1, block));
  TF_HIPS_OPEN_PHASE(t) {
    TF_HIPS_ROLLED
    for (int k = t; k < blocks; k += kThreads) {
      float value = init;
      TF_HIPS_ROLLED
      for (int j = 0; j < block / kEach; j += kNear) {
        value = Reducer::fold(value, found[k * (block / kEach) + j]);
      }
      end_of_block(k, value);
    }
  }
  if constexpr (!is_open) TF_HIPS_BARRIER();
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_TILES_CUH_
