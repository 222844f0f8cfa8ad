// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/runtime/tensor_codec.h"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>

#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/packet.h"
#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {
namespace {

// Room for n <= kChunkElements floats that lives as long as its thread: fresh pages for each chunk
// would cost as much as encoding it. Null when there is no memory.
float* Scratch(int64_t n) {
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t capacity = 0;
  if (n > capacity) {
    constexpr int64_t kPage = 4096;
    const int64_t bytes = (n * static_cast<int64_t>(sizeof(float)) + kPage - 1) / kPage * kPage;
    capacity = 0;
    memory.reset(static_cast<float*>(std::aligned_alloc(kPage, static_cast<size_t>(bytes))));
    if (memory == nullptr) return nullptr;
    capacity = bytes / static_cast<int64_t>(sizeof(float));
  }
  return memory.get();
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

// sum[i] = a[i] + b[i].
TF_HIPS_HOT void Add(const float* a, const float* b, float* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

// residual[i] = value[i] - residual[i], 0 where that is not finite: what a NaN or an overflow broke
// must not stay.
TF_HIPS_HOT void KeepResidual(const float* value, float* residual, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float left = value[i] - residual[i];
    residual[i] = std::fabs(left) <= std::numeric_limits<float>::max() ? left : 0.0f;
  }
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

// Encodes `value` and leaves value - decode(packet) in new_residual.
int64_t EncodeChunkFeedback(const CodecCall& call, const Layout& layout, const TfHipsKey& key,
                            const float* value, float* new_residual, const Chunk& chunk) {
  const int64_t bytes = EncodeChunk(call, layout, key, value, chunk);
  if (bytes < 0) return bytes;
  float* residual = new_residual + chunk.begin;
  const int32_t status = call.codec->decode(call.params, chunk.packet + kPrefixBytes,
                                            bytes - kPrefixBytes, residual, chunk.n, /*add=*/0);
  if (status != TF_HIPS_OK) return -status;
  KeepResidual(value, residual, chunk.n);
  return bytes;
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
int32_t DecodeChunk(const CodecCall& call, const Layout& layout, const uint8_t* row,
                    int64_t row_bytes, int64_t i, float* out, int64_t n, bool add) {
  const int64_t begin = i * layout.stride;
  const int64_t end = i == layout.num_chunks - 1 ? row_bytes : begin + layout.stride;
  return call.codec->decode(call.params, row + begin + kPrefixBytes, end - begin - kPrefixBytes,
                            out, n, add ? 1 : 0);
}

// Sum of chunk i over the rows, in their order. On failure `bad_row` is the row at fault.
int32_t MergeChunk(const CodecCall& call, const Layout& layout, const uint8_t* const* rows,
                   const int64_t* row_bytes, int32_t num_rows, int64_t i, float* out, int64_t n,
                   int32_t* bad_row) {
  for (int32_t row = 0; row < num_rows; ++row) {
    if (const int32_t status =
            DecodeChunk(call, layout, rows[row], row_bytes[row], i, out, n, row > 0)) {
      *bad_row = row;
      return status;
    }
  }
  return TF_HIPS_OK;
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
    float* sum = Scratch(chunk.n);
    if (sum == nullptr && chunk.n > 0) return -TF_HIPS_OUT_OF_MEMORY;
    Add(values, residual + chunk.begin, sum, chunk.n);
    return EncodeChunkFeedback(call, layout, key, sum, new_residual, chunk);
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
    const int32_t status = DecodeChunk(call, layout, packets, bytes, i, out + i * kChunkElements,
                                       ChunkElements(n, i), add);
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
    const int32_t status = MergeChunk(call, layout, rows, row_bytes, num_rows, i,
                                      out + i * kChunkElements, ChunkElements(n, i), &row);
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
    float* sum = Scratch(chunk.n);
    if (sum == nullptr && chunk.n > 0) return -TF_HIPS_OUT_OF_MEMORY;
    const int64_t i = chunk.begin / kChunkElements;
    if (const int32_t status =
            MergeChunk(call, layout, rows, row_bytes, num_rows, i, sum, chunk.n, row)) {
      return -status;
    }
    if (residual == nullptr) return EncodeChunk(call, layout, key, sum, chunk);
    Add(residual + chunk.begin, sum, sum, chunk.n);
    return EncodeChunkFeedback(call, layout, key, sum, new_residual, chunk);
  };
  return EncodeChunks(parallel_for, layout, n, out, capacity, encode_one, bad_row);
}

}  // namespace tf_hips
