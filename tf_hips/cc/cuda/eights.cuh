// SPDX-License-Identifier: Apache-2.0
// The eight neighbours that a thread has of a tile: read, summed with a residual, and written.

#ifndef TF_HIPS_CC_CUDA_EIGHTS_CUH_
#define TF_HIPS_CC_CUDA_EIGHTS_CUH_

#include "tf_hips/cc/cuda/device.cuh"

namespace tf_hips {
namespace cuda {

// What many numbers are divided by: with a multiplication each, of those that are not negative.
class Divisor {
 public:
  TF_HIPS_INLINE explicit Divisor(int64_t by)
      : by_(by), inverse_(by > 0 ? ~uint64_t{0} / static_cast<uint64_t>(by) : 0) {}

  // As int_div.
  TF_HIPS_INLINE int64_t divide(int64_t a) const {
    if (a < 0 || by_ <= 0) return tf_hips::int_div(a, by_);
    // Too small by 1 at most.
    const uint64_t quotient = high_product(static_cast<uint64_t>(a), inverse_);
    const uint64_t rest = static_cast<uint64_t>(a) - quotient * static_cast<uint64_t>(by_);
    return static_cast<int64_t>(quotient + (rest >= static_cast<uint64_t>(by_) ? 1 : 0));
  }

 private:
  static TF_HIPS_INLINE uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
    return __umul64hi(a, b);
#else
    return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
  }

  int64_t by_;
  uint64_t inverse_;
};

using tf_hips::int_div;
TF_HIPS_INLINE int64_t int_div(int64_t a, const Divisor& by) { return by.divide(a); }

// The eight floats from number `first` on; 0 behind the end. `is_full`: there are eight, at a
// multiple of 16 bytes.
template <bool is_full = false>
__device__ inline void load8(const float* values, int64_t first, int64_t count, float (&out)[8]) {
  if (is_full || (first + 8 <= count && is_aligned(values + first, 16))) {
    const float4 low = reinterpret_cast<const float4*>(values + first)[0];
    const float4 high = reinterpret_cast<const float4*>(values + first)[1];
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
  } else {
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) out[u] = first + u < count ? values[first + u] : 0.0f;
  }
}

#ifdef __CUDA_ARCH__
// Eight floats of each thread of a warp to where they lie behind one another, `out` those of this
// one; all threads of a block must call it. By shared memory, because memory is written at half its
// speed where the 16 bytes of two neighbours do not lie side by side: `turned`, a tile.
__device__ __forceinline__ void put_by_warps(const float (&values)[8], float* out, float4* turned) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float4* const here = turned + 2 * (static_cast<int>(threadIdx.x) - lane);
  // Neighbours in time use other banks.
  const auto place = [](int k) { return k ^ (k >> 3 & 1); };
  __syncwarp();
  here[place(2 * lane)] = {values[0], values[1], values[2], values[3]};
  here[place(2 * lane + 1)] = {values[4], values[5], values[6], values[7]};
  __syncwarp();
  float4* const to = reinterpret_cast<float4*>(out) - 2 * lane;
  to[lane] = here[place(lane)];
  to[lane + 32] = here[place(lane + 32)];
}
#endif

// Writes them. `is_full`: all threads of a block have eight, at a multiple of 16 bytes, and call
// it.
template <bool is_full = false>
__device__ inline void put8(const float (&values)[8], int64_t first, int64_t count, float* out) {
#ifdef __CUDA_ARCH__
  if constexpr (is_full) {
    __shared__ float4 turned[kTile / 4];
    put_by_warps(values, out + first, turned);
    return;
  }
#endif
  if (first + 8 <= count && is_aligned(out + first, 16)) {
    reinterpret_cast<float4*>(out + first)[0] = {values[0], values[1], values[2], values[3]};
    reinterpret_cast<float4*>(out + first)[1] = {values[4], values[5], values[6], values[7]};
  } else {
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) {
      if (first + u < count) out[first + u] = values[u];
    }
  }
}

// The same by way of a tile in shared memory, where each thread may overwrite what its warp has.
template <bool is_full>
__device__ __forceinline__ void put8_by(const float (&values)[8], int64_t first, int64_t count,
                                        float* out, [[maybe_unused]] float* turned) {
#ifdef __CUDA_ARCH__
  if constexpr (is_full) {
    put_by_warps(values, out + first, reinterpret_cast<float4*>(turned));
    return;
  }
#endif
  put8<false>(values, first, count, out);
}

// -x where `bit` is 1, x where it is 0: one instruction of a hash that ends in its highest bit.
TF_HIPS_INLINE float sign_turned(float x, uint32_t bit) {
  uint32_t word;
  memcpy(&word, &x, sizeof word);
  word ^= bit << 31;
  memcpy(&x, &word, sizeof x);
  return x;
}

// Eight values of memory of a call, which is aligned and has room for whole tiles.
template <typename T>
TF_HIPS_INLINE void take8(const T* from, T (&out)[8]) {
  uint4 words[sizeof(T) / 2];
  TF_HIPS_UNROLL
  for (size_t k = 0; k < sizeof(T) / 2; ++k) words[k] = reinterpret_cast<const uint4*>(from)[k];
  memcpy(out, words, sizeof words);
}

template <typename T>
TF_HIPS_INLINE void keep8(const T (&values)[8], T* to) {
  uint4 words[sizeof(T) / 2];
  memcpy(words, values, sizeof words);
  TF_HIPS_UNROLL
  for (size_t k = 0; k < sizeof(T) / 2; ++k) reinterpret_cast<uint4*>(to)[k] = words[k];
}

// The same of a vector that has `count` of them, and memory for `room`; 0 behind its end.
template <bool is_full, typename T>
TF_HIPS_INLINE void load_kept8(const T* from, int64_t first, int64_t count, int64_t room,
                               T (&out)[8]) {
  if (is_full || first + 8 <= room) {
    take8(from + first, out);
  } else {
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) out[u] = T{0};
  }
  if constexpr (!is_full) {
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) out[u] = first + u < count ? out[u] : T{0};
  }
}

// Where a kernel that also takes away what the packet holds keeps its tile of gradient + residual:
// in shared memory, element `base` first.
struct SumTile {
  float* at;
  int64_t base;
};

TF_HIPS_INLINE uintptr_t address_of(const SumTile&) { return 0; }

template <bool is_full>
__device__ __forceinline__ void keep_sum8(const float (&sum)[8], int64_t first, int64_t count,
                                          float* value) {
  put8<is_full>(sum, first, count, value);
}

template <bool>
__device__ __forceinline__ void keep_sum8(const float (&sum)[8], int64_t first, int64_t,
                                          SumTile value) {
  keep8(sum, value.at + (first - value.base));
}

// As load8, of gradient + residual, which is also left in `value`; the plain gradient without one.
template <bool is_full, typename Value>
__device__ __forceinline__ void load_sum8(const float* gradient, const float* residual, Value value,
                                          int64_t first, int64_t count, float (&out)[8]) {
  load8<is_full>(gradient, first, count, out);
  if (residual == nullptr) return;
  float rest[8];
  load8<is_full>(residual, first, count, rest);
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) out[u] = out[u] + rest[u];
  keep_sum8<is_full>(out, first, count, value);
}

// The same again, in the kernel that has formed it; `in` is where it is in global memory.
template <bool is_full>
__device__ __forceinline__ void load_again8(const float* in, const float*, float*, int64_t first,
                                            int64_t count, float (&out)[8]) {
  load8<is_full>(in, first, count, out);
}

template <bool is_full>
__device__ __forceinline__ void load_again8(const float* in, const float* residual, SumTile value,
                                            int64_t first, int64_t count, float (&out)[8]) {
  if (residual == nullptr) {
    load8<is_full>(in, first, count, out);
  } else {
    take8(value.at + (first - value.base), out);
  }
}

// value = gradient + residual, of the tile of a block of threads, and what `note` makes of each
// eight.
template <typename Note>
__device__ __forceinline__ void add_tile(const float* gradient, const float* residual, float* value,
                                         int64_t n, const Note& note) {
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kTile;
  const bool is_full_tile = base + kTile <= n && are_aligned(gradient, residual, value);
  TF_HIPS_PHASE(t) {
    float sum[8];
    if (is_full_tile) {
      load_sum8<true>(gradient, residual, value, base + 8 * t, n, sum);
    } else {
      load_sum8<false>(gradient, residual, value, base + 8 * t, n, sum);
    }
    note(sum);
  }
}

// The same, for codecs whose first kernel does not form it.
TF_HIPS_KERNEL add_all(const float* gradient, const float* residual, float* value, int64_t n) {
  follow();
  add_tile(gradient, residual, value, n, [](const float (&)[8]) {});
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_EIGHTS_CUH_
