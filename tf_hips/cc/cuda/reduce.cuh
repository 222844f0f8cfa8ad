// SPDX-License-Identifier: Apache-2.0
// Reductions in the fixed tree of tf_hips/cc/runtime/reduce.h, by the threads of a block.
//
// A tile lies in shared memory; 16 threads fold a lane each, one combines the lanes. The tiles of a
// chunk are combined pairwise by a block of threads. Integers wrap, so their order is free.

#ifndef TF_HIPS_CC_CUDA_REDUCE_CUH_
#define TF_HIPS_CC_CUDA_REDUCE_CUH_

#include "tf_hips/cc/cuda/eights.cuh"

namespace tf_hips {
namespace cuda {

constexpr int kLanes = 16;

// Threads of which one knows what all of them have found: of a warp, or each for itself.
#ifdef __CUDA_ARCH__
constexpr int kNear = 32;
#else
constexpr int kNear = 1;
#endif

// Groups of so many threads in a block.
constexpr int kGroups = kThreads / kNear;

struct Sum {
  static TF_HIPS_INLINE float neutral() { return 0.0f; }
  static TF_HIPS_INLINE float fold(float a, float b) { return a + b; }
};
struct Prod {
  static TF_HIPS_INLINE float neutral() { return 1.0f; }
  static TF_HIPS_INLINE float fold(float a, float b) { return a * b; }
};
struct Max {
  static TF_HIPS_INLINE float neutral() { return -std::numeric_limits<float>::infinity(); }
  static TF_HIPS_INLINE float fold(float a, float b) { return a > b ? a : b; }
};
struct Min {
  static TF_HIPS_INLINE float neutral() { return std::numeric_limits<float>::infinity(); }
  static TF_HIPS_INLINE float fold(float a, float b) { return a < b ? a : b; }
};

// `fold` takes an element, `join` two partial results; `neutral` changes neither.
struct IntSum {
  static TF_HIPS_INLINE int64_t neutral() { return 0; }
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return int_add(a, b); }
  static TF_HIPS_INLINE int64_t join(int64_t a, int64_t b) { return int_add(a, b); }
};
struct IntProd {
  static TF_HIPS_INLINE int64_t neutral() { return 1; }
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return int_mul(a, b); }
  static TF_HIPS_INLINE int64_t join(int64_t a, int64_t b) { return int_mul(a, b); }
};
struct IntMax {
  static TF_HIPS_INLINE int64_t neutral() { return INT64_MIN; }
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return maximum<int64_t>(a, b); }
  static TF_HIPS_INLINE int64_t join(int64_t a, int64_t b) { return maximum<int64_t>(a, b); }
};
struct IntMin {
  static TF_HIPS_INLINE int64_t neutral() { return INT64_MAX; }
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return minimum<int64_t>(a, b); }
  static TF_HIPS_INLINE int64_t join(int64_t a, int64_t b) { return minimum<int64_t>(a, b); }
};
struct IntCount {
  static TF_HIPS_INLINE int64_t neutral() { return 0; }
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return int_add(a, b != 0 ? 1 : 0); }
  static TF_HIPS_INLINE int64_t join(int64_t a, int64_t b) { return int_add(a, b); }
};
struct IntAnd {
  static TF_HIPS_INLINE int64_t neutral() { return 1; }
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return a != 0 && b != 0 ? 1 : 0; }
  static TF_HIPS_INLINE int64_t join(int64_t a, int64_t b) { return fold(a, b); }
};
struct IntOr {
  static TF_HIPS_INLINE int64_t neutral() { return 0; }
  static TF_HIPS_INLINE int64_t fold(int64_t a, int64_t b) { return a != 0 || b != 0 ? 1 : 0; }
  static TF_HIPS_INLINE int64_t join(int64_t a, int64_t b) { return fold(a, b); }
};

// Four neighbours each: in two of four rows of 16 neighbours have changed places, so that threads
// that write at once use different banks.
TF_HIPS_INLINE int place_of_four(int number) { return number ^ (number >> 3 & 1); }

// Eight values of thread t to their places in a tile.
__device__ inline void stage8(const float (&values)[8], int t, float* tile) {
  float4* const fours = reinterpret_cast<float4*>(tile);
  fours[place_of_four(2 * t)] = {values[0], values[1], values[2], values[3]};
  fours[place_of_four(2 * t + 1)] = {values[4], values[5], values[6], values[7]};
}

// Lane `lane` of `rows` times 16 values of a tile, from row `first` on.
template <typename Reducer>
TF_HIPS_INLINE float fold_lane(const float* tile, int first, int rows, int lane) {
  const auto at = [&](int row) { return kLanes * row + (lane ^ (row >> 1 & 1) << 2); };
  float value = tile[at(first)];
  TF_HIPS_UNROLL
  for (int row = 1; row < rows; ++row) value = Reducer::fold(value, tile[at(first + row)]);
  return value;
}

// 16 lanes to one: l with l + 8, then + 4, + 2, + 1.
template <typename Reducer>
__device__ float join_lanes(const float* lanes) {
  float lane[kLanes];
  TF_HIPS_UNROLL
  for (int l = 0; l < kLanes; ++l) lane[l] = lanes[l];
  // Bounds that do not change, or nvcc leaves the inner loop, and `lane` in memory.
  TF_HIPS_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2) {
    TF_HIPS_UNROLL
    for (int l = 0; l < kLanes / 2; ++l) {
      if (l < width) lane[l] = Reducer::fold(lane[l], lane[l + width]);
    }
  }
  return lane[0];
}

// One of 16 threads joins its share of what kThreads threads have found.
template <typename Reducer>
__device__ int64_t join_share(const int64_t* totals, int lane) {
  int64_t value = Reducer::neutral();
  for (int k = lane; k < kThreads; k += kLanes) value = Reducer::join(value, totals[k]);
  return value;
}

template <typename Reducer>
__device__ int64_t join_shares(const int64_t* lanes) {
  int64_t value = Reducer::neutral();
  for (int l = 0; l < kLanes; ++l) value = Reducer::join(value, lanes[l]);
  return value;
}

// Combines `count` neighbours, one to kMost, a power of two, pairwise. Others may be anything.
template <typename Reducer, int kMost>
TF_HIPS_INLINE float fold_pairs(float (&value)[kMost], int count) {
  TF_HIPS_UNROLL
  for (int width = kMost / 2; width > 0; width /= 2) {
    TF_HIPS_UNROLL
    for (int k = 0; k < kMost / 2; ++k) {
      if (k >= width) break;
      value[k] = 2 * k + 1 < count ? Reducer::fold(value[2 * k], value[2 * k + 1]) : value[2 * k];
    }
    count = (count + 1) / 2;
  }
  return value[0];
}

// Eight neighbours of which `count` are there.
template <typename Reducer>
__device__ float fold_few(const float* values, int count) {
  float value[8];
  TF_HIPS_UNROLL
  for (int k = 0; k < 8; ++k) value[k] = k < count ? values[k] : 0.0f;
  return fold_pairs<Reducer>(value, count);
}

// The results of a chunk's tiles are combined pairwise, in two phases, which those of several
// reductions share: each thread reads eight neighbours, and they become one by groups of threads;
// then one thread combines what groups have found.

// Where the results of at most kTile tiles are, or of what they are combined to.
struct Parts {
  const float* values;
  int count;
};

// Combines results until no more than kTile are left; there is room for half as many behind them.
// In phases; all threads must call it. A chunk of the gradient has none too many.
template <typename Reducer>
__device__ __forceinline__ Parts few_parts(float* from, int64_t tiles) {
  float* to = from + tiles;
  int64_t count = tiles;
  while (count > kTile) {
    TF_HIPS_PHASE(t) {
      for (int64_t k = t; 8 * k < count; k += kThreads) {
        to[k] = fold_few<Reducer>(from + 8 * k, static_cast<int>(least(8, count - 8 * k)));
      }
    }
    float* const last = from;
    from = to;
    to = last;
    count = (count + 7) / 8;
  }
  return {from, static_cast<int>(count)};
}

// What a thread reads of them.
TF_HIPS_INLINE void take_parts(const Parts& parts, int t, float (&out)[8]) {
  if (8 * t + 8 <= parts.count && is_aligned(parts.values, 16)) {
    take8(parts.values + 8 * t, out);
    return;
  }
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) out[u] = 8 * t + u < parts.count ? parts.values[8 * t + u] : 0.0f;
}

// What a group of threads makes of it, of which one leaves it in `found`. All threads of a block
// must call it.
template <typename Reducer>
TF_HIPS_INLINE void fold_parts(float (&values)[8], int count, int t, float* found) {
  const int own = count - 8 * t;
  float value = own >= 8 ? fold_pairs<Reducer>(values, 8) : fold_pairs<Reducer>(values, own);
#ifdef __CUDA_ARCH__
  TF_HIPS_UNROLL
  for (int apart = 1; apart < kNear; apart *= 2) {
    // Threads between would give what nobody takes.
    const float other = __shfl_down_sync(~0u, value, apart);
    if (8 * (t + apart) < count) value = Reducer::fold(value, other);
  }
#endif
  if (t % kNear == 0) found[t / kNear] = value;
}

// The result of all, by one thread.
template <typename Reducer>
__device__ float fold_found(const float* found, int count, float init) {
  if (count == 0) return init;
  float value[kGroups];
  TF_HIPS_UNROLL
  for (int k = 0; k < kGroups; ++k) value[k] = found[k];
  return Reducer::fold(init, fold_pairs<Reducer>(value, (count + 8 * kNear - 1) / (8 * kNear)));
}

// The same of integers, whose order is free.
template <typename Reducer>
TF_HIPS_INLINE int64_t join_parts(const int64_t* parts, int64_t tiles, int t) {
  int64_t value = Reducer::neutral();
  // All are asked for before the first is there.
  TF_HIPS_UNROLL
  for (int u = 0; u < kEach; ++u) {
    const int k = t + u * kThreads;
    value = Reducer::join(value, k < tiles ? parts[k] : Reducer::neutral());
  }
  for (int64_t k = t + kTile; k < tiles; k += kThreads) value = Reducer::join(value, parts[k]);
  return value;
}

template <typename Reducer>
TF_HIPS_INLINE void join_group(int64_t value, int t, int64_t* found) {
#ifdef __CUDA_ARCH__
  TF_HIPS_UNROLL
  for (int apart = 1; apart < kNear; apart *= 2) {
    value = Reducer::join(value, __shfl_xor_sync(~0u, static_cast<long long>(value), apart));
  }
#endif
  if (t % kNear == 0) found[t / kNear] = value;
}

template <typename Reducer>
__device__ int64_t join_found(const int64_t* found, int64_t init) {
  int64_t value = init;
  for (int k = 0; k < kGroups; ++k) value = Reducer::join(value, found[k]);
  return value;
}

// The sum of what the threads of a group have, which one of them leaves in `found`; and that of all
// groups. All threads of a block must call it.
TF_HIPS_INLINE void sum_group(int32_t value, int t, int32_t* found) {
#ifdef __CUDA_ARCH__
  value = sum_of_warp(value);
#endif
  if (t % kNear == 0) found[t / kNear] = value;
}

TF_HIPS_INLINE int64_t sum_found(const int32_t* found) {
  int32_t value = 0;
  TF_HIPS_UNROLL
  for (int k = 0; k < kGroups; ++k) value += found[k];
  return value;
}

// The largest or least float of a tile, in any order. That of its lanes is the same, bit for bit,
// unless it is a zero, of which there are two, or there is NaN, which is then the result.

// The larger of two, NaN if one is.
TF_HIPS_INLINE float largest_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a != a || a > b ? a : b;
#endif
}

// What is larger the sooner a float is the result.
template <typename Reducer>
TF_HIPS_INLINE float upwards(float x) {
  static_assert(std::is_same_v<Reducer, Max> || std::is_same_v<Reducer, Min>);
  return std::is_same_v<Reducer, Max> ? x : -x;
}

// What a group of threads finds, of which one leaves it in `found`. All threads of a block must
// call it.
template <typename Reducer>
TF_HIPS_INLINE void note_extreme(const float (&values)[8], int t, float* found) {
  float value = upwards<Reducer>(values[0]);
  TF_HIPS_UNROLL
  for (int u = 1; u < 8; ++u) value = largest_or_nan(value, upwards<Reducer>(values[u]));
#ifdef __CUDA_ARCH__
  // Of numbers below 0 the bits behind the sign have the opposite order.
  const int bits = __float_as_int(value);
  const int most = largest_of_warp(bits ^ (bits >> 31 & 0x7FFFFFFF));
  value = __int_as_float(most ^ (most >> 31 & 0x7FFFFFFF));
#endif
  if (t % kNear == 0) found[t / kNear] = value;
}

template <typename Reducer>
TF_HIPS_INLINE float extreme_found(const float* found) {
  float value = found[0];
  TF_HIPS_UNROLL
  for (int k = 1; k < kGroups; ++k) value = largest_or_nan(value, found[k]);
  return upwards<Reducer>(value);
}

// Whether a float is neither a zero nor NaN.
TF_HIPS_INLINE bool is_signed(float x) { return x < 0.0f || x > 0.0f; }

// The number of the block of `block` elements, a power of two, that holds an element; so of
// elements + block - 1 the number of blocks, without a division. In 32 bits where `element` has no
// more.
template <typename Int>
TF_HIPS_INLINE Int block_number(Int element, int64_t block) {
#ifdef __CUDA_ARCH__
  return element >> (31 - __clz(static_cast<int>(block)));
#else
  return element >> __builtin_ctzll(static_cast<uint64_t>(block));
#endif
}

// The reductions of blocks of `block` elements of a tile: out[k] becomes that of block k, for
// `count` elements; values behind them are neutral. In phases; all threads must call it.
template <typename Reducer>
__device__ void reduce_blocks(const float* tile, int count, int block, float init, float* out) {
  TF_HIPS_SHARED float lanes[kTile];
  const int blocks = static_cast<int>(block_number(count + block - 1, block));
  TF_HIPS_PHASE(t) {
    for (int k = t; k < blocks * kLanes; k += kThreads) {
      const int rows = block / kLanes;
      lanes[k] = fold_lane<Reducer>(tile, k / kLanes * rows, rows, k % kLanes);
    }
  }
  TF_HIPS_PHASE(t) {
    for (int k = t; k < blocks; k += kThreads) {
      out[k] = Reducer::fold(init, join_lanes<Reducer>(lanes + k * kLanes));
    }
  }
}

template <typename Reducer>
__device__ void reduce_int_blocks(const int64_t* tile, int count, int block, int64_t init,
                                  int64_t* out) {
  TF_HIPS_PHASE(t) {
    for (int k = t; k * block < count; k += kThreads) {
      int64_t value = init;
      for (int j = k * block; j < count && j < (k + 1) * block; ++j) {
        value = Reducer::fold(value, tile[j]);
      }
      out[k] = value;
    }
  }
}

// The larger of two sizes, of which none is -0, and the second not NaN: then the machine's own
// maximum is that of the language, but that it leaves out NaN.
TF_HIPS_INLINE float larger_size(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}

// The largest of eight sizes that are no larger than `most`, a number; 0 where there is none. They
// are absolute values, NaN and infinities among them.
TF_HIPS_INLINE float largest_size(const float (&sizes)[8], float most) {
  float largest = 0.0f;
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) largest = larger_size(sizes[u], largest);
  if (largest <= most) return largest;
  largest = 0.0f;
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    if (sizes[u] <= most) largest = larger_size(sizes[u], largest);
  }
  return largest;
}

// The same of the elements of `threads` threads, a power of two, of which this is one, or of the
// next kNear of them. All threads of a block must call it.
TF_HIPS_INLINE float largest_near(const float (&sizes)[8], float most,
                                  [[maybe_unused]] int threads) {
  float largest = largest_size(sizes, most);
#ifdef __CUDA_ARCH__
  if (threads >= kNear) {
    // Bits of numbers from 0 on have their order.
    return __int_as_float(largest_of_warp(__float_as_int(largest)));
  }
  TF_HIPS_UNROLL
  for (int apart = 1; apart < kNear / 2; apart *= 2) {
    if (apart >= threads) break;
    largest = larger_size(largest, __shfl_xor_sync(~0u, largest, apart));
  }
#endif
  return largest;
}

// The largest size of a block of `block` elements of a tile, of what its threads have found.
TF_HIPS_INLINE float largest_of_threads(const float* found, int number, int block) {
  const int threads = block / kEach;
  const float* const own = found + number * threads;
  float largest = own[0];
  TF_HIPS_UNROLL
  for (int j = kNear; j < kThreads; j += kNear) {
    if (j < threads) largest = larger_size(largest, own[j]);
  }
  return largest;
}

// What the blocks of a tile have, to where later kernels find it. In phases.
template <typename T>
__device__ void keep_blocks(const T* values, int count, int block, T* to) {
  const int blocks = static_cast<int>(block_number(count + block - 1, block));
  TF_HIPS_PHASE(t) {
    for (int k = t; k < blocks; k += kThreads) to[k] = values[k];
  }
}

// Whether `block_reduce` can have blocks of that many elements.
inline bool is_block(int64_t block) {
  return block >= kLanes && block <= kTile && (block & (block - 1)) == 0;
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_REDUCE_CUH_
