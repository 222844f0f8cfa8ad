// SPDX-License-Identifier: Apache-2.0
// What codecs are held against: kernels that only move bytes, and calls of the C interface in a
// row. Built by benchmarks/codecs_bound.py for the machine that it runs on, which also finds out
// which of the kernels is the fastest there.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <thread>
#include <vector>

#include "tf_hips/cc/runtime/api.h"

namespace {

// Bytes ahead that are asked for, as codecs do: a processor does so by itself, but not over the
// ends of pages. A multiple of a page was slower wherever it was measured.
constexpr int64_t kAhead = 4608;
constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;

// What is read again is read again after so many bytes, as codecs do: a chunk.
constexpr int64_t kChunk = int64_t{1} << 22;

// Bytes that a thread moves of the largest buffer before it turns to the next one.
constexpr int64_t kBlocks[] = {1 << 15, 1 << 12, 1 << 18};

// What is asked for: nothing, every line, or the first half of the next page.
enum class Ask { kNothing, kLines, kPages };

template <Ask kAsk>
void AskFor(const char* at) {
  if constexpr (kAsk == Ask::kLines) __builtin_prefetch(at + kAhead);
  if constexpr (kAsk == Ask::kPages) {
    if (reinterpret_cast<uintptr_t>(at) % kPage < kPage / 2) __builtin_prefetch(at + kPage);
  }
}

// So many bytes at any address of an int32_t.
template <int kBytes>
struct Vector {
  typedef int32_t Type __attribute__((vector_size(kBytes), aligned(4), may_alias));
};

template <int kBytes, Ask kAsk>
int32_t Read(const char* from, int64_t bytes) {
  using Type = typename Vector<kBytes>::Type;
  constexpr int kNum = kLine / kBytes;
  Type sums[kNum] = {};
  for (int64_t at = 0; at + kLine <= bytes; at += kLine) {
    AskFor<kAsk>(from + at);
    for (int k = 0; k < kNum; ++k) {
      sums[k] ^= *reinterpret_cast<const Type*>(from + at + kBytes * k);
    }
  }
  int32_t sum = 0;
  for (const Type& one : sums) {
    for (int k = 0; k < kBytes / 4; ++k) sum ^= one[k];
  }
  return sum;
}

// `flip` is 0, which the compiler does not know: what was there stays.
template <int kBytes, Ask kAsk>
void Update(char* to, int64_t bytes, int32_t flip) {
  using Type = typename Vector<kBytes>::Type;
  const Type flips = Type{} + flip;
  for (int64_t at = 0; at + kLine <= bytes; at += kLine) {
    AskFor<kAsk>(to + at);
    for (int k = 0; k < kLine; k += kBytes) {
      Type* const place = reinterpret_cast<Type*>(to + at + k);
      *place ^= flips;
    }
  }
}

// Calls line(at) for all whole lines of memory, and fills the rest.
template <typename Line>
void WriteLines(char* to, int64_t bytes, int32_t value, const Line& line) {
  const int64_t head =
      std::min<int64_t>(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memset(to, value, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + kLine <= bytes; at += kLine) line(to + at);
  std::memset(to + at, value, static_cast<size_t>(bytes - at));
}

// `value`, 0 or 1, in every byte.
template <int kBytes, Ask kAsk>
void Write(char* to, int64_t bytes, int32_t value) {
  using Type = typename Vector<kBytes>::Type;
  const Type values = Type{} + value * 0x01010101;
  WriteLines(to, bytes, value, [&](char* line) {
    AskFor<kAsk>(line);
    for (int k = 0; k < kLine; k += kBytes) *reinterpret_cast<Type*>(line + k) = values;
    // Or the compiler would make a call of memset of it.
    asm volatile("" ::: "memory");
  });
}

void Set(char* to, int64_t bytes, int32_t value) {
  std::memset(to, value, static_cast<size_t>(bytes));
}

#if defined(__x86_64__)
// Past the caches.
void WriteLate16(char* to, int64_t bytes, int32_t value) {
  const __m128i values = _mm_set1_epi8(static_cast<char>(value));
  WriteLines(to, bytes, value, [&](char* line) {
    for (int k = 0; k < kLine; k += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(line + k), values);
    }
  });
}

void SetByString(char* to, int64_t bytes, int32_t value) {
  asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
}
#endif

#if defined(__AVX__)
void WriteLate32(char* to, int64_t bytes, int32_t value) {
  const __m256i values = _mm256_set1_epi8(static_cast<char>(value));
  WriteLines(to, bytes, value, [&](char* line) {
    for (int k = 0; k < kLine; k += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(line + k), values);
    }
  });
}
#endif

#if defined(__AVX512F__)
void WriteLate64(char* to, int64_t bytes, int32_t value) {
  const __m512i values = _mm512_set1_epi32(value * 0x01010101);
  WriteLines(to, bytes, value,
             [&](char* line) { _mm512_stream_si512(reinterpret_cast<__m512i*>(line), values); });
}

template <Ask kAsk>
void UpdateLate(char* to, int64_t bytes, int32_t flip) {
  const __m512i flips = _mm512_set1_epi32(flip);
  const int64_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (head > bytes) return Update<16, kAsk>(to, bytes, flip);
  Update<16, kAsk>(to, head, flip);
  for (int64_t at = head; at + kLine <= bytes; at += kLine) {
    AskFor<kAsk>(to + at);
    __m512i* const place = reinterpret_cast<__m512i*>(to + at);
    _mm512_stream_si512(place, _mm512_xor_si512(_mm512_load_si512(place), flips));
  }
}
#endif

void Fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

struct Reader {
  const char* name;
  int32_t (*run)(const char* from, int64_t bytes);
};
struct Updater {
  const char* name;
  void (*run)(char* to, int64_t bytes, int32_t flip);
};
struct Writer {
  const char* name;
  void (*run)(char* to, int64_t bytes, int32_t value);
};

// Names say how many bytes a load or a store has, what is asked for, and what goes past the caches.
constexpr Reader kReaders[] = {
    {"r16 lines", Read<16, Ask::kLines>}, {"r16", Read<16, Ask::kNothing>},
    {"r64 lines", Read<64, Ask::kLines>}, {"r64", Read<64, Ask::kNothing>},
    {"r64 pages", Read<64, Ask::kPages>},
};
constexpr Updater kUpdaters[] = {
    {"u16 lines", Update<16, Ask::kLines>},      {"u16", Update<16, Ask::kNothing>},
    {"u64 lines", Update<64, Ask::kLines>},      {"u64", Update<64, Ask::kNothing>},
    {"u64 pages", Update<64, Ask::kPages>},
#if defined(__AVX512F__)
    {"u64 late lines", UpdateLate<Ask::kLines>}, {"u64 late pages", UpdateLate<Ask::kPages>},
#endif
};
constexpr Writer kWriters[] = {
#if defined(__x86_64__)
    {"w16 late", WriteLate16},
#endif
#if defined(__AVX__)
    {"w32 late", WriteLate32},
#endif
#if defined(__AVX512F__)
    {"w64 late", WriteLate64},
#endif
    {"w16", Write<16, Ask::kNothing>},
    {"w64", Write<64, Ask::kNothing>},
    {"w16 lines", Write<16, Ask::kLines>},
    {"w64 lines", Write<64, Ask::kLines>},
    {"w memset", Set},
#if defined(__x86_64__)
    {"w rep", SetByString},
#endif
};

struct Streams {
  const char* read;
  int64_t read_bytes;
  int64_t times;
  char* update;
  int64_t update_bytes;
  char* write;
  int64_t write_bytes;
  int32_t value;
  int32_t flip;
};

struct Way {
  int64_t block;
  const Reader& reader;
  const Updater& updater;
  const Writer& writer;
};

int64_t Part(int64_t bytes, int64_t block, int64_t blocks) {
  return static_cast<int64_t>(static_cast<double>(bytes) / static_cast<double>(blocks) *
                              static_cast<double>(block)) /
         kLine * kLine;
}

// Blocks begin .. end - 1 of `blocks`, of all buffers side by side, as a codec goes through them.
int32_t Run(const Streams& streams, const Way& way, int64_t begin, int64_t end, int64_t blocks) {
  const auto range = [&](int64_t bytes, int64_t block, int64_t* from) {
    *from = Part(bytes, block, blocks);
    return (block + 1 == blocks ? bytes : Part(bytes, block + 1, blocks)) - *from;
  };
  const int64_t of_chunk =
      std::max<int64_t>(1, kChunk * blocks / std::max<int64_t>(1, streams.read_bytes));
  int32_t sum = 0;
  int64_t from = 0;
  for (int64_t first = begin; first < end; first += of_chunk) {
    const int64_t last = std::min(end, first + of_chunk);
    for (int64_t block = first; block < last; ++block) {
      int64_t bytes = range(streams.read_bytes, block, &from);
      sum += way.reader.run(streams.read + from, bytes);
      bytes = range(streams.update_bytes, block, &from);
      way.updater.run(streams.update + from, bytes, streams.flip);
      bytes = range(streams.write_bytes, block, &from);
      way.writer.run(streams.write + from, bytes, streams.value);
    }
    // What was read last is still in a cache.
    for (int64_t again = 1; again < streams.times; ++again) {
      for (int64_t block = last; block-- > first;) {
        const int64_t bytes = range(streams.read_bytes, block, &from);
        sum += way.reader.run(streams.read + from, bytes);
      }
    }
  }
  Fence();
  return sum;
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

// How many ways there are to choose (0) the size of blocks, (1) to read, (2) to update, (3) to
// write.
int32_t num_ways(int32_t kind) {
  const size_t sizes[] = {std::size(kBlocks), std::size(kReaders), std::size(kUpdaters),
                          std::size(kWriters)};
  return static_cast<int32_t>(sizes[kind]);
}

// What one of them is called; blocks have numbers.
const char* way_name(int32_t kind, int32_t which) {
  switch (kind) {
    case 1:
      return kReaders[which].name;
    case 2:
      return kUpdaters[which].name;
    case 3:
      return kWriters[which].name;
    default:
      return "";
  }
}

// Reads `read_bytes` `times` times, reads and writes `update_bytes` in place, and writes
// `write_bytes`, each byte `value`, on so many threads, in the ways `ways`, one of each kind.
// `flip` must be 0. Returns the seconds it took.
double stream_by(const char* read, int64_t read_bytes, int64_t times, char* update,
                 int64_t update_bytes, char* write, int64_t write_bytes, int32_t num_threads,
                 int32_t value, int32_t flip, const int32_t* ways) {
  const Streams streams = {read,  read_bytes,  times, update, update_bytes,
                           write, write_bytes, value, flip};
  const Way way = {kBlocks[ways[0]], kReaders[ways[1]], kUpdaters[ways[2]], kWriters[ways[3]]};
  const int64_t blocks =
      std::max<int64_t>(1, std::max({read_bytes, update_bytes, write_bytes}) / way.block);
  std::vector<int32_t> sums(static_cast<size_t>(num_threads));
  const double began = Seconds();
  std::vector<std::thread> threads;
  for (int32_t t = 1; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      sums[static_cast<size_t>(t)] =
          Run(streams, way, blocks * t / num_threads, blocks * (t + 1) / num_threads, blocks);
    });
  }
  sums[0] = Run(streams, way, 0, blocks / num_threads, blocks);
  for (std::thread& thread : threads) thread.join();
  const double seconds = Seconds() - began;
  volatile int32_t sink = sums[0] ^ sums.back();  // or the compiler would leave the reading out
  (void)sink;
  return seconds;
}

// The same in the first way of each kind.
double stream(const char* read, int64_t read_bytes, int64_t times, char* update,
              int64_t update_bytes, char* write, int64_t write_bytes, int32_t num_threads) {
  const int32_t ways[4] = {};
  return stream_by(read, read_bytes, times, update, update_bytes, write, write_bytes, num_threads,
                   1, 0, ways);
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
