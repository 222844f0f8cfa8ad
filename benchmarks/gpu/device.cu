// SPDX-License-Identifier: Apache-2.0
// What the GPU benchmark needs of CUDA, as plain C: memory, copies, and the time of many calls
// between two events. Part of a benchmark, not of the product.

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>

#include "tf_hips/cc/cuda/codec_cuda.h"
#include "tf_hips/cc/cuda/robust_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// What the GPU does before a time begins, so that the host has launched all calls by then and its
// own time does not count; also, what the caches held before is gone.
void* head_start = nullptr;
int64_t head_start_bytes = 0;
int head_starts = 16;
constexpr int kMostHeadStarts = 1024;
// Whether the GPU came to the calls of the last time while the host still launched some.
bool was_late = false;
// Whether the host waits for each call, and its clock counts.
bool is_waiting = false;

// Milliseconds of one of `calls` calls of `call`, which is given its number and returns 0. Negative
// when something failed: an error of CUDA, or -1000 when a call did not return 0.
template <typename Call>
double milliseconds(int calls, const Call& call) {
  cudaError_t error = cudaSuccess;
  const auto note = [&](cudaError_t more) { error = error == cudaSuccess ? more : error; };
  int bad = 0;
  float total = 0;
  cudaEvent_t begin{}, end{};
  note(cudaEventCreate(&begin));
  note(cudaEventCreate(&end));
  for (int k = 0; k < calls / 4 + 2; ++k) bad |= call(k);
  note(cudaDeviceSynchronize());
  if (is_waiting) {
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < calls; ++k) {
      bad |= call(k);
      note(cudaDeviceSynchronize());
    }
    const auto passed = std::chrono::steady_clock::now() - start;
    total = std::chrono::duration<float, std::milli>(passed).count();
  }
  for (int k = 0; head_start != nullptr && k < head_starts; ++k) {
    note(cudaMemsetAsync(head_start, 0, static_cast<size_t>(head_start_bytes), nullptr));
  }
  note(cudaEventRecord(begin));
  for (int k = 0; k < calls && !is_waiting; ++k) bad |= call(k);
  was_late = head_start != nullptr && cudaEventQuery(begin) != cudaErrorNotReady;
  // "Not ready" stays behind as an error that the next launch would be blamed for.
  static_cast<void>(cudaGetLastError());
  note(cudaEventRecord(end));
  note(cudaEventSynchronize(end));
  if (!is_waiting) note(cudaEventElapsedTime(&total, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  if (bad != 0) return -1000;
  return error != cudaSuccess ? -static_cast<double>(error) : static_cast<double>(total) / calls;
}

}  // namespace

// Number of GPUs; 0 also where there is no driver.
EXPORT int gpu_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

EXPORT const char* gpu_name() {
  static cudaDeviceProp facts;
  return cudaGetDeviceProperties(&facts, 0) == cudaSuccess ? facts.name : "unknown";
}

// 1000 times the major number of CUDA and 10 times the minor one; 0: unknown.
EXPORT int gpu_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

EXPORT int gpu_library_version() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

EXPORT const char* gpu_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

EXPORT void* gpu_alloc(int64_t bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, static_cast<size_t>(bytes > 0 ? bytes : 1)) == cudaSuccess ? memory
                                                                                        : nullptr;
}

EXPORT int gpu_free(void* memory) { return cudaFree(memory); }

EXPORT int gpu_upload(void* to, const void* from, int64_t bytes) {
  return cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice);
}

EXPORT int gpu_fill(void* to, int32_t byte, int64_t bytes) {
  return cudaMemsetAsync(to, byte, static_cast<size_t>(bytes), nullptr);
}

// Waits for everything before; returns what went wrong, kernels included.
EXPORT int gpu_download(void* to, const void* from, int64_t bytes) {
  const cudaError_t done = cudaDeviceSynchronize();
  if (done != cudaSuccess) return done;
  return cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost);
}

// Bytes that are written several times before a time begins; 0: none are.
EXPORT int gpu_head_start(int64_t bytes) {
  cudaFree(head_start);
  head_start = nullptr;
  head_start_bytes = bytes;
  return bytes == 0 ? 0 : cudaMalloc(&head_start, static_cast<size_t>(bytes));
}

// Whether the last time has to be measured again, because the host's own time is in it; the head
// start is then twice as long.
EXPORT int gpu_was_late() {
  if (!was_late || head_starts >= kMostHeadStarts) return 0;
  head_starts *= 2;
  return 1;
}

// Whether times are from now on those of the host, which waits for each call.
EXPORT int gpu_wait_for_each(int32_t waits) {
  is_waiting = waits != 0;
  return 0;
}

// Call number k has the buffers of set k % sets: a call finds nothing in a cache that the one
// before has left there.
EXPORT double gpu_time_copy(void* const* to, const void* const* from, int64_t bytes, int32_t sets,
                            int calls) {
  return milliseconds(calls, [&](int k) {
    return static_cast<int>(cudaMemcpyAsync(to[k % sets], from[k % sets],
                                            static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice));
  });
}

// `residuals`: NULL, or one of each set.
EXPORT double gpu_time_encode(const TfHipsCudaCodec* codec, const double* params,
                              const TfHipsKey* key, const float* const* gradients,
                              float* const* residuals, int64_t n, uint8_t* const* packets,
                              int64_t bytes, void* scratch, int64_t room, int32_t sets, int calls) {
  return milliseconds(calls, [&](int k) {
    float* const residual = residuals == nullptr ? nullptr : residuals[k % sets];
    return codec->encode(params, key, gradients[k % sets], residual, residual, nullptr, n,
                         packets[k % sets], bytes, scratch, room, nullptr);
  });
}

// `packets`: `num` of each set.
EXPORT double gpu_time_decode(const TfHipsCudaCodec* codec, const double* params,
                              const uint8_t* const* packets, int64_t bytes, int32_t num,
                              float* const* outs, int64_t n, int32_t mode, uint64_t* report,
                              void* scratch, int64_t room, int32_t sets, int calls) {
  return milliseconds(calls, [&](int k) {
    const int set = k % sets;
    return codec->decode(params, packets + set * num, bytes, num, outs[set], n, mode, report,
                         scratch, room, nullptr);
  });
}

// Of a codec with state: from `states` to `new_states`, again and again.
EXPORT double gpu_time_encode_state(const TfHipsCudaCodec* codec, const double* params,
                                    const TfHipsKey* key, const float* const* gradients,
                                    const float* const* states, float* const* new_states, int64_t n,
                                    uint8_t* const* packets, int64_t bytes, void* scratch,
                                    int64_t room, int32_t sets, int calls) {
  return milliseconds(calls, [&](int k) {
    const int set = k % sets;
    return codec->encode_state(params, key, gradients[set], states[set], new_states[set], n,
                               packets[set], bytes, scratch, room, nullptr);
  });
}

// The passes of robust_cuda.h; `pass` is the function, which a library may lack.
EXPORT double gpu_time_coordinate(decltype(&tf_hips_cuda_robust_coordinate) pass,
                                  const float* const* rows, int32_t n, int64_t d,
                                  const float* weights, int32_t m, int32_t rule, int32_t drop,
                                  float* out, double* squares, void* scratch, int64_t room,
                                  int calls) {
  return milliseconds(calls, [&](int) {
    return pass(rows, n, d, weights, m, rule, drop, out, squares, scratch, room, nullptr);
  });
}

EXPORT double gpu_time_distances(decltype(&tf_hips_cuda_robust_distances) pass,
                                 const float* const* rows, int32_t n, int64_t d, double* squares,
                                 double* distances, void* scratch, int64_t room, int calls) {
  return milliseconds(
      calls, [&](int) { return pass(rows, n, d, squares, distances, scratch, room, nullptr); });
}

EXPORT double gpu_time_mix(decltype(&tf_hips_cuda_robust_mix) pass, const float* const* rows,
                           int32_t n, int64_t d, const float* weights, int32_t m, float* const* out,
                           void* scratch, int64_t room, int calls) {
  return milliseconds(
      calls, [&](int) { return pass(rows, n, d, weights, m, out, scratch, room, nullptr); });
}
