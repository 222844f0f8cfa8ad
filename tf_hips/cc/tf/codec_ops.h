// SPDX-License-Identifier: Apache-2.0
// The TensorFlow face of a codec: kernels and shape functions, instantiated by the text that compll
// generates.
//
// `GetCodec` is the function that returns the codec's table. Each kernel reads one attribute per
// parameter of the codec, under the parameter's name. Where it returns null, the codec is one that
// was loaded while the program runs, named by the attribute `codec` (see loaded_ops.cc). Kernels
// keep no state between calls, are thread-safe, and run chunks on TensorFlow's own pool. A wrong
// packet, shape or parameter is an InvalidArgument that says what was expected and what came.

#ifndef TF_HIPS_CC_TF_CODEC_OPS_H_
#define TF_HIPS_CC_TF_CODEC_OPS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/tensor_codec.h"

// What the names of generated operations begin with. Those that users build have another beginning:
// a name that is registered twice in a process is neither's.
#ifndef TF_HIPS_OPERATIONS
#define TF_HIPS_OPERATIONS "TfHips>"
#endif

namespace tf_hips {

using CodecGetter = const TfHipsCodec* (*)();

// What all kernels of a codec share: the codec and the values of its parameters. A null `codec`:
// the one that the attribute `codec` names.
class CodecKernel : public tensorflow::OpKernel {
 public:
  CodecKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);

 protected:
  CodecCall call() const { return CodecCall{codec_, params_.data()}; }
  const TfHipsCodec& codec() const { return *codec_; }
  const double* params() const { return params_.data(); }

 private:
  const TfHipsCodec* codec_;
  std::vector<double> params_;
};

// gradient, seed, step -> packet.
class EncodeKernel : public CodecKernel {
 public:
  EncodeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  int64_t tensor_id_ = 0, offset_ = 0;
};

// gradient, residual, seed, step -> packet, new_residual.
class EncodeFeedbackKernel : public CodecKernel {
 public:
  EncodeFeedbackKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  int64_t tensor_id_ = 0, offset_ = 0;
};

// gradient, state, seed, step -> packet, new_state: for codecs with state, [num_states, n].
class EncodeStateKernel : public CodecKernel {
 public:
  EncodeStateKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  int64_t tensor_id_ = 0, offset_ = 0;
};

// gradient, kept, seed, step -> packet, new_kept: momentum before a codec; kept is m, [1, n], or
// with error feedback m and the residual, [2, n].
class EncodeMomentumKernel : public CodecKernel {
 public:
  EncodeMomentumKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  int64_t tensor_id_ = 0, offset_ = 0;
  float beta_ = 0;
  bool feedback_ = false;
};

// packet -> gradient.
class DecodeKernel : public CodecKernel {
 public:
  DecodeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  int64_t num_elements_ = 0;
};

// packets -> sum of the decoded rows.
class MergeKernel : public CodecKernel {
 public:
  MergeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  int64_t num_elements_ = 0;
};

// packets, residual, seed, step -> packet, new_residual.
class MergeEncodeKernel : public CodecKernel {
 public:
  MergeEncodeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  int64_t num_elements_ = 0, tensor_id_ = 0, offset_ = 0;
};

absl::Status InferEncode(tensorflow::shape_inference::InferenceContext* c,
                         const TfHipsCodec* codec);
absl::Status InferEncodeFeedback(tensorflow::shape_inference::InferenceContext* c,
                                 const TfHipsCodec* codec);
absl::Status InferEncodeState(tensorflow::shape_inference::InferenceContext* c,
                              const TfHipsCodec* codec);
absl::Status InferDecode(tensorflow::shape_inference::InferenceContext* c,
                         const TfHipsCodec* codec);
absl::Status InferMerge(tensorflow::shape_inference::InferenceContext* c, const TfHipsCodec* codec);
absl::Status InferMergeEncode(tensorflow::shape_inference::InferenceContext* c,
                              const TfHipsCodec* codec);

// The names that generated text uses: a kernel class and a shape function per op, made for one
// codec.
template <CodecGetter GetCodec, typename Kernel>
class KernelOf final : public Kernel {
 public:
  explicit KernelOf(tensorflow::OpKernelConstruction* ctx) : Kernel(ctx, GetCodec()) {}
};

template <CodecGetter GetCodec>
using EncodeOp = KernelOf<GetCodec, EncodeKernel>;
template <CodecGetter GetCodec>
using EncodeFeedbackOp = KernelOf<GetCodec, EncodeFeedbackKernel>;
template <CodecGetter GetCodec>
using EncodeStateOp = KernelOf<GetCodec, EncodeStateKernel>;
template <CodecGetter GetCodec>
using EncodeMomentumOp = KernelOf<GetCodec, EncodeMomentumKernel>;
template <CodecGetter GetCodec>
using DecodeOp = KernelOf<GetCodec, DecodeKernel>;
template <CodecGetter GetCodec>
using MergeOp = KernelOf<GetCodec, MergeKernel>;
template <CodecGetter GetCodec>
using MergeEncodeOp = KernelOf<GetCodec, MergeEncodeKernel>;

template <CodecGetter GetCodec>
absl::Status EncodeShape(tensorflow::shape_inference::InferenceContext* c) {
  return InferEncode(c, GetCodec());
}
template <CodecGetter GetCodec>
absl::Status EncodeFeedbackShape(tensorflow::shape_inference::InferenceContext* c) {
  return InferEncodeFeedback(c, GetCodec());
}
template <CodecGetter GetCodec>
absl::Status EncodeStateShape(tensorflow::shape_inference::InferenceContext* c) {
  return InferEncodeState(c, GetCodec());
}
template <CodecGetter GetCodec>
absl::Status DecodeShape(tensorflow::shape_inference::InferenceContext* c) {
  return InferDecode(c, GetCodec());
}
template <CodecGetter GetCodec>
absl::Status MergeShape(tensorflow::shape_inference::InferenceContext* c) {
  return InferMerge(c, GetCodec());
}
template <CodecGetter GetCodec>
absl::Status MergeEncodeShape(tensorflow::shape_inference::InferenceContext* c) {
  return InferMergeEncode(c, GetCodec());
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_TF_CODEC_OPS_H_
