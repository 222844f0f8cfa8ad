// SPDX-License-Identifier: Apache-2.0
// What a GPU takes for patterns of reading and writing, and for starting kernels: what kernels here
// are measured against.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 -o patterns benchmarks/gpu/patterns.cu && ./patterns

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>
constexpr int kThreads = 128;
__device__ __forceinline__ void put_half(float* o, int64_t first, const float (&v)[8]) {
  reinterpret_cast<float4*>(o + first)[0] = {v[0], v[1], v[2], v[3]};
  reinterpret_cast<float4*>(o + first)[1] = {v[4], v[5], v[6], v[7]};
}
__device__ __forceinline__ void put_pair(float* o, int64_t first, const float (&v)[8]) {
  const bool odd = threadIdx.x & 1;
  float4 keep = odd ? float4{v[4], v[5], v[6], v[7]} : float4{v[0], v[1], v[2], v[3]};
  float4 give = odd ? float4{v[0], v[1], v[2], v[3]} : float4{v[4], v[5], v[6], v[7]};
  give.x = __shfl_xor_sync(~0u, give.x, 1), give.y = __shfl_xor_sync(~0u, give.y, 1);
  give.z = __shfl_xor_sync(~0u, give.z, 1), give.w = __shfl_xor_sync(~0u, give.w, 1);
  float4* at = reinterpret_cast<float4*>(o + (first - 8 * odd));
  at[odd] = odd ? give : keep;      // sector of the even thread
  at[2 + odd] = odd ? keep : give;  // of the odd one
}
// 0: half, 1: pair, 2: whole, 3: half cs, 4: pair behind a barrier, 5: whole cs.
template <int kMode>
__global__ void __launch_bounds__(kThreads) write(float* o, int run, float a) {
  for (int k = 0; k < run; ++k) {
    const int64_t base = (int64_t{blockIdx.x} * run + k) * 1024;
    float v[8];
    for (int u = 0; u < 8; ++u) v[u] = a + u + threadIdx.x;
    if (kMode == 0) put_half(o, base + 8 * threadIdx.x, v);
    if (kMode == 1) put_pair(o, base + 8 * threadIdx.x, v);
    if (kMode == 2) {
      float4* at = reinterpret_cast<float4*>(o + base);
      at[threadIdx.x] = {v[0], v[1], v[2], v[3]};
      at[kThreads + threadIdx.x] = {v[4], v[5], v[6], v[7]};
    }
    if (kMode == 3) {
      float4* at = reinterpret_cast<float4*>(o + base + 8 * threadIdx.x);
      __stcs(at, float4{v[0], v[1], v[2], v[3]});
      __stcs(at + 1, float4{v[4], v[5], v[6], v[7]});
    }
    if (kMode == 5) {
      float4* at = reinterpret_cast<float4*>(o + base);
      __stcs(at + threadIdx.x, float4{v[0], v[1], v[2], v[3]});
      __stcs(at + kThreads + threadIdx.x, float4{v[4], v[5], v[6], v[7]});
    }
    if (kMode == 4) __syncthreads();
    if (kMode == 4) put_pair(o, base + 8 * threadIdx.x, v);
  }
}
// 0 to 2 as above, reading likewise; 3: a byte of eight floats.
template <int kMode>
__global__ void __launch_bounds__(kThreads) rw(const float* in, float* o, int run, float a) {
  for (int k = 0; k < run; ++k) {
    const int64_t base = (int64_t{blockIdx.x} * run + k) * 1024;
    float v[8];
    const float4* from = reinterpret_cast<const float4*>(in + base);
    float4 x, y;
    if (kMode == 2)
      x = from[threadIdx.x], y = from[kThreads + threadIdx.x];
    else
      x = from[2 * threadIdx.x], y = from[2 * threadIdx.x + 1];
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w, v[4] = y.x, v[5] = y.y, v[6] = y.z, v[7] = y.w;
    for (int u = 0; u < 8; ++u) v[u] += a;
    if (kMode == 0) put_half(o, base + 8 * threadIdx.x, v);
    if (kMode == 1) put_pair(o, base + 8 * threadIdx.x, v);
    if (kMode == 2) {
      float4* at = reinterpret_cast<float4*>(o + base);
      at[threadIdx.x] = {v[0], v[1], v[2], v[3]};
      at[kThreads + threadIdx.x] = {v[4], v[5], v[6], v[7]};
    }
    if (kMode == 3) {  // a byte for each thread: onebit's traffic
      uint8_t b = 0;
      for (int u = 0; u < 8; ++u) b |= (v[u] < 0) << u;
      reinterpret_cast<uint8_t*>(o)[base / 8 + threadIdx.x] = b;
    }
  }
}
__global__ void nothing(int) {}
struct Big {
  char c[2000];
};
__global__ void big(const Big b, int* o) {
  if (o) *o = b.c[threadIdx.x];
}
template <typename F>
float time(F f, int calls = 20) {
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  std::vector<float> all;
  static void* room = nullptr;
  if (!room) cudaMalloc(&room, 1 << 28);
  for (int r = 0; r < 7; ++r) {
    f(0);
    for (int k = 0; k < 12; ++k) cudaMemsetAsync(room, 0, 1 << 28);
    cudaEventRecord(a);
    for (int k = 0; k < calls; ++k) f(k);
    cudaEventRecord(b);
    cudaEventSynchronize(b);
    float t;
    cudaEventElapsedTime(&t, a, b);
    all.push_back(t / calls * 1000);
  }
  std::sort(all.begin(), all.end());
  return all[3];
}
int main() {
  for (int64_t n : {int64_t{1} << 24, int64_t{1} << 26}) {
    const int sets = n == 1 << 24 ? 5 : 2;
    std::vector<float*> in(sets), out(sets);
    for (auto& p : in) cudaMalloc(&p, 4 * n), cudaMemset(p, 1, 4 * n);
    for (auto& p : out) cudaMalloc(&p, 4 * n);
    auto say = [&](const char* what, int run, double bytes, float us) {
      printf("%3lld Mi %-28s run %2d %8.1f us %7.0f GB/s\n", (long long)(n >> 20), what, run, us,
             bytes / us / 1e3);
    };
    say("cudaMemcpy", 0, 8.0 * n, time([&](int k) {
          cudaMemcpyAsync(out[k % sets], in[k % sets], 4 * n, cudaMemcpyDeviceToDevice);
        }));
    say("cudaMemset", 0, 4.0 * n, time([&](int k) { cudaMemsetAsync(out[k % sets], 0, 4 * n); }));
    for (int run : {1, 4, 16}) {
      const int blocks = n / 1024 / run;
      say("write half", run, 4.0 * n,
          time([&](int k) { write<0><<<blocks, kThreads>>>(out[k % sets], run, 1.f); }));
      say("write pair", run, 4.0 * n,
          time([&](int k) { write<1><<<blocks, kThreads>>>(out[k % sets], run, 1.f); }));
      say("write whole", run, 4.0 * n,
          time([&](int k) { write<2><<<blocks, kThreads>>>(out[k % sets], run, 1.f); }));
      say("write half cs", run, 4.0 * n,
          time([&](int k) { write<3><<<blocks, kThreads>>>(out[k % sets], run, 1.f); }));
      say("write whole cs", run, 4.0 * n,
          time([&](int k) { write<5><<<blocks, kThreads>>>(out[k % sets], run, 1.f); }));
      say("write pair, barrier", run, 4.0 * n,
          time([&](int k) { write<4><<<blocks, kThreads>>>(out[k % sets], run, 1.f); }));
      say("copy half", run, 8.0 * n,
          time([&](int k) { rw<0><<<blocks, kThreads>>>(in[k % sets], out[k % sets], run, 1.f); }));
      say("copy pair", run, 8.0 * n,
          time([&](int k) { rw<1><<<blocks, kThreads>>>(in[k % sets], out[k % sets], run, 1.f); }));
      say("copy whole", run, 8.0 * n,
          time([&](int k) { rw<2><<<blocks, kThreads>>>(in[k % sets], out[k % sets], run, 1.f); }));
      say("read, a byte of 8", run, 4.125 * n,
          time([&](int k) { rw<3><<<blocks, kThreads>>>(in[k % sets], out[k % sets], run, 1.f); }));
    }
    for (auto& p : in) cudaFree(p);
    for (auto& p : out) cudaFree(p);
  }
  int* dev;
  cudaMalloc(&dev, 4);
  printf("empty kernel, one behind another %.2f us\n",
         time([&](int) { nothing<<<1, 128>>>(0); }, 1000));
  printf("two empty kernels, one behind another %.2f us\n", time(
                                                                [&](int) {
                                                                  nothing<<<1, 128>>>(0);
                                                                  nothing<<<1, 128>>>(0);
                                                                },
                                                                1000));
  Big b{};
  auto wait = [&](auto f) {
    std::vector<double> all;
    for (int r = 0; r < 9; ++r) {
      auto s = std::chrono::steady_clock::now();
      for (int k = 0; k < 1000; ++k) f(), cudaDeviceSynchronize();
      all.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - s).count() /
          1000);
    }
    std::sort(all.begin(), all.end());
    return all[4];
  };
  printf("empty kernel, waited %.2f us\n", wait([&] { nothing<<<1, 128>>>(0); }));
  printf("2000 bytes of arguments, waited %.2f us\n", wait([&] { big<<<1, 128>>>(b, dev); }));
  printf("empty kernel + GetLastError, waited %.2f us\n", wait([&] {
           nothing<<<1, 128>>>(0);
           (void)cudaGetLastError();
         }));
  printf("memset 8 bytes + kernel, waited %.2f us\n", wait([&] {
           cudaMemsetAsync(dev, 0, 4);
           nothing<<<1, 128>>>(0);
         }));
}
