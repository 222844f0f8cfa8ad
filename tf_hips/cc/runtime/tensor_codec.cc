// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/runtime/tensor_codec.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/momentum.h"
#include "tf_hips/cc/runtime/packet.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {
namespace {

// Rooms of a thread: for values that are made to be encoded (a sum of rows, what momentum sends
// where it is not finite), and for such with residual.
enum Room { kMade, kSumWithResidual, kNumRooms };

// Room for n <= kChunkElements floats that lives as long as its thread: fresh pages for each chunk
// would cost as much as encoding it. Null when there is no memory.
float* Scratch(Room room, int64_t n) {
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<float, Free> memory[kNumRooms];
  thread_local int64_t capacity[kNumRooms] = {};
  if (n > capacity[room]) {
    constexpr int64_t kPage = 4096;
    const int64_t bytes = (n * static_cast<int64_t>(sizeof(float)) + kPage - 1) / kPage * kPage;
    capacity[room] = 0;
    memory[room].reset(static_cast<float*>(std::aligned_alloc(kPage, static_cast<size_t>(bytes))));
    if (memory[room] == nullptr) return nullptr;
    capacity[room] = bytes / static_cast<int64_t>(sizeof(float));
  }
  return memory[room].get();
}

// The failure of the first chunk that failed, whichever thread met its own first. Read it when all
// chunks are done.
class FirstFailure {
 public:
  // `row`: of several packets, the one that is at fault; -1 for none.
  void Report(int64_t chunk, int32_t status, int32_t row = -1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_ != TF_HIPS_OK && chunk_ < chunk) return;
    chunk_ = chunk;
    status_ = status;
    row_ = row;
  }
  int32_t status() const { return status_; }
  int32_t row() const { return row_; }

 private:
  std::mutex mutex_;
  int64_t chunk_ = 0;
  int32_t status_ = TF_HIPS_OK;
  int32_t row_ = -1;
};

// Tensors of more bytes than this are written past the caches: about what a core has of them to
// itself. Whoever reads them next would not find them there anyway.
constexpr int64_t kStreamedBytes = int64_t{1} << 23;

int32_t WriteMode(int64_t n) {
  const bool is_large = n > kStreamedBytes / static_cast<int64_t>(sizeof(float));
  return is_large ? TF_HIPS_STREAM : TF_HIPS_SET;
}

// The part of a call that one chunk sees.
struct Chunk {
  int64_t begin;  // first element
  int64_t n;
  uint8_t* packet;
  int64_t capacity;
};

// Encodes one chunk of `value` to its packet. Returns its bytes, or -status.
int64_t EncodeChunk(const CodecCall& call, const Layout& layout, const TfHipsKey& key,
                    const float* value, const Chunk& chunk) {
  TfHipsKey chunk_key = key;
  chunk_key.offset += static_cast<uint64_t>(chunk.begin);
  WritePrefix(chunk.packet, layout.hash, static_cast<uint32_t>(chunk.n));
  const int64_t body =
      call.codec->encode(call.params, &chunk_key, value, chunk.n, chunk.packet + kPrefixBytes,
                         chunk.capacity - kPrefixBytes);
  return body < 0 ? body : kPrefixBytes + body;
}

// EncodeChunkFeedback for a codec without encode_feedback.
int64_t EncodeThenDecode(const CodecCall& call, const Layout& layout, const TfHipsKey& key,
                         const float* gradient, const float* residual, float* new_residual,
                         const Chunk& chunk) {
  // `gradient` may be in this thread's room. The old residual must survive a failure.
  float* sum = Scratch(kSumWithResidual, chunk.n);
  if (sum == nullptr && chunk.n > 0) return -TF_HIPS_OUT_OF_MEMORY;
  for (int64_t i = 0; i < chunk.n; ++i) sum[i] = gradient[i] + residual[i];
  const int64_t bytes = EncodeChunk(call, layout, key, sum, chunk);
  if (bytes < 0) return bytes;
  const int32_t status = call.codec->decode(call.params, chunk.packet + kPrefixBytes,
                                            bytes - kPrefixBytes, sum, chunk.n, TF_HIPS_RESIDUAL);
  if (status != TF_HIPS_OK) return -status;
  std::copy(sum, sum + chunk.n, new_residual);
  return bytes;
}

// Encodes v = gradient + residual and leaves v - decode(packet) in new_residual; pointers to the
// chunk's elements.
int64_t EncodeChunkFeedback(const CodecCall& call, const Layout& layout, const TfHipsKey& key,
                            const float* gradient, const float* residual, float* new_residual,
                            const Chunk& chunk) {
  if (call.codec->encode_feedback == nullptr) {
    return EncodeThenDecode(call, layout, key, gradient, residual, new_residual, chunk);
  }
  TfHipsKey chunk_key = key;
  chunk_key.offset += static_cast<uint64_t>(chunk.begin);
  WritePrefix(chunk.packet, layout.hash, static_cast<uint32_t>(chunk.n));
  const int64_t body = call.codec->encode_feedback(
      call.params, &chunk_key, gradient, residual, new_residual, chunk.n,
      chunk.packet + kPrefixBytes, chunk.capacity - kPrefixBytes);
  return body < 0 ? body : kPrefixBytes + body;
}

// Runs `encode_one(chunk, &row)` for every chunk and adds up the bytes written. `bad_row`, when not
// null, becomes what the first chunk that failed left in `row`.
template <typename EncodeOne>
int64_t EncodeChunks(const ParallelFor& parallel_for, const Layout& layout, int64_t n, uint8_t* out,
                     int64_t capacity, const EncodeOne& encode_one, int32_t* bad_row = nullptr) {
  if (capacity < layout.total) return -TF_HIPS_BUFFER_TOO_SMALL;
  FirstFailure failure;
  // Written by the task of the last chunk alone; only that one may have a variable size.
  int64_t last_bytes = 0;
  parallel_for(layout.num_chunks, [&](int64_t i) {
    const ScopedExactDenormals exact;
    const int64_t begin = i * layout.stride;
    const bool is_last = i == layout.num_chunks - 1;
    const Chunk chunk{i * kChunkElements, ChunkElements(n, i), out + begin,
                      is_last ? layout.total - begin : layout.stride};
    int32_t row = -1;
    const int64_t bytes = encode_one(chunk, &row);
    if (bytes < 0) failure.Report(i, static_cast<int32_t>(-bytes), row);
    if (is_last) last_bytes = bytes;
  });
  if (bad_row != nullptr) *bad_row = failure.row();
  if (failure.status() != TF_HIPS_OK) return -failure.status();
  return (layout.num_chunks - 1) * layout.stride + last_bytes;
}

// Body of chunk i in a row whose prefixes were checked.
struct Body {
  const uint8_t* begin;
  int64_t bytes;
};

Body BodyOf(const Layout& layout, const uint8_t* row, int64_t row_bytes, int64_t i) {
  const int64_t begin = i * layout.stride;
  const int64_t end = i == layout.num_chunks - 1 ? row_bytes : begin + layout.stride;
  return {row + begin + kPrefixBytes, end - begin - kPrefixBytes};
}

// Sum of chunk i over the rows, in their order. On failure `bad_row` is the row at fault.
int32_t MergeChunk(const CodecCall& call, const Layout& layout, const uint8_t* const* rows,
                   const int64_t* row_bytes, int32_t num_rows, int64_t i, float* out, int64_t n,
                   int32_t mode, int32_t* bad_row) {
  if (call.codec->merge == nullptr) {
    for (int32_t row = 0; row < num_rows; ++row) {
      const Body body = BodyOf(layout, rows[row], row_bytes[row], i);
      const int32_t status = call.codec->decode(call.params, body.begin, body.bytes, out, n,
                                                row == 0 ? TF_HIPS_SET : TF_HIPS_ADD);
      if (status == TF_HIPS_OK) continue;
      *bad_row = row;
      return status;
    }
    return TF_HIPS_OK;
  }
  // A few rows fit the stack; a call with more of them takes longer than finding memory does.
  constexpr int32_t kFew = 32;
  const uint8_t* few_bodies[kFew];
  int64_t few_bytes[kFew];
  std::unique_ptr<const uint8_t*[]> many_bodies;
  std::unique_ptr<int64_t[]> many_bytes;
  const uint8_t** bodies = few_bodies;
  int64_t* bytes = few_bytes;
  if (num_rows > kFew) {
    many_bodies.reset(new (std::nothrow) const uint8_t*[static_cast<size_t>(num_rows)]);
    many_bytes.reset(new (std::nothrow) int64_t[static_cast<size_t>(num_rows)]);
    if (many_bodies == nullptr || many_bytes == nullptr) return TF_HIPS_OUT_OF_MEMORY;
    bodies = many_bodies.get();
    bytes = many_bytes.get();
  }
  for (int32_t row = 0; row < num_rows; ++row) {
    const Body body = BodyOf(layout, rows[row], row_bytes[row], i);
    bodies[row] = body.begin;
    bytes[row] = body.bytes;
  }
  return call.codec->merge(call.params, bodies, bytes, num_rows, out, n, mode, bad_row);
}

// Lays the packets of every row out, and checks all of them before anything is written.
int32_t CheckedLayout(const CodecCall& call, const uint8_t* const* rows, const int64_t* row_bytes,
                      int32_t num_rows, int64_t n, Layout* layout, int32_t* bad_row) {
  if (bad_row != nullptr) *bad_row = -1;
  if (num_rows < 1) return TF_HIPS_BAD_ARGUMENT;
  if (const int32_t status = LayoutFor(*call.codec, call.params, n, layout)) return status;
  for (int32_t row = 0; row < num_rows; ++row) {
    if (const int32_t status = CheckPackets(*call.codec, *layout, rows[row], row_bytes[row], n)) {
      if (bad_row != nullptr) *bad_row = row;
      return status;
    }
  }
  return TF_HIPS_OK;
}

}  // namespace

int32_t CheckRows(const CodecCall& call, const uint8_t* const* rows, const int64_t* row_bytes,
                  int32_t num_rows, int64_t n, int32_t* bad_row) {
  Layout layout;
  return CheckedLayout(call, rows, row_bytes, num_rows, n, &layout, bad_row);
}

int64_t EncodeTensor(const ParallelFor& parallel_for, const CodecCall& call, const TfHipsKey& key,
                     const float* gradient, const float* residual, float* new_residual, int64_t n,
                     uint8_t* out, int64_t capacity) {
  Layout layout;
  if (const int32_t status = LayoutFor(*call.codec, call.params, n, &layout)) return -status;
  const auto encode_one = [&](const Chunk& chunk, int32_t*) -> int64_t {
    const float* values = gradient + chunk.begin;
    if (residual == nullptr) return EncodeChunk(call, layout, key, values, chunk);
    return EncodeChunkFeedback(call, layout, key, values, residual + chunk.begin,
                               new_residual + chunk.begin, chunk);
  };
  return EncodeChunks(parallel_for, layout, n, out, capacity, encode_one);
}

int64_t EncodeStateTensor(const ParallelFor& parallel_for, const CodecCall& call,
                          const TfHipsKey& key, const float* gradient, const float* state,
                          float* new_state, int64_t n, uint8_t* out, int64_t capacity) {
  const int32_t num_states = call.codec->num_states;
  if (call.codec->encode_state == nullptr || num_states < 1 || num_states > TF_HIPS_MAX_STATES) {
    return -TF_HIPS_NOT_PROVIDED;
  }
  Layout layout;
  if (const int32_t status = LayoutFor(*call.codec, call.params, n, &layout)) return -status;
  const auto encode_one = [&](const Chunk& chunk, int32_t*) -> int64_t {
    const float* from[TF_HIPS_MAX_STATES];
    float* to[TF_HIPS_MAX_STATES];
    for (int32_t i = 0; i < num_states; ++i) {
      from[i] = state + i * n + chunk.begin;
      to[i] = new_state + i * n + chunk.begin;
    }
    TfHipsKey chunk_key = key;
    chunk_key.offset += static_cast<uint64_t>(chunk.begin);
    WritePrefix(chunk.packet, layout.hash, static_cast<uint32_t>(chunk.n));
    const int64_t body =
        call.codec->encode_state(call.params, &chunk_key, gradient + chunk.begin, from, to, chunk.n,
                                 chunk.packet + kPrefixBytes, chunk.capacity - kPrefixBytes);
    return body < 0 ? body : kPrefixBytes + body;
  };
  return EncodeChunks(parallel_for, layout, n, out, capacity, encode_one);
}

int64_t EncodeMomentumTensor(const ParallelFor& parallel_for, const CodecCall& call,
                             const TfHipsKey& key, const float* gradient, float beta, bool feedback,
                             const float* state, float* new_state, int64_t n, uint8_t* out,
                             int64_t capacity) {
  Layout layout;
  if (const int32_t status = LayoutFor(*call.codec, call.params, n, &layout)) return -status;
  const auto encode_one = [&](const Chunk& chunk, int32_t*) -> int64_t {
    const float* values = gradient + chunk.begin;
    float* moved = new_state + chunk.begin;
    const float* sent = moved;
    if (!MoveMomentum(values, state + chunk.begin, beta, moved, chunk.n)) {
      float* room = Scratch(kMade, chunk.n);
      SendNonFinite(values, moved, room, chunk.n);
      if (room == nullptr) return -TF_HIPS_OUT_OF_MEMORY;
      sent = room;
    }
    if (!feedback) return EncodeChunk(call, layout, key, sent, chunk);
    return EncodeChunkFeedback(call, layout, key, sent, state + n + chunk.begin,
                               new_state + n + chunk.begin, chunk);
  };
  return EncodeChunks(parallel_for, layout, n, out, capacity, encode_one);
}

int32_t DecodeTensor(const ParallelFor& parallel_for, const CodecCall& call, const uint8_t* packets,
                     int64_t bytes, float* out, int64_t n, bool add) {
  Layout layout;
  if (const int32_t status = LayoutFor(*call.codec, call.params, n, &layout)) return status;
  if (const int32_t status = CheckPackets(*call.codec, layout, packets, bytes, n)) return status;
  FirstFailure failure;
  parallel_for(layout.num_chunks, [&](int64_t i) {
    const ScopedExactDenormals exact;
    const Body body = BodyOf(layout, packets, bytes, i);
    const int32_t status =
        call.codec->decode(call.params, body.begin, body.bytes, out + i * kChunkElements,
                           ChunkElements(n, i), add ? TF_HIPS_ADD : WriteMode(n));
    if (status != TF_HIPS_OK) failure.Report(i, status);
  });
  return failure.status();
}

int32_t MergeTensor(const ParallelFor& parallel_for, const CodecCall& call,
                    const uint8_t* const* rows, const int64_t* row_bytes, int32_t num_rows,
                    float* out, int64_t n, int32_t* bad_row) {
  Layout layout;
  if (const int32_t status = CheckedLayout(call, rows, row_bytes, num_rows, n, &layout, bad_row))
    return status;
  FirstFailure failure;
  parallel_for(layout.num_chunks, [&](int64_t i) {
    const ScopedExactDenormals exact;
    int32_t row = -1;
    const int32_t status =
        MergeChunk(call, layout, rows, row_bytes, num_rows, i, out + i * kChunkElements,
                   ChunkElements(n, i), WriteMode(n), &row);
    if (status != TF_HIPS_OK) failure.Report(i, status, row);
  });
  if (bad_row != nullptr) *bad_row = failure.row();
  return failure.status();
}

int64_t MergeEncodeTensor(const ParallelFor& parallel_for, const CodecCall& call,
                          const TfHipsKey& key, const uint8_t* const* rows,
                          const int64_t* row_bytes, int32_t num_rows, const float* residual,
                          float* new_residual, int64_t n, uint8_t* out, int64_t capacity,
                          int32_t* bad_row) {
  Layout layout;
  if (const int32_t status = CheckedLayout(call, rows, row_bytes, num_rows, n, &layout, bad_row))
    return -status;
  const auto encode_one = [&](const Chunk& chunk, int32_t* row) -> int64_t {
    float* sum = Scratch(kMade, chunk.n);
    if (sum == nullptr && chunk.n > 0) return -TF_HIPS_OUT_OF_MEMORY;
    const int64_t i = chunk.begin / kChunkElements;
    if (const int32_t status = MergeChunk(call, layout, rows, row_bytes, num_rows, i, sum, chunk.n,
                                          TF_HIPS_SET, row)) {
      return -status;
    }
    if (residual == nullptr) return EncodeChunk(call, layout, key, sum, chunk);
    return EncodeChunkFeedback(call, layout, key, sum, residual + chunk.begin,
                               new_residual + chunk.begin, chunk);
  };
  return EncodeChunks(parallel_for, layout, n, out, capacity, encode_one, bad_row);
}

}  // namespace tf_hips
