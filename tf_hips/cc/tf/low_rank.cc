// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/tf/low_rank.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/rng.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {
namespace {

// Rows whose products are one partial sum, and one task: a sum's order, so never changed.
constexpr int64_t kBlockRows = 4096;
// Elements of a product that are one task.
constexpr int64_t kTaskElements = int64_t{1} << 16;
// Columns whose sums over all rows are one task.
constexpr int64_t kTaskColumns = 512;
// Squares of norms, as shares of the largest column's and of noise's own.
constexpr double kNothing = 0x1p-40;
constexpr double kLeastNoise = 0x1p-20;

// 64 bytes, which compilers cut into what registers there are; lanes never meet before the end.
using Doubles = double __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
constexpr int64_t kDoubles = 8;
constexpr int64_t kFloats = 16;

TF_HIPS_HOT void LoadColumn(const float* matrix, int64_t stride, int64_t n, double* column) {
  for (int64_t i = 0; i < n; ++i) column[i] = static_cast<double>(matrix[i * stride]);
}

TF_HIPS_HOT void StoreColumn(const double* column, int64_t stride, int64_t n, float* basis) {
  for (int64_t i = 0; i < n; ++i) basis[i * stride] = static_cast<float>(column[i]);
}

TF_HIPS_HOT double Dot(const double* x, const double* y, int64_t n) {
  Doubles sum = {};
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) {
    Doubles a, b;
    std::memcpy(&a, x + i, sizeof a);
    std::memcpy(&b, y + i, sizeof b);
    sum += a * b;
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) sum[lane] += x[i] * y[i];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

TF_HIPS_HOT void Subtract(const double* __restrict__ x, double factor, int64_t n,
                          double* __restrict__ y) {
  for (int64_t i = 0; i < n; ++i) y[i] -= factor * x[i];
}

TF_HIPS_HOT void Divide(double by, int64_t n, double* x) {
  for (int64_t i = 0; i < n; ++i) x[i] /= by;
}

TF_HIPS_HOT void FillWithNoise(const TfHipsKey& key, int64_t first, int64_t n, double* x) {
  // Between -1 and 1, and never 0.
  for (int64_t i = 0; i < n; ++i) {
    x[i] = (static_cast<double>(noise_at(key, 0, first + i)) - 32767.5) * 0x1p-15;
  }
}

// The columns of a matrix, one after the other, in double.
class Columns {
 public:
  Columns(const float* matrix, int64_t rows, int64_t rank, const ParallelFor& parallel)
      : rows_(rows),
        num_blocks_((rows + kBlockRows - 1) / kBlockRows),
        parallel_(parallel),
        values_(rows * rank),
        partial_(num_blocks_ * rank),
        dots_(rank) {
    ForBlocks([&](int64_t, int64_t first, int64_t n) {
      for (int64_t j = 0; j < rank; ++j)
        LoadColumn(matrix + first * rank + j, rank, n, At(j, first));
    });
  }

  // The square of a column's norm.
  double Square(int64_t j) {
    Dots(j, j + 1, j);
    return dots_[j];
  }

  // Takes from column j its part along those before it. Once leaves of that part what rounding
  // does, which is much where little else is left; twice leaves nothing.
  void Project(int64_t j) {
    for (int time = 0; time < 2; ++time) {
      Dots(0, j, j);
      ForBlocks([&](int64_t, int64_t first, int64_t n) {
        for (int64_t i = 0; i < j; ++i) Subtract(At(i, first), dots_[i], n, At(j, first));
      });
    }
  }

  void SetToNoise(int64_t j, const TfHipsKey& key) {
    ForBlocks([&](int64_t, int64_t first, int64_t n) {
      FillWithNoise(key, j * rows_ + first, n, At(j, first));
    });
  }

  // The axis that is farthest from the columns before: what is left of it is at least 1 / rows,
  // while there are fewer columns than rows.
  void SetToAxis(int64_t j) {
    int64_t axis = 0;
    double least = HUGE_VAL;
    for (int64_t row = 0; row < rows_; ++row) {
      double covered = 0;
      for (int64_t i = 0; i < j; ++i) covered += *At(i, row) * *At(i, row);
      if (covered < least) {
        least = covered;
        axis = row;
      }
    }
    std::fill(At(j, 0), At(j, 0) + rows_, 0.0);
    *At(j, axis) = 1;
  }

  void SetToZero(int64_t j) { std::fill(At(j, 0), At(j, 0) + rows_, 0.0); }

  void Normalize(int64_t j, double square) {
    const double norm = std::sqrt(square);
    ForBlocks([&](int64_t, int64_t first, int64_t n) { Divide(norm, n, At(j, first)); });
  }

  void Store(int64_t rank, float* basis) {
    ForBlocks([&](int64_t, int64_t first, int64_t n) {
      for (int64_t j = 0; j < rank; ++j)
        StoreColumn(At(j, first), rank, n, basis + first * rank + j);
    });
  }

 private:
  double* At(int64_t column, int64_t row) { return values_.data() + column * rows_ + row; }

  // Products of column j with each of [begin, end), into dots_.
  void Dots(int64_t begin, int64_t end, int64_t j) {
    ForBlocks([&](int64_t block, int64_t first, int64_t n) {
      for (int64_t i = begin; i < end; ++i) {
        partial_[i * num_blocks_ + block] = Dot(At(i, first), At(j, first), n);
      }
    });
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t block = 0; block < num_blocks_; ++block)
        sum += partial_[i * num_blocks_ + block];
      dots_[i] = sum;
    }
  }

  void ForBlocks(const std::function<void(int64_t block, int64_t first, int64_t n)>& run) {
    const auto task = [&](int64_t block) {
      const ScopedExactDenormals exact;
      const int64_t first = block * kBlockRows;
      run(block, first, std::min(kBlockRows, rows_ - first));
    };
    if (num_blocks_ == 1) {
      task(0);
    } else if (num_blocks_ > 1) {
      parallel_(num_blocks_, task);
    }
  }

  const int64_t rows_, num_blocks_;
  const ParallelFor& parallel_;
  std::vector<double> values_, partial_, dots_;
};

// right [columns, rank] in tiles of 16 of its rows, each as [rank, 16], so that a row of a product
// reads it from front to back.
std::vector<float> Tiled(const float* right, int64_t columns, int64_t rank) {
  std::vector<float> tiled((columns + kFloats - 1) / kFloats * kFloats * rank);
  for (int64_t c = 0; c < columns; ++c) {
    float* tile = tiled.data() + c / kFloats * kFloats * rank + c % kFloats;
    for (int64_t k = 0; k < rank; ++k) tile[k * kFloats] = right[c * rank + k];
  }
  return tiled;
}

constexpr uint32_t kExponent = 0x7f800000u;

// kRows rows of the product, or with a matrix of what it leaves of that. Rows share what is read of
// `right`, and each keeps its sum in a register.
template <bool kIsRest, int kRows>
TF_HIPS_INLINE void SomeRows(const float* left, const float* right, int64_t columns, int64_t rank,
                             const float* matrix, float* out) {
  int64_t c = 0;
  for (; c + kFloats <= columns; c += kFloats) {
    Floats sums[kRows] = {};
    for (int64_t k = 0; k < rank; ++k) {
      Floats part;
      std::memcpy(&part, right + c * rank + k * kFloats, sizeof part);
      for (int row = 0; row < kRows; ++row) sums[row] += left[row * rank + k] * part;
    }
    for (int row = 0; row < kRows; ++row) {
      const int64_t at = row * columns + c;
      if (kIsRest) {
        Floats own;
        std::memcpy(&own, matrix + at, sizeof own);
        own -= sums[row];
        Words words;
        std::memcpy(&words, &own, sizeof words);
        words &= ~reinterpret_cast<Words>((words & kExponent) == kExponent);
        std::memcpy(out + at, &words, sizeof words);
      } else {
        std::memcpy(out + at, &sums[row], sizeof sums[row]);
      }
    }
  }
  for (const float* tile = right + c * rank; c < columns; ++c, ++tile) {
    for (int row = 0; row < kRows; ++row) {
      float sum = 0;
      for (int64_t k = 0; k < rank; ++k) sum += left[row * rank + k] * tile[k * kFloats];
      if (kIsRest) {
        const float rest = matrix[row * columns + c] - sum;
        uint32_t word;
        std::memcpy(&word, &rest, sizeof word);
        sum = (word & kExponent) == kExponent ? 0.0f : rest;
      }
      out[row * columns + c] = sum;
    }
  }
}

template <bool kIsRest>
TF_HIPS_INLINE void Rows(const float* left, const float* right, int64_t rows, int64_t columns,
                         int64_t rank, const float* matrix, float* out) {
  constexpr int kTogether = 4;
  int64_t row = 0;
  for (; row + kTogether <= rows; row += kTogether) {
    SomeRows<kIsRest, kTogether>(left + row * rank, right, columns, rank,
                                 kIsRest ? matrix + row * columns : nullptr, out + row * columns);
  }
  for (; row < rows; ++row) {
    SomeRows<kIsRest, 1>(left + row * rank, right, columns, rank,
                         kIsRest ? matrix + row * columns : nullptr, out + row * columns);
  }
}

TF_HIPS_HOT void ProductRows(const float* left, const float* right, int64_t rows, int64_t columns,
                             int64_t rank, float* product) {
  Rows<false>(left, right, rows, columns, rank, nullptr, product);
}

TF_HIPS_HOT void RestRows(const float* left, const float* right, int64_t rows, int64_t columns,
                          int64_t rank, const float* matrix, float* rest) {
  Rows<true>(left, right, rows, columns, rank, matrix, rest);
}

// Products of kRows rows with kRank neighbouring columns of `right`, in tiles: `tile` is where the
// first of them begins.
template <int kRows, int kRank>
TF_HIPS_INLINE void SomeProducts(const float* rows, const float* tile, int64_t columns,
                                 int64_t rank, float* products) {
  Floats sums[kRows][kRank] = {};
  int64_t c = 0;
  for (; c + kFloats <= columns; c += kFloats, tile += kFloats * rank) {
    Floats own[kRows];
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(&own[row], rows + row * columns + c, sizeof own[row]);
    }
    for (int k = 0; k < kRank; ++k) {
      Floats part;
      std::memcpy(&part, tile + k * kFloats, sizeof part);
      for (int row = 0; row < kRows; ++row) sums[row][k] += own[row] * part;
    }
  }
  for (int64_t lane = 0; c < columns; ++c, ++lane) {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kRank; ++k) {
        sums[row][k][lane] += rows[row * columns + c] * tile[k * kFloats + lane];
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kRank; ++k) {
      float sum = 0;
      for (int64_t lane = 0; lane < kFloats; ++lane) sum += sums[row][k][lane];
      products[row * rank + k] = sum;
    }
  }
}

template <int kRows>
TF_HIPS_INLINE void LeftSomeRows(const float* matrix, const float* right, int64_t columns,
                                 int64_t rank, float* left) {
  int64_t k = 0;
  for (; k + 4 <= rank; k += 4) {
    SomeProducts<kRows, 4>(matrix, right + k * kFloats, columns, rank, left + k);
  }
  for (; k < rank; ++k) {
    SomeProducts<kRows, 1>(matrix, right + k * kFloats, columns, rank, left + k);
  }
}

TF_HIPS_HOT void LeftRows(const float* matrix, const float* right, int64_t rows, int64_t columns,
                          int64_t rank, float* left) {
  constexpr int kTogether = 4;
  int64_t row = 0;
  for (; row + kTogether <= rows; row += kTogether) {
    LeftSomeRows<kTogether>(matrix + row * columns, right, columns, rank, left + row * rank);
  }
  for (; row < rows; ++row) {
    LeftSomeRows<1>(matrix + row * columns, right, columns, rank, left + row * rank);
  }
}

// Adds to `sums` [rank, n] the products of kRows rows of n columns with those of `left`.
template <int kRows>
TF_HIPS_INLINE void AddRows(const float* matrix, const float* left, int64_t columns, int64_t rank,
                            int64_t n, float* sums) {
  int64_t c = 0;
  for (; c + kFloats <= n; c += kFloats) {
    Floats own[kRows];
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(&own[row], matrix + row * columns + c, sizeof own[row]);
    }
    for (int64_t k = 0; k < rank; ++k) {
      Floats sum;
      std::memcpy(&sum, sums + k * n + c, sizeof sum);
      for (int row = 0; row < kRows; ++row) sum += left[row * rank + k] * own[row];
      std::memcpy(sums + k * n + c, &sum, sizeof sum);
    }
  }
  for (; c < n; ++c) {
    for (int64_t k = 0; k < rank; ++k) {
      for (int row = 0; row < kRows; ++row) {
        sums[k * n + c] += left[row * rank + k] * matrix[row * columns + c];
      }
    }
  }
}

TF_HIPS_HOT void AddAllRows(const float* matrix, const float* left, int64_t rows, int64_t columns,
                            int64_t rank, int64_t n, float* sums) {
  constexpr int kTogether = 4;
  int64_t row = 0;
  for (; row + kTogether <= rows; row += kTogether) {
    AddRows<kTogether>(matrix + row * columns, left + row * rank, columns, rank, n, sums);
  }
  for (; row < rows; ++row) {
    AddRows<1>(matrix + row * columns, left + row * rank, columns, rank, n, sums);
  }
}

// Calls `run(first, n)` for rows [first, first + n) of a matrix, in tasks.
void ForRows(int64_t rows, int64_t columns, const ParallelFor& parallel,
             const std::function<void(int64_t first, int64_t n)>& run) {
  if (rows == 0) return;
  const int64_t together = std::max(int64_t{1}, kTaskElements / std::max(int64_t{1}, columns));
  const int64_t num_tasks = (rows + together - 1) / together;
  const auto task = [&](int64_t i) {
    const ScopedExactDenormals exact;
    run(i * together, std::min(together, rows - i * together));
  };
  if (num_tasks == 1) {
    task(0);
  } else {
    parallel(num_tasks, task);
  }
}

}  // namespace

void Orthonormalize(const float* matrix, int64_t rows, int64_t rank, const TfHipsKey& key,
                    const ParallelFor& parallel, float* basis) {
  const ScopedExactDenormals exact;
  Columns columns(matrix, rows, rank, parallel);
  double largest = 0;
  for (int64_t j = 0; j < rank; ++j) {
    const double square = columns.Square(j);
    if (std::isfinite(square)) largest = std::max(largest, square);
  }
  for (int64_t j = 0; j < rank; ++j) {
    if (j >= rows) {
      columns.SetToZero(j);
      continue;
    }
    columns.Project(j);
    double square = columns.Square(j);
    // A column that is not finite makes neither comparison true.
    if (!(square > kNothing * largest && square <= largest * 2)) {
      columns.SetToNoise(j, key);
      columns.Project(j);
      square = columns.Square(j);
      if (!(square > kLeastNoise)) {
        columns.SetToAxis(j);
        columns.Project(j);
        square = columns.Square(j);
      }
    }
    columns.Normalize(j, square);
  }
  columns.Store(rank, basis);
}

void LeftFactor(const float* matrix, const float* right, int64_t rows, int64_t columns,
                int64_t rank, const ParallelFor& parallel, float* left) {
  const std::vector<float> tiled = Tiled(right, columns, rank);
  ForRows(rows, columns, parallel, [&](int64_t first, int64_t n) {
    LeftRows(matrix + first * columns, tiled.data(), n, columns, rank, left + first * rank);
  });
}

void RightFactor(const float* matrix, const float* left, int64_t rows, int64_t columns,
                 int64_t rank, const ParallelFor& parallel, float* right) {
  const int64_t num_tasks = (columns + kTaskColumns - 1) / kTaskColumns;
  // Of all tasks, here: in a thread of the pool nobody could catch that there is no memory.
  std::vector<float> of_tasks(rank * columns);
  const auto task = [&](int64_t i) {
    const ScopedExactDenormals exact;
    const int64_t first = i * kTaskColumns;
    const int64_t n = std::min(kTaskColumns, columns - first);
    float* const sums = of_tasks.data() + rank * first;
    AddAllRows(matrix + first, left, rows, columns, rank, n, sums);
    for (int64_t c = 0; c < n; ++c) {
      for (int64_t k = 0; k < rank; ++k) right[(first + c) * rank + k] = sums[k * n + c];
    }
  };
  if (num_tasks == 1) {
    task(0);
  } else if (num_tasks > 1) {
    parallel(num_tasks, task);
  }
}

void LowRankProduct(const LowRank& factors, const ParallelFor& parallel, float* product) {
  const std::vector<float> right = Tiled(factors.right, factors.columns, factors.rank);
  ForRows(factors.rows, factors.columns, parallel, [&](int64_t first, int64_t n) {
    ProductRows(factors.left + first * factors.rank, right.data(), n, factors.columns, factors.rank,
                product + first * factors.columns);
  });
}

void LowRankRest(const LowRank& factors, const float* matrix, const ParallelFor& parallel,
                 float* rest) {
  const std::vector<float> right = Tiled(factors.right, factors.columns, factors.rank);
  ForRows(factors.rows, factors.columns, parallel, [&](int64_t first, int64_t n) {
    RestRows(factors.left + first * factors.rank, right.data(), n, factors.columns, factors.rank,
             matrix + first * factors.columns, rest + first * factors.columns);
  });
}

}  // namespace tf_hips
