// SPDX-License-Identifier: Apache-2.0
// The TensorFlow face of a codec on a GPU: kernels, instantiated by the text that compll generates
// beside those of codec_ops.h, with which they share ops and shape functions.
//
// Without a header of CUDA: what runs on the GPU is behind codec_cuda.h, in a library that is
// opened when the first kernel is made (cuda_library.h). Work goes to TensorFlow's stream, in its
// order; no kernel waits for the GPU, though in eager mode TensorFlow does for what ends late.
// Scratch memory is the allocator's. `seed` and `step` lie in host memory. What decodes ends when
// the GPU's report on the packets has come to the host, by a copy behind the kernels: a wrong
// packet is an InvalidArgument, as on a CPU, and its outputs are not given on. So does what encodes
// with a residual, but at once where the codec never refuses a packet of its own. Kernels keep no
// state between calls and are thread-safe.

#ifndef TF_HIPS_CC_TF_GPU_KERNELS_H_
#define TF_HIPS_CC_TF_GPU_KERNELS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_hips/cc/cuda/codec_cuda.h"
#include "tf_hips/cc/tf/codec_ops.h"

namespace tf_hips {

// A codec on a GPU with the values of its parameters.
class GpuCodec {
 public:
  // Reads the attributes of an op and finds its kernels. A null `codec`: the one that the attribute
  // `codec` names.
  absl::Status Read(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);

  const TfHipsCodec& codec() const { return *codec_; }
  const TfHipsCudaCodec& cuda() const { return *cuda_; }
  const double* params() const { return params_.data(); }

 private:
  const TfHipsCodec* codec_ = nullptr;
  const TfHipsCudaCodec* cuda_ = nullptr;
  std::vector<double> params_;
};

// gradient, seed, step -> packet.
class GpuEncodeKernel : public tensorflow::OpKernel {
 public:
  GpuEncodeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  GpuCodec codec_;
  int64_t tensor_id_ = 0, offset_ = 0;
};

// gradient, residual, seed, step -> packet, new_residual.
class GpuEncodeFeedbackKernel : public tensorflow::AsyncOpKernel {
 public:
  GpuEncodeFeedbackKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) override;

 private:
  GpuCodec codec_;
  int64_t tensor_id_ = 0, offset_ = 0;
};

// gradient, state, seed, step -> packet, new_state.
class GpuEncodeStateKernel : public tensorflow::OpKernel {
 public:
  GpuEncodeStateKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void Compute(tensorflow::OpKernelContext* ctx) override;

 private:
  GpuCodec codec_;
  int64_t tensor_id_ = 0, offset_ = 0;
};

// packet -> gradient.
class GpuDecodeKernel : public tensorflow::AsyncOpKernel {
 public:
  GpuDecodeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) override;

 private:
  GpuCodec codec_;
  int64_t num_elements_ = 0;
};

// packets -> sum of the decoded rows.
class GpuMergeKernel : public tensorflow::AsyncOpKernel {
 public:
  GpuMergeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) override;

 private:
  GpuCodec codec_;
  int64_t num_elements_ = 0;
};

// packets, residual, seed, step -> packet, new_residual.
class GpuMergeEncodeKernel : public tensorflow::AsyncOpKernel {
 public:
  GpuMergeEncodeKernel(tensorflow::OpKernelConstruction* ctx, const TfHipsCodec* codec);
  void ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) override;

 private:
  GpuCodec codec_;
  int64_t num_elements_ = 0, tensor_id_ = 0, offset_ = 0;
};

// The names that generated text uses.
template <CodecGetter GetCodec>
using GpuEncodeOp = KernelOf<GetCodec, GpuEncodeKernel>;
template <CodecGetter GetCodec>
using GpuEncodeFeedbackOp = KernelOf<GetCodec, GpuEncodeFeedbackKernel>;
template <CodecGetter GetCodec>
using GpuEncodeStateOp = KernelOf<GetCodec, GpuEncodeStateKernel>;
template <CodecGetter GetCodec>
using GpuDecodeOp = KernelOf<GetCodec, GpuDecodeKernel>;
template <CodecGetter GetCodec>
using GpuMergeOp = KernelOf<GetCodec, GpuMergeKernel>;
template <CodecGetter GetCodec>
using GpuMergeEncodeOp = KernelOf<GetCodec, GpuMergeEncodeKernel>;

}  // namespace tf_hips

#endif  // TF_HIPS_CC_TF_GPU_KERNELS_H_
