// SPDX-License-Identifier: Apache-2.0
// Sorting networks: Batcher's merge exchange (Knuth, volume 3, 5.2.2, algorithm M) for any n, and
// his odd-even merges of runs that are sorted (5.3.4).

#ifndef TF_HIPS_CC_RUNTIME_SORTING_H_
#define TF_HIPS_CC_RUNTIME_SORTING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tf_hips {

// Calls exchange(i, j), i < j, for each comparator in order: afterwards the smaller one is at i.
template <class Exchange>
constexpr void ForComparators(int n, const Exchange& exchange) {
  int top = 1;
  while (2 * top < n) top *= 2;
  if (n < 2) return;
  for (int p = top; p > 0; p /= 2) {
    int q = top, r = 0, d = p;
    for (;;) {
      for (int i = 0; i + d < n; ++i) {
        if ((i & p) == r) exchange(i, i + d);
      }
      if (q == p) break;
      d = q - p;
      q /= 2;
      r = p;
    }
  }
}

struct Comparator {
  int16_t low = 0, high = 0;
  bool keeps_low = true, keeps_high = true;  // whether anybody looks at that output
};

constexpr int NumComparators(int n) {
  int count = 0;
  ForComparators(n, [&count](int, int) { ++count; });
  return count;
}

// The network of n inputs at compile time.
template <int kN>
struct Network {
  Comparator at[NumComparators(kN) + 1] = {};
  int count = 0;
  constexpr Network() {
    ForComparators(kN, [this](int i, int j) {
      at[count].low = static_cast<int16_t>(i);
      at[count].high = static_cast<int16_t>(j);
      ++count;
    });
  }
};

// The comparators that merge the halves of inputs low .. low + size - 1, of which only those that
// are multiples of `step` from `low` are looked at. What is at n and behind it would be larger than
// all others and stay where it is: it need not be there.
template <class Exchange>
void ForMerge(int n, int low, int size, int step, const Exchange& exchange) {
  if (low + step >= n) return;
  if (2 * step >= size) {
    exchange(low, low + step);
    return;
  }
  ForMerge(n, low, size, 2 * step, exchange);
  ForMerge(n, low + step, size, 2 * step, exchange);
  for (int i = low + step; i + step < low + size && i + step < n; i += 2 * step) {
    exchange(i, i + step);
  }
}

// The network that makes of runs of `run` sorted inputs, a power of two, and a shorter one what the
// outputs first .. last need: as if all n were sorted.
inline std::vector<Comparator> MergeNetwork(int n, int run, int first, int last) {
  std::vector<Comparator> all;
  for (int size = 2 * run; size < 2 * n; size *= 2) {
    for (int low = 0; low < n; low += size) {
      ForMerge(n, low, size, 1, [&all](int i, int j) {
        all.push_back({static_cast<int16_t>(i), static_cast<int16_t>(j), true, true});
      });
    }
  }
  std::vector<bool> needed(static_cast<size_t>(n), false);
  for (int i = first; i <= last; ++i) needed[static_cast<size_t>(i)] = true;
  std::vector<Comparator> kept;
  for (size_t k = all.size(); k-- > 0;) {
    Comparator one = all[k];
    const auto low = static_cast<size_t>(one.low), high = static_cast<size_t>(one.high);
    one.keeps_low = needed[low];
    one.keeps_high = needed[high];
    if (!one.keeps_low && !one.keeps_high) continue;
    needed[low] = needed[high] = true;
    kept.push_back(one);
  }
  return {kept.rbegin(), kept.rend()};
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_SORTING_H_
