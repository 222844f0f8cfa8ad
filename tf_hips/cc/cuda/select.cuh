// SPDX-License-Identifier: Apache-2.0
// Vectors that are kept between kernels: filter, sort, top_k, scatter.
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
  int count = 0;
  for (; word != 0; word &= word - 1) ++count;
  return count;
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

template <typename Key>
__device__ void sort_steps(Key* keys, int64_t padded) {
  for (int64_t run = 2; run <= padded; run *= 2) {
    for (int64_t step = run / 2; step > 0; step /= 2) {
      TF_HIPS_PHASE(t) {
        for (int64_t k = t; k < padded / 2; k += kThreads) {
          const int64_t low = k / step * 2 * step + k % step;
          const int64_t high = low + step;
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
  constexpr int64_t kFew = 16384 / sizeof(Key);
  TF_HIPS_SHARED Key few[kFew];
  const int64_t padded = padded_count(count);
  const bool is_few = padded <= kFew;
  Key* const all = is_few ? few : keys;
  TF_HIPS_PHASE(t) {
    for (int64_t k = t; k < padded; k += kThreads) {
      if (k >= count) {
        all[k] = static_cast<Key>(~Key{0});
      } else if (is_few) {
        all[k] = keys[k];
      }
    }
  }
  sort_steps(all, padded);
  if (is_few) {
    TF_HIPS_PHASE(t) {
      for (int64_t k = t; k < count; k += kThreads) keys[k] = few[k];
    }
  }
}

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
  const uint32_t* keys;
  int64_t room;
  int32_t* bins;    // of each chunk kPasses * kBins, zero at first
  Chosen* chosen;   // of each chunk
  int64_t* totals;  // of each tile
  int64_t totals_room;
  uint32_t* tile_keys;    // what each tile has left, at its beginning, and where that was
  uint32_t* tile_places;  // both of `room` elements a chunk
  uint32_t* few_keys;     // what a chunk has left
  uint32_t* few_places;
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
  const uint32_t* const keys = call.few_keys + chunk * call.room;
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
      int found = 0;
      TF_HIPS_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if (kEach * t + u < count && call.keys[begin + kEach * t + u] >= least_key) ++found;
      }
      sums[t] = found;
    }
    const int64_t* const scanned = scan_threads(sums);
    TF_HIPS_PHASE(t) {
      int64_t place = t == 0 ? 0 : scanned[t - 1];
      const bool is_some = place < scanned[t];
      for (int u = 0; u < kEach && is_some; ++u) {
        if (kEach * t + u >= count || call.keys[begin + kEach * t + u] < least_key) continue;
        call.tile_keys[begin + place] = call.keys[begin + kEach * t + u];
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
        call.few_keys[to + k] = call.tile_keys[from + k];
        call.few_places[to + k] = call.tile_places[from + k];
      }
    }
  }
}

// Writes the places of the k largest of `count` keys: of equal ones the first. `places`: where the
// keys were, null if there. In phases.
__device__ inline void write_chosen(const uint32_t* keys, const uint32_t* places, int64_t count,
                                    const Chosen& chosen, int64_t* out) {
  TF_HIPS_SHARED int64_t sums[2 * kThreads];
  TF_HIPS_SHARED int64_t before_tile;
  TF_HIPS_PHASE(t) {
    if (t == 0) before_tile = 0;
  }
  for (int64_t base = 0; base < count; base += kTile) {
    TF_HIPS_PHASE(t) {
      int64_t sum = 0;
      for (int u = 0; u < kEach; ++u) {
        const int64_t k = base + kEach * t + u;
        if (k < count) sum += compared(keys[k], chosen);
      }
      sums[t] = sum;
    }
    const int64_t* const scanned = scan_threads(sums);
    TF_HIPS_PHASE(t) {
      int64_t before = before_tile + (t == 0 ? 0 : scanned[t - 1]);
      for (int u = 0; u < kEach; ++u) {
        const int64_t k = base + kEach * t + u;
        const int64_t here = k < count ? compared(keys[k], chosen) : 0;
        const int64_t equal = least(before & 0xFFFFFFFF, chosen.equal);
        if (here > 1 || (here == 1 && equal < chosen.equal)) {
          out[(before >> 32) + equal] = places == nullptr ? k : places[k];
        }
        before += here;
      }
    }
    TF_HIPS_PHASE(t) {
      if (t == 0) before_tile += scanned[kThreads - 1];
    }
  }
}

// A block of threads has a chunk.
TF_HIPS_KERNEL top_k_write(const TopK call) {
  const int64_t chunk = blockIdx.x;
  const Chosen& chosen = call.chosen[chunk];
  write_chosen(call.few_keys + chunk * call.room, call.few_places + chunk * call.room, chosen.left,
               chosen, call.out + chunk * call.out_room);
}

// All of it by one block of threads, for one chunk of few keys, of which no digit is counted yet.
__device__ inline void top_k_alone(const TopK& call) {
  TF_HIPS_SHARED int32_t bins[kBins];
  Chosen* const chosen = call.chosen;
  for (int pass = 0; pass < kPasses; ++pass) {
    clear_bins(bins);
    TF_HIPS_PHASE(t) {
      for (int64_t k = t; k < chosen->count; k += kThreads) {
        if (!is_candidate(call.keys[k], chosen->key, pass)) continue;
        atomicAdd(&bins[digit_of(call.keys[k], pass)], 1);
      }
    }
    pick_digit(bins, pass, chosen);
  }
  write_chosen(call.keys, nullptr, chosen->count, *chosen, call.out);
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
  TF_HIPS_LAUNCH(top_k_write, call.chunks, kThreads, stream, call);
}

// Where the values of a scatter go in a chunk: `used` places of `whole`.
struct Placed {
  int64_t used, whole;
};

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_SELECT_CUH_
