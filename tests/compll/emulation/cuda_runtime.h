// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's header of this name, so that generated kernels run on a CPU: a tool of
// tests, and no part of the product. Blocks run one after another, and so do the threads of a
// block from barrier to barrier; both forwards, or both backwards. What a kernel keeps in shared
// memory is garbage at first, as on a GPU. Kernels of several threads of the host take turns.

#ifndef TF_HIPS_TESTS_COMPLL_EMULATION_CUDA_RUNTIME_H_
#define TF_HIPS_TESTS_COMPLL_EMULATION_CUDA_RUNTIME_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim {
  unsigned x = 0;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline std::mutex kernel_mutex;
inline Dim blockIdx;
// Whether the last block runs first, and its last thread: what depends on their order shows.
inline bool is_backwards = false;
inline long long launches = 0;
// Whether one block of threads may do all of a small call.
inline bool may_be_alone = true;

// With trace.cc each kernel is told before it runs.
#ifdef TF_HIPS_TRACE
void trace_kernel(const char* name);
#define TF_HIPS_TRACED(kernel) trace_kernel(#kernel)
#else
#define TF_HIPS_TRACED(kernel) static_cast<void>(0)
#endif

#define TF_HIPS_PHASE(t)                                             \
  for (int t##_turn = 0, t = is_backwards ? 127 : 0; t##_turn < 128; \
       ++t##_turn, t += is_backwards ? -1 : 1)
// So few that chunks have runs of 16 tiles.
#define TF_HIPS_MANY_BLOCKS 2
#define TF_HIPS_MAY_BE_ALONE may_be_alone
#define TF_HIPS_SHARED alignas(16) static
#define TF_HIPS_UNROLL
#define TF_HIPS_LAUNCH(kernel, blocks, threads, stream, ...)      \
  do {                                                            \
    static_assert(threads == 128, "a phase has 128 threads");     \
    static_cast<void>(stream);                                    \
    const std::lock_guard<std::mutex> kernel_lock(kernel_mutex);  \
    TF_HIPS_TRACED(kernel);                                       \
    ++launches;                                                   \
    const int64_t num = static_cast<int64_t>(blocks);             \
    for (int64_t turn = 0; turn < num; ++turn) {                  \
      const int64_t block = is_backwards ? num - 1 - turn : turn; \
      blockIdx.x = static_cast<unsigned>(block);                  \
      kernel(__VA_ARGS__);                                        \
    }                                                             \
  } while (false)

#define TF_HIPS_FOLLOW TF_HIPS_LAUNCH

typedef void* cudaStream_t;
typedef int cudaError_t;
constexpr cudaError_t cudaSuccess = 0, cudaErrorNotReady = 600;

// What a test lets CUDA find: an error of the next launch or of the driver, 0 for none, and a GPU.
inline cudaError_t launch_error = cudaSuccess, driver_error = cudaSuccess;
// For how many questions from now on an event has come already, while calls are launched.
inline int early_events = 0;
inline int compute_capability = 90;

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = launch_error;
  launch_error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an emulated error";
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

// What a benchmark needs besides: one GPU, whose memory is that of the process.
struct cudaDeviceProp {
  char name[16] = "emulation";
};
typedef double cudaEvent_t;
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };

#define __CUDA_ARCH_LIST__ 800, 900
enum { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, driver_error; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int which, int) {
  const bool is_major = which == cudaDevAttrComputeCapabilityMajor;
  return *value = is_major ? compute_capability / 10 : compute_capability % 10, cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 12040, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t) {
  return early_events > 0 ? --early_events, cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t& event) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  event = std::chrono::duration<double, std::milli>(now).count();
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t begin, cudaEvent_t end) {
  *time = static_cast<float>(end - begin);
  return cudaSuccess;
}

template <typename T>
inline T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}

template <typename T>
inline T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}

extern "C" {
__attribute__((visibility("default"))) inline void emulation_order(int backwards) {
  is_backwards = backwards != 0;
}
__attribute__((visibility("default"))) inline void emulation_alone(int may_be) {
  may_be_alone = may_be != 0;
}
__attribute__((visibility("default"))) inline long long emulation_launches() { return launches; }
__attribute__((visibility("default"))) inline void emulation_fail(int launch, int driver) {
  launch_error = launch, driver_error = driver;
}
__attribute__((visibility("default"))) inline void emulation_early(int events) {
  early_events = events;
}
__attribute__((visibility("default"))) inline void emulation_capability(int capability) {
  compute_capability = capability;
}
// Inline functions are made only where they are used.
__attribute__((used)) static void* const emulation_kept[] = {
    reinterpret_cast<void*>(emulation_order),      reinterpret_cast<void*>(emulation_alone),
    reinterpret_cast<void*>(emulation_launches),   reinterpret_cast<void*>(emulation_fail),
    reinterpret_cast<void*>(emulation_capability), reinterpret_cast<void*>(emulation_early)};
}

#endif  // TF_HIPS_TESTS_COMPLL_EMULATION_CUDA_RUNTIME_H_
