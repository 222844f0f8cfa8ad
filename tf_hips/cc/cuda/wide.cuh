// SPDX-License-Identifier: Apache-2.0
// What one block of many threads does for a chunk: it counts keys, picks one of them by that, and
// goes through what others have left, without a kernel for each step.
//
// A GPU has shuffles and votes of a warp for this; the emulation has plain twins, in which one
// thread does what its warp would do.

#ifndef TF_HIPS_CC_CUDA_WIDE_CUH_
#define TF_HIPS_CC_CUDA_WIDE_CUH_

#include "tf_hips/cc/cuda/device.cuh"

namespace tf_hips {
namespace cuda {

constexpr int kWarp = 32;
constexpr int kWarps = kWide / kWarp;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;

// A bin that holds the wanted key.
struct Picked {
  int32_t bin;
  int32_t wanted;  // which of its keys that is, counted from the largest: 1 is the largest
  int32_t inside;  // how many keys it has
  int32_t top;     // the highest bin that has any
};

// Finds the bin of the wanted key from the counts of all, in a block of `threads` threads, each of
// which must call it. `wanted`: 1 for the largest, and no more than there are keys. In phases.
template <int threads>
__device__ __forceinline__ void pick_bin(const int32_t* bins, int32_t wanted, Picked* picked) {
#ifdef __CUDA_ARCH__
  constexpr int kShare = kBins / threads;
  __shared__ int32_t sums[threads / kWarp];
  const int t = static_cast<int>(threadIdx.x), lane = t % kWarp, warp = t / kWarp;
  // Thread 0 has the highest bins.
  const int first = kShare * (threads - 1 - t);
  int32_t here[kShare];
  if constexpr (kShare % 4 == 0) {
    TF_HIPS_UNROLL
    for (int k = 0; k < kShare / 4; ++k) {
      const int4 four = reinterpret_cast<const int4*>(bins + first)[k];
      here[4 * k] = four.x, here[4 * k + 1] = four.y;
      here[4 * k + 2] = four.z, here[4 * k + 3] = four.w;
    }
  } else {
    TF_HIPS_UNROLL
    for (int k = 0; k < kShare; ++k) here[k] = bins[first + k];
  }
  int32_t own = 0;
  TF_HIPS_UNROLL
  for (int k = 0; k < kShare; ++k) own += here[k];
  int32_t sum = own;
  TF_HIPS_UNROLL
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == kWarp - 1) sums[warp] = sum;
  __syncthreads();
  const int32_t others = lane < warp ? sums[lane] : 0;
  int32_t above = sum_of_warp(others) + sum - own;
  const bool has_it = above < wanted && wanted <= above + own;
  const bool is_top = above == 0 && own != 0;
  if (has_it || is_top) {
    int top = -1;
    TF_HIPS_UNROLL
    for (int k = kShare - 1; k >= 0; --k) {
      if (top < 0 && here[k] != 0) top = first + k;
      if (above < wanted && wanted <= above + here[k]) {
        picked->bin = first + k;
        picked->wanted = wanted - above;
        picked->inside = here[k];
      }
      above += here[k];
    }
    if (is_top) picked->top = top;
  }
  __syncthreads();
#else
  const auto pick = [&](int t) {
    if (t != 0) return;
    int32_t above = 0;
    picked->top = -1;
    for (int bin = kBins - 1; bin >= 0 && above < wanted; --bin) {
      if (picked->top < 0 && bins[bin] != 0) picked->top = bin;
      if (wanted <= above + bins[bin]) *picked = {bin, wanted - above, bins[bin], picked->top};
      above += bins[bin];
    }
  };
  if constexpr (threads == kThreads) {
    TF_HIPS_PHASE(t) { pick(t); }
  } else {
    TF_HIPS_WIDE(t) { pick(t); }
  }
#endif
}

// What a chunk has left, in segments of `each` elements, which begin with what they have.
struct Left {
  const uint32_t* keys;
  const uint32_t* places;  // null: where a key lies is its place
  const int32_t* counts;   // of each segment; null: each is full but the last
  int64_t count;           // of all elements of the chunk
  int64_t segments, each;
};

TF_HIPS_INLINE int32_t count_of(const Left& left, int64_t segment) {
  if (left.counts != nullptr) return left.counts[segment];
  return static_cast<int32_t>(least(left.each, left.count - segment * left.each));
}

// Neighbours that a lane of a warp has at a time, and of a piece, which some lanes of it have.
constexpr int kLaneKeys = 4;
constexpr int kPiece = 32;
constexpr int kPieceLanes = kPiece / kLaneKeys;

// How many keys come before those of a lane, of all that its warp has.
struct Before {
  int32_t above, equal;
};

// The sum of what the lanes below have, up to seven each, and *all: of all lanes.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ int32_t sum_below(int32_t own, int32_t* all) {
  const unsigned lower = (1u << (threadIdx.x % kWarp)) - 1;
  int32_t sum = 0;
  TF_HIPS_UNROLL
  for (int bit = 0; bit < 3; ++bit) {
    const unsigned has = __ballot_sync(0xFFFFFFFFu, own >> bit & 1);
    sum += __popc(has & lower) << bit;
    *all += __popc(has) << bit;
  }
  return sum;
}
#endif

// A warp's lanes ask together, each for what it has. *before: of what the warp had until now.
TF_HIPS_INLINE Before count_before(int32_t above, int32_t equal, Before* before) {
#ifdef __CUDA_ARCH__
  Before here = *before;
  here.above += sum_below(above, &before->above);
  // Hardly any are, but where all are.
  if (__any_sync(0xFFFFFFFFu, equal != 0)) here.equal += sum_below(equal, &before->equal);
#else
  const Before here = *before;
  before->above += above;
  before->equal += equal;
#endif
  return here;
}

// Calls `use` with the keys of the share of what is left that thread t's warp has, which is a part
// without gaps: up to kLaneKeys neighbours and how many there are, with their places if
// `has_places`. All lanes of a warp call it together, in the order of keys.
template <bool has_places, typename Use>
__device__ __forceinline__ void each_left(const Left& left, int t, const Use& use) {
  const int64_t share = (left.segments + kWarps - 1) / kWarps, begin = share * (t / kWarp);
  const int64_t end = least(left.segments, begin + share);
#ifdef __CUDA_ARCH__
  constexpr unsigned kAll = 0xFFFFFFFFu;
  constexpr int kAtOnce = has_places ? 2 : 4;
  constexpr int kPieces = kWarp / kPieceLanes;
  const int lane = t % kWarp, skipped = kLaneKeys * (lane % kPieceLanes);
  for (int64_t first = begin; first < end; first += kWarp) {
    // A lane has a segment, which has pieces.
    const int count = first + lane < end ? count_of(left, first + lane) : 0;
    const int pieces = (count + kPiece - 1) / kPiece;
    int until = pieces;
    TF_HIPS_UNROLL
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(kAll, until, step);
      if (lane >= step) until += before;
    }
    const int number = __shfl_sync(kAll, until, kWarp - 1);
    for (int piece = 0; piece < number; piece += kWarp) {
      // Then it has a piece: it looks for the segment of that.
      int at = 0;
      TF_HIPS_UNROLL
      for (int step = kWarp / 2; step > 0; step /= 2) {
        if (__shfl_sync(kAll, until, at + step - 1) <= piece + lane) at += step;
      }
      const int inside = kPiece * (piece + lane - __shfl_sync(kAll, until - pieces, at));
      const int keys_here = __shfl_sync(kAll, count, at) - inside;
      const int valid = piece + lane < number ? keys_here : 0;
      const uint32_t from = static_cast<uint32_t>((first + at) * left.each) + inside;
      for (int k = 0; k < kWarp && piece + k < number; k += kAtOnce * kPieces) {
        // All are read before the first is used.
        uint4 keys[kAtOnce], places[kAtOnce];
        int number_here[kAtOnce];
        TF_HIPS_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          const int own = k + u * kPieces + lane / kPieceLanes;
          const uint32_t place = __shfl_sync(kAll, from, own) + skipped;
          number_here[u] = __shfl_sync(kAll, valid, own) - skipped;
          keys[u] = {};
          places[u] = {place, place + 1, place + 2, place + 3};
          if (number_here[u] > 0) {
            keys[u] = *reinterpret_cast<const uint4*>(left.keys + place);
            if (has_places && left.places != nullptr) {
              places[u] = *reinterpret_cast<const uint4*>(left.places + place);
            }
          }
        }
        TF_HIPS_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          const uint32_t keys_of[] = {keys[u].x, keys[u].y, keys[u].z, keys[u].w};
          const uint32_t places_of[] = {places[u].x, places[u].y, places[u].z, places[u].w};
          use(keys_of, places_of, number_here[u]);
        }
      }
    }
  }
#else
  if (t % kWarp != 0) return;
  for (int64_t segment = begin; segment < end; ++segment) {
    const int64_t from = segment * left.each, until = from + count_of(left, segment);
    for (int64_t k = from; k < until; k += kLaneKeys) {
      uint32_t keys[kLaneKeys] = {}, places[kLaneKeys] = {};
      for (int u = 0; u < kLaneKeys && k + u < until; ++u) {
        const bool has_place = has_places && left.places != nullptr;
        keys[u] = left.keys[k + u];
        places[u] = has_place ? left.places[k + u] : static_cast<uint32_t>(k + u);
      }
      use(keys, places, static_cast<int>(least(kLaneKeys, until - k)));
    }
  }
#endif
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_WIDE_CUH_
