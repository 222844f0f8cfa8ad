// SPDX-License-Identifier: Apache-2.0
// One key of many, by its place among them when they are sorted, without sorting: digits are
// counted, from the top, until few keys can still be the one.

#ifndef TF_HIPS_CC_CUDA_PICKED_CUH_
#define TF_HIPS_CC_CUDA_PICKED_CUH_

#include "tf_hips/cc/cuda/select.cuh"
#include "tf_hips/cc/cuda/wide.cuh"

// Up to so many tiles a vector is small enough for one wide block a chunk.
#ifndef TF_HIPS_FEW_TILES
#define TF_HIPS_FEW_TILES 32
#endif

namespace tf_hips {
namespace cuda {

// So many keys are compared with each other instead of counted, by a wide block.
constexpr int kFewKeys = 256;
// By so many bits a key is shifted for its first digit.
constexpr int kFirstShift = 32 - kBinBits;

TF_HIPS_INLINE bool is_few_tiles(int64_t tiles) { return tiles <= TF_HIPS_FEW_TILES; }

// Whether one wide block makes and picks keys sooner than two kernels.
TF_HIPS_INLINE bool is_few_picks(int64_t tiles) { return is_few_tiles(tiles) && tiles <= 8; }

// Which keys can still be the wanted one: those from `low` to `low + last`.
struct Span {
  uint32_t low, last;
  int32_t bits;    // of which `last` has no more
  int32_t wanted;  // which of them that is, counted from the largest
  int32_t inside;  // how many there are
};

TF_HIPS_INLINE Span span_of(uint32_t low, int32_t bits, const Picked& picked) {
  const uint32_t most = 0xFFFFFFFFu - low;
  const uint32_t last = bits < 32 && (1u << bits) - 1 < most ? (1u << bits) - 1 : most;
  return {low, last, bits, picked.wanted, picked.inside};
}

// Whether one of few keys is the wanted one of them, counted from the largest; then `equal` becomes
// which of those with that key it is. All that have it say the same.
TF_HIPS_INLINE bool is_wanted(const uint32_t* few, const Span& span, uint32_t key, int32_t* equal) {
  int32_t larger = 0, same = 0;
  for (int k = 0; k < span.inside; ++k) {
    larger += few[k] > key ? 1 : 0;
    same += few[k] == key ? 1 : 0;
  }
  if (larger >= span.wanted || span.wanted > larger + same) return false;
  *equal = span.wanted - larger;
  return true;
}

// Calls `use` with each of few keys, eight neighbours of a tile by a thread.
template <typename Use>
TF_HIPS_INLINE void each_key(const uint32_t* keys, int32_t count, int t, const Use& use) {
  // Tiles whose keys a thread reads before it uses any: it waits for memory once.
  constexpr int kAtOnce = 2;
  for (int32_t base = kEach * t; base < count; base += kAtOnce * kTile) {
    uint32_t here[kAtOnce][kEach];
    TF_HIPS_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      if (base + k * kTile < count) take8(keys + base + k * kTile, here[k]);
    }
    TF_HIPS_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const int32_t inside = count - base - k * kTile;
      if (inside <= 0) break;
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if (u < inside) use(here[k][u]);
      }
    }
  }
}

// The key that is the wanted one of few keys, counted from the largest, and which of those with
// that key it is; by one block of threads. In phases.
__device__ inline void find_key(const uint32_t* keys, int32_t count, int32_t wanted, uint32_t* key,
                                int32_t* equal) {
  TF_HIPS_SHARED int32_t bins[kBins];
  TF_HIPS_SHARED uint32_t few[kThreads];
  TF_HIPS_SHARED int32_t num_few;
  TF_HIPS_SHARED Picked picked;
  Span span = {0, 0xFFFFFFFFu, 32, wanted, count};
  TF_HIPS_PHASE(t) {
    if (t == 0) num_few = 0;
  }
  while (span.bits > 0 && span.inside > kThreads) {
    const int shift = span.bits > kBinBits ? span.bits - kBinBits : 0;
    TF_HIPS_PHASE(t) {
      for (int k = t; k < kBins / 4; k += kThreads) reinterpret_cast<uint4*>(bins)[k] = {};
    }
    TF_HIPS_PHASE(t) {
      each_key(keys, count, t, [&](uint32_t one) {
        if (one - span.low <= span.last) atomicAdd(&bins[(one - span.low) >> shift], 1);
      });
    }
    pick_bin<kThreads>(bins, span.wanted, &picked);
    span = span_of(span.low + (static_cast<uint32_t>(picked.bin) << shift), shift, picked);
  }
  if (span.inside > kThreads) {
    TF_HIPS_PHASE(t) {
      if (t == 0) *key = span.low, *equal = span.wanted;
    }
    return;
  }
  // So few that each is compared with the others.
  TF_HIPS_PHASE(t) {
    each_key(keys, count, t, [&](uint32_t one) {
      if (one - span.low <= span.last) few[atomicAdd(&num_few, 1)] = one;
    });
  }
  TF_HIPS_PHASE(t) {
    if (t < span.inside) {
      const uint32_t own = few[t];
      if (is_wanted(few, span, own, equal)) *key = own;
    }
  }
}

// Which of `count` keys is at place `index` when they are sorted, upwards; 0 where there is none.
// In phases; all threads must call it.
__device__ inline void pick_sorted(const uint32_t* keys, int64_t count, int64_t index,
                                   uint32_t* key) {
  TF_HIPS_SHARED int32_t equal;
  if (index < 0 || index >= count) {
    TF_HIPS_PHASE(t) {
      if (t == 0) *key = 0;
    }
    return;
  }
  find_key(keys, static_cast<int32_t>(count), static_cast<int32_t>(count - index), key, &equal);
}

// As pick_sorted, by a wide block, which makes the keys, too, and leaves them in `keys`.
// key_at(number of an element): its key; put(key) takes the one. In phases.
template <typename KeyAt, typename Put>
__device__ __forceinline__ void pick_made(int64_t count, int64_t index, uint32_t* keys,
                                          const KeyAt& key_at, const Put& put) {
  // Keys that a thread makes at once, and so reads for.
  constexpr int kAtOnce = 4;
  TF_HIPS_SHARED int32_t bins[kBins];
  TF_HIPS_SHARED uint32_t few[kFewKeys];
  TF_HIPS_SHARED int32_t num_few;
  TF_HIPS_SHARED Picked picked;
  if (index < 0 || index >= count) {
    TF_HIPS_WIDE(t) {
      if (t == 0) put(0u);
    }
    return;
  }
  Span span = {0, 0xFFFFFFFFu, 32, static_cast<int32_t>(count - index),
               static_cast<int32_t>(count)};
  while (span.bits > 0 && (span.bits == 32 || span.inside > kFewKeys)) {
    const int shift = span.bits > kBinBits ? span.bits - kBinBits : 0;
    const bool is_first = span.bits == 32;
    TF_HIPS_WIDE(t) {
      for (int k = t; k < kBins; k += kWide) bins[k] = 0;
      if (t == 0) num_few = 0;
    }
    TF_HIPS_WIDE(t) {
      for (int64_t first = t; first < count; first += kAtOnce * kWide) {
        uint32_t made[kAtOnce];
        TF_HIPS_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          const int64_t k = first + u * kWide;
          made[u] = k >= count ? 0 : is_first ? key_at(k) : keys[k];
        }
        TF_HIPS_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          const int64_t k = first + u * kWide;
          if (k >= count) break;
          if (is_first) keys[k] = made[u];
          const uint32_t offset = made[u] - span.low;
          if (offset <= span.last) atomicAdd(&bins[offset >> shift], 1);
        }
      }
    }
    pick_bin<kWide>(bins, span.wanted, &picked);
    span = span_of(span.low + (static_cast<uint32_t>(picked.bin) << shift), shift, picked);
  }
  if (span.inside > kFewKeys) {
    TF_HIPS_WIDE(t) {
      if (t == 0) put(span.low);
    }
    return;
  }
  // So few that each is compared with the others.
  TF_HIPS_WIDE(t) {
    for (int64_t k = t; k < count; k += kWide) {
      if (keys[k] - span.low <= span.last) few[atomicAdd(&num_few, 1)] = keys[k];
    }
  }
  TF_HIPS_WIDE(t) {
    if (t < span.inside) {
      int32_t equal = 0;
      if (is_wanted(few, span, few[t], &equal)) put(few[t]);
    }
  }
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_PICKED_CUH_
