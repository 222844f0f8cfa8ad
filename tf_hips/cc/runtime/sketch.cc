// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/runtime/sketch.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/parallel.h"
#include "tf_hips/cc/runtime/robust.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {
namespace {

// Elements that stay in the first-level cache while each half takes them.
constexpr int64_t kTile = 4096;
constexpr int64_t kWord = 64;
constexpr uint32_t kSign = uint32_t{1} << 31;

// The elements of one word of signs; where the compiler knows their number, they stay in registers.
TF_HIPS_INLINE void GiveWord(const float* values, uint64_t word, int64_t here,
                             float* signed_values) {
  uint32_t lanes[kWord];
  std::memcpy(lanes, values, static_cast<size_t>(here) * sizeof(float));
  const uint32_t low = static_cast<uint32_t>(word), high = static_cast<uint32_t>(word >> 32);
  for (int j = 0; j < 32; ++j) lanes[j] ^= (low >> j) << 31 & kSign;
  for (int j = 0; j < 32; ++j) lanes[32 + j] ^= (high >> j) << 31 & kSign;
  std::memcpy(signed_values, lanes, static_cast<size_t>(here) * sizeof(float));
}

// The elements of a tile, each with its sign. Tiles begin with a word of signs.
TF_HIPS_HOT void GiveSigns(const float* values, const uint64_t* signs, int64_t count,
                           float* signed_values) {
  int64_t first = 0;
  for (; first + kWord <= count; first += kWord) {
    GiveWord(values + first, signs[first / kWord], kWord, signed_values + first);
  }
  if (first < count) {
    GiveWord(values + first, signs[first / kWord], count - first, signed_values + first);
  }
}

TF_HIPS_HOT void AddTo(double* sums, const float* values, int64_t count) {
  for (int64_t j = 0; j < count; ++j) sums[j] += static_cast<double>(values[j]);
}

// Adds elements [first, first + count) of a row, which have their signs, to the sums of a half.
void AddTile(const TfHipsSketchHalf& half, const float* values, int64_t first, int64_t count,
             double* sums) {
  int64_t block = first / half.width, place = first % half.width;
  for (int64_t at = 0; at < count; ++block, place = 0) {
    const int64_t here = std::min(half.width - place, count - at);
    AddTo(sums + half.turns[block] + place, values + at, here);
    at += here;
  }
}

bool IsBad(const TfHipsSketchHalf& half, int64_t d) {
  if (half.width < 1 || half.sums == nullptr) return true;
  if (d == 0) return false;
  if (half.signs == nullptr || half.turns == nullptr) return true;
  return !std::all_of(half.turns, half.turns + (d - 1) / half.width + 1,
                      [&](int64_t turn) { return turn >= 0 && turn < half.width; });
}

int32_t Sketch(const float* const* rows, int32_t n, int64_t d, const TfHipsSketchHalf* halves,
               int32_t num_halves, const ParallelFor& parallel) {
  if (rows == nullptr || n < 1 || n > TF_HIPS_ROBUST_MAX_ROWS || d < 0 || halves == nullptr ||
      num_halves < 1 || (d > 0 && std::find(rows, rows + n, nullptr) != rows + n) ||
      std::any_of(
          halves, halves + num_halves,
          [&](const TfHipsSketchHalf& half) { return IsBad(half, d); })) {
    return TF_HIPS_BAD_ROWS;
  }
  int64_t num_sums = 0;
  for (int32_t h = 0; h < num_halves; ++h) num_sums += 2 * halves[h].width;
  const auto size = static_cast<size_t>(n) * static_cast<size_t>(num_sums);
  // What one call adds is summed by itself, and is then added in one piece.
  const std::unique_ptr<double[]> room(new (std::nothrow) double[size]());
  if (room == nullptr) return TF_HIPS_ROBUST_OUT_OF_MEMORY;
  parallel(n, [&](int64_t row) {
    const ScopedExactDenormals exact;
    alignas(64) float tile[kTile];
    double* const sums = room.get() + row * num_sums;
    for (int64_t first = 0; first < d; first += kTile) {
      const int64_t count = std::min(kTile, d - first);
      double* mine = sums;
      for (int32_t h = 0; h < num_halves; ++h) {
        const TfHipsSketchHalf& half = halves[h];
        GiveSigns(rows[row] + first, half.signs + first / kWord, count, tile);
        AddTile(half, tile, first, count, mine);
        mine += 2 * half.width;
      }
    }
    const double* mine = sums;
    for (int32_t h = 0; h < num_halves; ++h) {
      const int64_t width = 2 * halves[h].width;
      double* const to = halves[h].sums + row * width;
      for (int64_t j = 0; j < width; ++j) to[j] += mine[j];
      mine += width;
    }
  });
  return 0;
}

}  // namespace
}  // namespace tf_hips

extern "C" int32_t tf_hips_robust_sketch(const float* const* rows, int32_t n, int64_t d,
                                         const struct TfHipsSketchHalf* halves,
                                         int32_t num_halves) {
  return tf_hips::Sketch(rows, n, d, halves, num_halves, tf_hips::PoolParallelFor);
}
