// SPDX-License-Identifier: Apache-2.0
// The largest elements of a vector, and one element of a sorted vector, by counting digits of keys.

#ifndef TF_HIPS_CC_CUDA_TOP_K_CUH_
#define TF_HIPS_CC_CUDA_TOP_K_CUH_

#include "tf_hips/cc/cuda/device.cuh"
#include "tf_hips/cc/cuda/reduce.cuh"
#include "tf_hips/cc/cuda/select.cuh"

namespace tf_hips {
namespace cuda {

// Top k: the digits of the k-th largest key, from the top, by counting. The first digit is counted
// where the keys are made (rank_tile); keys that are surely too small are left behind then
// (top_k_gather, top_k_scan, top_k_pack), so that the rest looks at few.
constexpr int kBins = 2048;
constexpr int kPasses = 3;
// Blocks of threads a chunk that look at what is left.
constexpr int kFewBlocks = 8;

// What is known of a chunk.
struct Chosen {
  int64_t count, wanted;
  int64_t left;    // keys that are not too small
  uint32_t key;    // of the k-th largest, as far as its digits are known
  uint32_t equal;  // how many of those with that key are wanted
};

struct TopK {
  uint32_t* keys;  // of all elements; behind top_k_pack those that a chunk has left
  int64_t room;
  int32_t* bins;    // of each chunk kPasses * kBins, zero at first
  Chosen* chosen;   // of each chunk
  int64_t* totals;  // of each tile
  int64_t totals_room;
  uint32_t* tile_keys;    // what each tile has left, at its beginning, and where that was
  uint32_t* tile_places;  // both of `room` elements a chunk
  uint32_t* few_places;   // where those were that a chunk has left
  int64_t* out;
  int64_t out_room;
  int64_t tiles, chunks, blocks;
  int32_t run;
};

TF_HIPS_INLINE int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }

// Whether the digits before those of a pass are the ones of the wanted key.
TF_HIPS_INLINE bool is_candidate(uint32_t key, uint32_t found, int pass) {
  return pass == 0 || key >> shift_of(pass - 1) == found >> shift_of(pass - 1);
}

// Adds what a block of threads has counted to the bins of its chunk. In phases.
__device__ inline void add_bins(const int32_t* bins, int32_t* all) {
  TF_HIPS_PHASE(t) {
    for (int k = t; k < kBins; k += kThreads) {
      if (bins[k] != 0) atomicAdd(&all[k], bins[k]);
    }
  }
}

__device__ inline void clear_bins(int32_t* bins) {
  TF_HIPS_PHASE(t) {
    for (int k = t; k < kBins; k += kThreads) bins[k] = 0;
  }
}

TF_HIPS_INLINE uint32_t digit_of(uint32_t key, int pass) {
  return key >> shift_of(pass) & (pass == 2 ? 1023u : 2047u);
}

// Counts a digit of the keys that are left.
TF_HIPS_KERNEL top_k_count(const TopK call, int pass) {
  TF_HIPS_SHARED int32_t bins[kBins];
  const int64_t chunk = blockIdx.x / kFewBlocks;
  const Chosen& chosen = call.chosen[chunk];
  const uint32_t* const keys = call.keys + chunk * call.room;
  clear_bins(bins);
  TF_HIPS_PHASE(t) {
    const int64_t first = static_cast<int64_t>(blockIdx.x % kFewBlocks) * kThreads + t;
    for (int64_t k = first; k < chosen.left; k += kFewBlocks * kThreads) {
      if (!is_candidate(keys[k], chosen.key, pass)) continue;
      atomicAdd(&bins[digit_of(keys[k], pass)], 1);
    }
  }
  add_bins(bins, call.bins + (chunk * kPasses + pass) * kBins);
}

// Finds the digit of the wanted key from the counts of a pass. In phases.
__device__ inline void pick_digit(const int32_t* bins, int pass, Chosen* found) {
  TF_HIPS_SHARED int32_t sums[kThreads];
  TF_HIPS_SHARED int32_t groups[kThreads / kLanes];
  constexpr int kShare = kBins / kThreads;
  TF_HIPS_PHASE(t) {
    int32_t sum = 0;
    for (int k = 0; k < kShare; ++k) sum += bins[kShare * t + k];
    sums[t] = sum;
  }
  TF_HIPS_PHASE(t) {
    if (t < kThreads / kLanes) {
      int32_t sum = 0;
      for (int k = 0; k < kLanes; ++k) sum += sums[kLanes * t + k];
      groups[t] = sum;
    }
  }
  TF_HIPS_PHASE(t) {
    Chosen& chosen = *found;
    if (t == 0 && chosen.wanted > 0) {
      int64_t left = chosen.equal;
      int group = kThreads / kLanes - 1;
      for (; group > 0 && groups[group] < left; --group) left -= groups[group];
      int share = kLanes * group + kLanes - 1;
      for (; share > kLanes * group && sums[share] < left; --share) left -= sums[share];
      int bin = kShare * share + kShare - 1;
      for (; bin > kShare * share && bins[bin] < left; --bin) left -= bins[bin];
      chosen.key |= static_cast<uint32_t>(bin) << shift_of(pass);
      chosen.equal = static_cast<uint32_t>(left);
    }
  }
}

TF_HIPS_KERNEL top_k_pick(const TopK call, int pass) {
  const int64_t chunk = blockIdx.x;
  pick_digit(call.bins + (chunk * kPasses + pass) * kBins, pass, &call.chosen[chunk]);
}

TF_HIPS_INLINE int64_t compared(uint32_t key, const Chosen& chosen) {
  if (chosen.wanted == 0) return 0;
  return key > chosen.key ? int64_t{1} << 32 : key == chosen.key ? 1 : 0;
}

// The keys of a tile that are not too small go to its beginning, in their order.
TF_HIPS_KERNEL top_k_gather(const TopK call) {
  TF_HIPS_SHARED int64_t sums[2 * kThreads];
  for (int turn = 0; turn < call.run; ++turn) {
    const int64_t block = int64_t{blockIdx.x} * call.run + turn;
    if (block >= call.blocks) break;
    const Spot spot = find_spot(static_cast<uint32_t>(block), call.tiles);
    const Chosen& chosen = call.chosen[spot.chunk];
    const int64_t begin = spot.chunk * call.room + spot.base;
    const int count = static_cast<int>(least(kTile, chosen.count - spot.base));
    const uint32_t least_key = chosen.wanted == 0 ? 0xFFFFFFFFu : chosen.key;
    TF_HIPS_PHASE(t) {
      uint32_t here[kEach];
      take8(call.keys + begin + kEach * t, here);
      int found = 0;
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if (kEach * t + u < count && here[u] >= least_key) ++found;
      }
      sums[t] = found;
    }
    const int64_t* const scanned = scan_threads(sums);
    TF_HIPS_PHASE(t) {
      int64_t place = t == 0 ? 0 : scanned[t - 1];
      uint32_t here[kEach] = {};
      if (place < scanned[t]) take8(call.keys + begin + kEach * t, here);
      const int inside = place < scanned[t] ? count - kEach * t : 0;
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if (u >= inside || here[u] < least_key) continue;
        call.tile_keys[begin + place] = here[u];
        call.tile_places[begin + place] = static_cast<uint32_t>(spot.base + kEach * t + u);
        ++place;
      }
      if (t == kThreads - 1) {
        call.totals[spot.chunk * call.totals_room + spot.base / kTile] = place;
      }
    }
  }
}

TF_HIPS_KERNEL top_k_scan(const TopK call) {
  TF_HIPS_SHARED int64_t total;
  const int64_t chunk = blockIdx.x;
  const int64_t tiles = num_tiles(call.chosen[chunk].count);
  scan_tiles(call.totals + chunk * call.totals_room, tiles, &total);
  TF_HIPS_PHASE(t) {
    if (t == 0) call.chosen[chunk].left = total;
  }
}

// What the tiles of a chunk have left, one behind another.
TF_HIPS_KERNEL top_k_pack(const TopK call) {
  for (int turn = 0; turn < call.run; ++turn) {
    const int64_t block = int64_t{blockIdx.x} * call.run + turn;
    if (block >= call.blocks) break;
    const Spot spot = find_spot(static_cast<uint32_t>(block), call.tiles);
    const Chosen& chosen = call.chosen[spot.chunk];
    const int64_t* const before = call.totals + spot.chunk * call.totals_room;
    const int64_t tile = spot.base / kTile;
    if (spot.base >= chosen.count) break;
    const bool is_last = spot.base + kTile >= chosen.count;
    const int64_t count = (is_last ? chosen.left : before[tile + 1]) - before[tile];
    const int64_t from = spot.chunk * call.room + spot.base;
    const int64_t to = spot.chunk * call.room + before[tile];
    TF_HIPS_PHASE(t) {
      for (int64_t k = t; k < count; k += kThreads) {
        call.keys[to + k] = call.tile_keys[from + k];
        call.few_places[to + k] = call.tile_places[from + k];
      }
    }
  }
}

// Writes the places of those of a tile of keys that are among the k largest: of equal ones the
// first. `before`: what compared() is of all keys before the tile, added up; `places`: where the
// keys were, null if there. Returns where the sum of the tile's own is. In phases.
__device__ inline const int64_t* write_tile(const uint32_t* keys, const uint32_t* places,
                                            int64_t base, int64_t count, const Chosen& chosen,
                                            const int64_t* before_tile, int64_t* out) {
  TF_HIPS_SHARED int64_t sums[2 * kThreads];
  TF_HIPS_PHASE(t) {
    uint32_t here[kEach];
    take8(keys + base + kEach * t, here);
    int64_t sum = 0;
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) {
      if (base + kEach * t + u < count) sum += compared(here[u], chosen);
    }
    sums[t] = sum;
  }
  const int64_t* const scanned = scan_threads(sums);
  TF_HIPS_PHASE(t) {
    uint32_t here[kEach];
    take8(keys + base + kEach * t, here);
    int64_t before = *before_tile + (t == 0 ? 0 : scanned[t - 1]);
    TF_HIPS_UNROLL
    for (int u = 0; u < kEach; ++u) {
      const int64_t k = base + kEach * t + u;
      const int64_t own = k < count ? compared(here[u], chosen) : 0;
      const int64_t equal = least(before & 0xFFFFFFFF, chosen.equal);
      if (own > 1 || (own == 1 && equal < chosen.equal)) {
        out[(before >> 32) + equal] = places == nullptr ? k : places[k];
      }
      before += own;
    }
  }
  return scanned + kThreads - 1;
}

// What compared() is of the keys of a tile of what is left, added up. There may be as many as there
// are elements: where few are not 0, most keys are the wanted one.
TF_HIPS_KERNEL top_k_sum(const TopK call) {
  TF_HIPS_SHARED int64_t sums[kThreads];
  for (int turn = 0; turn < call.run; ++turn) {
    const int64_t block = int64_t{blockIdx.x} * call.run + turn;
    if (block >= call.blocks) break;
    const Spot spot = find_spot(static_cast<uint32_t>(block), call.tiles);
    const Chosen& chosen = call.chosen[spot.chunk];
    if (spot.base >= chosen.left) break;
    const uint32_t* const keys = call.keys + spot.chunk * call.room;
    TF_HIPS_PHASE(t) {
      uint32_t here[kEach];
      take8(keys + spot.base + kEach * t, here);
      int64_t sum = 0;
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if (spot.base + kEach * t + u < chosen.left) sum += compared(here[u], chosen);
      }
      sums[t] = sum;
    }
    sum_threads(sums, &call.totals[spot.chunk * call.totals_room + spot.base / kTile]);
  }
}

TF_HIPS_KERNEL top_k_write(const TopK call) {
  TF_HIPS_SHARED int64_t sums[kThreads];
  TF_HIPS_SHARED int64_t before;
  for (int turn = 0; turn < call.run; ++turn) {
    const int64_t block = int64_t{blockIdx.x} * call.run + turn;
    if (block >= call.blocks) break;
    const Spot spot = find_spot(static_cast<uint32_t>(block), call.tiles);
    const Chosen& chosen = call.chosen[spot.chunk];
    if (spot.base >= chosen.left) break;
    const int64_t* const totals = call.totals + spot.chunk * call.totals_room;
    TF_HIPS_PHASE(t) {
      int64_t sum = 0;
      for (int64_t k = t; k < spot.base / kTile; k += kThreads) sum += totals[k];
      sums[t] = sum;
    }
    sum_threads(sums, &before);
    const int64_t first = spot.chunk * call.room;
    write_tile(call.keys + first, call.few_places + first, spot.base, chosen.left, chosen, &before,
               call.out + spot.chunk * call.out_room);
  }
}

// The key that is the wanted one of few keys, by one block of threads. `chosen`: nothing is known
// but numbers. In phases.
__device__ inline void find_key(const uint32_t* keys, Chosen* chosen) {
  TF_HIPS_SHARED int32_t bins[kBins];
  for (int pass = 0; pass < kPasses; ++pass) {
    clear_bins(bins);
    for (int64_t base = 0; base < chosen->count; base += kTile) {
      TF_HIPS_PHASE(t) {
        uint32_t here[kEach];
        take8(keys + base + kEach * t, here);
        TF_HIPS_UNROLL
        for (int u = 0; u < kEach; ++u) {
          if (base + kEach * t + u >= chosen->count) continue;
          if (!is_candidate(here[u], chosen->key, pass)) continue;
          atomicAdd(&bins[digit_of(here[u], pass)], 1);
        }
      }
    }
    pick_digit(bins, pass, chosen);
  }
}

// Which of `count` keys is at place `index` when they are sorted, upwards; 0 where there is none.
// In phases; all threads must call it.
__device__ inline void pick_sorted(const uint32_t* keys, int64_t count, int64_t index,
                                   uint32_t* key) {
  TF_HIPS_SHARED Chosen chosen;
  TF_HIPS_PHASE(t) {
    if (t == 0) {
      const int64_t wanted = index >= 0 && index < count ? count - index : 0;
      chosen = {count, wanted, 0, 0u, static_cast<uint32_t>(wanted)};
    }
  }
  find_key(keys, &chosen);
  TF_HIPS_PHASE(t) {
    if (t == 0) *key = chosen.key;
  }
}

// All of it by one block of threads, for one chunk of few keys, of which no digit is counted yet.
__device__ inline void top_k_alone(const TopK& call) {
  TF_HIPS_SHARED int64_t before;
  const Chosen& chosen = *call.chosen;
  find_key(call.keys, call.chosen);
  TF_HIPS_PHASE(t) {
    if (t == 0) before = 0;
  }
  for (int64_t base = 0; base < chosen.count; base += kTile) {
    const int64_t* const sum =
        write_tile(call.keys, nullptr, base, chosen.count, chosen, &before, call.out);
    TF_HIPS_PHASE(t) {
      if (t == 0) before += *sum;
    }
  }
}

// Of the keys of each chunk, whose first digit is counted, the places of the largest, ascending.
inline void run_top_k(const TopK& call, cudaStream_t stream) {
  const int64_t runs = num_runs(call.blocks, call.run);
  TF_HIPS_LAUNCH(top_k_pick, call.chunks, kThreads, stream, call, 0);
  TF_HIPS_LAUNCH(top_k_gather, runs, kThreads, stream, call);
  TF_HIPS_LAUNCH(top_k_scan, call.chunks, kThreads, stream, call);
  TF_HIPS_LAUNCH(top_k_pack, runs, kThreads, stream, call);
  for (int pass = 1; pass < kPasses; ++pass) {
    TF_HIPS_LAUNCH(top_k_count, kFewBlocks * call.chunks, kThreads, stream, call, pass);
    TF_HIPS_LAUNCH(top_k_pick, call.chunks, kThreads, stream, call, pass);
  }
  TF_HIPS_LAUNCH(top_k_sum, runs, kThreads, stream, call);
  TF_HIPS_LAUNCH(top_k_write, runs, kThreads, stream, call);
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_TOP_K_CUH_
