// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/runtime/robust.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "tf_hips/cc/runtime/ahead.h"
#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/sorting.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/tiles.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {
namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kTask = int64_t{1} << 15;
constexpr int64_t kChunk = int64_t{1} << 20;
// Coordinates that are sorted at a time where registers do not hold all rows: a hundred rows of
// them fit the first-level cache.
constexpr int64_t kSlice = 64;
// Results of so many floats go past the caches: they hold no more of them, and would fetch each
// line first, which costs as much as reading another row.
constexpr int64_t kStreamed = int64_t{1} << 21;
// Rows of results for which that is so: of ten at a time a processor has no buffers.
constexpr int32_t kStreamedRows = 8;
// Rows that are sorted in registers, where registers could hold `all`. Under sanitizers, which do
// not optimise, networks of every size would take as long to compile as all the rest.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int RowsInRegisters(int) { return 3; }
#else
constexpr int RowsInRegisters(int all) { return all; }
#endif

struct CoordinatePlan {
  int rule = TF_HIPS_MEDIAN, drop = 0;
  std::vector<Comparator> network;  // of rows that registers do not hold
};

// What a width of registers offers; each works on one block of kBlock elements of n rows.
struct Loops {
  int in_registers;  // rows at most
  int run;           // rows of a run, where there are more
  void (*squares)(const float* const* rows, int n, double* lanes);
  void (*distances)(const float* const* rows, int n, double* squares, double* distances);
  void (*mix)(const float* const* rows, int n, const float* weights, int m, float* const* out);
  // `lanes`: as of `squares`, or NULL.
  void (*coordinate)(const float* const* rows, int n, const CoordinatePlan& plan, float* scratch,
                     float* out, double* lanes);
};

namespace base {

constexpr int kInRegisters = RowsInRegisters(8);
constexpr int kTile = 4, kGroup = 4;

// Any machine. `__builtin_fmaf` is a call where there is no instruction for it: slow, the same
// bits.
struct V {
  static constexpr int kWidth = 4;
  float x[kWidth];

  static V Zero() { return Set(0.0f); }
  static V Set(float value) {
    return Of([&](int) { return value; });
  }
  static V Load(const float* from) {
    return Of([&](int i) { return from[i]; });
  }
  void Store(float* to) const { std::memcpy(to, x, sizeof x); }
  void Keep() {}  // in a register: no reason to read it again
  static V Add(V a, V b) {
    return Of([&](int i) { return a.x[i] + b.x[i]; });
  }
  static V Sub(V a, V b) {
    return Of([&](int i) { return a.x[i] - b.x[i]; });
  }
  static V Mul(V a, V b) {
    return Of([&](int i) { return a.x[i] * b.x[i]; });
  }
  static V Div(V a, V b) {
    return Of([&](int i) { return a.x[i] / b.x[i]; });
  }
  static V Fma(V a, V b, V c) {
    return Of([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
  }
  // As the instructions have them: the second where the two do not compare.
  static V Min(V a, V b) {
    return Of([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
  }
  static V Max(V a, V b) {
    return Of([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
  }
  static void Exchange(V& low, V& high) {
    const V a = low, b = high;
    low = Min(a, b);
    high = Max(a, b);
  }
  static V Greater(V a, V b) {
    return Of([&](int i) { return a.x[i] > b.x[i] ? 1.0f : 0.0f; });
  }
  static V ZeroWhere(V mask, V a) {
    return Of([&](int i) { return mask.x[i] != 0.0f ? 0.0f : a.x[i]; });
  }
  static V ZeroUnless(V mask, V a) {
    return Of([&](int i) { return mask.x[i] != 0.0f ? a.x[i] : 0.0f; });
  }
  void AddTo(double* sums) const {
    for (int i = 0; i < kWidth; ++i) sums[i] += static_cast<double>(x[i]);
  }

 private:
  template <class Value>
  static V Of(const Value& value) {
    V all;
    for (int i = 0; i < kWidth; ++i) all.x[i] = value(i);
    return all;
  }
};

#include "tf_hips/cc/runtime/robust_loops.h"

}  // namespace base

#if defined(TF_HIPS_HAS_AVX) && !defined(__clang__)
#define TF_HIPS_ROBUST_WIDE 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {

constexpr int kInRegisters = RowsInRegisters(16);
constexpr int kTile = 3, kGroup = 3;

struct V {
  static constexpr int kWidth = 8;
  __m256 x;

  static V Zero() { return {_mm256_setzero_ps()}; }
  static V Set(float value) { return {_mm256_set1_ps(value)}; }
  static V Load(const float* from) { return {_mm256_loadu_ps(from)}; }
  void Store(float* to) const { _mm256_storeu_ps(to, x); }
  void Keep() { asm("" : "+x"(x)); }
  static V Add(V a, V b) { return {_mm256_add_ps(a.x, b.x)}; }
  static V Sub(V a, V b) { return {_mm256_sub_ps(a.x, b.x)}; }
  static V Mul(V a, V b) { return {_mm256_mul_ps(a.x, b.x)}; }
  static V Div(V a, V b) { return {_mm256_div_ps(a.x, b.x)}; }
  static V Fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
  static V Min(V a, V b) { return {_mm256_min_ps(a.x, b.x)}; }
  static V Max(V a, V b) { return {_mm256_max_ps(a.x, b.x)}; }
  static void Exchange(V& low, V& high) {
    const V a = low, b = high;
    low = Min(a, b);
    high = Max(a, b);
  }
  static V Greater(V a, V b) { return {_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ)}; }
  static V ZeroWhere(V mask, V a) { return {_mm256_andnot_ps(mask.x, a.x)}; }
  static V ZeroUnless(V mask, V a) { return {_mm256_and_ps(mask.x, a.x)}; }
  void AddTo(double* sums) const {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), low));
    _mm256_storeu_pd(sums + 4, _mm256_add_pd(_mm256_loadu_pd(sums + 4), high));
  }
};

#include "tf_hips/cc/runtime/robust_loops.h"

}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,fma,avx2")
namespace avx512 {

constexpr int kInRegisters = RowsInRegisters(32);
constexpr int kTile = 4, kGroup = 8;

struct V {
  static constexpr int kWidth = 16;
  __m512 x;

  static V Zero() { return {_mm512_setzero_ps()}; }
  static V Set(float value) { return {_mm512_set1_ps(value)}; }
  static V Load(const float* from) { return {_mm512_loadu_ps(from)}; }
  void Store(float* to) const { _mm512_storeu_ps(to, x); }
  void Keep() { asm("" : "+v"(x)); }
  static V Add(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
  static V Sub(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
  static V Mul(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
  static V Div(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
  static V Fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
  static V Min(V a, V b) { return {_mm512_min_ps(a.x, b.x)}; }
  static V Max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
  static void Exchange(V& low, V& high) {
    const V a = low, b = high;
    low = Min(a, b);
    high = Max(a, b);
  }
  static __mmask16 Greater(V a, V b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ); }
  static V ZeroWhere(__mmask16 mask, V a) {
    return {_mm512_maskz_mov_ps(static_cast<__mmask16>(~mask), a.x)};
  }
  static V ZeroUnless(__mmask16 mask, V a) { return {_mm512_maskz_mov_ps(mask, a.x)}; }
  void AddTo(double* sums) const {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), low));
    _mm512_storeu_pd(sums + 8, _mm512_add_pd(_mm512_loadu_pd(sums + 8), high));
  }
};

#include "tf_hips/cc/runtime/robust_loops.h"

}  // namespace avx512
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif

#if defined(TF_HIPS_HAS_NEON)
namespace neon {

constexpr int kInRegisters = RowsInRegisters(32);
constexpr int kTile = 4, kGroup = 8;

struct V {
  static constexpr int kWidth = 4;
  float32x4_t x;

  static V Zero() { return Set(0.0f); }
  static V Set(float value) { return {vdupq_n_f32(value)}; }
  static V Load(const float* from) { return {vld1q_f32(from)}; }
  void Store(float* to) const { vst1q_f32(to, x); }
  void Keep() { asm("" : "+w"(x)); }
  static V Add(V a, V b) { return {vaddq_f32(a.x, b.x)}; }
  static V Sub(V a, V b) { return {vsubq_f32(a.x, b.x)}; }
  static V Mul(V a, V b) { return {vmulq_f32(a.x, b.x)}; }
  static V Div(V a, V b) { return {vdivq_f32(a.x, b.x)}; }
  static V Fma(V a, V b, V c) { return {vfmaq_f32(c.x, a.x, b.x)}; }
  // Its own minimum and maximum of NaN are NaN, and not the second one.
  static V Min(V a, V b) { return {vbslq_f32(vcltq_f32(a.x, b.x), a.x, b.x)}; }
  static V Max(V a, V b) { return {vbslq_f32(vcgtq_f32(a.x, b.x), a.x, b.x)}; }
  static void Exchange(V& low, V& high) {
    const V a = low, b = high;
    low = Min(a, b);
    high = Max(a, b);
  }
  static uint32x4_t Greater(V a, V b) { return vcgtq_f32(a.x, b.x); }
  static V ZeroWhere(uint32x4_t mask, V a) {
    return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a.x), mask))};
  }
  static V ZeroUnless(uint32x4_t mask, V a) {
    return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.x), mask))};
  }
  void AddTo(double* sums) const {
    vst1q_f64(sums, vaddq_f64(vld1q_f64(sums), vcvt_f64_f32(vget_low_f32(x))));
    vst1q_f64(sums + 2, vaddq_f64(vld1q_f64(sums + 2), vcvt_high_f64_f32(x)));
  }
};

#include "tf_hips/cc/runtime/robust_loops.h"

}  // namespace neon
#endif

const Loops& TheLoops() {
#if defined(TF_HIPS_ROBUST_WIDE)
  // No machine has AVX2 without fused multiply-add, but for one of VIA's.
  if (machine() == Machine::kAvx512) return avx512::kLoops;
  if (machine() == Machine::kAvx2 && __builtin_cpu_supports("fma")) return avx2::kLoops;
#elif defined(TF_HIPS_HAS_NEON)
  if (machine() == Machine::kNeon) return neon::kLoops;
#endif
  return base::kLoops;
}

int64_t NumTasks(int64_t d) { return (d + kTask - 1) / kTask; }

bool AreBad(const float* const* rows, int32_t n, int64_t d) {
  if (rows == nullptr || n < 1 || n > TF_HIPS_ROBUST_MAX_ROWS || d < 0) return true;
  return d > 0 && std::find(rows, rows + n, nullptr) != rows + n;
}

// Memory of one task; `has_failed` where there is none.
template <class T>
struct Room {
  explicit Room(int64_t size)
      : at(static_cast<T*>(operator new[](static_cast<size_t>(size) * sizeof(T), kLine,
                                          std::nothrow)),
           Free{size}) {
    if (at != nullptr) std::uninitialized_value_construct_n(at.get(), size);
  }
  bool has_failed() const { return at == nullptr; }

  // A register that begins at any float would be in two lines, and cost two accesses.
  static constexpr std::align_val_t kLine{64};
  struct Free {
    int64_t size;
    void operator()(T* all) const {
      std::destroy_n(all, size);
      operator delete[](all, kLine);
    }
  };
  const std::unique_ptr<T[], Free> at;
};

// Calls body(first, rows) for the blocks of a task: where a block begins, and its rows there. A
// shorter one is in `padded`, n blocks, with zeros behind it.
template <class Body>
void ForBlocks(const float* const* rows, int n, int64_t d, int64_t task, const float** here,
               float* padded, const Body& body) {
  const int64_t end = std::min(d, (task + 1) * kTask);
  for (int64_t first = task * kTask; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    for (int i = 0; i < n; ++i) {
      here[i] = rows[i] + first;
      if (count == kBlock) continue;
      float* const copy = padded + i * kBlock;
      std::memcpy(copy, here[i], static_cast<size_t>(count) * sizeof(float));
      std::fill(copy + count, copy + kBlock, 0.0f);
      here[i] = copy;
    }
    body(first, count, here);
  }
}

// Floats for the last block of a row that is shorter, where the task has it.
int64_t PaddedSize(int n, int64_t d, int64_t task) {
  const bool is_last = task + 1 == NumTasks(d);
  return is_last && d % kBlock != 0 ? n * kBlock : 0;
}

// sums[i] = the sum of lanes[i].
void AddLanes(const double* lanes, int64_t count, double* sums) {
  for (int64_t i = 0; i < count; ++i) {
    double half[kLanes];
    std::copy(lanes + i * kLanes, lanes + (i + 1) * kLanes, half);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
    }
    sums[i] = half[0];
  }
}

// Sums of tasks to sums of chunks, in order.
void AddTasks(const double* of_tasks, int64_t d, int64_t count, double* of_chunks) {
  constexpr int64_t kTasks = kChunk / kTask;
  const int64_t num_tasks = NumTasks(d);
  for (int64_t task = 0; task < num_tasks; ++task) {
    double* const sums = of_chunks + task / kTasks * count;
    if (task % kTasks == 0) std::fill(sums, sums + count, 0.0);
    for (int64_t i = 0; i < count; ++i) sums[i] += of_tasks[task * count + i];
  }
}

}  // namespace

int32_t RobustCoordinate(const float* const* rows, int32_t n, int64_t d, const float* weights,
                         int32_t m, int32_t rule, int32_t drop, float* out, double* squares,
                         const ParallelFor& parallel) {
  if (weights == nullptr) m = 0;
  const int32_t sorted = weights == nullptr ? n : m;
  if (AreBad(rows, n, d) || (d > 0 && out == nullptr) || sorted < 1 ||
      sorted > TF_HIPS_ROBUST_MAX_ROWS || drop < 0 || rule < TF_HIPS_MEDIAN ||
      rule > TF_HIPS_MAJORITY || (rule == TF_HIPS_MEDIAN && drop != 0) ||
      (rule == TF_HIPS_MAJORITY && drop != 0) ||
      (rule == TF_HIPS_TRIMMED && drop > (sorted - 1) / 2) ||
      (rule == TF_HIPS_NEAREST && drop >= sorted)) {
    return TF_HIPS_BAD_ROWS;
  }
  CoordinatePlan plan;
  plan.rule = rule;
  plan.drop = drop;
  const Loops& loops = TheLoops();
  if (sorted > loops.in_registers && rule != TF_HIPS_MAJORITY) {
    const bool is_median = rule == TF_HIPS_MEDIAN;
    const int first = is_median ? (sorted - 1) / 2 : rule == TF_HIPS_TRIMMED ? drop : 0;
    const int last = is_median ? sorted / 2 : sorted - 1 - first;
    try {
      plan.network = MergeNetwork(sorted, loops.run, first, last);
    } catch (const std::bad_alloc&) {
      return TF_HIPS_ROBUST_OUT_OF_MEMORY;
    }
  }
  const bool is_streamed = d >= kStreamed;
  const int64_t num_tasks = NumTasks(d);
  Room<double> sums(squares == nullptr ? 0 : num_tasks * n);
  std::atomic<bool> has_failed{sums.has_failed()};
  parallel(has_failed ? 0 : num_tasks, [&](int64_t task) {
    const ScopedExactDenormals exact;
    const int64_t mixed_size = weights == nullptr ? 0 : m * kBlock;
    Room<const float*> here(n + m);
    Room<float*> mixed_rows(m);
    Room<double> lanes(n * kLanes);
    Room<float> floats(PaddedSize(n, d, task) + mixed_size + sorted * kSlice + kBlock);
    if (here.has_failed() || mixed_rows.has_failed() || lanes.has_failed() || floats.has_failed()) {
      has_failed = true;
      return;
    }
    float* const result = floats.at.get();
    float* const scratch = result + kBlock;
    float* const mixed = scratch + sorted * kSlice;
    float* const padded = mixed + mixed_size;
    for (int k = 0; mixed_size > 0 && k < m; ++k) {
      mixed_rows.at[k] = mixed + k * kBlock;
      here.at[n + k] = mixed_rows.at[k];
    }
    {
      Stream stream;
      ForBlocks(rows, n, d, task, here.at.get(), padded,
                [&](int64_t first, int64_t count, const float* const* block) {
                  double* squared = squares == nullptr ? nullptr : lanes.at.get();
                  if (weights != nullptr) {
                    if (squared != nullptr) loops.squares(block, n, squared);
                    squared = nullptr;
                    loops.mix(block, n, weights, m, mixed_rows.at.get());
                    block += n;
                  }
                  const bool is_direct = count == kBlock && !is_streamed;
                  float* const to = is_direct ? out + first : result;
                  loops.coordinate(block, sorted, plan, scratch, to, squared);
                  if (is_streamed) {
                    stream.put(result, count, out + first);
                  } else if (!is_direct) {
                    std::memcpy(out + first, result, static_cast<size_t>(count) * sizeof(float));
                  }
                });
    }
    if (is_streamed) stream_end();
    if (squares != nullptr) AddLanes(lanes.at.get(), n, sums.at.get() + task * n);
  });
  if (has_failed) return TF_HIPS_ROBUST_OUT_OF_MEMORY;
  if (squares != nullptr) AddTasks(sums.at.get(), d, n, squares);
  return 0;
}

int32_t RobustDistances(const float* const* rows, int32_t n, int64_t d, double* squares,
                        double* distances, const ParallelFor& parallel) {
  if (AreBad(rows, n, d) || (d > 0 && squares == nullptr)) return TF_HIPS_BAD_ROWS;
  const Loops& loops = TheLoops();
  const int64_t num_tasks = NumTasks(d);
  const int64_t pairs = distances == nullptr ? 0 : int64_t{n} * (n - 1) / 2;
  Room<double> of_rows(num_tasks * n), of_pairs(num_tasks * pairs);
  std::atomic<bool> has_failed{of_rows.has_failed() || of_pairs.has_failed()};
  parallel(has_failed ? 0 : num_tasks, [&](int64_t task) {
    const ScopedExactDenormals exact;
    Room<const float*> here(n);
    Room<double> lanes((n + pairs) * kLanes);
    Room<float> padded(PaddedSize(n, d, task));
    if (here.has_failed() || lanes.has_failed() || padded.has_failed()) {
      has_failed = true;
      return;
    }
    double* const squared = lanes.at.get();
    double* const apart = squared + n * kLanes;
    ForBlocks(rows, n, d, task, here.at.get(), padded.at.get(),
              [&](int64_t, int64_t, const float* const* block) {
                if (pairs > 0) {
                  loops.distances(block, n, squared, apart);
                } else {
                  loops.squares(block, n, squared);
                }
              });
    AddLanes(lanes.at.get(), n, of_rows.at.get() + task * n);
    AddLanes(apart, pairs, of_pairs.at.get() + task * pairs);
  });
  if (has_failed) return TF_HIPS_ROBUST_OUT_OF_MEMORY;
  AddTasks(of_rows.at.get(), d, n, squares);
  AddTasks(of_pairs.at.get(), d, pairs, distances);
  return 0;
}

int32_t RobustMix(const float* const* rows, int32_t n, int64_t d, const float* weights, int32_t m,
                  float* const* out, const ParallelFor& parallel) {
  if (AreBad(rows, n, d) || weights == nullptr || m < 1 || m > TF_HIPS_ROBUST_MAX_ROWS ||
      out == nullptr || (d > 0 && std::find(out, out + m, nullptr) != out + m)) {
    return TF_HIPS_BAD_ROWS;
  }
  const Loops& loops = TheLoops();
  const bool is_streamed = d >= kStreamed && m <= kStreamedRows;
  std::atomic<bool> has_failed{false};
  parallel(NumTasks(d), [&](int64_t task) {
    const ScopedExactDenormals exact;
    const int64_t padded_size = PaddedSize(n, d, task);
    const bool has_copies = padded_size > 0 || is_streamed;
    Room<const float*> here(n);
    Room<float*> there(m);
    Room<float> floats(padded_size + (has_copies ? m * kBlock : 0));
    {
      Room<Stream> streams(is_streamed ? m : 0);
      if (here.has_failed() || there.has_failed() || floats.has_failed() || streams.has_failed()) {
        has_failed = true;
        return;
      }
      float* const copies = floats.at.get() + padded_size;
      ForBlocks(rows, n, d, task, here.at.get(), floats.at.get(),
                [&](int64_t first, int64_t count, const float* const* block) {
                  const bool is_direct = count == kBlock && !is_streamed;
                  for (int k = 0; k < m; ++k) {
                    there.at[k] = is_direct ? out[k] + first : copies + k * kBlock;
                  }
                  loops.mix(block, n, weights, m, there.at.get());
                  for (int k = 0; !is_direct && k < m; ++k) {
                    if (is_streamed) {
                      streams.at[k].put(there.at[k], count, out[k] + first);
                    } else {
                      std::memcpy(out[k] + first, there.at[k],
                                  static_cast<size_t>(count) * sizeof(float));
                    }
                  }
                });
    }
    if (is_streamed) stream_end();
  });
  return has_failed ? TF_HIPS_ROBUST_OUT_OF_MEMORY : 0;
}

}  // namespace tf_hips

extern "C" {

int32_t tf_hips_robust_coordinate(const float* const* rows, int32_t n, int64_t d,
                                  const float* weights, int32_t m, int32_t rule, int32_t drop,
                                  float* out, double* squares) {
  return tf_hips::RobustCoordinate(rows, n, d, weights, m, rule, drop, out, squares,
                                   tf_hips::PoolParallelFor);
}

int32_t tf_hips_robust_distances(const float* const* rows, int32_t n, int64_t d, double* squares,
                                 double* distances) {
  return tf_hips::RobustDistances(rows, n, d, squares, distances, tf_hips::PoolParallelFor);
}

int32_t tf_hips_robust_mix(const float* const* rows, int32_t n, int64_t d, const float* weights,
                           int32_t m, float* const* out) {
  return tf_hips::RobustMix(rows, n, d, weights, m, out, tf_hips::PoolParallelFor);
}

}  // extern "C"
