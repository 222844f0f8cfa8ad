// SPDX-License-Identifier: Apache-2.0
// What the kernels of a codec are given besides its parameters, read and checked; the same on CPUs
// and GPUs.
//
// `seed` and `step` must lie in host memory. Thread-safe.

#ifndef TF_HIPS_CC_TF_ARGUMENTS_H_
#define TF_HIPS_CC_TF_ARGUMENTS_H_

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/packet.h"

namespace tf_hips {

constexpr int64_t kMaxWord = std::numeric_limits<uint32_t>::max();

inline absl::Status ReadElements(tensorflow::OpKernelConstruction* ctx, int64_t* num_elements) {
  if (absl::Status status = ctx->GetAttr("num_elements", num_elements); !status.ok()) return status;
  if (*num_elements < 0 || *num_elements > kMaxTensorElements) {
    return absl::InvalidArgumentError(absl::StrCat("`num_elements` must be in [0, ",
                                                   kMaxTensorElements,
                                                   "]. Received: num_elements=", *num_elements));
  }
  return absl::OkStatus();
}

inline absl::Status ReadKeyAttrs(tensorflow::OpKernelConstruction* ctx, int64_t* tensor_id,
                                 int64_t* offset) {
  if (absl::Status status = ctx->GetAttr("tensor_id", tensor_id); !status.ok()) return status;
  if (absl::Status status = ctx->GetAttr("offset", offset); !status.ok()) return status;
  if (*tensor_id < 0 || *tensor_id > kMaxWord) {
    return absl::InvalidArgumentError(
        absl::StrCat("`tensor_id` must be in [0, 2^32). Received: tensor_id=", *tensor_id));
  }
  if (*offset < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("`offset` must be at least 0. Received: offset=", *offset));
  }
  return absl::OkStatus();
}

// The key of a call: inputs `seed` and `step` and the attributes.
inline absl::Status ReadKey(const tensorflow::Tensor& seed, const tensorflow::Tensor& step,
                            int64_t tensor_id, int64_t offset, TfHipsKey* key) {
  if (seed.dims() != 0 || step.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("`seed` and `step` must be scalars. Received: seed of shape ",
                     seed.shape().DebugString(), ", step of shape ", step.shape().DebugString()));
  }
  const int64_t step_value = step.scalar<int64_t>()();
  if (step_value < 0 || step_value > kMaxWord) {
    return absl::InvalidArgumentError(
        absl::StrCat("`step` must be in [0, 2^32). Received: step=", step_value));
  }
  key->seed = static_cast<uint64_t>(seed.scalar<int64_t>()());
  key->step = static_cast<uint32_t>(step_value);
  key->tensor_id = static_cast<uint32_t>(tensor_id);
  key->offset = static_cast<uint64_t>(offset);
  return absl::OkStatus();
}

inline absl::Status CheckVector(const tensorflow::Tensor& tensor, const char* name) {
  if (tensor.dims() == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "`", name, "` must have 1 dimension. Received: shape ", tensor.shape().DebugString()));
}

// Whether `packets` has a tensor's packets in each row.
inline absl::Status CheckRowsShape(const tensorflow::Tensor& packets, const TfHipsCodec& codec) {
  if (!codec.is_fixed_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rows of one tensor must be packets of one size, and those of ", codec.name, " vary"));
  }
  if (packets.dims() == 2 && packets.dim_size(0) >= 1 &&
      packets.dim_size(0) <= std::numeric_limits<int32_t>::max()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("`packets` must have 2 dimensions, at least one row. Received: shape ",
                   packets.shape().DebugString()));
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_TF_ARGUMENTS_H_
