// SPDX-License-Identifier: Apache-2.0
// The runtime and the generated codecs under address and undefined-behaviour sanitizers, without
// TensorFlow.
//
// Buffers are of the exact size on the heap, so that a byte read or written outside of one is an
// error here. Prints each failed check; the exit status is their number, at most 100.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/robust.h"
#include "tf_hips/cc/runtime/sketch.h"
#include "tf_hips/cc/runtime/sorting.h"
#include "tf_hips/cc/runtime/update.h"

namespace {

int num_failures = 0;

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      ++num_failures;                                                     \
    }                                                                     \
  } while (false)

constexpr int64_t kChunk = 1 << 20;

// A body of 0 to n bytes: one per element that is not zero. The only codec here without a fixed
// size.
int64_t SparseMax(const double*, int64_t n) { return n; }

int64_t SparseEncode(const double*, const TfHipsKey*, const float* in, int64_t n, uint8_t* body,
                     int64_t capacity) {
  int64_t written = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (in[i] == 0) continue;
    if (written == capacity) return -TF_HIPS_BUFFER_TOO_SMALL;
    body[written++] = static_cast<uint8_t>(i);
  }
  return written;
}

int32_t SparseDecode(const double*, const uint8_t* body, int64_t bytes, float* out, int64_t n,
                     int32_t mode) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (body[i] >= n) return TF_HIPS_BODY_CONTRADICTS_PARAMS;
  }
  const bool is_new = mode == TF_HIPS_SET || mode == TF_HIPS_STREAM;
  if (is_new) std::fill(out, out + n, 0.0f);
  for (int64_t i = 0; i < bytes; ++i) out[body[i]] += mode == TF_HIPS_RESIDUAL ? -1 : 1;
  return TF_HIPS_OK;
}

const TfHipsCodec kSparse = {
    TF_HIPS_ABI_VERSION, "sparse",     1,       0,       nullptr, 0,       1,      SparseMax,
    SparseEncode,        SparseDecode, nullptr, nullptr, 0,       nullptr, nullptr};
const TfHipsCodec* Sparse() { return &kSparse; }
TF_HIPS_REGISTER_CODEC(Sparse);

uint64_t random_state = 88172645463325252ull;
uint64_t Random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

std::vector<double> Defaults(const TfHipsCodec* codec) {
  std::vector<double> params;
  for (int32_t i = 0; i < codec->num_params; ++i) params.push_back(codec->params[i].default_value);
  return params;
}

// Heap memory of exactly `size` elements, so that the sanitizer sees both ends.
template <typename T>
struct Exact {
  explicit Exact(int64_t size) : data(new T[static_cast<size_t>(size)]()), size(size) {}
  std::unique_ptr<T[]> data;
  int64_t size;
};

Exact<float> Gradient(int64_t n) {
  Exact<float> gradient(n);
  for (int64_t i = 0; i < n; ++i) {
    gradient.data[i] = static_cast<float>(static_cast<int64_t>(Random() >> 40)) / (1 << 20) - 8;
  }
  return gradient;
}

// Encodes without feedback; a codec with state gets zeros.
int64_t Encode(const TfHipsCodec* codec, const std::vector<double>& params, const TfHipsKey& key,
               const float* gradient, int64_t n, uint8_t* out, int64_t capacity) {
  if (codec->num_states == 0) {
    return tf_hips_encode(codec, params.data(), &key, gradient, nullptr, n, out, capacity);
  }
  const Exact<float> state(codec->num_states * n);
  Exact<float> new_state(codec->num_states * n);
  return tf_hips_encode_state(codec, params.data(), &key, gradient, state.data.get(),
                              new_state.data.get(), n, out, capacity);
}

// What one call leaves is what the next one reads; each chunk has its part of every row.
void KeepsState(const TfHipsCodec* codec, int64_t n) {
  const std::vector<double> params = Defaults(codec);
  const TfHipsKey key = {7, 1, 2, 0};
  const Exact<float> gradient = Gradient(n);
  const int64_t bytes = tf_hips_wire_bytes(codec, params.data(), n);
  const int32_t rows = codec->num_states;
  Exact<uint8_t> packets(bytes), last(bytes);
  Exact<float> state(rows * n), next(rows * n);
  CHECK(tf_hips_encode(codec, params.data(), &key, gradient.data.get(), nullptr, n,
                       packets.data.get(), bytes) == -TF_HIPS_NEEDS_STATE);
  CHECK(tf_hips_encode(codec, params.data(), &key, gradient.data.get(), state.data.get(), n,
                       packets.data.get(), bytes) == -TF_HIPS_NEEDS_STATE);
  CHECK(tf_hips_encode_state(codec, params.data(), &key, gradient.data.get(), nullptr,
                             next.data.get(), n, packets.data.get(),
                             bytes) == (n > 0 ? -TF_HIPS_BAD_ARGUMENT : bytes));
  CHECK(tf_hips_encode_state(codec, params.data(), &key, gradient.data.get(), state.data.get(),
                             next.data.get(), n, packets.data.get(),
                             bytes - 1) == -TF_HIPS_BUFFER_TOO_SMALL);
  for (int64_t i = 0; i < state.size; ++i) CHECK(state.data[i] == 0 && next.data[i] == 0);
  for (int step = 0; step < 2; ++step) {
    CHECK(tf_hips_encode_state(codec, params.data(), &key, gradient.data.get(), state.data.get(),
                               next.data.get(), n, packets.data.get(), bytes) == bytes);
    std::swap(state.data, next.data);
  }
  // In place.
  Exact<float> own(rows * n);
  Exact<uint8_t> same(bytes);
  for (int step = 0; step < 2; ++step) {
    CHECK(tf_hips_encode_state(codec, params.data(), &key, gradient.data.get(), own.data.get(),
                               own.data.get(), n, same.data.get(), bytes) == bytes);
  }
  CHECK(std::equal(state.data.get(), state.data.get() + state.size, own.data.get()));
  CHECK(std::equal(same.data.get(), same.data.get() + bytes, packets.data.get()));
  const int64_t begin = n / kChunk * kChunk, tail = n - begin;
  Exact<float> tail_state(rows * tail), tail_next(rows * tail);
  const TfHipsKey tail_key = {7, 1, 2, static_cast<uint64_t>(begin)};
  int64_t written = 0;
  for (int step = 0; step < 2; ++step) {
    written = tf_hips_encode_state(codec, params.data(), &tail_key, gradient.data.get() + begin,
                                   tail_state.data.get(), tail_next.data.get(), tail,
                                   last.data.get(), bytes);
    std::swap(tail_state.data, tail_next.data);
  }
  CHECK(written > 0 && std::memcmp(last.data.get(), packets.data.get() + (bytes - written),
                                   static_cast<size_t>(written)) == 0);
  for (int32_t row = 0; row < rows; ++row) {
    CHECK(std::equal(tail_state.data.get() + row * tail, tail_state.data.get() + (row + 1) * tail,
                     state.data.get() + row * n + begin));
  }
}

void RoundTrip(const TfHipsCodec* codec, int64_t n) {
  const std::vector<double> params = Defaults(codec);
  const TfHipsKey key = {7, 1, 2, 0};
  const Exact<float> gradient = Gradient(n);
  const int64_t bytes = tf_hips_wire_bytes(codec, params.data(), n);
  CHECK(bytes >= 16);
  Exact<uint8_t> packets(bytes);
  Exact<float> residual(n), decoded(n), sum(n);
  CHECK(tf_hips_encode(codec, params.data(), &key, gradient.data.get(), residual.data.get(), n,
                       packets.data.get(), bytes) == bytes);
  CHECK(tf_hips_encode(codec, params.data(), &key, gradient.data.get(), nullptr, n,
                       packets.data.get(), bytes - 1) == -TF_HIPS_BUFFER_TOO_SMALL);
  CHECK(tf_hips_decode(codec, params.data(), packets.data.get(), bytes, decoded.data.get(), n, 0) ==
        0);
  for (int64_t i = 0; i < n; ++i) CHECK(residual.data[i] == gradient.data[i] - decoded.data[i]);

  const uint8_t* rows[] = {packets.data.get(), packets.data.get()};
  const int64_t row_bytes[] = {bytes, bytes};
  CHECK(tf_hips_merge(codec, params.data(), rows, row_bytes, 2, sum.data.get(), n, nullptr) == 0);
  for (int64_t i = 0; i < n; ++i) CHECK(sum.data[i] == decoded.data[i] + decoded.data[i]);

  Exact<uint8_t> merged(bytes), again(bytes);
  Exact<float> other_residual(n);
  std::copy(residual.data.get(), residual.data.get() + n, other_residual.data.get());
  CHECK(tf_hips_merge_encode(codec, params.data(), &key, rows, row_bytes, 2, residual.data.get(), n,
                             merged.data.get(), bytes, nullptr) == bytes);
  CHECK(tf_hips_encode(codec, params.data(), &key, sum.data.get(), other_residual.data.get(), n,
                       again.data.get(), bytes) == bytes);
  CHECK(std::memcmp(merged.data.get(), again.data.get(), static_cast<size_t>(bytes)) == 0);
}

void HostilePackets(const TfHipsCodec* codec) {
  const std::vector<double> params = Defaults(codec);
  const TfHipsKey key = {7, 1, 2, 0};
  for (const int64_t n : {0, 1, 9, 100}) {
    const Exact<float> gradient = Gradient(n);
    const int64_t bytes = tf_hips_wire_bytes(codec, params.data(), n);
    Exact<uint8_t> packets(bytes);
    Encode(codec, params, key, gradient.data.get(), n, packets.data.get(), bytes);
    for (int64_t length = 0; length < bytes; ++length) {
      Exact<uint8_t> part(length);
      Exact<float> out(n);
      std::copy(packets.data.get(), packets.data.get() + length, part.data.get());
      CHECK(tf_hips_decode(codec, params.data(), part.data.get(), length, out.data.get(), n, 0) ==
            TF_HIPS_TRUNCATED);
    }
    for (int trial = 0; trial < 2000; ++trial) {
      Exact<uint8_t> changed(bytes);
      Exact<float> out(n);
      std::copy(packets.data.get(), packets.data.get() + bytes, changed.data.get());
      for (uint64_t flips = Random() % 4 + 1; flips > 0; --flips) {
        changed.data[Random() % static_cast<uint64_t>(bytes)] ^=
            static_cast<uint8_t>(1u << (Random() % 8));
      }
      const int32_t status = tf_hips_decode(codec, params.data(), changed.data.get(), bytes,
                                            out.data.get(), n, trial % 2);
      CHECK(std::strcmp(tf_hips_status_text(status), "unknown status") != 0);
      char text[40];
      const int32_t explained =
          tf_hips_explain(codec, params.data(), changed.data.get(), bytes, n, text, sizeof(text));
      CHECK(status < 16 ? explained == 0 : explained == status);
      CHECK((explained == 0) == (text[0] == '\0'));
    }
  }
}

void VariableSize() {
  const TfHipsKey key = {};
  Exact<float> gradient(100);
  gradient.data[3] = gradient.data[97] = 1;
  Exact<uint8_t> packet(tf_hips_wire_bytes(&kSparse, nullptr, 100));
  const int64_t bytes = tf_hips_encode(&kSparse, nullptr, &key, gradient.data.get(), nullptr, 100,
                                       packet.data.get(), packet.size);
  CHECK(bytes == 18);
  Exact<uint8_t> exact(bytes);
  std::copy(packet.data.get(), packet.data.get() + bytes, exact.data.get());
  Exact<float> out(100);
  CHECK(tf_hips_decode(&kSparse, nullptr, exact.data.get(), bytes, out.data.get(), 100, 0) == 0);
  CHECK(std::equal(out.data.get(), out.data.get() + 100, gradient.data.get()));
  exact.data[17] = 100;
  CHECK(tf_hips_decode(&kSparse, nullptr, exact.data.get(), bytes, out.data.get(), 100, 0) ==
        TF_HIPS_BODY_CONTRADICTS_PARAMS);
  // The row whose body is at fault is named, not only one whose prefix is.
  const uint8_t* rows[] = {packet.data.get(), exact.data.get(), exact.data.get()};
  const int64_t row_bytes[] = {bytes, bytes, bytes};
  int32_t bad_row = 7;
  CHECK(tf_hips_merge(&kSparse, nullptr, rows, row_bytes, 3, out.data.get(), 100, &bad_row) ==
        TF_HIPS_BODY_CONTRADICTS_PARAMS);
  CHECK(bad_row == 1);
  CHECK(tf_hips_merge(&kSparse, nullptr, rows, row_bytes, 1, out.data.get(), 100, &bad_row) == 0);
  CHECK(bad_row == -1);
  Exact<uint8_t> remade(packet.size);
  CHECK(tf_hips_merge_encode(&kSparse, nullptr, &key, rows, row_bytes, 2, nullptr, 100,
                             remade.data.get(), remade.size,
                             &bad_row) == -TF_HIPS_BODY_CONTRADICTS_PARAMS);
  CHECK(bad_row == 1);
  exact.data[0] = 'X';
  CHECK(tf_hips_merge(&kSparse, nullptr, rows, row_bytes, 2, out.data.get(), 100, &bad_row) ==
        TF_HIPS_BAD_MAGIC);
  CHECK(bad_row == 1);
  CHECK(tf_hips_merge_encode(&kSparse, nullptr, &key, rows, row_bytes, 1, nullptr, 100,
                             remade.data.get(), 0, &bad_row) == -TF_HIPS_BUFFER_TOO_SMALL);
  CHECK(bad_row == -1);
  Exact<uint8_t> long_packet(117);
  std::copy(packet.data.get(), packet.data.get() + bytes, long_packet.data.get());
  CHECK(tf_hips_decode(&kSparse, nullptr, long_packet.data.get(), 117, out.data.get(), 100, 0) ==
        TF_HIPS_TOO_LONG);
  // Where the second packet begins could not be told.
  Exact<float> two_chunks(kChunk + 1);
  Exact<uint8_t> room(tf_hips_wire_bytes(&kSparse, nullptr, kChunk + 1));
  CHECK(tf_hips_encode(&kSparse, nullptr, &key, two_chunks.data.get(), nullptr, kChunk + 1,
                       room.data.get(), room.size) == -TF_HIPS_SPLIT_VARIABLE_SIZE);
}

void BadArguments(const TfHipsCodec* codec) {
  const std::vector<double> params = Defaults(codec);
  const TfHipsKey key = {};
  uint8_t byte = 0;
  float value = 0;
  CHECK(tf_hips_wire_bytes(nullptr, params.data(), 1) == -TF_HIPS_BAD_ARGUMENT);
  CHECK(tf_hips_wire_bytes(codec, params.data(), -1) == -TF_HIPS_BAD_ARGUMENT);
  CHECK(tf_hips_wire_bytes(codec, params.data(), int64_t{1} << 62) == -TF_HIPS_BAD_ARGUMENT);
  CHECK(tf_hips_encode(codec, params.data(), nullptr, &value, nullptr, 1, &byte, 1) ==
        -TF_HIPS_BAD_ARGUMENT);
  CHECK(tf_hips_encode(codec, params.data(), &key, nullptr, nullptr, 1, &byte, 1) ==
        -TF_HIPS_BAD_ARGUMENT);
  CHECK(tf_hips_decode(codec, params.data(), nullptr, 16, &value, 1, 0) == TF_HIPS_BAD_ARGUMENT);
  CHECK(tf_hips_decode(codec, params.data(), &byte, -1, &value, 1, 0) == TF_HIPS_BAD_ARGUMENT);
  CHECK(tf_hips_merge(codec, params.data(), nullptr, nullptr, 0, &value, 1, nullptr) ==
        TF_HIPS_BAD_ARGUMENT);
  for (int32_t i = 0; i < codec->num_params; ++i) {
    for (const double wrong :
         {codec->params[i].minimum - 1, codec->params[i].maximum + 1, std::nan("")}) {
      std::vector<double> changed = params;
      changed[i] = wrong;
      CHECK(tf_hips_wire_bytes(codec, changed.data(), 1) == -TF_HIPS_BAD_PARAMETER);
    }
  }
}

// The mean of three gradients' halves, in place, and what is sent where the last one ends in a NaN.
void Momentum(const TfHipsCodec* codec, int64_t n, int32_t feedback) {
  const std::vector<double> params = Defaults(codec);
  const TfHipsKey key = {7, 1, 2, 0};
  const int64_t bytes = tf_hips_wire_bytes(codec, params.data(), n);
  Exact<uint8_t> packets(bytes), wanted(bytes);
  Exact<float> state((1 + feedback) * n), residual(feedback * n), sent(n);
  for (int step = 0; step < 3; ++step) {
    const Exact<float> g = Gradient(n);
    if (step == 2 && n > 0) g.data[n - 1] = std::nanf("");
    for (int64_t i = 0; i < n; ++i) sent.data[i] = 0.5f * sent.data[i] + 0.5f * g.data[i];
    CHECK(tf_hips_encode(codec, params.data(), &key, sent.data.get(),
                         feedback != 0 ? residual.data.get() : nullptr, n, wanted.data.get(),
                         bytes) == bytes);
    CHECK(tf_hips_encode_momentum(codec, params.data(), &key, g.data.get(), 0.5f, feedback,
                                  state.data.get(), state.data.get(), n, packets.data.get(),
                                  bytes) == bytes);
    CHECK(std::equal(wanted.data.get(), wanted.data.get() + bytes, packets.data.get()));
  }
  CHECK(std::equal(residual.data.get(), residual.data.get() + residual.size, state.data.get() + n));
}

// Every status has a text of its own; the numbers around them have none.
void StatusTexts() {
  std::vector<int32_t> known;
  for (int32_t status = TF_HIPS_OK; status <= TF_HIPS_NEEDS_STATE; ++status)
    known.push_back(status);
  for (int32_t status = TF_HIPS_BAD_ARGUMENT; status <= TF_HIPS_OUT_OF_MEMORY; ++status)
    known.push_back(status);
  std::vector<std::string> texts = {"unknown status"};
  for (const int32_t status : known) {
    const std::string text = tf_hips_status_text(status);
    CHECK(std::find(texts.begin(), texts.end(), text) == texts.end());
    texts.push_back(text);
  }
  for (const int32_t status :
       {-1, TF_HIPS_NEEDS_STATE + 1, TF_HIPS_BAD_ARGUMENT - 1, TF_HIPS_OUT_OF_MEMORY + 1}) {
    CHECK(tf_hips_status_text(status) == texts[0]);
  }
}

// A codec whose body is far larger than its tensor: the sum over chunks would not fit.
int64_t HugeMax(const double*, int64_t) { return int64_t{1} << 44; }

// A parameter that is no integer counts as the nearest binary32, in bounds and in the hash.
void FloatParameters() {
  const double tenth = static_cast<double>(0.1f);
  const TfHipsParam param = {"clip", 0, tenth, 0, tenth};
  const TfHipsCodec codec = {
      TF_HIPS_ABI_VERSION, "huge",       1,       1,       &param, 1,       0,      HugeMax,
      SparseEncode,        SparseDecode, nullptr, nullptr, 0,      nullptr, nullptr};
  const double exact = 0.1, above = 0.1000001, infinite = HUGE_VAL;
  CHECK(tf_hips_wire_bytes(&codec, &exact, 1) == (int64_t{1} << 44) + 16);
  CHECK(tf_hips_codec_hash(&codec, &exact) == tf_hips_codec_hash(&codec, &tenth));
  CHECK(tf_hips_codec_hash(&codec, &exact) != tf_hips_codec_hash(&codec, &above));
  CHECK(tf_hips_wire_bytes(&codec, &above, 1) == -TF_HIPS_BAD_PARAMETER);
  CHECK(tf_hips_wire_bytes(&codec, &infinite, 1) == -TF_HIPS_BAD_PARAMETER);
  CHECK(tf_hips_wire_bytes(&codec, &exact, int64_t{1} << 48) == -TF_HIPS_BAD_ARGUMENT);
}

// Several threads use the pool at once; every result is the same.
void Threads(const TfHipsCodec* codec) {
  const std::vector<double> params = Defaults(codec);
  const TfHipsKey key = {1, 2, 3, 0};
  const int64_t n = 3 * kChunk + 11;
  const Exact<float> gradient = Gradient(n);
  const int64_t bytes = tf_hips_wire_bytes(codec, params.data(), n);
  std::vector<Exact<uint8_t>> packets;
  for (int i = 0; i < 3; ++i) packets.emplace_back(bytes);
  std::vector<std::thread> threads;
  for (auto& mine : packets) {
    threads.emplace_back(
        [&] { Encode(codec, params, key, gradient.data.get(), n, mine.data.get(), bytes); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& mine : packets) {
    CHECK(std::memcmp(mine.data.get(), packets[0].data.get(), static_cast<size_t>(bytes)) == 0);
  }
}

void Denormals() {
#if defined(__SSE2__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  {
    const tf_hips::ScopedExactDenormals exact;
    volatile float tiny = 1e-40f;
    CHECK(tiny * 1.0f != 0.0f);
  }
  CHECK((_mm_getcsr() & 0x8040u) == 0x8040u);
  _mm_setcsr(before);
  // What a codec's parameters are, and the hash of them, is the same where denormals are flushed.
  const double tiny = static_cast<double>(1e-40f), zero = 0.0;
  const TfHipsParam param = {"decay", 0, tiny, tiny, 1.0};
  const TfHipsCodec codec = {
      TF_HIPS_ABI_VERSION, "tiny",       1,       1,       &param, 1,       0,      SparseMax,
      SparseEncode,        SparseDecode, nullptr, nullptr, 0,      nullptr, nullptr};
  const uint32_t hash = tf_hips_codec_hash(&codec, &tiny);
  _mm_setcsr(before | 0x8040u);
  const uint32_t flushed = tf_hips_codec_hash(&codec, &tiny);
  const int64_t bytes = tf_hips_wire_bytes(&codec, &tiny, 1);
  _mm_setcsr(before);
  CHECK(flushed == hash && hash != tf_hips_codec_hash(&codec, &zero));
  CHECK(bytes == 17 && tf_hips_wire_bytes(&codec, &zero, 1) == -TF_HIPS_BAD_PARAMETER);
#endif
}

// In memory of exactly n floats, so that the sanitizers see any read or write beside it.
void Updates(int64_t n) {
  const size_t size = static_cast<size_t>(n);
  const std::vector<float> g(size, 2.0f), one(size, 1.0f), three(size, 3.0f);
  std::vector<float> a(size), b(size), c(size);
  CHECK(tf_hips_update_scale(g.data(), 0.5f, a.data(), n) == 0);
  CHECK(a == one);
  CHECK(tf_hips_update_add_scaled(one.data(), g.data(), 1.0f, a.data(), n) == 0);
  CHECK(a == three);
  for (const int32_t nesterov : {0, 1}) {
    CHECK(tf_hips_update_momentum(g.data(), one.data(), 1.0f, 1.0f, nesterov, a.data(), b.data(),
                                  n) == 0);
    CHECK(a == three);
    CHECK(b == std::vector<float>(size, nesterov ? 5.0f : 3.0f));
  }
  CHECK(tf_hips_update_adam(g.data(), one.data(), one.data(), 1.0f, 0.0f, 0.0f, 0.0f, a.data(),
                            b.data(), c.data(), n) == 0);
  CHECK(a == g && b == std::vector<float>(size, 4.0f) && c == one);
  for (const int32_t kind : {TF_HIPS_ADAGRAD, TF_HIPS_ADAM, TF_HIPS_YOGI}) {
    for (const float* first : {static_cast<const float*>(nullptr), one.data()}) {
      CHECK(tf_hips_update_adaptive(g.data(), first, one.data(), 1.0f, 0.0f, 0.0f, 0.0f, kind,
                                    first == nullptr ? nullptr : a.data(), b.data(), c.data(),
                                    n) == 0);
      CHECK(b == std::vector<float>(size, kind == TF_HIPS_ADAM ? 4.0f : 5.0f));
    }
  }
  for (const float* square : {static_cast<const float*>(nullptr), one.data()}) {
    CHECK(tf_hips_update_delayed(g.data(), one.data(), three.data(), square, 1.0f, 1.0f, 0.0f, 0.0f,
                                 a.data(), square == nullptr ? nullptr : b.data(), n) == 0);
    CHECK(a == std::vector<float>(size, square == nullptr ? 11.0f : 7.0f));
  }
  CHECK(tf_hips_update_mix(g.data(), one.data(), three.data(), 0.5f, a.data(), n) == 0);
  CHECK(a == three);

  CHECK(tf_hips_update_scale(g.data(), 0.5f, a.data(), -1) == TF_HIPS_BAD_UPDATE);
  if (n == 0) return;
  CHECK(tf_hips_update_adaptive(g.data(), nullptr, one.data(), 1.0f, 0.0f, 0.0f, 0.0f, 3, nullptr,
                                b.data(), c.data(), n) == TF_HIPS_BAD_UPDATE);
  CHECK(tf_hips_update_delayed(g.data(), one.data(), one.data(), one.data(), 1.0f, 1.0f, 0.0f, 0.0f,
                               a.data(), nullptr, n) == TF_HIPS_BAD_UPDATE);
  CHECK(tf_hips_update_scale(nullptr, 0.5f, a.data(), n) == TF_HIPS_BAD_UPDATE);
  std::vector<float> bad = g;
  bad.back() = std::numeric_limits<float>::quiet_NaN();
  CHECK(tf_hips_update_scale(bad.data(), 0.5f, a.data(), n) == TF_HIPS_NOT_FINITE);
  bad.back() = std::numeric_limits<float>::max();
  CHECK(tf_hips_update_scale(bad.data(), 0.5f, a.data(), n) == 0);
  CHECK(tf_hips_update_scale(bad.data(), 2.0f, a.data(), n) == TF_HIPS_NOT_FINITE);
}

// Rows of the exact size on the heap; the median of all rows equal is the row, and distances are 0.
void Robust(int32_t n, int64_t d) {
  std::vector<std::vector<float>> rows(static_cast<size_t>(n)), mixed(3);
  std::vector<const float*> at;
  std::vector<float*> to;
  for (auto& row : rows) {
    row.resize(static_cast<size_t>(d));
    for (int64_t i = 0; i < d; ++i) row[static_cast<size_t>(i)] = static_cast<float>(i % 97);
    at.push_back(row.data());
  }
  for (auto& row : mixed) {
    row.resize(static_cast<size_t>(d));
    to.push_back(row.data());
  }
  const auto chunks = static_cast<size_t>((d + kChunk - 1) / kChunk);
  std::vector<float> out(static_cast<size_t>(d)), weights(3 * static_cast<size_t>(n));
  for (int32_t k = 0; k < 3; ++k) weights[static_cast<size_t>(k * n)] = 1.0f;
  std::vector<double> squares(chunks * n), pairs(chunks * n * (n - 1) / 2, -1.0);
  for (int32_t rule = TF_HIPS_MEDIAN; rule <= TF_HIPS_NEAREST; ++rule) {
    const int32_t drop = rule == TF_HIPS_MEDIAN ? 0 : (n - 1) / 2;
    CHECK(tf_hips_robust_coordinate(at.data(), n, d, nullptr, -7, rule, drop, out.data(),
                                    squares.data()) == 0);
    CHECK(out == rows[0]);
    std::fill(out.begin(), out.end(), -1.0f);
    CHECK(tf_hips_robust_coordinate(at.data(), n, d, weights.data(), 3, rule, drop > 0 ? 1 : 0,
                                    out.data(), nullptr) == 0);
    CHECK(out == rows[0]);
  }
  CHECK(tf_hips_robust_coordinate(at.data(), n, d, nullptr, 0, TF_HIPS_MAJORITY, 0, out.data(),
                                  nullptr) == 0);
  CHECK(std::equal(out.begin(), out.end(), rows[0].begin(),
                   [](float sign, float value) { return sign == (value > 0 ? 1.0f : 0.0f); }));
  CHECK(tf_hips_robust_distances(at.data(), n, d, squares.data(), pairs.data()) == 0);
  CHECK(std::all_of(pairs.begin(), pairs.end(), [](double one) { return one == 0.0; }));
  CHECK(tf_hips_robust_mix(at.data(), n, d, weights.data(), 3, to.data()) == 0);
  CHECK(mixed[0] == rows[0] && mixed[2] == rows[0]);
  CHECK(tf_hips_robust_coordinate(at.data(), n, d, nullptr, 0, TF_HIPS_TRIMMED, n, out.data(),
                                  nullptr) == TF_HIPS_BAD_ROWS);
  CHECK(tf_hips_robust_coordinate(nullptr, n, d, nullptr, 0, TF_HIPS_MEDIAN, 0, out.data(),
                                  nullptr) == TF_HIPS_BAD_ROWS);
  CHECK(tf_hips_robust_distances(at.data(), 0, d, squares.data(), nullptr) == TF_HIPS_BAD_ROWS);
  CHECK(tf_hips_robust_mix(at.data(), n, d, nullptr, 3, to.data()) == TF_HIPS_BAD_ROWS);
}

// Equal rows have equal sketches, and of one block without turns these are the rows.
void Sketches(int32_t n, int64_t d) {
  std::vector<float> row(static_cast<size_t>(d));
  for (int64_t i = 0; i < d; ++i) row[static_cast<size_t>(i)] = static_cast<float>(i % 97 + 1);
  const std::vector<const float*> at(static_cast<size_t>(n), row.data());
  const std::vector<uint64_t> signs(static_cast<size_t>(d / 64 + 1), 1);
  const std::vector<int64_t> turns(static_cast<size_t>(d), 0);
  const auto size = static_cast<size_t>(n * 2 * d);
  std::vector<double> whole(size, 0.0), cut(static_cast<size_t>(n) * 14, 0.0);
  const TfHipsSketchHalf halves[2] = {{signs.data(), turns.data(), d, whole.data()},
                                      {signs.data(), turns.data(), 7, cut.data()}};
  CHECK(tf_hips_robust_sketch(at.data(), n, d, halves, 2) == 0);
  double sum = 0.0, cut_sum = 0.0;
  for (int64_t i = 0; i < d; ++i) {
    const double wanted = row[static_cast<size_t>(i)] * (i % 64 == 0 ? -1.0 : 1.0);
    CHECK(whole[static_cast<size_t>(i)] == wanted && whole[static_cast<size_t>(d + i)] == 0.0);
    sum += wanted;
  }
  for (size_t j = 0; j < 14; ++j) cut_sum += cut[j];
  CHECK(cut_sum == sum);
  CHECK(std::equal(cut.begin(), cut.begin() + 14, cut.end() - 14));
  CHECK(tf_hips_robust_sketch(at.data(), n, 0, halves, 2) == 0);
  CHECK(tf_hips_robust_sketch(at.data(), n, d, nullptr, 2) == TF_HIPS_BAD_ROWS);
  CHECK(tf_hips_robust_sketch(at.data(), n, d, halves, 0) == TF_HIPS_BAD_ROWS);
  CHECK(tf_hips_robust_sketch(nullptr, n, d, halves, 2) == TF_HIPS_BAD_ROWS);
  const std::vector<int64_t> wrong(static_cast<size_t>(d), d);
  const TfHipsSketchHalf turned = {signs.data(), wrong.data(), d, whole.data()};
  CHECK(tf_hips_robust_sketch(at.data(), n, d, &turned, 1) == TF_HIPS_BAD_ROWS);
}

// What a network makes of runs that are sorted is sorted, where anybody looks.
void Networks(int n, int run, int first, int last) {
  const auto network = tf_hips::MergeNetwork(n, run, first, last);
  for (int tries = 0; tries < 20; ++tries) {
    std::vector<int> values(static_cast<size_t>(n));
    // Zeros and ones, which networks that do not sort cannot sort either, and numbers.
    for (int& value : values) value = static_cast<int>(Random() % (tries % 2 == 0 ? 2 : 1000));
    std::vector<int> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    for (int begin = 0; begin < n; begin += run) {
      std::sort(values.begin() + begin, values.begin() + std::min(begin + run, n));
    }
    for (const tf_hips::Comparator& one : network) {
      const int low = values[static_cast<size_t>(one.low)];
      const int high = values[static_cast<size_t>(one.high)];
      // What is not kept is nobody's.
      values[static_cast<size_t>(one.low)] = one.keeps_low ? std::min(low, high) : -1;
      values[static_cast<size_t>(one.high)] = one.keeps_high ? std::max(low, high) : -1;
    }
    CHECK(std::equal(values.begin() + first, values.begin() + last + 1, sorted.begin() + first));
  }
}

}  // namespace

int main() {
  CHECK(tf_hips_abi_version() == TF_HIPS_ABI_VERSION);
  CHECK(tf_hips_num_codecs() >= 2);
  CHECK(tf_hips_codec_at(-1) == nullptr);
  CHECK(tf_hips_codec_at(tf_hips_num_codecs()) == nullptr);
  CHECK(tf_hips_find_codec("no such codec") == nullptr);
  for (int32_t i = 0; i < tf_hips_num_codecs(); ++i) {
    const TfHipsCodec* codec = tf_hips_codec_at(i);
    CHECK(tf_hips_find_codec(codec->name) == codec);
    if (!codec->is_fixed_size) continue;
    for (const int64_t n :
         {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, int64_t{1023}, kChunk + 5}) {
      codec->num_states > 0 ? KeepsState(codec, n) : RoundTrip(codec, n);
      if (codec->num_states == 0 && n < kChunk) Momentum(codec, n, n % 2);
    }
    HostilePackets(codec);
    BadArguments(codec);
    Threads(codec);
  }
  VariableSize();
  Momentum(tf_hips_find_codec("int8"), kChunk + 5, 1);
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{17}, (int64_t{1} << 18) + 3}) Updates(n);
  for (const int32_t n : {1, 2, 3, 5, 9}) {
    for (const int64_t d : {int64_t{0}, int64_t{1}, int64_t{513}, (int64_t{1} << 15) + 7}) {
      Robust(n, d);
      if (d > 0) Sketches(n, d);
    }
  }
  for (const int run : {2, 4, 8, 16, 32}) {
    for (int n = run + 1; n <= 4 * run + 5; ++n) {
      Networks(n, run, 0, n - 1);
      Networks(n, run, (n - 1) / 2, n / 2);
      Networks(n, run, n / 3, n - 1 - n / 3);
    }
  }
  StatusTexts();
  FloatParameters();
  Denormals();
  return std::min(num_failures, 100);
}
