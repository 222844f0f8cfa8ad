// SPDX-License-Identifier: Apache-2.0
// The largest elements of a vector, by counting digits of keys.

#ifndef TF_HIPS_CC_CUDA_TOP_K_CUH_
#define TF_HIPS_CC_CUDA_TOP_K_CUH_

#include "tf_hips/cc/cuda/picked.cuh"

namespace tf_hips {
namespace cuda {

// Top k. A sample tells below which key surely none of the k largest is. Those that are not below
// are left by the only kernel that makes keys (top_k_settle makes it leave all where the sample was
// wrong): a few hundredths of them, of which one block of threads a chunk finds the k-th largest,
// and writes which are not smaller. Of a vector of few tiles all are left.
constexpr int kSamples = 2 * kWide;

// What is known of a chunk.
struct Chosen {
  int64_t count, wanted;
  int32_t left;    // keys that are not too small
  uint32_t least;  // keys below it are too small
  int32_t shift;   // by so many bits the first digit of a key less `least` is shifted
};

struct TopK {
  const uint32_t* keys;    // what each segment of a chunk has left, at its beginning,
  const uint32_t* places;  // and where that was; both of `room` elements a chunk
  int64_t room;
  const int32_t* counts;  // of each segment
  int64_t counts_room;
  const Chosen* chosen;  // of each chunk
  int64_t* out;
  int64_t out_room;
  int64_t each, chunks;  // `each`: elements of a segment, if not all is left
  bool is_few;           // all is left, and in its place
};

// All of `count` keys are left.
TF_HIPS_INLINE Chosen chosen_of(int64_t count, int64_t wanted) {
  return {count, wanted, static_cast<int32_t>(count), 0u, kFirstShift};
}

// The least float that is not too small. `least`: 0, or not below the key of a number.
TF_HIPS_INLINE float least_value(uint32_t least) {
  return least == 0
             ? 0.0f
             : bits_float(static_cast<int64_t>(least ^ (0x80000000u | ((least >> 31) - 1u))));
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

// Which of the samples, counted from the largest, is taken for `least`: a rank that fewer of the k
// largest exceed than chance has it once in some hundred million chunks.
TF_HIPS_INLINE int64_t sample_rank(int64_t count, int64_t wanted) {
  const float mean = static_cast<float>(wanted) * static_cast<float>(num_samples(count)) /
                     static_cast<float>(count);
  return static_cast<int64_t>(mean + 6.0f * std::sqrt(mean) + 7.0f);
}

// Below which key surely none of the largest is, from those of a sample; key_at(number of an
// element): its key. By a wide block; in phases.
template <typename KeyAt>
__device__ __forceinline__ void guess_least(int64_t count, int64_t wanted, Chosen* chosen,
                                            const KeyAt& key_at) {
  constexpr int kOwn = kSamples / kWide;
  TF_HIPS_SHARED uint32_t sample[kSamples];
  TF_HIPS_SHARED int32_t bins[2][kBins];
  TF_HIPS_SHARED Picked first, second;
  const int64_t rank = wanted > 0 ? sample_rank(count, wanted) : 0;
  const int64_t samples = num_samples(count);
  if (wanted == 0 || rank > samples) {
    TF_HIPS_WIDE(t) {
      if (t == 0) {
        *chosen = chosen_of(count, wanted);
        chosen->left = 0;
        if (wanted == 0) chosen->least = 0xFFFFFFFFu;
      }
    }
    return;
  }
  TF_HIPS_WIDE(t) {
    uint32_t made[kOwn];
    TF_HIPS_UNROLL
    for (int u = 0; u < kOwn; ++u) made[u] = key_at(sample_place(t + kWide * u, count));
    TF_HIPS_UNROLL
    for (int u = 0; u < kOwn; ++u) sample[t + kWide * u] = made[u];
    for (int k = t; k < 2 * kBins; k += kWide) bins[k / kBins][k % kBins] = 0;
  }
  TF_HIPS_WIDE(t) {
    for (int k = t; k < samples; k += kWide) atomicAdd(&bins[0][sample[k] >> kFirstShift], 1);
  }
  pick_bin<kWide>(bins[0], static_cast<int32_t>(rank), &first);
  TF_HIPS_WIDE(t) {
    const uint32_t bin = static_cast<uint32_t>(first.bin);
    for (int k = t; k < samples; k += kWide) {
      if (sample[k] >> kFirstShift == bin)
        atomicAdd(&bins[1][sample[k] >> (kFirstShift - kBinBits) & (kBins - 1)], 1);
    }
  }
  pick_bin<kWide>(bins[1], first.wanted, &second);
  TF_HIPS_WIDE(t) {
    if (t == 0) {
      // Two digits tell it near enough.
      uint32_t low = static_cast<uint32_t>(first.bin) << kFirstShift |
                     static_cast<uint32_t>(second.bin) << (kFirstShift - kBinBits);
      // Below are keys of no number.
      if (low < 0x00800000u) low = 0;
      // Up to the largest of the sample as many first digits as there can be.
      const uint64_t range = (static_cast<uint64_t>(first.top + 1) << kFirstShift) - low;
      int shift = 0;
      while ((range - 1) >> shift >= kBins) ++shift;
      *chosen = {count, wanted, 0, low, shift};
    }
  }
}

// The keys of the numbers that a tile keeps, and where they are, go to its segment behind those of
// the tiles before, in their order. `before`: how many those are, and behind it how many with its
// own. In phases.
__device__ inline void leave_tile(uint32_t* keys_left, uint32_t* places_left, int64_t base,
                                  const float* values, const Kept& kept, int32_t* before) {
  TF_HIPS_PHASE(t) {
    int64_t own = 0;
    const int32_t from = before[0];
    each_kept(t, kept, &own, [&](int u, int place) {
      keys_left[from + place] = rank_key(values[kEach * t + u]);
      places_left[from + place] = static_cast<uint32_t>(base) + kEach * t + u;
    });
    if (t == kThreads - 1) before[1] = from + static_cast<int32_t>(own);
  }
}

// Of what a chunk has left the places of the largest, ascending: of equals the first. By a wide
// block. each_first(t, left, use) calls use(key, whether it is there) with each key of the share of
// thread t, before any is read. In phases.
template <typename EachFirst>
__device__ __forceinline__ void find_largest(const TopK& call, int64_t chunk, const Chosen& chosen,
                                             const EachFirst& each_first) {
  // Behind the bins one for what is in none: no branch around a count.
  TF_HIPS_SHARED int32_t bins[kBins + 1];
  TF_HIPS_SHARED int32_t above[kWarps], equal[kWarps];  // of each warp, what comes before the cut
  TF_HIPS_SHARED uint32_t few[kFewKeys];
  TF_HIPS_SHARED uint8_t few_warps[kFewKeys];
  TF_HIPS_SHARED int32_t num_few, cut_equal;
  TF_HIPS_SHARED uint32_t cut;
  TF_HIPS_SHARED Picked picked;
  if (chosen.wanted == 0) return;
  // Where all is left a warp has a segment.
  const int64_t share = (chosen.count + kWarps * kPiece - 1) / (kWarps * kPiece) * kPiece;
  const int64_t each = call.is_few ? share : call.each;
  const int64_t segments = (chosen.count + each - 1) / each;
  const uint32_t* const keys = call.keys + chunk * call.room;
  const int32_t* const counts = call.is_few ? nullptr : call.counts + chunk * call.counts_room;
  const uint32_t* const places = call.is_few ? nullptr : call.places + chunk * call.room;
  const Left left = {keys, places, counts, chosen.count, segments, each};
  TF_HIPS_WIDE(t) {
    for (int k = t; k < kBins; k += kWide) bins[k] = 0;
    if (t < kWarps) above[t] = equal[t] = 0;
    if (t == 0) num_few = 0;
  }
  // The first digit, of which the last bin has all that is larger.
  TF_HIPS_WIDE(t) {
    each_first(t, left, [&](uint32_t key, bool is_there) {
      const uint32_t digit = (key - chosen.least) >> chosen.shift;
      const uint32_t bin = digit < kBins ? digit : kBins - 1;
      atomicAdd(&bins[is_there ? bin : kBins], 1);
    });
  }
  pick_bin<kWide>(bins, static_cast<int32_t>(chosen.wanted), &picked);
  Span span = span_of(chosen.least + (static_cast<uint32_t>(picked.bin) << chosen.shift),
                      picked.bin == kBins - 1 ? 32 : chosen.shift, picked);
  while (span.inside > kFewKeys && span.bits > 0) {
    const int shift = span.bits > kBinBits ? span.bits - kBinBits : 0;
    TF_HIPS_WIDE(t) {
      for (int k = t; k < kBins; k += kWide) bins[k] = 0;
    }
    TF_HIPS_WIDE(t) {
      each_left<false>(left, t, [&](const auto& here, const auto&, int number) {
        TF_HIPS_UNROLL
        for (int u = 0; u < kLaneKeys; ++u) {
          const uint32_t offset = here[u] - span.low;
          const bool is_inside = u < number && offset <= span.last;
          atomicAdd(&bins[is_inside ? offset >> shift : kBins], 1);
        }
      });
    }
    pick_bin<kWide>(bins, span.wanted, &picked);
    span = span_of(span.low + (static_cast<uint32_t>(picked.bin) << shift), shift, picked);
  }
  // Few that are inside are compared with each other; many are all equal.
  const bool is_few = span.inside <= kFewKeys;
  TF_HIPS_WIDE(t) {
    int32_t above_here = 0, equal_here = 0;
    const uint32_t highest = span.low + span.last;
    each_left<false>(left, t, [&](const auto& here, const auto&, int number) {
      uint32_t inside = 0;
      TF_HIPS_UNROLL
      for (int u = 0; u < kLaneKeys; ++u) {
        above_here += u < number && here[u] > highest ? 1 : 0;
        inside |= u < number && here[u] - span.low <= span.last ? 1u << u : 0u;
      }
      if (inside == 0) return;
      TF_HIPS_UNROLL
      for (int u = 0; u < kLaneKeys; ++u) {
        if ((inside >> u & 1) == 0) continue;
        if (is_few) {
          const int slot = atomicAdd(&num_few, 1);
          few[slot] = here[u];
          few_warps[slot] = static_cast<uint8_t>(t / kWarp);
        } else {
          ++equal_here;
        }
      }
    });
    if (above_here != 0) atomicAdd(&above[t / kWarp], above_here);
    if (equal_here != 0) atomicAdd(&equal[t / kWarp], equal_here);
    if (t == 0) cut = span.low, cut_equal = span.wanted;
  }
  if (is_few) {
    TF_HIPS_WIDE(t) {
      if (t < span.inside) {
        const uint32_t own = few[t];
        if (is_wanted(few, span, own, &cut_equal)) cut = own;
      }
    }
    TF_HIPS_WIDE(t) {
      if (t < span.inside) {
        if (few[t] > cut) atomicAdd(&above[few_warps[t]], 1);
        if (few[t] == cut) atomicAdd(&equal[few_warps[t]], 1);
      }
    }
  }
  TF_HIPS_WIDE(t) {
    Before before = {0, 0};
    for (int k = 0; k < t / kWarp; ++k) before.above += above[k], before.equal += equal[k];
    int64_t* const out = call.out + chunk * call.out_room;
    const uint32_t cut_here = cut;
    const int32_t most = cut_equal;
    each_left<true>(left, t, [&](const auto& here, const auto& places_here, int number) {
      int32_t above_here = 0, equal_here = 0;
      TF_HIPS_UNROLL
      for (int u = 0; u < kLaneKeys; ++u) {
        above_here += u < number && here[u] > cut_here ? 1 : 0;
        equal_here += u < number && here[u] == cut_here ? 1 : 0;
      }
      Before at = count_before(above_here, equal_here, &before);
      TF_HIPS_UNROLL
      for (int u = 0; u < kLaneKeys; ++u) {
        const bool is_larger = u < number && here[u] > cut_here;
        const bool is_same = u < number && here[u] == cut_here;
        const int32_t place = at.above + (at.equal < most ? at.equal : most);
        if (is_larger || (is_same && at.equal < most)) out[place] = places_here[u];
        at.above += is_larger ? 1 : 0;
        at.equal += is_same ? 1 : 0;
      }
    });
  }
}

TF_HIPS_WIDE_KERNEL top_k_wide(const TopK call) {
  follow();
  const int64_t chunk = blockIdx.x;
  const Chosen chosen = call.chosen[chunk];
  find_largest(call, chunk, chosen, [](int t, const Left& left, const auto& use) {
    each_left<false>(left, t, [&](const auto& here, const auto&, int number) {
      TF_HIPS_UNROLL
      for (int u = 0; u < kLaneKeys; ++u) {
        use(here[u], u < number);
      }
    });
  });
}

// The same where all is left, and no kernel before has made keys: key_at(number of an element).
template <typename KeyAt>
__device__ __forceinline__ void find_largest_of(const TopK& call, int64_t chunk, int64_t count,
                                                int64_t wanted, uint32_t* keys,
                                                const KeyAt& key_at) {
  constexpr int kAtOnce = 8;
  find_largest(call, chunk, chosen_of(count, wanted), [&](int t, const Left&, const auto& use) {
    for (int64_t first = t; first < count; first += kAtOnce * kWide) {
      uint32_t made[kAtOnce];
      TF_HIPS_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        made[u] = first + u * kWide < count ? key_at(first + u * kWide) : 0;
      }
      TF_HIPS_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        const bool is_there = first + u * kWide < count;
        if (is_there) keys[first + u * kWide] = made[u];
        use(made[u], is_there);
      }
    }
  });
}

// What is above a key of eight, and what is equal to it, as two halves of a word.
TF_HIPS_INLINE int64_t compared(const uint32_t (&keys)[kEach], int32_t inside, uint32_t cut) {
  int32_t above = 0, equal = 0;
  TF_HIPS_UNROLL
  for (int u = 0; u < kEach; ++u) {
    above += u < inside && keys[u] > cut ? 1 : 0;
    equal += u < inside && keys[u] == cut ? 1 : 0;
  }
  return int64_t{above} << 32 | equal;
}

// All of it by one block of threads, for one chunk of few keys, all of which are left.
__device__ inline void top_k_alone(const TopK& call) {
  TF_HIPS_SHARED uint32_t cut;
  TF_HIPS_SHARED int32_t cut_equal;
  TF_HIPS_SHARED int64_t before;
  TF_HIPS_SHARED int64_t sums[2 * kThreads];
  const Chosen& chosen = *call.chosen;
  const int32_t count = static_cast<int32_t>(chosen.count);
  const int32_t wanted = static_cast<int32_t>(chosen.wanted);
  if (wanted == 0) return;
  find_key(call.keys, count, wanted, &cut, &cut_equal);
  TF_HIPS_PHASE(t) {
    if (t == 0) before = 0;
  }
  for (int32_t base = 0; base < count; base += kTile) {
    TF_HIPS_PHASE(t) {
      uint32_t here[kEach];
      take8(call.keys + base + kEach * t, here);
      sums[t] = compared(here, count - base - kEach * t, cut);
    }
    const int64_t* const scanned = scan_threads(sums);
    TF_HIPS_PHASE(t) {
      const int64_t own = t == 0 ? 0 : scanned[t - 1];
      // Few have any.
      if (scanned[t] != own) {
        const int64_t here_before = before + own;
        int32_t above = static_cast<int32_t>(here_before >> 32);
        int32_t equal = static_cast<int32_t>(here_before);
        uint32_t here[kEach];
        const int32_t first = base + kEach * t;
        take8(call.keys + first, here);
        TF_HIPS_UNROLL
        for (int u = 0; u < kEach; ++u) {
          if (first + u >= count || here[u] < cut) continue;
          if (here[u] > cut || equal < cut_equal) {
            call.out[above + (equal < cut_equal ? equal : cut_equal)] = first + u;
          }
          above += here[u] > cut ? 1 : 0;
          equal += here[u] == cut ? 1 : 0;
        }
      }
    }
    TF_HIPS_PHASE(t) {
      if (t == 0) before += scanned[kThreads - 1];
    }
  }
}

inline void run_top_k(const TopK& call, cudaStream_t stream) {
  TF_HIPS_FOLLOW(top_k_wide, call.chunks, kWide, stream, call);
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_TOP_K_CUH_
