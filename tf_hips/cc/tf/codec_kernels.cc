// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/packet.h"
#include "tf_hips/cc/tf/arguments.h"
#include "tf_hips/cc/tf/codec_ops.h"
#include "tf_hips/cc/tf/params.h"
#include "tf_hips/cc/tf/pool.h"

namespace tf_hips {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status EncodeError(int64_t result, const TfHipsCodec& codec) {
  return absl::InvalidArgumentError(
      absl::StrCat("encoding with ", codec.name,
                   " failed: ", tf_hips_status_text(static_cast<int32_t>(-result))));
}

// Allocates output 0 for the packets of n elements and lets `encode(out, capacity)` fill it.
template <typename Encode>
void WritePackets(OpKernelContext* ctx, const CodecCall& call, int64_t n, const Encode& encode) {
  const int64_t capacity = WireBytes(*call.codec, call.params, n);
  OP_REQUIRES(ctx, capacity >= 0, EncodeError(capacity, *call.codec));
  Tensor packets;
  Tensor* output = nullptr;
  if (call.codec->is_fixed_size) {
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({capacity}), &output));
    packets = *output;
  } else {
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({capacity}), &packets));
  }
  const int64_t written = encode(packets.flat<uint8_t>().data(), capacity);
  if (!ctx->status().ok()) return;  // `encode` knew more about the failure
  OP_REQUIRES(ctx, written >= 0, EncodeError(written, *call.codec));
  if (call.codec->is_fixed_size) return;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({written}), &output));
  std::memcpy(output->flat<uint8_t>().data(), packets.flat<uint8_t>().data(),
              static_cast<size_t>(written));
}

// The rows of `packets` (shape [W, B]), as pointers.
class Rows {
 public:
  explicit Rows(const Tensor& packets)
      : bytes_(packets.dim_size(0), packets.dim_size(1)), pointers_(packets.dim_size(0)) {
    const uint8_t* data = packets.flat<uint8_t>().data();
    for (size_t row = 0; row < pointers_.size(); ++row) pointers_[row] = data + row * bytes_[row];
  }

  const uint8_t* const* pointers() const { return pointers_.data(); }
  const int64_t* bytes() const { return bytes_.data(); }
  int32_t size() const { return static_cast<int32_t>(pointers_.size()); }

  // OK if these can be packets of n elements; asked before allocating, so that false packets cost
  // no memory.
  absl::Status Check(const CodecCall& call, int64_t n) const {
    int32_t row = -1;
    const int32_t status = CheckRows(call, pointers(), bytes(), size(), n, &row);
    return status == TF_HIPS_OK ? absl::OkStatus() : Error(status, row, call, n);
  }

  // `row`: what the failure is about; -1 for none of them.
  absl::Status Error(int32_t status, int32_t row, const CodecCall& call, int64_t n) const {
    if (row < 0) {
      return absl::InvalidArgumentError(absl::StrCat("merging with ", call.codec->name,
                                                     " failed: ", tf_hips_status_text(status)));
    }
    return absl::InvalidArgumentError(
        absl::StrCat("row ", row, " of `packets` does not decode: ",
                     Explain(status, *call.codec, call.params, pointers_[row], bytes_[row], n)));
  }

 private:
  std::vector<int64_t> bytes_;
  std::vector<const uint8_t*> pointers_;
};

}  // namespace

CodecKernel::CodecKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : OpKernel(ctx), codec_(codec) {
  std::string name;
  OP_REQUIRES_OK(ctx, ReadCodec(*ctx, &codec_, &params_, &name));
  OP_REQUIRES(ctx, codec_ != nullptr, NotLoaded(name));
}

EncodeKernel::EncodeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : CodecKernel(ctx, codec) {
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void EncodeKernel::Compute(OpKernelContext* ctx) {
  const Tensor& gradient = ctx->input(0);
  TfHipsKey key;
  OP_REQUIRES_OK(ctx, ReadKey(ctx->input(1), ctx->input(2), tensor_id_, offset_, &key));
  const int64_t n = gradient.NumElements();
  WritePackets(ctx, call(), n, [&](uint8_t* out, int64_t capacity) {
    return EncodeTensor(PoolOf(ctx), call(), key, gradient.flat<float>().data(), nullptr, nullptr,
                        n, out, capacity);
  });
}

EncodeFeedbackKernel::EncodeFeedbackKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : CodecKernel(ctx, codec) {
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void EncodeFeedbackKernel::Compute(OpKernelContext* ctx) {
  const Tensor& gradient = ctx->input(0);
  const Tensor residual = ctx->input(1);
  OP_REQUIRES(ctx, gradient.shape() == residual.shape(),
              absl::InvalidArgumentError(absl::StrCat(
                  "`residual` must have the gradient's shape ", gradient.shape().DebugString(),
                  ". Received: shape ", residual.shape().DebugString())));
  TfHipsKey key;
  OP_REQUIRES_OK(ctx, ReadKey(ctx->input(2), ctx->input(3), tensor_id_, offset_, &key));
  Tensor* new_residual = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(1, residual.shape(), &new_residual));
  const int64_t n = gradient.NumElements();
  WritePackets(ctx, call(), n, [&](uint8_t* out, int64_t capacity) {
    return EncodeTensor(PoolOf(ctx), call(), key, gradient.flat<float>().data(),
                        residual.flat<float>().data(), new_residual->flat<float>().data(), n, out,
                        capacity);
  });
}

EncodeStateKernel::EncodeStateKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : CodecKernel(ctx, codec) {
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void EncodeStateKernel::Compute(OpKernelContext* ctx) {
  const Tensor& gradient = ctx->input(0);
  const Tensor state = ctx->input(1);
  const int64_t n = gradient.NumElements();
  const TensorShape wanted({codec().num_states, n});
  OP_REQUIRES(ctx, state.shape() == wanted,
              absl::InvalidArgumentError(absl::StrCat(
                  "`state` of ", codec().name, " must have the shape ", wanted.DebugString(),
                  ". Received: shape ", state.shape().DebugString())));
  TfHipsKey key;
  OP_REQUIRES_OK(ctx, ReadKey(ctx->input(2), ctx->input(3), tensor_id_, offset_, &key));
  Tensor* new_state = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(1, wanted, &new_state));
  WritePackets(ctx, call(), n, [&](uint8_t* out, int64_t capacity) {
    return EncodeStateTensor(PoolOf(ctx), call(), key, gradient.flat<float>().data(),
                             state.flat<float>().data(), new_state->flat<float>().data(), n, out,
                             capacity);
  });
}

EncodeMomentumKernel::EncodeMomentumKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : CodecKernel(ctx, codec) {
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("beta", &beta_));
  OP_REQUIRES(
      ctx, beta_ >= 0.0f && beta_ < 1.0f,
      absl::InvalidArgumentError(absl::StrCat("`beta` must be in [0, 1). Received: beta=", beta_)));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("feedback", &feedback_));
}

void EncodeMomentumKernel::Compute(OpKernelContext* ctx) {
  const Tensor& gradient = ctx->input(0);
  const Tensor kept = ctx->input(1);
  const int64_t n = gradient.NumElements();
  const TensorShape wanted({feedback_ ? 2 : 1, n});
  OP_REQUIRES(
      ctx, kept.shape() == wanted,
      absl::InvalidArgumentError(absl::StrCat("`kept` must have the shape ", wanted.DebugString(),
                                              ". Received: shape ", kept.shape().DebugString())));
  TfHipsKey key;
  OP_REQUIRES_OK(ctx, ReadKey(ctx->input(2), ctx->input(3), tensor_id_, offset_, &key));
  Tensor* new_kept = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(1, wanted, &new_kept));
  WritePackets(ctx, call(), n, [&](uint8_t* out, int64_t capacity) {
    return EncodeMomentumTensor(PoolOf(ctx), call(), key, gradient.flat<float>().data(), beta_,
                                feedback_, kept.flat<float>().data(),
                                new_kept->flat<float>().data(), n, out, capacity);
  });
}

DecodeKernel::DecodeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : CodecKernel(ctx, codec) {
  OP_REQUIRES_OK(ctx, ReadElements(ctx, &num_elements_));
}

void DecodeKernel::Compute(OpKernelContext* ctx) {
  const Tensor& packet = ctx->input(0);
  OP_REQUIRES_OK(ctx, CheckVector(packet, "packet"));
  // Read before allocating: a false packet must not cost memory.
  const uint8_t* bytes = packet.flat<uint8_t>().data();
  Layout layout;
  int32_t status = LayoutFor(codec(), params(), num_elements_, &layout);
  if (status == TF_HIPS_OK)
    status = CheckPackets(codec(), layout, bytes, packet.NumElements(), num_elements_);
  if (status == TF_HIPS_OK) {
    Tensor* gradient = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({num_elements_}), &gradient));
    status = DecodeTensor(PoolOf(ctx), call(), bytes, packet.NumElements(),
                          gradient->flat<float>().data(), num_elements_, /*add=*/false);
  }
  OP_REQUIRES(ctx, status == TF_HIPS_OK,
              absl::InvalidArgumentError(absl::StrCat(
                  "`packet` does not decode: ",
                  Explain(status, codec(), params(), bytes, packet.NumElements(), num_elements_))));
}

MergeKernel::MergeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : CodecKernel(ctx, codec) {
  OP_REQUIRES_OK(ctx, ReadElements(ctx, &num_elements_));
}

void MergeKernel::Compute(OpKernelContext* ctx) {
  OP_REQUIRES_OK(ctx, CheckRowsShape(ctx->input(0), codec()));
  const Rows rows(ctx->input(0));
  OP_REQUIRES_OK(ctx, rows.Check(call(), num_elements_));
  Tensor* sum = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({num_elements_}), &sum));
  int32_t bad_row = -1;
  const int32_t status =
      MergeTensor(PoolOf(ctx), call(), rows.pointers(), rows.bytes(), rows.size(),
                  sum->flat<float>().data(), num_elements_, &bad_row);
  OP_REQUIRES(ctx, status == TF_HIPS_OK, rows.Error(status, bad_row, call(), num_elements_));
}

MergeEncodeKernel::MergeEncodeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : CodecKernel(ctx, codec) {
  OP_REQUIRES_OK(ctx, ReadElements(ctx, &num_elements_));
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void MergeEncodeKernel::Compute(OpKernelContext* ctx) {
  OP_REQUIRES_OK(ctx, CheckRowsShape(ctx->input(0), codec()));
  const Rows rows(ctx->input(0));
  const Tensor residual = ctx->input(1);
  OP_REQUIRES_OK(ctx, CheckVector(residual, "residual"));
  OP_REQUIRES(
      ctx, residual.NumElements() == num_elements_,
      absl::InvalidArgumentError(absl::StrCat("`residual` must have ", num_elements_,
                                              " elements. Received: ", residual.NumElements())));
  TfHipsKey key;
  OP_REQUIRES_OK(ctx, ReadKey(ctx->input(2), ctx->input(3), tensor_id_, offset_, &key));
  OP_REQUIRES_OK(ctx, rows.Check(call(), num_elements_));
  Tensor* new_residual = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(1, residual.shape(), &new_residual));
  WritePackets(ctx, call(), num_elements_, [&](uint8_t* out, int64_t capacity) {
    int32_t bad_row = -1;
    const int64_t written =
        MergeEncodeTensor(PoolOf(ctx), call(), key, rows.pointers(), rows.bytes(), rows.size(),
                          residual.flat<float>().data(), new_residual->flat<float>().data(),
                          num_elements_, out, capacity, &bad_row);
    if (written < 0) {
      ctx->CtxFailure(rows.Error(static_cast<int32_t>(-written), bad_row, call(), num_elements_));
    }
    return written;
  });
}

}  // namespace tf_hips
