// SPDX-License-Identifier: Apache-2.0
// How generated kernels are written: in phases, each of which ends with a barrier.
//
// A block of threads works on a tile of 1024 elements, eight neighbours a thread. Between phases
// nothing is kept in registers, only in shared memory, so the same source also runs as a loop over
// the threads (tests/compll/emulation): what stands outside of a phase is the same for all threads
// of a block.
//
// All arithmetic is that of the C++ back end: nvcc must be told -fmad=false; its other defaults
// (denormals kept, division and square root rounded to nearest) are what is needed.

#ifndef TF_HIPS_CC_CUDA_DEVICE_CUH_
#define TF_HIPS_CC_CUDA_DEVICE_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tf_hips/cc/cuda/codec_cuda.h"
#include "tf_hips/cc/runtime/convert.h"
#include "tf_hips/cc/runtime/functions.h"
#include "tf_hips/cc/runtime/target.h"

// A test that runs kernels on a CPU defines these itself.
#ifndef TF_HIPS_PHASE
// Blocks of threads that keep a GPU busy.
#define TF_HIPS_MANY_BLOCKS 4096
#define TF_HIPS_PHASE(t)                                                   \
  for (int t = static_cast<int>(threadIdx.x), t##_left = 1; t##_left != 0; \
       t##_left = 0, __syncthreads())
// The same in a block of kWide threads.
#define TF_HIPS_WIDE(t) TF_HIPS_PHASE(t)
#define TF_HIPS_SHARED __shared__ __align__(16)
#define TF_HIPS_UNROLL _Pragma("unroll")
#define TF_HIPS_LAUNCH(kernel, blocks, threads, stream, ...) \
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(__VA_ARGS__)
// Of a kernel that calls follow(): its blocks may be there before the kernel before it has ended.
#define TF_HIPS_FOLLOW(kernel, blocks, threads, stream, ...) \
  ::tf_hips::cuda::launch_early(kernel, static_cast<unsigned>(blocks), threads, stream, __VA_ARGS__)
#endif

#ifndef TF_HIPS_MAY_BE_ALONE
#define TF_HIPS_MAY_BE_ALONE true
#endif

// What the host has seen to.
#ifdef __CUDA_ARCH__
#define TF_HIPS_ASSUME(condition) __builtin_assume(condition)
#else
#define TF_HIPS_ASSUME(condition) static_cast<void>(condition)
#endif

// What a block of threads does: a function of its number. All threads of it call it.
#define TF_HIPS_BLOCK [[maybe_unused]] static __device__ __forceinline__ void

#define TF_HIPS_KERNEL \
  [[maybe_unused]] static __global__ void __launch_bounds__(::tf_hips::cuda::kThreads)

// One of which a multiprocessor is to have as many blocks of threads as it can: at 32 registers a
// thread. Left alone nvcc takes some more, which save it nothing.
#define TF_HIPS_CROWDED_KERNEL \
  [[maybe_unused]] static __global__ void __launch_bounds__(::tf_hips::cuda::kThreads, 16)

#define TF_HIPS_WIDE_KERNEL \
  [[maybe_unused]] static __global__ void __launch_bounds__(::tf_hips::cuda::kWide)

namespace tf_hips {
namespace cuda {

// Elements of a chunk and of a tile, which is one block of a reduction; threads of a block.
constexpr int64_t kChunkElements = int64_t{1} << 20;
constexpr int kTile = 1024;
constexpr int kThreads = 128;
// Threads of a block that has a chunk's few leftovers for itself.
constexpr int kWide = 1024;
constexpr int kEach = kTile / kThreads;
static_assert(kEach == 8,
              "a thread has eight elements: one Philox block, and whole bytes of codes");

using Report = unsigned long long;

// Where a block of threads works. 32 bits, of which a GPU adds and compares twice as many a time.
struct Spot {
  int32_t chunk;
  int32_t base;  // first element of its tile, in the chunk
};

// `tiles`: of each chunk but the last, which may have fewer. Where a loop is shorter in a chunk,
// the tiles behind its end are empty.
TF_HIPS_INLINE Spot find_spot(uint32_t block, int64_t tiles) {
  // 32 bits: a division of 64 would cost as much as encoding a few elements. Nearly all loops have
  // as many tiles as a chunk, and need none.
  const uint32_t each = static_cast<uint32_t>(tiles);
  constexpr uint32_t kMost = kChunkElements / kTile;
  if (each == kMost) {
    return {static_cast<int32_t>(block / kMost), static_cast<int32_t>(block % kMost) * kTile};
  }
  const uint32_t chunk = block / each;
  return {static_cast<int32_t>(chunk), static_cast<int32_t>(block - chunk * each) * kTile};
}

// The most blocks of threads that a kernel can have.
constexpr int64_t kMaxBlocks = 0x7FFFFFFF;

// Tiles that a block of threads has: more than one where there are enough of them, because starting
// a block takes its time too. Divides `tiles`, those of a chunk, so that a run is in one chunk.
inline int32_t run_of(int64_t tiles, int64_t blocks) {
  for (int32_t run = 16; run > 1; run /= 2) {
    if (tiles % run == 0 && blocks / run >= TF_HIPS_MANY_BLOCKS) return run;
  }
  return 1;
}

TF_HIPS_INLINE int64_t num_runs(int64_t blocks, int32_t run) { return (blocks + run - 1) / run; }

TF_HIPS_INLINE int64_t num_tiles(int64_t elements) {
  return elements <= kTile ? 1 : (elements + kTile - 1) / kTile;
}

TF_HIPS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

TF_HIPS_INLINE bool is_aligned(const void* at, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(at) % bytes == 0;
}

TF_HIPS_INLINE uintptr_t address_of(const void* at) { return reinterpret_cast<uintptr_t>(at); }

// Whether vectors, if they are there, begin at multiples of 16 bytes.
template <typename... Vectors>
TF_HIPS_INLINE bool are_aligned(Vectors... vectors) {
  return ((uintptr_t{0} | ... | address_of(vectors)) & 15) == 0;
}

// Element `index` of a vector, 0 where there is none.
template <typename T>
TF_HIPS_INLINE T value_at(const T* values, int64_t count, int64_t index) {
  return index >= 0 && index < count ? values[index] : T{0};
}

TF_HIPS_INLINE bool is_finite(float x) { return std::fabs(x) <= 3.402823466e+38f; }

// minimum and maximum of convert.h where `b` is neither a zero nor NaN: as the machine has them.
TF_HIPS_INLINE float bounded_min(float a, float b) {
#ifdef __CUDA_ARCH__
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}

TF_HIPS_INLINE float bounded_max(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}

// float_bits of what is not NaN.
TF_HIPS_INLINE uint32_t number_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// The code of a float that is below the first number that is too large for one; 0 of NaN, and of
// what is less.
TF_HIPS_INLINE uint32_t whole_part(float x) {
#ifdef __CUDA_ARCH__
  return __float2uint_rz(x);
#else
  return x > 0.0f ? static_cast<uint32_t>(x) : 0;
#endif
}

// What decoding leaves of a value that is to be taken away.
TF_HIPS_INLINE float taken(float out, float value) {
  const float rest = out - value;
  return is_finite(rest) ? rest : 0.0f;
}

// A decoded value put where `mode` (TfHipsDecodeMode) says.
TF_HIPS_INLINE float joined(int32_t mode, float out, float value) {
  if (mode == TF_HIPS_SET) return value;
  return mode == TF_HIPS_RESIDUAL ? taken(out, value) : out + value;
}

// Says what is wrong with a packet; the first one counts.
__device__ inline void complain(Report* report, int64_t row, int64_t chunk, int32_t status) {
  atomicMin(report, static_cast<Report>(row << 40 | chunk << 8 | status));
}

#ifdef __CUDA_ARCH__
// Of the whole numbers of a warp's 32 threads the sum and the largest; all of them must call it.
// From sm_80 on that is one instruction.
__device__ __forceinline__ int32_t sum_of_warp(int32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, value);
#else
  TF_HIPS_UNROLL
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
  return value;
#endif
}

__device__ __forceinline__ int32_t largest_of_warp(int32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, value);
#else
  TF_HIPS_UNROLL
  for (int apart = 16; apart > 0; apart /= 2) {
    const int32_t there = __shfl_xor_sync(~0u, value, apart);
    value = there > value ? there : value;
  }
  return value;
#endif
}
#endif

// Waits until all that the stream had before this kernel is done, if the kernel was launched early,
// and lets the next one be. All threads must call it before they touch what others have written.
__device__ __forceinline__ void follow() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether all packets of a decode are in order. All threads must call it.
template <typename Call>
__device__ __forceinline__ bool is_fine(const Call& call) {
  if (call.is_just_checked) follow();
  return *call.report == TF_HIPS_CUDA_FINE;
}

#ifdef __CUDACC__
// Whether this thread's GPU can begin a kernel before the one before it has ended, and its code
// waits for that: what is compiled for older GPUs alone does not.
inline bool begins_early() {
  constexpr int kCompiled[] = {__CUDA_ARCH_LIST__};
  static thread_local int known = -1, major = 0;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device != known) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    known = device;
  }
  bool waits = false;
  for (const int one : kCompiled) waits |= one >= 900 && one / 100 <= major;
  return waits;
}

// Launches a kernel that calls follow(). Between two kernels of a call a GPU would idle for 1 to 2
// microseconds.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                  cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = begins_early() ? 1 : 0;
  // launched() says what is wrong.
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}
#endif

// What CUDA said when `launched` last failed in this thread.
inline const char*& last_error() {
  static thread_local const char* text = "";
  return text;
}

inline const char* error_text() { return last_error(); }

// What launching has brought, and whether it worked.
inline int32_t launched() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return TF_HIPS_OK;
  last_error() = cudaGetErrorString(error);
  return TF_HIPS_CUDA_FAILED;
}

// Memory for the vectors of a call, one behind another; counts only where there is none.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    const int64_t begin = used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + begin);
  }

  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_DEVICE_CUH_
