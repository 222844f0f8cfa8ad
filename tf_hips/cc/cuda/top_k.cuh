// SPDX-License-Identifier: Apache-2.0
// The largest elements of a vector, and one element of a sorted vector, by counting digits of keys.

#ifndef TF_HIPS_CC_CUDA_TOP_K_CUH_
#define TF_HIPS_CC_CUDA_TOP_K_CUH_

#include "tf_hips/cc/cuda/device.cuh"
#include "tf_hips/cc/cuda/reduce.cuh"
#include "tf_hips/cc/cuda/select.cuh"

namespace tf_hips {
namespace cuda {

// Top k. A sample tells below which key surely none of the k largest is. Those that are not below
// are left by the only kernel that makes keys, which counts their first digits (top_k_settle makes
// it leave all where the sample was wrong). Of what is left each digit of the k-th largest key is
// found by counting, from the top.
constexpr int kBins = 2048;
constexpr int kPasses = 3;
// Behind the bins of a chunk: how many blocks of threads are done, by passes.
constexpr int kCounters = 32;
constexpr int kCounts = kPasses * kBins + kCounters;
constexpr int kSamples = 2048;
// Blocks of threads a chunk that look at what is left.
constexpr int kFewBlocks = 32;

// What is known of a chunk.
struct Chosen {
  int64_t count, wanted;
  int64_t left;    // keys that are not too small
  uint32_t key;    // of the k-th largest, as far as its digits are known
  uint32_t equal;  // how many of those with that key are wanted
  uint32_t least;  // keys below it are too small
};

struct TopK {
  uint32_t* keys;  // those that a chunk has left
  int64_t room;
  int32_t* bins;    // of each chunk kCounts, zero at first
  Chosen* chosen;   // of each chunk
  int64_t* totals;  // of each tile
  int64_t totals_room;
  uint32_t* tile_keys;    // what each tile has left, at its beginning, and where that was
  uint32_t* tile_places;  // both of `room` elements a chunk
  uint32_t* few_places;   // where those were that a chunk has left
  int64_t* out;
  int64_t out_room;
  int64_t tiles, chunks;
};

TF_HIPS_INLINE int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }

// Whether the digits before those of a pass are the ones of the wanted key.
TF_HIPS_INLINE bool is_candidate(uint32_t key, uint32_t found, int pass) {
  return pass == 0 || key >> shift_of(pass - 1) == found >> shift_of(pass - 1);
}

// Adds what a block of threads has counted to the bins of its chunk. In phases. `first`: bins
// before it count nothing.
__device__ inline void add_bins(const int32_t* bins, int32_t* all, uint32_t first = 0) {
  TF_HIPS_PHASE(t) {
    for (uint32_t k = first + t; k < kBins; k += kThreads) {
      if (bins[k] != 0) atomicAdd(&all[k], bins[k]);
    }
  }
}

__device__ inline void clear_bins(int32_t* bins, uint32_t first = 0) {
  TF_HIPS_PHASE(t) {
    for (uint32_t k = first + t; k < kBins; k += kThreads) bins[k] = 0;
  }
}

// What this thread has written or seen is there for others that see what it writes next.
TF_HIPS_INLINE void fence() {
#ifdef __CUDA_ARCH__
  __threadfence();
#endif
}

// Whether a block of threads is the last of `blocks` to get here; it then sees what the others have
// written. `counter`: zero at first. In phases.
__device__ inline bool is_last_block(int32_t* counter, int64_t blocks) {
  TF_HIPS_SHARED int32_t before;
  TF_HIPS_PHASE(t) {
    if (t == 0) {
      fence();
      before = atomicAdd(counter, 1);
      fence();
    }
  }
  return before == blocks - 1;
}

TF_HIPS_INLINE uint32_t digit_of(uint32_t key, int pass) {
  return key >> shift_of(pass) & (pass == 2 ? 1023u : 2047u);
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

// A digit of the wanted key, from the bins of its chunk.
__device__ inline void pick_pass(const TopK& call, int64_t chunk, int pass) {
  pick_digit(call.bins + chunk * kCounts + pass * kBins, pass, &call.chosen[chunk]);
}

// The same by the last of `blocks` blocks of threads of a chunk, which have counted `bins`.
__device__ inline void pick_last(const TopK& call, int64_t chunk, int pass, const int32_t* bins,
                                 int64_t blocks) {
  int32_t* const counts = call.bins + chunk * kCounts;
  add_bins(bins, counts + pass * kBins);
  if (is_last_block(counts + kPasses * kBins + pass, blocks)) pick_pass(call, chunk, pass);
}

TF_HIPS_INLINE int64_t compared(uint32_t key, const Chosen& chosen) {
  if (chosen.wanted == 0) return 0;
  return key > chosen.key ? int64_t{1} << 32 : key == chosen.key ? 1 : 0;
}

TF_HIPS_INLINE Chosen chosen_of(int64_t size, int64_t wanted) {
  return {size, wanted, 0, 0u, static_cast<uint32_t>(wanted), wanted == 0 ? 0xFFFFFFFFu : 0u};
}

TF_HIPS_INLINE int64_t num_samples(int64_t size) { return least(kSamples, size); }

// The element that is a sample: one of each as many neighbours, but none that a period would meet.
TF_HIPS_INLINE int64_t sample_place(int64_t number, int64_t size) {
  if (number >= num_samples(size)) return -1;
  const int64_t step = size / num_samples(size);
  uint32_t hash = static_cast<uint32_t>(number + 1) * 2654435769u;
  hash = (hash ^ hash >> 15) * 2246822519u;
  return number * step + static_cast<int64_t>(static_cast<uint64_t>(hash) * step >> 32);
}

// Which of the sorted samples is taken for `least`: a rank that fewer of the k largest exceed than
// chance has it once in some hundred million chunks.
TF_HIPS_INLINE int64_t sample_rank(const Chosen& chosen) {
  const int64_t samples = num_samples(chosen.count);
  const float mean = static_cast<float>(chosen.wanted) * static_cast<float>(samples) /
                     static_cast<float>(chosen.count);
  return samples - static_cast<int64_t>(mean + 6.0f * std::sqrt(mean) + 7.0f);
}

// The keys that a tile keeps, and where they are, go to its beginning, in their order. In phases.
__device__ inline void leave_tile(const TopK& call, const Spot& spot, const uint32_t* keys,
                                  const Kept& kept, int32_t* bins) {
  uint32_t* const keys_left = call.tile_keys + spot.chunk * call.room + spot.base;
  uint32_t* const places_left = call.tile_places + spot.chunk * call.room + spot.base;
  int64_t* const total = call.totals + spot.chunk * call.totals_room + spot.base / kTile;
  TF_HIPS_PHASE(t) {
    each_kept(t, kept, total, [&](int u, int place) {
      const uint32_t key = keys[kEach * t + u];
      keys_left[place] = key;
      places_left[place] = static_cast<uint32_t>(spot.base) + kEach * t + u;
      atomicAdd(&bins[digit_of(key, 0)], 1);
    });
  }
}

// What the tiles of a chunk have left. False if that is less than is wanted. In phases.
__device__ inline bool scan_left(const TopK& call, int64_t chunk) {
  TF_HIPS_SHARED int64_t total;
  Chosen& chosen = call.chosen[chunk];
  scan_tiles(call.totals + chunk * call.totals_room, num_tiles(chosen.count), &total);
  TF_HIPS_PHASE(t) {
    if (t == 0) chosen.left = total;
  }
  return total >= chosen.wanted;
}

// Lets all keys of a chunk be left, and forgets what was counted.
__device__ inline void leave_all(const TopK& call, int64_t chunk) {
  clear_bins(call.bins + chunk * kCounts);
  TF_HIPS_PHASE(t) {
    if (t == 0) call.chosen[chunk].least = 0;
  }
}

// What the tiles of a chunk have left, one behind another; the second digit is counted.
TF_HIPS_KERNEL top_k_pack(const TopK call) {
  follow();
  TF_HIPS_SHARED int32_t bins[kBins];
  const uint32_t blocks = static_cast<uint32_t>(num_packers(call.tiles));
  const uint32_t chunk = blockIdx.x / blocks;
  const uint32_t first = (blockIdx.x - chunk * blocks) * kPackedTiles;
  const Chosen& chosen = call.chosen[chunk];
  clear_bins(bins);
  TF_HIPS_PHASE(t) {
    const int64_t tile = first + t / kPackers, tiles = num_tiles(chosen.count);
    if (tile < tiles) {
      const int64_t* const before = call.totals + chunk * call.totals_room + tile;
      const int64_t count = (tile + 1 == tiles ? chosen.left : before[1]) - before[0];
      const int64_t from = chunk * call.room + tile * kTile;
      const int64_t to = chunk * call.room + before[0];
      const uint32_t found = chosen.key;
      for (int64_t first_here = t % kPackers; first_here < count;
           first_here += kPackers * kPackedAtOnce) {
        // All are read before the first is written, or each would wait for the one before.
        uint32_t keys[kPackedAtOnce], places[kPackedAtOnce];
        TF_HIPS_UNROLL
        for (int u = 0; u < kPackedAtOnce; ++u) {
          const int64_t k = first_here + u * kPackers;
          if (k < count) keys[u] = call.tile_keys[from + k], places[u] = call.tile_places[from + k];
        }
        TF_HIPS_UNROLL
        for (int u = 0; u < kPackedAtOnce; ++u) {
          const int64_t k = first_here + u * kPackers;
          if (k >= count) break;
          call.keys[to + k] = keys[u];
          call.few_places[to + k] = places[u];
          if (is_candidate(keys[u], found, 1)) atomicAdd(&bins[digit_of(keys[u], 1)], 1);
        }
      }
    }
  }
  pick_last(call, chunk, 1, bins, blocks);
}

// The last digit is counted.
TF_HIPS_KERNEL top_k_count(const TopK call) {
  follow();
  TF_HIPS_SHARED int32_t bins[kBins];
  constexpr int kPass = kPasses - 1;
  const int64_t chunk = blockIdx.x / kFewBlocks;
  const Chosen& chosen = call.chosen[chunk];
  const int64_t left = chosen.left, first = int64_t{blockIdx.x % kFewBlocks} * kTile;
  clear_bins(bins);
  TF_HIPS_PHASE(t) {
    for (int64_t base = first; base < left; base += kFewBlocks * kTile) {
      uint32_t here[kEach];
      take8(call.keys + chunk * call.room + base + kEach * t, here);
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if (base + kEach * t + u >= left || !is_candidate(here[u], chosen.key, kPass)) continue;
        atomicAdd(&bins[digit_of(here[u], kPass)], 1);
      }
    }
  }
  pick_last(call, chunk, kPass, bins, kFewBlocks);
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
  follow();
  TF_HIPS_SHARED int64_t sums[kThreads];
  const int64_t chunk = blockIdx.x / kFewBlocks;
  const Chosen& chosen = call.chosen[chunk];
  const uint32_t* const keys = call.keys + chunk * call.room;
  for (int64_t tile = blockIdx.x % kFewBlocks; tile * kTile < chosen.left; tile += kFewBlocks) {
    TF_HIPS_PHASE(t) {
      uint32_t here[kEach];
      const int64_t first = tile * kTile + kEach * t;
      take8(keys + first, here);
      int64_t sum = 0;
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if (first + u < chosen.left) sum += compared(here[u], chosen);
      }
      sums[t] = sum;
    }
    sum_threads(sums, &call.totals[chunk * call.totals_room + tile]);
  }
}

TF_HIPS_KERNEL top_k_write(const TopK call) {
  follow();
  TF_HIPS_SHARED int64_t sums[kThreads];
  TF_HIPS_SHARED int64_t before;
  const int64_t chunk = blockIdx.x / kFewBlocks, first = chunk * call.room;
  const Chosen& chosen = call.chosen[chunk];
  const int64_t* const totals = call.totals + chunk * call.totals_room;
  for (int64_t tile = blockIdx.x % kFewBlocks; tile * kTile < chosen.left; tile += kFewBlocks) {
    TF_HIPS_PHASE(t) {
      int64_t sum = 0;
      for (int64_t k = t; k < tile; k += kThreads) sum += totals[k];
      sums[t] = sum;
    }
    sum_threads(sums, &before);
    write_tile(call.keys + first, call.few_places + first, tile * kTile, chosen.left, chosen,
               &before, call.out + chunk * call.out_room);
  }
}

// The key that is the wanted one of few keys, as far as `passes` digits tell it, by one block of
// threads. `chosen`: nothing is known but numbers. In phases.
__device__ inline void find_key(const uint32_t* keys, Chosen* chosen, int passes = kPasses) {
  TF_HIPS_SHARED int32_t bins[kBins];
  // Tiles whose keys a thread reads before it counts any: it waits for memory once.
  constexpr int kAtOnce = 4;
  const int64_t count = chosen->count;
  for (int pass = 0; pass < passes; ++pass) {
    clear_bins(bins);
    TF_HIPS_PHASE(t) {
      const uint32_t found = chosen->key;
      for (int64_t base = kEach * t; base < count; base += kAtOnce * kTile) {
        uint32_t here[kAtOnce][kEach];
        TF_HIPS_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (base + k * kTile < count) take8(keys + base + k * kTile, here[k]);
        }
        TF_HIPS_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          const int64_t inside = count - base - k * kTile;
          TF_HIPS_UNROLL
          for (int u = 0; u < kEach; ++u) {
            if (u >= inside || !is_candidate(here[k][u], found, pass)) continue;
            atomicAdd(&bins[digit_of(here[k][u], pass)], 1);
          }
        }
      }
    }
    pick_digit(bins, pass, chosen);
  }
}

// Which of `count` keys is at place `index` when they are sorted, upwards; 0 where there is none.
// `passes`: digits behind so many are 0. In phases; all threads must call it.
__device__ inline void pick_sorted(const uint32_t* keys, int64_t count, int64_t index,
                                   uint32_t* key, int passes = kPasses) {
  TF_HIPS_SHARED Chosen chosen;
  TF_HIPS_PHASE(t) {
    if (t == 0) {
      const int64_t wanted = index >= 0 && index < count ? count - index : 0;
      chosen = chosen_of(count, wanted);
    }
  }
  find_key(keys, &chosen, passes);
  TF_HIPS_PHASE(t) {
    if (t == 0) *key = chosen.key;
  }
}

// Below which key surely none of the largest is, from those of a sample. In phases.
__device__ inline void guess_least(const uint32_t* keys, Chosen* chosen) {
  TF_HIPS_SHARED uint32_t key;
  if (chosen->wanted == 0) return;
  // Two digits tell it near enough.
  pick_sorted(keys, num_samples(chosen->count), sample_rank(*chosen), &key, 2);
  TF_HIPS_PHASE(t) {
    if (t == 0) chosen->least = key;
  }
}

// All of it by one block of threads, for one chunk of few keys, all of which are left, and of which
// no digit is counted.
__device__ inline void top_k_alone(const TopK& call) {
  TF_HIPS_SHARED int64_t before;
  const Chosen& chosen = *call.chosen;
  find_key(call.tile_keys, call.chosen);
  TF_HIPS_PHASE(t) {
    if (t == 0) before = 0;
  }
  for (int64_t base = 0; base < chosen.count; base += kTile) {
    const int64_t* const sum =
        write_tile(call.tile_keys, nullptr, base, chosen.count, chosen, &before, call.out);
    TF_HIPS_PHASE(t) {
      if (t == 0) before += *sum;
    }
  }
}

// Of what each chunk has left, of whose wanted key the first digit is known, the places of the
// largest, ascending.
inline void run_top_k(const TopK& call, cudaStream_t stream) {
  const int64_t packers = num_packers(call.tiles);
  const int64_t few = kFewBlocks * call.chunks;
  TF_HIPS_FOLLOW(top_k_pack, packers * call.chunks, kThreads, stream, call);
  TF_HIPS_FOLLOW(top_k_count, few, kThreads, stream, call);
  TF_HIPS_FOLLOW(top_k_sum, few, kThreads, stream, call);
  TF_HIPS_FOLLOW(top_k_write, few, kThreads, stream, call);
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_TOP_K_CUH_
