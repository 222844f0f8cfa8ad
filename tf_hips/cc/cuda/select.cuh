// SPDX-License-Identifier: Apache-2.0
// Vectors that are kept between kernels: filter, sort, scatter; top_k.cuh is about the largest.
//
// Results do not depend on the order in which threads run: places come from scans, and of equal
// elements the first ones are taken. All is per chunk; a block of threads has a tile or a chunk.

#ifndef TF_HIPS_CC_CUDA_SELECT_CUH_
#define TF_HIPS_CC_CUDA_SELECT_CUH_

#include "tf_hips/cc/cuda/eights.cuh"
#include "tf_hips/cc/cuda/reduce.cuh"

namespace tf_hips {
namespace cuda {

// Sums up to each thread, its own value included; `values` has kThreads, and room for as many more.
// In phases; all threads must call it. Returns where the sums are.
__device__ inline const int64_t* scan_threads(int64_t* values) {
#ifdef __CUDA_ARCH__
  constexpr int kWarpThreads = 32;
  __shared__ int64_t sums[kThreads / kWarpThreads];
  const int t = static_cast<int>(threadIdx.x), lane = t % kWarpThreads, warp = t / kWarpThreads;
  long long sum = values[t];
  TF_HIPS_UNROLL
  for (int step = 1; step < kWarpThreads; step *= 2) {
    const long long before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == kWarpThreads - 1) sums[warp] = sum;
  __syncthreads();
  TF_HIPS_UNROLL
  for (int k = 0; k < kThreads / kWarpThreads - 1; ++k) sum += k < warp ? sums[k] : 0;
  values[kThreads + t] = sum;
  __syncthreads();
  return values + kThreads;
#else
  int64_t* from = values;
  int64_t* to = values + kThreads;
  for (int width = 1; width < kThreads; width *= 2) {
    TF_HIPS_PHASE(t) { to[t] = from[t] + (t >= width ? from[t - width] : 0); }
    int64_t* const last = from;
    from = to;
    to = last;
  }
  return from;
#endif
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

// The number of the lowest bit that is set; one is.
TF_HIPS_INLINE int lowest_bit(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

// `sum` and the four bytes of a word.
TF_HIPS_INLINE uint32_t add_bytes(uint32_t sum, uint32_t word) {
#ifdef __CUDA_ARCH__
  return __dp4a(word, 0x01010101u, sum);
#else
  return sum + (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24);
#endif
}

// What threads keep of the elements that they have: a bit for each, in shared memory.
struct Kept {
  uint32_t masks[kThreads / 4];   // a byte a thread
  uint32_t counts[kThreads / 4];  // how many bits of it are set
};

TF_HIPS_INLINE void note_kept(int t, uint32_t mask, Kept* kept) {
  reinterpret_cast<uint8_t*>(kept->masks)[t] = static_cast<uint8_t>(mask);
  reinterpret_cast<uint8_t*>(kept->counts)[t] = static_cast<uint8_t>(count_bits(mask));
}

TF_HIPS_INLINE int kept_before(int t, const Kept& kept) {
  uint32_t sum = 0;
  for (int k = 0; k < t / 16; ++k) {
    const uint4 words = reinterpret_cast<const uint4*>(kept.counts)[k];
    sum = add_bytes(add_bytes(add_bytes(add_bytes(sum, words.x), words.y), words.z), words.w);
  }
  for (int k = t / 16 * 4; k < t / 4; ++k) sum = add_bytes(sum, kept.counts[k]);
  if (t % 4 != 0) sum = add_bytes(sum, kept.counts[t / 4] & ((1u << (8 * (t % 4))) - 1));
  return static_cast<int>(sum);
}

// Calls `put` with each element of its eight that thread t keeps, and with how many of the tile are
// before. *count: how many those are altogether.
template <typename Put>
TF_HIPS_INLINE void each_kept(int t, const Kept& kept, int64_t* count, const Put& put) {
  uint32_t mask = reinterpret_cast<const uint8_t*>(kept.masks)[t];
  if (mask == 0 && t != kThreads - 1) return;
  int place = kept_before(t, kept);
  // Bit by bit of those that are set: few are, and not the same ones in the threads of a warp.
  for (; mask != 0; mask &= mask - 1) put(lowest_bit(mask), place++);
  if (t == kThreads - 1) *count = place;
}

// The gradient as a later kernel forms it.
struct Summed {
  const float* gradient;
  const float* residual;  // null where there is none
};

TF_HIPS_INLINE float value_at(const Summed& sum, int64_t count, int64_t index) {
  const float value = value_at(sum.gradient, count, index);
  return sum.residual == nullptr ? value : value + value_at(sum.residual, count, index);
}

// Tells of sums with a residual, if there is one, that are not finite.
TF_HIPS_INLINE void note_broken(const float (&sums)[8], const float* residual, int32_t* broken) {
  if (residual == nullptr) return;
  bool is_fine = true;
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) is_fine = is_fine && is_finite(sums[u]);
  if (!is_fine) *broken = 1;
}

// Nothing is broken yet. A kernel, and no memset, which the next kernel could not overlap.
TF_HIPS_KERNEL clear_flag(int32_t* broken) {
  follow();
  TF_HIPS_PHASE(t) {
    if (t == 0) *broken = 0;
  }
}

// As add_all, for a decode that looks for what is not finite.
TF_HIPS_KERNEL add_all_noting(const float* gradient, const float* residual, float* value, int64_t n,
                              int32_t* broken) {
  follow();
  add_tile(gradient, residual, value, n,
           [&](const float (&sum)[8]) { note_broken(sum, residual, broken); });
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

// Threads that copy what a tile has left, and tiles of a block of threads.
constexpr int kPackers = 4;
constexpr int kPackedTiles = kThreads / kPackers;
constexpr int kPackedAtOnce = 8;

TF_HIPS_INLINE int64_t num_packers(int64_t tiles) {
  return (tiles + kPackedTiles - 1) / kPackedTiles;
}

// What the tiles of a chunk have left, each at its beginning.
template <typename T>
struct Packing {
  const T* left;
  int64_t left_room;
  const int64_t* before;  // a tile: how many those before it have
  int64_t before_room;
  const Placed* placed;  // a chunk: how many are wanted, and of how many elements
  T* out;                // where they go, one behind another
  int64_t out_room;
  int64_t tiles;
};

// Copies `count` values, by kPackers threads, of which this is number `t`.
template <typename T>
TF_HIPS_INLINE void copy_left(int t, const T* from, int64_t count, T* to) {
  for (int64_t k = t; k < count; k += kPackers * kPackedAtOnce) {
    // All are read before the first is written, or each would wait for the one before.
    T here[kPackedAtOnce];
    TF_HIPS_UNROLL
    for (int u = 0; u < kPackedAtOnce; ++u) {
      if (k + u * kPackers < count) here[u] = from[k + u * kPackers];
    }
    TF_HIPS_UNROLL
    for (int u = 0; u < kPackedAtOnce; ++u) {
      if (k + u * kPackers < count) to[k + u * kPackers] = here[u];
    }
  }
}

template <typename T>
TF_HIPS_BLOCK pack_tiles(const Packing<T>& call, uint32_t block_index) {
  const uint32_t blocks = static_cast<uint32_t>(num_packers(call.tiles));
  const uint32_t chunk = block_index / blocks;
  const uint32_t first = (block_index - chunk * blocks) * kPackedTiles;
  const Placed placed = call.placed[chunk];
  TF_HIPS_PHASE(t) {
    const int64_t tile = first + t / kPackers, tiles = num_tiles(placed.whole);
    if (tile < tiles) {
      const int64_t* const before = call.before + chunk * call.before_room + tile;
      const int64_t begin = before[0];
      const int64_t end = tile + 1 == tiles ? placed.used : least(before[1], placed.used);
      const T* const from = call.left + chunk * call.left_room + tile * kTile;
      T* const to = call.out + chunk * call.out_room + begin;
      copy_left(t % kPackers, from, end - begin, to);
    }
  }
}

// The same where `before` has how many values each tile has, and `placed` how many are wanted at
// most: a block of threads adds up what is before its tiles. *total, of chunks that lie `stride`
// bytes behind one another: how many there are.
template <typename T>
TF_HIPS_KERNEL pack_counted(const Packing<T> call, int64_t* total, int64_t stride) {
  follow();
  TF_HIPS_SHARED int64_t sums[kThreads];
  TF_HIPS_SHARED int64_t before;
  TF_HIPS_SHARED int32_t counts_here[kPackedTiles];
  const uint32_t blocks = static_cast<uint32_t>(num_packers(call.tiles));
  const uint32_t chunk = blockIdx.x / blocks;
  const int64_t first = int64_t{blockIdx.x - chunk * blocks} * kPackedTiles;
  const Placed placed = call.placed[chunk];
  const int64_t tiles = num_tiles(placed.whole);
  if (first >= tiles) return;
  const int64_t* const counts = call.before + chunk * call.before_room;
  TF_HIPS_PHASE(t) {
    int64_t sum = 0;
    for (int64_t k = t; k < first; k += kThreads) sum += counts[k];
    sums[t] = sum;
    if (t < kPackedTiles) {
      counts_here[t] = first + t < tiles ? static_cast<int32_t>(counts[first + t]) : 0;
    }
  }
  sum_threads(sums, &before);
  TF_HIPS_PHASE(t) {
    const int64_t tile = first + t / kPackers;
    if (tile < tiles) {
      int32_t skipped = 0;
      for (int k = 0; k < t / kPackers; ++k) skipped += counts_here[k];
      const int64_t begin = before + skipped, end = begin + counts_here[t / kPackers];
      copy_left(t % kPackers, call.left + chunk * call.left_room + tile * kTile,
                least(end, placed.used) - begin, call.out + chunk * call.out_room + begin);
      if (tile + 1 == tiles && t % kPackers == 0) {
        int64_t* const at =
            reinterpret_cast<int64_t*>(reinterpret_cast<char*>(total) + chunk * stride);
        *at = least(end, placed.used);
      }
    }
  }
}

template <typename T>
void launch_pack(const Packing<T>& call, int64_t blocks, int64_t* total, int64_t stride,
                 cudaStream_t stream) {
  TF_HIPS_FOLLOW(pack_counted<T>, blocks, kThreads, stream, call, total, stride);
}

// A place of a vector of `whole` elements; -1, which is behind none, where it is outside.
template <typename Place>
TF_HIPS_INLINE Place place_of(int64_t place, int64_t whole) {
  return place >= 0 && place < whole ? static_cast<Place>(place) : Place{-1};
}

// Has memory begin to bring what will soon be read at these places of a vector.
TF_HIPS_INLINE void fetch_ahead([[maybe_unused]] const int32_t (&places)[8],
                                [[maybe_unused]] const float* out) {
#ifdef __CUDA_ARCH__
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    if (places[u] >= 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(out + places[u]));
  }
#endif
}

// Adds a tile's first `last` values to where they go; places_here[k + 1] is the place of number k,
// and places_here[0] the one before. is_fine(): waits for what says whether it may. Returns whether
// those of thread t ascend.
template <typename IsFine>
TF_HIPS_INLINE bool add_placed(int t, const int32_t* places_here, const float* values, int64_t last,
                               const IsFine& is_fine, float* out) {
  bool in_order = true;
  bool is_own[8];
  float there[8];
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    const int k = t + u * kThreads;
    is_own[u] = k < last && places_here[k + 1] > places_here[k];
    in_order = in_order && (k >= last || is_own[u]);
    there[u] = is_own[u] ? out[places_here[k + 1]] : 0.0f;
  }
  if (!is_fine()) return in_order;
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    const int k = t + u * kThreads;
    if (is_own[u]) out[places_here[k + 1]] = there[u] + values[k];
  }
  return in_order;
}

// Which of the values is the first of each tile of a vector, and behind the last tile how many
// there are: what value `number` at `place`, behind one at `before` (-1: behind none), tells of
// that.
TF_HIPS_INLINE void note_first(int32_t before, int32_t place, int64_t number, const Placed& placed,
                               int32_t* firsts) {
  if (place <= before) return;
  for (int tile = before < 0 ? 0 : before / kTile + 1; tile <= place / kTile; ++tile) {
    firsts[tile] = static_cast<int32_t>(number);
  }
  if (number + 1 < placed.used) return;
  for (int64_t tile = place / kTile + 1; tile <= num_tiles(placed.whole); ++tile) {
    firsts[tile] = static_cast<int32_t>(placed.used);
  }
}

// The same where there is no value.
TF_HIPS_INLINE void note_no_first(const Placed& placed, int32_t* firsts) {
  for (int64_t tile = 0; placed.used == 0 && tile <= num_tiles(placed.whole); ++tile) {
    firsts[tile] = 0;
  }
}

// Eight values to their places, which all differ: those of the first `count`. All are read before
// the first is written, or each would wait for the one before.
template <typename Place>
TF_HIPS_INLINE void scatter8(const float (&values)[8], const Place (&places)[8], int64_t count,
                             int32_t mode, float* out) {
  if (count <= 0) return;
  float there[8];
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    there[u] = mode != TF_HIPS_SET && u < count ? out[places[u]] : 0.0f;
  }
  TF_HIPS_UNROLL
  for (int u = 0; u < 8; ++u) {
    if (u >= count) break;
    out[places[u]] =
        mode == TF_HIPS_RESIDUAL ? taken(there[u], 0.0f + values[u]) : there[u] + values[u];
  }
}

// Calls `four` with the first of each four neighbours that thread t has of a tile of `out`, which
// ends at `end`, and `one` with each element where they are not all there, or not aligned. A warp's
// fours are neighbours, too.
template <typename Four, typename One>
TF_HIPS_INLINE void each_four(int t, int64_t base, int64_t end, const float* out, const Four& four,
                              const One& one) {
  TF_HIPS_UNROLL
  for (int part = 0; part < kTile / (4 * kThreads); ++part) {
    const int64_t first = base + 4 * (part * kThreads + t);
    if (first + 4 <= end && is_aligned(out + first, 16)) {
      four(first);
    } else {
      for (int64_t k = first; k < least(first + 4, end); ++k) one(k);
    }
  }
}

TF_HIPS_INLINE void clear_tile(int t, int64_t base, int64_t end, float* out) {
  each_four(
      t, base, end, out,
      [&](int64_t first) { *reinterpret_cast<float4*>(out + first) = {0.0f, 0.0f, 0.0f, 0.0f}; },
      [&](int64_t k) { out[k] = 0.0f; });
}

// A tile of `out` from shared memory.
TF_HIPS_INLINE void put_tile(int t, int64_t base, int64_t end, const float* tile, float* out) {
  each_four(
      t, base, end, out,
      [&](int64_t first) {
        *reinterpret_cast<float4*>(out + first) =
            *reinterpret_cast<const float4*>(tile + (first - base));
      },
      [&](int64_t k) { out[k] = tile[k - base]; });
}

// Makes 0 of what is not finite.
TF_HIPS_INLINE void make_finite(int t, int64_t base, int64_t end, float* out) {
  const auto one = [&](int64_t k) {
    if (!is_finite(out[k])) out[k] = 0.0f;
  };
  const auto four = [&](int64_t first) {
    const float4 here = *reinterpret_cast<const float4*>(out + first);
    if (is_finite(here.x) && is_finite(here.y) && is_finite(here.z) && is_finite(here.w)) return;
    for (int k = 0; k < 4; ++k) one(first + k);
  };
  each_four(t, base, end, out, four, one);
}

// Blocks of threads that look for what is not finite: as many as a large GPU has at once.
TF_HIPS_INLINE int64_t finite_blocks(int64_t n) { return least(num_tiles(n), 1024); }

// make_finite of all tiles, if the packets are in order and some sum was not finite; `broken`: null
// where that is not known.
TF_HIPS_KERNEL finite_all(float* out, int64_t n, int64_t blocks, const Report* report,
                          const int32_t* broken) {
  follow();
  const bool is_fine = *report == TF_HIPS_CUDA_FINE, is_whole = broken != nullptr && *broken == 0;
  if (!is_fine || is_whole) return;
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += blocks) {
    TF_HIPS_PHASE(t) { make_finite(t, tile * kTile, n, out); }
  }
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_SELECT_CUH_
