// SPDX-License-Identifier: Apache-2.0
// Vectors that are kept between kernels: filter, sort, scatter; top_k.cuh is about the largest.
//
// Results do not depend on the order in which threads run: places come from scans, and of equal
// elements the first ones are taken. All is per chunk; a block of threads has a tile or a chunk.

#ifndef TF_HIPS_CC_CUDA_SELECT_CUH_
#define TF_HIPS_CC_CUDA_SELECT_CUH_

#include "tf_hips/cc/cuda/device.cuh"
#include "tf_hips/cc/cuda/reduce.cuh"

namespace tf_hips {
namespace cuda {

// Sums up to each thread, its own value included; `values` has kThreads, and room for as many more.
// In phases; all threads must call it. Returns where the sums are.
__device__ inline const int64_t* scan_threads(int64_t* values) {
  int64_t* from = values;
  int64_t* to = values + kThreads;
  for (int width = 1; width < kThreads; width *= 2) {
    TF_HIPS_PHASE(t) { to[t] = from[t] + (t >= width ? from[t - width] : 0); }
    int64_t* const last = from;
    from = to;
    to = last;
  }
  return from;
}

// The sum of a value of each thread. In phases; all threads must call it.
__device__ inline void sum_threads(const int64_t* values, int64_t* result) {
  TF_HIPS_SHARED int64_t lanes[kLanes];
  TF_HIPS_PHASE(t) {
    if (t < kLanes) lanes[t] = join_share<IntSum>(values, t);
  }
  TF_HIPS_PHASE(t) {
    if (t == 0) *result = join_shares<IntSum>(lanes);
  }
}

// Replaces the counts of a chunk's tiles by what is before each; *total becomes their sum. In
// phases; all threads must call it.
__device__ inline void scan_tiles(int64_t* counts, int64_t tiles, int64_t* total) {
  TF_HIPS_SHARED int64_t sums[2 * kThreads];
  const int64_t share = (tiles + kThreads - 1) / kThreads;
  TF_HIPS_PHASE(t) {
    int64_t sum = 0;
    for (int64_t k = share * t; k < least(tiles, share * (t + 1)); ++k) sum += counts[k];
    sums[t] = sum;
  }
  const int64_t* const scanned = scan_threads(sums);
  TF_HIPS_PHASE(t) {
    int64_t before = t == 0 ? 0 : scanned[t - 1];
    for (int64_t k = share * t; k < least(tiles, share * (t + 1)); ++k) {
      const int64_t count = counts[k];
      counts[k] = before;
      before += count;
    }
    if (t == 0) *total = scanned[kThreads - 1];
  }
}

TF_HIPS_INLINE int count_bits(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

// Words in the order of floats, -0 before 0.
TF_HIPS_INLINE uint32_t float_key(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits ^ (0x80000000u | (0u - (bits >> 31)));
}

// The largest floats have the largest keys: -0 equals 0, NaN is below all.
TF_HIPS_INLINE uint32_t rank_key(float value) {
  return value == value ? float_key(value + 0.0f) : 0u;
}

// Keys in whose order a vector is sorted; NaN is last either way.
TF_HIPS_INLINE uint32_t sort_key(float value, bool is_descending) {
  if (!(value == value)) return 0xFFFFFFFFu;
  return is_descending ? ~float_key(value) : float_key(value);
}

TF_HIPS_INLINE float sorted_value(uint32_t key, bool is_descending, float) {
  if (key == 0xFFFFFFFFu) return bits_float(0x7FC00000);
  const uint32_t word = is_descending ? ~key : key;
  return bits_float(static_cast<int64_t>(word ^ (0x80000000u | ((word >> 31) - 1u))));
}

TF_HIPS_INLINE uint64_t sort_key(int64_t value, bool is_descending) {
  const uint64_t word = static_cast<uint64_t>(value) ^ (uint64_t{1} << 63);
  return is_descending ? ~word : word;
}

template <typename T>
TF_HIPS_INLINE T sorted_value(uint64_t key, bool is_descending, T) {
  const uint64_t word = is_descending ? ~key : key;
  return static_cast<T>(static_cast<int64_t>(word ^ (uint64_t{1} << 63)));
}

// The least power of two that is not less than `count`.
TF_HIPS_INLINE int64_t padded_count(int64_t count) {
  int64_t padded = 1;
  while (padded < count) padded *= 2;
  return padded;
}

// `Index`: an integer that holds `padded`.
template <typename Index, typename Key>
__device__ void sort_steps(Key* keys, Index padded) {
  for (Index run = 2; run <= padded; run *= 2) {
    for (Index step = run / 2; step > 0; step /= 2) {
      TF_HIPS_PHASE(t) {
        for (Index k = t; k < padded / 2; k += kThreads) {
          // k / step * 2 * step + k % step, of powers of two.
          const Index low = (k & ~(step - 1)) << 1 | (k & (step - 1));
          const Index high = low + step;
          const bool is_up = (low & run) == 0;
          const Key a = keys[low], b = keys[high];
          if ((a > b) == is_up && a != b) {
            keys[low] = b;
            keys[high] = a;
          }
        }
      }
    }
  }
}

// Sorts the keys of a chunk, which have room up to padded_count(count): bitonic, in shared memory
// where they fit. In phases; all threads must call it.
template <typename Key>
__device__ void sort_keys(Key* keys, int64_t count) {
  constexpr int kFew = 16384 / sizeof(Key);
  TF_HIPS_SHARED Key few[kFew];
  const int64_t padded = padded_count(count);
  // Each way has its own steps: a pointer to either memory would be slower to read from.
  if (padded > kFew) {
    TF_HIPS_PHASE(t) {
      for (int64_t k = count + t; k < padded; k += kThreads) keys[k] = static_cast<Key>(~Key{0});
    }
    sort_steps(keys, padded);
    return;
  }
  TF_HIPS_PHASE(t) {
    for (int64_t k = t; k < padded; k += kThreads) {
      few[k] = k < count ? keys[k] : static_cast<Key>(~Key{0});
    }
  }
  sort_steps(few, static_cast<int>(padded));
  TF_HIPS_PHASE(t) {
    for (int64_t k = t; k < count; k += kThreads) keys[k] = few[k];
  }
}

// Where the values of a scatter go in a chunk: `used` places of `whole`.
struct Placed {
  int64_t used, whole;
};

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_SELECT_CUH_
