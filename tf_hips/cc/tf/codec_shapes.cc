// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tf_hips/cc/tf/codec_ops.h"
#include "tf_hips/cc/tf/params.h"

namespace tf_hips {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Bytes of the packets of `elements` elements, unknown when these are, or when the codec has no
// fixed size, or is not loaded.
absl::Status PacketDim(InferenceContext* c, const TfHipsCodec* given, DimensionHandle elements,
                       DimensionHandle* bytes) {
  std::vector<double> params;
  std::string name;
  TF_RETURN_IF_ERROR(ReadCodec(*c, &given, &params, &name));
  *bytes = c->UnknownDim();
  // A graph may be read before its codec is loaded; the kernel is made later, and says so.
  if (given == nullptr) return absl::OkStatus();
  const TfHipsCodec& codec = *given;
  if (!codec.is_fixed_size || !c->ValueKnown(elements)) return absl::OkStatus();
  const int64_t size = WireBytes(codec, params.data(), c->Value(elements));
  if (size < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("no packet of ", codec.name, " holds ", c->Value(elements),
                     " elements: ", tf_hips_status_text(static_cast<int32_t>(-size))));
  }
  *bytes = c->MakeDim(size);
  return absl::OkStatus();
}

absl::Status ElementsAttr(InferenceContext* c, DimensionHandle* elements) {
  int64_t value = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("num_elements", &value));
  if (value < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("`num_elements` must be at least 0. Received: ", value));
  }
  *elements = c->MakeDim(value);
  return absl::OkStatus();
}

absl::Status CheckScalars(InferenceContext* c, int first) {
  ShapeHandle scalar;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 0, &scalar));
  return c->WithRank(c->input(first + 1), 0, &scalar);
}

// Checks the last dimension of the packets against the number of elements.
absl::Status CheckPacketShape(InferenceContext* c, const TfHipsCodec* codec, int rank,
                              DimensionHandle elements, DimensionHandle* bytes) {
  ShapeHandle packets;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), rank, &packets));
  TF_RETURN_IF_ERROR(PacketDim(c, codec, elements, bytes));
  return c->Merge(c->Dim(packets, rank - 1), *bytes, bytes);
}

}  // namespace

absl::Status InferEncode(InferenceContext* c, const TfHipsCodec* codec) {
  TF_RETURN_IF_ERROR(CheckScalars(c, 1));
  DimensionHandle bytes;
  TF_RETURN_IF_ERROR(PacketDim(c, codec, c->NumElements(c->input(0)), &bytes));
  c->set_output(0, c->Vector(bytes));
  return absl::OkStatus();
}

absl::Status InferEncodeFeedback(InferenceContext* c, const TfHipsCodec* codec) {
  TF_RETURN_IF_ERROR(CheckScalars(c, 2));
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(1), &shape));
  DimensionHandle bytes;
  TF_RETURN_IF_ERROR(PacketDim(c, codec, c->NumElements(shape), &bytes));
  c->set_output(0, c->Vector(bytes));
  c->set_output(1, shape);
  return absl::OkStatus();
}

absl::Status InferEncodeState(InferenceContext* c, const TfHipsCodec* codec) {
  TF_RETURN_IF_ERROR(CheckScalars(c, 2));
  const DimensionHandle elements = c->NumElements(c->input(0));
  ShapeHandle state;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &state));
  TF_RETURN_IF_ERROR(c->Merge(state, c->Matrix(c->Dim(state, 0), elements), &state));
  DimensionHandle bytes;
  TF_RETURN_IF_ERROR(PacketDim(c, codec, elements, &bytes));
  c->set_output(0, c->Vector(bytes));
  c->set_output(1, state);
  return absl::OkStatus();
}

absl::Status InferDecode(InferenceContext* c, const TfHipsCodec* codec) {
  DimensionHandle elements, bytes;
  TF_RETURN_IF_ERROR(ElementsAttr(c, &elements));
  TF_RETURN_IF_ERROR(CheckPacketShape(c, codec, 1, elements, &bytes));
  c->set_output(0, c->Vector(elements));
  return absl::OkStatus();
}

absl::Status InferMerge(InferenceContext* c, const TfHipsCodec* codec) {
  DimensionHandle elements, bytes;
  TF_RETURN_IF_ERROR(ElementsAttr(c, &elements));
  TF_RETURN_IF_ERROR(CheckPacketShape(c, codec, 2, elements, &bytes));
  c->set_output(0, c->Vector(elements));
  return absl::OkStatus();
}

absl::Status InferMergeEncode(InferenceContext* c, const TfHipsCodec* codec) {
  TF_RETURN_IF_ERROR(CheckScalars(c, 2));
  DimensionHandle elements, bytes;
  TF_RETURN_IF_ERROR(ElementsAttr(c, &elements));
  TF_RETURN_IF_ERROR(CheckPacketShape(c, codec, 2, elements, &bytes));
  ShapeHandle residual;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &residual));
  TF_RETURN_IF_ERROR(c->Merge(residual, c->Vector(elements), &residual));
  c->set_output(0, c->Vector(bytes));
  c->set_output(1, residual);
  return absl::OkStatus();
}

}  // namespace tf_hips
