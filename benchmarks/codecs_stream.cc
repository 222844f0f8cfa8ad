// SPDX-License-Identifier: Apache-2.0
// What codecs are held against: kernels that only move bytes, and calls of the C interface in a
// row. Built by benchmarks/codecs.py for the machine that it runs on.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "tf_hips/cc/runtime/api.h"

namespace {

// Bytes ahead that are asked for, as codecs do: a processor does so by itself, but not over the
// ends of pages. A multiple of a page was slower wherever it was measured.
constexpr int64_t kAhead = 4608;

// Bytes that a thread moves of the largest buffer before it turns to the next one.
constexpr int64_t kBlock = 1 << 15;

struct Streams {
  const char* read;
  int64_t read_bytes;
  int64_t times;
  char* update;
  int64_t update_bytes;
  char* write;
  int64_t write_bytes;
};

float Read(const char* from, int64_t bytes) {
  __m128 sums[4] = {};
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    __builtin_prefetch(from + at + kAhead);
    for (int k = 0; k < 4; ++k) {
      const __m128 next = _mm_loadu_ps(reinterpret_cast<const float*>(from + at + 16 * k));
      sums[k] = _mm_xor_ps(sums[k], next);
    }
  }
  return _mm_cvtss_f32(_mm_xor_ps(_mm_xor_ps(sums[0], sums[1]), _mm_xor_ps(sums[2], sums[3])));
}

void Update(char* at, int64_t bytes) {
  const __m128 one = _mm_set1_ps(1);
  for (int64_t k = 0; k + 16 <= bytes; k += 16) {
    if (k % 64 == 0) __builtin_prefetch(at + k + kAhead);
    float* values = reinterpret_cast<float*>(at + k);
    _mm_storeu_ps(values, _mm_add_ps(_mm_loadu_ps(values), one));
  }
}

void Write(char* at, int64_t bytes) {
  const int64_t head = std::min<int64_t>(bytes, (16 - reinterpret_cast<uintptr_t>(at) % 16) % 16);
  std::memset(at, 1, static_cast<size_t>(head));
  int64_t k = head;
  for (; k + 16 <= bytes; k += 16) {
    _mm_stream_ps(reinterpret_cast<float*>(at + k), _mm_set1_ps(1));
  }
  std::memset(at + k, 1, static_cast<size_t>(bytes - k));
}

int64_t Part(int64_t bytes, int64_t block, int64_t blocks) {
  return static_cast<int64_t>(static_cast<double>(bytes) / static_cast<double>(blocks) *
                              static_cast<double>(block)) /
         64 * 64;
}

// Blocks begin .. end - 1 of `blocks`, of all buffers side by side, as a codec goes through them.
float Run(const Streams& streams, int64_t begin, int64_t end, int64_t blocks) {
  float sum = 0;
  for (int64_t block = begin; block < end; ++block) {
    const auto range = [&](int64_t bytes, int64_t* from) {
      *from = Part(bytes, block, blocks);
      return (block + 1 == blocks ? bytes : Part(bytes, block + 1, blocks)) - *from;
    };
    int64_t from = 0;
    int64_t bytes = range(streams.read_bytes, &from);
    sum += Read(streams.read + from, bytes);
    bytes = range(streams.update_bytes, &from);
    Update(streams.update + from, bytes);
    bytes = range(streams.write_bytes, &from);
    Write(streams.write + from, bytes);
  }
  for (int64_t again = 1; again < streams.times; ++again) {
    const int64_t from = Part(streams.read_bytes, begin, blocks);
    sum += Read(streams.read + from, Part(streams.read_bytes, end, blocks) - from);
  }
  _mm_sfence();
  return sum;
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

// Reads `read_bytes` `times` times, reads and writes `update_bytes` in place, and writes
// `write_bytes` past the caches, on so many threads. Returns the seconds it took.
double stream(const char* read, int64_t read_bytes, int64_t times, char* update,
              int64_t update_bytes, char* write, int64_t write_bytes, int32_t num_threads) {
  const Streams streams = {read, read_bytes, times, update, update_bytes, write, write_bytes};
  const int64_t blocks =
      std::max<int64_t>(1, std::max({read_bytes, update_bytes, write_bytes}) / kBlock);
  std::vector<float> sums(static_cast<size_t>(num_threads));
  const double began = Seconds();
  std::vector<std::thread> threads;
  for (int32_t t = 1; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      sums[static_cast<size_t>(t)] =
          Run(streams, blocks * t / num_threads, blocks * (t + 1) / num_threads, blocks);
    });
  }
  sums[0] = Run(streams, 0, blocks / num_threads, blocks);
  for (std::thread& thread : threads) thread.join();
  const double seconds = Seconds() - began;
  volatile float sink = sums[0] + sums.back();  // or the compiler would leave the reading out
  (void)sink;
  return seconds;
}

// Seconds of one call of tf_hips_encode, and of one of tf_hips_decode, of `calls` in a row.
double encode_seconds(decltype(&tf_hips_encode) encode, const TfHipsCodec* codec,
                      const double* params, const float* gradient, int64_t n, uint8_t* out,
                      int64_t capacity, int64_t calls) {
  const TfHipsKey key = {1, 2, 3, 0};
  const double began = Seconds();
  for (int64_t call = 0; call < calls; ++call) {
    if (encode(codec, params, &key, gradient, nullptr, n, out, capacity) < 0) return -1;
  }
  return (Seconds() - began) / static_cast<double>(calls);
}

double decode_seconds(decltype(&tf_hips_decode) decode, const TfHipsCodec* codec,
                      const double* params, const uint8_t* packets, int64_t bytes, float* out,
                      int64_t n, int64_t calls) {
  const double began = Seconds();
  for (int64_t call = 0; call < calls; ++call) {
    if (decode(codec, params, packets, bytes, out, n, 0) != 0) return -1;
  }
  return (Seconds() - began) / static_cast<double>(calls);
}

}  // extern "C"
