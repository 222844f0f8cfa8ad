// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/cuda/robust_apart.cuh"
#include "tf_hips/cc/cuda/robust_cuda.h"
#include "tf_hips/cc/cuda/robust_halves.cuh"
#include "tf_hips/cc/cuda/robust_pairs.cuh"
#include "tf_hips/cc/cuda/robust_rows.cuh"
#include "tf_hips/cc/cuda/robust_sort.cuh"

namespace tf_hips {
namespace cuda {
namespace robust {
namespace {

int64_t blocks_of(int64_t elements, int64_t each) { return (elements + each - 1) / each; }

bool are_bad(const float* const* rows, int32_t n, int64_t d) {
  if (n < 1 || n > TF_HIPS_ROBUST_MAX_ROWS || d < 0) return true;
  if (rows == nullptr) return true;
  for (int32_t i = 0; d > 0 && i < n; ++i) {
    if (rows[i] == nullptr) return true;
  }
  return false;
}

bool are_aligned(const float* const* rows, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    if (!is_aligned(rows[i], 16)) return false;
  }
  return true;
}

// How n rows are cut into tiles, and how many tasks a block of threads adds up: all of a chunk
// where there are enough chunks, so that sums of tasks need no memory, but of bands one.
struct Cut {
  int32_t rows = 8, groups = 0, tasks = 1;  // groups, or bands of four of them
  bool has_bands = false;
  int64_t tiles = 0, runs = 0;

  Cut(int32_t n, int64_t d, bool has_pairs) : has_bands(has_pairs && n > 8) {
    groups = static_cast<int32_t>(blocks_of(n, has_bands ? 4 * kGroups : 8));
    if (has_bands) {
      rows = static_cast<int32_t>(blocks_of(n, groups * kGroups));
    } else if (has_pairs) {
      rows = (n + 1) / 2 * 2;
    }
    tiles = has_bands ? int64_t{groups} * (groups + 1) / 2 : groups;
    const int64_t chunks = blocks_of(d, kChunkElements);
    if (!has_bands && tiles * chunks >= TF_HIPS_MANY_BLOCKS) tasks = kTasks;
    runs = blocks_of(d, tasks * kTask);
  }
};

int64_t num_pairs(int32_t n) { return int64_t{n} * (n - 1) / 2; }

// The memory of a call; counts only where there is none.
struct Room {
  const float** many = nullptr;
  float* mixing = nullptr;
  double* sums = nullptr;  // of tasks: of rows, and behind them of pairs
  float* parts = nullptr;  // of blocks of 512: of rows
  int64_t used = 0;

  Room(int32_t n, int64_t d, void* memory) {
    Arena arena(memory);
    if (n > kFew) many = arena.take<const float*>(n);
    mixing = arena.take<float>(int64_t{n} * kMost);
    int64_t count = blocks_of(d, kTask) * n;  // coordinate rules have them
    const Cut cut(n, d, true);
    if (cut.tasks == 1) count += cut.runs * num_pairs(n);
    sums = arena.take<double>(count);
    if (n <= kMost) parts = arena.take<float>(blocks_of(d, kBlock) * n * kLanes);
    used = arena.used();
  }
};

Rows rows_of(const float* const* rows, int32_t n, const Room& room, cudaStream_t stream) {
  Rows all = {};
  if (n <= kFew) {
    for (int32_t i = 0; i < n; ++i) all.few[i] = rows[i];
    return all;
  }
  for (int32_t first = 0; first < n; first += kFew) {
    const int32_t count = n - first < kFew ? n - first : kFew;
    for (int32_t i = 0; i < count; ++i) all.few[i] = rows[first + i];
    TF_HIPS_LAUNCH(put_rows, 1, kThreads, stream, all, first, count, room.many);
  }
  all.many = room.many;
  return all;
}

void add_up(const double* of_tasks, int64_t d, int64_t count, double* of_chunks,
            cudaStream_t stream) {
  const int64_t chunks = blocks_of(d, kChunkElements);
  if (chunks * count == 0) return;
  TF_HIPS_LAUNCH(add_tasks, blocks_of(chunks * count, kThreads), kThreads, stream, of_tasks,
                 blocks_of(d, kTask), count, chunks, of_chunks);
}

using Kernel = void (*)(Apart);

Kernel kernel_for(const Cut& cut, bool has_pairs) {
  if (!has_pairs) return within_groups<8, true>;
  if (!cut.has_bands) {
    return cut.rows == 2   ? within_groups<2, false>
           : cut.rows == 4 ? within_groups<4, false>
           : cut.rows == 6 ? within_groups<6, false>
                           : within_groups<8, false>;
  }
  if (cut.groups == 1) return cut.rows == 3 ? among_bands<3, true> : among_bands<4, true>;
  return cut.rows == 3 ? among_bands<3, false> : among_bands<4, false>;
}

int32_t add_apart(const Rows& rows, int32_t n, int64_t d, double* squares, double* distances,
                  const Room& room, cudaStream_t stream) {
  const bool has_pairs = distances != nullptr && n > 1;
  const Cut cut(n, d, has_pairs);
  const int64_t blocks = cut.tiles * cut.runs;
  if (blocks > kMaxBlocks) return TF_HIPS_BAD_ROWS;
  const bool is_done = cut.tasks == kTasks;
  Apart of = {rows, n, cut.groups, cut.tasks, d, squares, distances};
  for (int32_t i = n; i < cut.rows; ++i) of.rows.few[i] = of.rows.few[n - 1];
  if (!is_done) of.squares = room.sums, of.distances = room.sums + cut.runs * n;
  const Kernel kernel = kernel_for(cut, has_pairs);
  TF_HIPS_LAUNCH(kernel, blocks, kThreads, stream, of);
  if (!is_done) {
    add_up(of.squares, d, n, squares, stream);
    if (has_pairs) add_up(of.distances, d, num_pairs(n), distances, stream);
  }
  return TF_HIPS_OK;
}

int32_t sort_few(Source source, const Ending& ending, bool is_wide, int32_t size, float* out,
                 double* squares, const Room& room, cudaStream_t stream) {
  const bool is_median = ending.rule == TF_HIPS_MEDIAN;
  const SortedFew kernel =
      is_wide ? (is_median ? few_of<true, 4>(size, Sizes()) : few_of<false, 4>(size, Sizes()))
              : (is_median ? few_of<true, 1>(size, Sizes()) : few_of<false, 1>(size, Sizes()));
  const bool has_sums = squares != nullptr;
  // Sums are those of blocks of 512; without them, more blocks of threads are better.
  const int32_t steps = has_sums ? kSteps : 4;
  const int64_t blocks = blocks_of(source.d, steps * kThreads * (is_wide ? 4 : 1));
  if (blocks > kMaxBlocks) return TF_HIPS_BAD_ROWS;
  TF_HIPS_LAUNCH(kernel, blocks, kThreads, stream, source, ending, steps, out,
                 has_sums ? room.parts : nullptr);
  if (has_sums) {
    const int64_t groups = blocks_of(source.d, kTask) * blocks_of(source.n, kRowsAtOnce);
    TF_HIPS_LAUNCH(add_parts, groups, kThreads, stream, room.parts, source.n,
                   blocks_of(source.d, kBlock), room.sums);
    add_up(room.sums, source.d, source.n, squares, stream);
  }
  return TF_HIPS_OK;
}

int32_t sort_halves(const Source& source, const Ending& ending, float* out, cudaStream_t stream) {
  const auto kernel = ending.rule == TF_HIPS_MEDIAN ? sorted_halves<true> : sorted_halves<false>;
  const int64_t blocks = blocks_of(source.d, kThreads);
  if (blocks > kMaxBlocks) return TF_HIPS_BAD_ROWS;
  TF_HIPS_LAUNCH(kernel, blocks, kThreads, stream, source, ending, out);
  return TF_HIPS_OK;
}

int32_t sort_many(const Source& source, const Ending& ending, float* out, cudaStream_t stream) {
  int32_t shift = 0;
  while (source.sorted << (shift + 1) <= kSortedFloats) ++shift;
  const int64_t blocks = blocks_of(source.d, int64_t{1} << shift);
  if (blocks > kMaxBlocks) return TF_HIPS_BAD_ROWS;
  TF_HIPS_LAUNCH(sorted_many, blocks, kThreads, stream, source, ending, shift, out);
  return TF_HIPS_OK;
}

template <int kSumsAtOnce>
void mix_some(const Rows& rows, int32_t n, int64_t d, const float* weights, int32_t m,
              const Rows& out, bool is_wide, cudaStream_t stream) {
  const auto kernel = is_wide ? mixed<kSumsAtOnce, 4> : mixed<kSumsAtOnce, 1>;
  const int64_t blocks = blocks_of(d, kThreads * (is_wide ? 4 : 1)) * blocks_of(m, kSumsAtOnce);
  TF_HIPS_LAUNCH(kernel, blocks, kThreads, stream, rows, n, d, weights, m, out);
}

// Whether a rule leaves a value of `sorted` ones.
bool is_rule(int32_t rule, int32_t drop, int32_t sorted) {
  switch (rule) {
    case TF_HIPS_MEDIAN:
    case TF_HIPS_MAJORITY:
      return drop == 0;
    case TF_HIPS_TRIMMED:
      return drop >= 0 && drop <= (sorted - 1) / 2;  // twice it may not fit
    case TF_HIPS_NEAREST:
      return drop >= 0 && drop < sorted;
    default:
      return false;
  }
}

int32_t coordinate(const float* const* rows, int32_t n, int64_t d, const float* weights, int32_t m,
                   const Ending& ending, float* out, double* squares, const Room& room,
                   cudaStream_t stream) {
  Source source = {{}, n, weights == nullptr ? n : m, 0, d, weights, nullptr};
  const int32_t size = size_for(source.sorted, Sizes());
  const bool is_few = size != 0;
  const bool is_halved = !is_few && weights == nullptr && n <= kFew &&
                         (ending.rule == TF_HIPS_MEDIAN || ending.rule == TF_HIPS_TRIMMED);
  const bool is_wide = weights == nullptr && is_few && size <= kWideRows && are_aligned(rows, n) &&
                       is_aligned(out, 16);
  if (is_few) source.before = (size - source.sorted) / 2;
  if (is_halved) source.before = before_halves(n);
  const Rows all = rows_of(rows, n, room, stream);
  source.rows = all;
  if (weights == nullptr && (is_few || is_halved)) {
    for (int32_t k = 0; k < (is_few ? size : kFew); ++k) {
      const int32_t i = k - source.before;
      source.rows.few[k] = rows[i >= 0 && i < n ? i : 0];
    }
  }
  if (weights != nullptr && is_few) {
    const int32_t padded = (size + 3) / 4 * 4;
    TF_HIPS_LAUNCH(spread_weights, blocks_of(int64_t{n} * padded, kThreads), kThreads, stream,
                   weights, n, m, source.before, padded, room.mixing);
    source.mixing = room.mixing;
  }
  const bool is_apart = squares != nullptr && (weights != nullptr || !is_few);
  if (is_apart) {
    const int32_t status = add_apart(all, n, d, squares, nullptr, room, stream);
    if (status != TF_HIPS_OK) return status;
  }
  if (is_halved) return sort_halves(source, ending, out, stream);
  if (!is_few) return sort_many(source, ending, out, stream);
  return sort_few(source, ending, is_wide, size, out, is_apart ? nullptr : squares, room, stream);
}

int32_t mix(const float* const* rows, int32_t n, int64_t d, const float* weights, int32_t m,
            float* const* out, const Room& room, cudaStream_t stream) {
  bool is_wide = are_aligned(rows, n);
  for (int32_t k = 0; k < m; ++k) is_wide = is_wide && is_aligned(out[k], 16);
  if (blocks_of(d, kThreads) * kFew > kMaxBlocks) return TF_HIPS_BAD_ROWS;
  const Rows all = rows_of(rows, n, room, stream);
  for (int32_t first = 0; first < m; first += kFew) {
    const int32_t count = m - first < kFew ? m - first : kFew;
    Rows to = {};
    for (int32_t k = 0; k < count; ++k) to.few[k] = out[first + k];
    const float* const some = weights + int64_t{first} * n;
    if (count == 1) {
      mix_some<1>(all, n, d, some, count, to, is_wide, stream);
    } else {
      mix_some<8>(all, n, d, some, count, to, is_wide, stream);
    }
  }
  return TF_HIPS_OK;
}

// Calls body(room, stream) where there is something to do and memory to do it in.
template <class Body>
int32_t in_room(int32_t n, int64_t d, void* scratch, int64_t bytes, void* stream,
                const Body& body) {
  if (d == 0) return TF_HIPS_OK;
  const Room room(n, d, scratch);
  if (scratch == nullptr || bytes < room.used) {
    return TF_HIPS_ROBUST_OUT_OF_MEMORY;
  }
  const int32_t status = body(room, static_cast<cudaStream_t>(stream));
  return status != TF_HIPS_OK ? status : launched();
}

}  // namespace
}  // namespace robust
}  // namespace cuda
}  // namespace tf_hips

extern "C" {

int64_t tf_hips_cuda_robust_scratch_bytes(int32_t n, int64_t d) {
  if (n < 1 || n > TF_HIPS_ROBUST_MAX_ROWS || d < 0) return -TF_HIPS_BAD_ROWS;
  return tf_hips::cuda::robust::Room(n, d, nullptr).used;
}

int32_t tf_hips_cuda_robust_coordinate(const float* const* rows, int32_t n, int64_t d,
                                       const float* weights, int32_t m, int32_t rule, int32_t drop,
                                       float* out, double* squares, void* scratch,
                                       int64_t scratch_bytes, void* stream) {
  namespace robust = tf_hips::cuda::robust;
  const int32_t sorted = weights == nullptr ? n : m;
  if (robust::are_bad(rows, n, d) || (d > 0 && out == nullptr) || sorted < 1 ||
      sorted > TF_HIPS_ROBUST_MAX_ROWS || !robust::is_rule(rule, drop, sorted)) {
    return TF_HIPS_BAD_ROWS;
  }
  return robust::in_room(
      n, d, scratch, scratch_bytes, stream, [&](const robust::Room& room, cudaStream_t on) {
        return robust::coordinate(rows, n, d, weights, m, {rule, drop}, out, squares, room, on);
      });
}

int32_t tf_hips_cuda_robust_distances(const float* const* rows, int32_t n, int64_t d,
                                      double* squares, double* distances, void* scratch,
                                      int64_t scratch_bytes, void* stream) {
  namespace robust = tf_hips::cuda::robust;
  if (robust::are_bad(rows, n, d) || (d > 0 && squares == nullptr)) return TF_HIPS_BAD_ROWS;
  return robust::in_room(n, d, scratch, scratch_bytes, stream,
                         [&](const robust::Room& room, cudaStream_t on) {
                           const robust::Rows all = robust::rows_of(rows, n, room, on);
                           return robust::add_apart(all, n, d, squares, distances, room, on);
                         });
}

int32_t tf_hips_cuda_robust_mix(const float* const* rows, int32_t n, int64_t d,
                                const float* weights, int32_t m, float* const* out, void* scratch,
                                int64_t scratch_bytes, void* stream) {
  namespace robust = tf_hips::cuda::robust;
  if (robust::are_bad(rows, n, d) || weights == nullptr || m < 1 || m > TF_HIPS_ROBUST_MAX_ROWS ||
      out == nullptr) {
    return TF_HIPS_BAD_ROWS;
  }
  for (int32_t k = 0; d > 0 && k < m; ++k) {
    if (out[k] == nullptr) return TF_HIPS_BAD_ROWS;
  }
  return robust::in_room(n, d, scratch, scratch_bytes, stream,
                         [&](const robust::Room& room, cudaStream_t on) {
                           return robust::mix(rows, n, d, weights, m, out, room, on);
                         });
}

}  // extern "C"
