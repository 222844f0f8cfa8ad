// SPDX-License-Identifier: Apache-2.0
// What the GPU benchmark needs of CUDA, as plain C: memory, copies, and the time of many calls
// between two events. Part of a benchmark, not of the product.

#include <cuda_runtime.h>

#include <cstdint>

#include "tf_hips/cc/cuda/codec_cuda.h"
#include "tf_hips/cc/cuda/robust_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Milliseconds of one of `calls` calls of `call`, which returns 0; negative when something failed.
template <typename Call>
double milliseconds(int calls, const Call& call) {
  cudaEvent_t begin, end;
  if (cudaEventCreate(&begin) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess) return -1;
  int bad = 0;
  for (int k = 0; k < calls / 4 + 2; ++k) bad |= call();
  bad |= cudaDeviceSynchronize() != cudaSuccess;
  cudaEventRecord(begin);
  for (int k = 0; k < calls; ++k) bad |= call();
  cudaEventRecord(end);
  bad |= cudaEventSynchronize(end) != cudaSuccess;
  float total = 0;
  bad |= cudaEventElapsedTime(&total, begin, end) != cudaSuccess;
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return bad != 0 ? -1 : static_cast<double>(total) / calls;
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

EXPORT void* gpu_alloc(int64_t bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, static_cast<size_t>(bytes > 0 ? bytes : 1)) == cudaSuccess ? memory
                                                                                        : nullptr;
}

EXPORT int gpu_free(void* memory) { return cudaFree(memory); }

EXPORT int gpu_upload(void* to, const void* from, int64_t bytes) {
  return cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice);
}

// Waits for everything before; returns what went wrong, kernels included.
EXPORT int gpu_download(void* to, const void* from, int64_t bytes) {
  const cudaError_t done = cudaDeviceSynchronize();
  if (done != cudaSuccess) return done;
  return cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost);
}

EXPORT double gpu_time_copy(void* to, const void* from, int64_t bytes, int calls) {
  return milliseconds(calls, [&] {
    return static_cast<int>(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice));
  });
}

EXPORT double gpu_time_encode(const TfHipsCudaCodec* codec, const double* params,
                              const TfHipsKey* key, const float* gradient, float* residual,
                              int64_t n, uint8_t* packets, int64_t bytes, void* scratch,
                              int64_t room, int calls) {
  return milliseconds(calls, [&] {
    return codec->encode(params, key, gradient, residual, residual, n, packets, bytes, scratch,
                         room, nullptr);
  });
}

EXPORT double gpu_time_decode(const TfHipsCudaCodec* codec, const double* params,
                              const uint8_t* const* packets, int64_t bytes, int32_t num, float* out,
                              int64_t n, int32_t mode, uint64_t* report, void* scratch,
                              int64_t room, int calls) {
  return milliseconds(calls, [&] {
    return codec->decode(params, packets, bytes, num, out, n, mode, report, scratch, room, nullptr);
  });
}

// Of a codec with state: from `state` to `new_state`, again and again.
EXPORT double gpu_time_encode_state(const TfHipsCudaCodec* codec, const double* params,
                                    const TfHipsKey* key, const float* gradient, const float* state,
                                    float* new_state, int64_t n, uint8_t* packets, int64_t bytes,
                                    void* scratch, int64_t room, int calls) {
  return milliseconds(calls, [&] {
    return codec->encode_state(params, key, gradient, state, new_state, n, packets, bytes, scratch,
                               room, nullptr);
  });
}

// The passes of robust_cuda.h; `pass` is the function, which a library may lack.
EXPORT double gpu_time_coordinate(decltype(&tf_hips_cuda_robust_coordinate) pass,
                                  const float* const* rows, int32_t n, int64_t d,
                                  const float* weights, int32_t m, int32_t rule, int32_t drop,
                                  float* out, double* squares, void* scratch, int64_t room,
                                  int calls) {
  return milliseconds(calls, [&] {
    return pass(rows, n, d, weights, m, rule, drop, out, squares, scratch, room, nullptr);
  });
}

EXPORT double gpu_time_distances(decltype(&tf_hips_cuda_robust_distances) pass,
                                 const float* const* rows, int32_t n, int64_t d, double* squares,
                                 double* distances, void* scratch, int64_t room, int calls) {
  return milliseconds(calls,
                      [&] { return pass(rows, n, d, squares, distances, scratch, room, nullptr); });
}

EXPORT double gpu_time_mix(decltype(&tf_hips_cuda_robust_mix) pass, const float* const* rows,
                           int32_t n, int64_t d, const float* weights, int32_t m, float* const* out,
                           void* scratch, int64_t room, int calls) {
  return milliseconds(calls,
                      [&] { return pass(rows, n, d, weights, m, out, scratch, room, nullptr); });
}
