// SPDX-License-Identifier: Apache-2.0
// A kernel for XLA's devices that cannot be made and says why. Without one, XLA tells only that an
// op has no kernel.

#ifndef TF_HIPS_CC_TF_REFUSE_XLA_H_
#define TF_HIPS_CC_TF_REFUSE_XLA_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_hips {

// Unimplemented: what compiles clusters on its own (auto-jit) then falls back to the CPU's kernel.
class RefuseXla final : public tensorflow::OpKernel {
 public:
  explicit RefuseXla(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    ctx->CtxFailure(absl::UnimplementedError(absl::StrCat(
        "`", ctx->def().op(),
        "` has no XLA kernel: packets are bit-equal everywhere because no compiler rearranges "
        "their arithmetic. Call it outside of tf.function(jit_compile=True); what is around it may "
        "be compiled")));
  }
  void Compute(tensorflow::OpKernelContext* ctx) override {
    ctx->CtxFailure(absl::UnimplementedError("XLA cannot run this"));
  }
};

}  // namespace tf_hips

#define TF_HIPS_REFUSE_XLA(op)                                                   \
  REGISTER_KERNEL_BUILDER(Name(op).Device("XLA_CPU_JIT"), ::tf_hips::RefuseXla); \
  REGISTER_KERNEL_BUILDER(Name(op).Device("XLA_GPU_JIT"), ::tf_hips::RefuseXla)

#endif  // TF_HIPS_CC_TF_REFUSE_XLA_H_
