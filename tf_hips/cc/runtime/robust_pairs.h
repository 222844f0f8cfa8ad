// SPDX-License-Identifier: Apache-2.0
// The part of robust_loops.h that is about pairs of rows; included by it, for each width of
// registers.
//
// No include guard: that is the point.

// Squared distances of all pairs of rows of a block, 16 lanes of double for each pair, and sums of
// squares. Pairs are taken in shapes whose sums registers hold: what there is among rows of a
// group, and tiles between rows.
//
// Memory is slower than arithmetic where it is asked for all at once, and faster where it is asked
// all the time: each shape asks for the next block of some rows, a line at every step.
struct Pairs {
  const float* const* rows;
  int n;
  double *squares, *distances;
  int of_shape;  // rows that a shape asks for, kTile at most
  int asked;     // rows that were asked for

  double* Of(int i, int j) const {
    const int64_t before = static_cast<int64_t>(i) * (2 * n - i - 1) / 2;
    return distances + (before + j - i - 1) * kLanes;
  }

  // Where the rows begin that the next shape asks for, and how many they are.
  int Ask(const float** next) {
    int count = 0;
    for (; count < of_shape && asked < n; ++count) next[count] = rows[asked++] + kBlock;
    return count;
  }
};

// What some rows add in lanes of one part: among kN of them, and among kM behind these.
template <int kN, int kM, bool kAsks>
inline __attribute__((always_inline)) void AddPartAmong(const Pairs& pairs, int first, int part,
                                                        const float* const* next, int asks) {
  constexpr int kAll = kN + kM;
  const float* rows[kAll];
  for (int i = 0; i < kAll; ++i) rows[i] = pairs.rows[first + i] + part * V::kWidth;
  V sums[kAll][kAll];
#pragma GCC unroll 8
  for (int i = 0; i < kAll; ++i) {
#pragma GCC unroll 8
    for (int j = i < kN ? 0 : kN; j <= i; ++j) sums[i][j] = V::Zero();
  }
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    for (int k = 0; kAsks && k < asks; ++k) prefetch_line(next[k] + at);
    V x[kAll];
#pragma GCC unroll 8
    for (int i = 0; i < kAll; ++i) {
      x[i] = V::Load(rows[i] + at);
      x[i].Keep();  // or it would be read again for each pair
      sums[i][i] = V::Fma(x[i], x[i], sums[i][i]);
#pragma GCC unroll 8
      for (int j = i < kN ? 0 : kN; j < i; ++j) {
        const V apart = V::Sub(x[j], x[i]);
        sums[i][j] = V::Fma(apart, apart, sums[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kAll; ++i) {
#pragma GCC unroll 8
    for (int j = i < kN ? 0 : kN; j < i; ++j) {
      sums[i][j].AddTo(pairs.Of(first + j, first + i) + part * V::kWidth);
    }
    sums[i][i].AddTo(pairs.squares + (first + i) * kLanes + part * V::kWidth);
  }
}

// The same between kI rows behind `left` and kJ behind `right`.
template <int kI, int kJ, bool kAsks>
inline __attribute__((always_inline)) void AddPartBetween(const Pairs& pairs, int left, int right,
                                                          int part, const float* const* next,
                                                          int asks) {
  const float *rows[kI], *others[kJ];
  for (int i = 0; i < kI; ++i) rows[i] = pairs.rows[left + i] + part * V::kWidth;
  for (int j = 0; j < kJ; ++j) others[j] = pairs.rows[right + j] + part * V::kWidth;
  V sums[kI][kJ];
#pragma GCC unroll 4
  for (int i = 0; i < kI; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kJ; ++j) sums[i][j] = V::Zero();
  }
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    for (int k = 0; kAsks && k < asks; ++k) prefetch_line(next[k] + at);
    V x[kI];
#pragma GCC unroll 4
    for (int i = 0; i < kI; ++i) x[i] = V::Load(rows[i] + at);
#pragma GCC unroll 4
    for (int j = 0; j < kJ; ++j) {
      const V y = V::Load(others[j] + at);
#pragma GCC unroll 4
      for (int i = 0; i < kI; ++i) {
        const V apart = V::Sub(x[i], y);
        sums[i][j] = V::Fma(apart, apart, sums[i][j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kI; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kJ; ++j) {
      sums[i][j].AddTo(pairs.Of(left + i, right + j) + part * V::kWidth);
    }
  }
}

template <int kN, int kM>
__attribute__((noinline)) void AddAmong(Pairs& pairs, int first) {
  const float* next[kTile];
  const int asks = pairs.Ask(next);
  int part = 0;
  if (asks > 0) AddPartAmong<kN, kM, true>(pairs, first, part++, next, asks);
  for (; part < kParts; ++part) AddPartAmong<kN, kM, false>(pairs, first, part, next, 0);
}

template <int kI, int kJ>
__attribute__((noinline)) void AddBetween(Pairs& pairs, int left, int right) {
  const float* next[kTile];
  const int asks = pairs.Ask(next);
  int part = 0;
  if (asks > 0) AddPartBetween<kI, kJ, true>(pairs, left, right, part++, next, asks);
  for (; part < kParts; ++part) {
    AddPartBetween<kI, kJ, false>(pairs, left, right, part, next, 0);
  }
}

template <int... kNs>
void AddGroup(Pairs& pairs, int first, int rows, std::integer_sequence<int, kNs...>) {
  using Add = void (*)(Pairs&, int);
  static constexpr Add all[] = {
      AddAmong<(kNs < kTile ? kNs + 1 : kTile), (kNs < kTile ? 0 : kNs + 1 - kTile)>...};
  all[rows - 1](pairs, first);
}

template <int... kJs>
void AddTile(Pairs& pairs, int left, int right, int rows, std::integer_sequence<int, kJs...>) {
  using Add = void (*)(Pairs&, int, int);
  static constexpr Add all[] = {AddBetween<kTile, kJs + 1>...};
  all[rows - 1](pairs, left, right);
}

void AddDistances(const Block& block, double* squares, double* distances) {
  static_assert(kGroup == kTile || kGroup == 2 * kTile, "of one tile or of two");
  constexpr std::make_integer_sequence<int, kGroup> of_group;
  constexpr std::make_integer_sequence<int, kTile> of_tile;
  const int n = block.n;
  const int tiles = (n + kTile - 1) / kTile;
  const int shapes = (n + kGroup - 1) / kGroup + tiles * (tiles - 1) / 2;
  Pairs pairs = {block.rows, n, squares, distances, (n + shapes - 1) / shapes, 0};
  for (int first = 0; first < n; first += kGroup) {
    AddGroup(pairs, first, n - first < kGroup ? n - first : kGroup, of_group);
    for (int i = first; i < first + kGroup; i += kTile) {
      for (int j = i + kTile; j < n; j += kTile) {
        AddTile(pairs, i, j, n - j < kTile ? n - j : kTile, of_tile);
      }
    }
  }
}
