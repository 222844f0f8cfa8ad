// SPDX-License-Identifier: Apache-2.0
// Vectors whose elements cannot be computed one by one: filter, sort, top_k, scatter.
//
// Loops hand in a tile at a time. What is kept between loops lies in memory of the thread that is
// reused by its next call: fresh pages would cost as much as the work.

#ifndef TF_HIPS_CC_RUNTIME_SELECT_H_
#define TF_HIPS_CC_RUNTIME_SELECT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

constexpr int64_t kLargePage = int64_t{1} << 21;

// Room for `count` elements, and a tile more: loops write whole tiles. Each slot is a memory of its
// own, which lives as long as its thread. Null when there is no memory, or for more than 2^31.
// Static: else its variables would be one for all libraries of a process, whatever their versions.
template <int slot, typename T>
static __attribute__((noinline)) T* scratch(int64_t count) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t capacity = 0;
  if (count < 0 || count > int64_t{1} << 31) return nullptr;
  const int64_t wanted = (count + kTile) * static_cast<int64_t>(sizeof(T));
  if (wanted > capacity) {
    // Large pages, where the system gives them: else finding pages costs as much as the work.
    const int64_t page = wanted < kLargePage ? 4096 : kLargePage;
    const int64_t bytes = (wanted + page - 1) / page * page;
    capacity = 0;
    memory.reset(std::aligned_alloc(static_cast<size_t>(page), static_cast<size_t>(bytes)));
    if (memory == nullptr) return nullptr;
#ifdef MADV_HUGEPAGE
    if (page == kLargePage) madvise(memory.get(), static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
    capacity = bytes;
  }
  return static_cast<T*>(memory.get());
}

// Calls put(number, j) for every j whose flag is set, in order; numbers go on from `total`. Returns
// `total` plus the number of flags set. Costs a test per eight elements, and a step per flag.
template <typename Put>
TF_HIPS_INLINE int64_t for_flags(const bool* flags, int64_t count, int64_t total, const Put& put) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    uint64_t group;
    std::memcpy(&group, flags + j, sizeof group);
    for (; group != 0; group &= group - 1) put(total++, j + __builtin_ctzll(group) / 8);
  }
  for (; j < count; ++j) {
    if (flags[j]) put(total++, j);
  }
  return total;
}

// Appends the values whose flag is set to `out`, which holds `total` of them; returns their number.
template <typename T>
TF_HIPS_INLINE int64_t keep_values(const bool* flags, const T* values, int64_t count, int64_t total,
                                   T* out) {
  return for_flags(flags, count, total, [&](int64_t at, int64_t j) { out[at] = values[j]; });
}

// The same for the values base, base + 1, ...
template <typename T>
TF_HIPS_INLINE int64_t keep_range(const bool* flags, int64_t base, int64_t count, int64_t total,
                                  T* out) {
  return for_flags(flags, count, total,
                   [&](int64_t at, int64_t j) { out[at] = static_cast<T>(base + j); });
}

// Words in the order of floats, -0 before 0.
TF_HIPS_INLINE uint32_t float_key(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits ^ (0x80000000u | (0u - (bits >> 31)));
}

TF_HIPS_INLINE float key_float(uint32_t key) {
  const uint32_t bits = key ^ (0x80000000u | ((key >> 31) - 1u));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Sorts in place. NaNs become one and come last, -0 is less than 0.
inline void sort_values(float* values, int64_t count, bool is_descending) {
  float* end = values;
  for (int64_t j = 0; j < count; ++j) {
    if (values[j] == values[j]) *end++ = values[j];
  }
  for (float* nan = end; nan != values + count; ++nan) {
    const uint32_t bits = 0x7FC00000u;
    std::memcpy(nan, &bits, sizeof bits);
  }
  const auto is_before = [](float a, float b) { return float_key(a) < float_key(b); };
  std::sort(values, end, is_before);
  if (is_descending) std::reverse(values, end);
}

template <typename T>
inline void sort_values(T* values, int64_t count, bool is_descending) {
  std::sort(values, values + count);
  if (is_descending) std::reverse(values, values + count);
}

// The indices of the k largest of n floats, ascending: the first of equal ones, -0 equal to 0, NaN
// below all. A few keys say what is surely too small; one pass takes the others, of which the k
// largest are found. Should the few mislead, a count of the leading bits of all keys does not. Uses
// slots slot .. slot + 4.
template <int slot>
class TopK {
 public:
  // False when there is no memory.
  bool start(int64_t n) {
    n_ = n;
    keys_ = scratch<slot, uint32_t>(n);
    places_ = scratch<slot + 1, uint32_t>(n);
    found_ = scratch<slot + 2, uint32_t>(n);
    return keys_ != nullptr && places_ != nullptr && found_ != nullptr;
  }

  // Elements base .. base + count - 1.
  TF_HIPS_INLINE void add(const float* tile, int64_t base, int64_t count) {
    uint32_t* keys = keys_ + base;
    for (int64_t j = 0; j < count; ++j) {
      keys[j] = tile[j] == tile[j] ? float_key(tile[j] + 0.0f) : 0u;
    }
  }

  // Returns the indices of the `chosen` = min(k, n) largest, or null when there is no memory.
  TF_HIPS_INLINE int64_t* finish(int64_t k, int64_t* chosen) {
    const int64_t wanted = std::max<int64_t>(0, std::min(k, n_));
    *chosen = wanted;
    int64_t* out = scratch<slot + 3, int64_t>(wanted);
    if (out == nullptr || wanted == 0) return out;
    int64_t found = take(n_ > kFew ? guess(wanted) : 0);
    if (found < wanted) found = take(bound(wanted));
    uint32_t* order = scratch<slot + 4, uint32_t>(found);
    if (order == nullptr) return nullptr;
    std::copy(found_, found_ + found, order);
    std::nth_element(order, order + wanted - 1, order + found, std::greater<uint32_t>());
    const uint32_t last = order[wanted - 1];
    int64_t above = 0;
    for (int64_t j = 0; j < found; ++j) above += order[j] > last ? 1 : 0;
    int64_t equal = wanted - above;
    int64_t taken = 0;
    for (int64_t j = 0; j < found && taken < wanted; ++j) {
      const uint32_t key = found_[j];
      const int64_t is_equal = (key == last) & (equal > 0);
      out[taken] = places_[j];
      taken += (key > last) | is_equal;
      equal -= is_equal;
    }
    return out;
  }

 private:
  // So few elements are all looked at.
  static constexpr int64_t kFew = 8192;
  static constexpr int64_t kSample = 4096;

  // A key that probably at least `wanted` ones reach, and not many more.
  __attribute__((noinline)) uint32_t guess(int64_t wanted) const {
    uint32_t sample[kSample];
    for (int64_t j = 0; j < kSample; ++j) sample[j] = keys_[j * n_ / kSample];
    const double expected = static_cast<double>(wanted) * kSample / static_cast<double>(n_);
    // Four standard deviations to be sure.
    const int64_t rank = static_cast<int64_t>(expected + 4 * std::sqrt(expected)) + 4;
    if (rank >= kSample) return 0;
    std::nth_element(sample, sample + rank, sample + kSample, std::greater<uint32_t>());
    return sample[rank];
  }

  // A key that at least `wanted` ones reach, by counting.
  __attribute__((noinline)) uint32_t bound(int64_t wanted) const {
    // Sign, exponent, and one bit of the fraction.
    constexpr int kShift = 22;
    uint32_t bins[1 << (32 - kShift)] = {};
    for (int64_t j = 0; j < n_; ++j) ++bins[keys_[j] >> kShift];
    uint32_t bin = 1 << (32 - kShift);
    for (int64_t reached = 0; reached < wanted;) reached += bins[--bin];
    return bin << kShift;
  }

  // Notes the keys that are at least `least`, and where they are; returns their number.
  TF_HIPS_INLINE int64_t take(uint32_t least) {
    int64_t found = 0;
    for (int64_t base = 0; base < n_; base += kTile) {
      const int64_t count = std::min(kTile, n_ - base);
      alignas(64) bool flags[kTile];
      for (int64_t j = 0; j < count; ++j) flags[j] = keys_[base + j] >= least;
      found = for_flags(flags, count, found, [&](int64_t at, int64_t j) {
        places_[at] = static_cast<uint32_t>(base + j);
        found_[at] = keys_[base + j];
      });
    }
    return found;
  }

  int64_t n_ = 0;
  uint32_t* keys_ = nullptr;
  uint32_t* places_ = nullptr;
  uint32_t* found_ = nullptr;
};

// Places are kept as 32 bits.
constexpr int64_t kMaxScatter = int64_t{1} << 32;

// Appends a tile of indices to `out`, which holds `total`. False unless all ascend strictly and are
// less than n; `last`: the one before, -1 at first.
TF_HIPS_INLINE bool take_indices(const int64_t* tile, int64_t count, int64_t n, int64_t* last,
                                 uint32_t* out) {
  if (count == 0) return true;
  // A negative index is below the one before, or below -1 at first.
  bool is_good = tile[0] > *last;
  for (int64_t j = 1; j < count; ++j) is_good &= tile[j] > tile[j - 1];
  for (int64_t j = 0; j < count; ++j) out[j] = static_cast<uint32_t>(tile[j]);
  *last = tile[count - 1];
  return is_good & (*last < n);
}

// out[indices[j]] += values[j], or -= as far as decoding makes of it.
TF_HIPS_INLINE void scatter_tile(const uint32_t* indices, const float* values, int64_t count,
                                 bool is_taken, float* out) {
  if (is_taken) {
    for (int64_t j = 0; j < count; ++j) out[indices[j]] -= 0.0f + values[j];
  } else {
    for (int64_t j = 0; j < count; ++j) out[indices[j]] += values[j];
  }
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_SELECT_H_
