// SPDX-License-Identifier: Apache-2.0
// The operations of low_rank.h. Stateless; a wrong shape is an InvalidArgument.

#include <cstdint>
#include <new>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tf_hips/cc/tf/low_rank.h"
#include "tf_hips/cc/tf/pool.h"

namespace tf_hips {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Computes; where there is no memory to compute with, the op fails and not the process. What
// low_rank.h has allocates in the thread that calls it alone.
template <typename Compute>
void WithMemory(OpKernelContext* ctx, const Compute& compute) {
  try {
    compute();
  } catch (const std::bad_alloc&) {
    ctx->CtxFailure(absl::ResourceExhaustedError("there is no memory to factorise a gradient"));
  }
}

// matrix, step -> basis.
class OrthonormalKernel : public OpKernel {
 public:
  explicit OrthonormalKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tensor_id", &tensor_id_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& matrix = ctx->input(0);
    const Tensor& step = ctx->input(1);
    OP_REQUIRES(ctx, matrix.dims() == 2 && step.dims() == 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "`matrix` must have two dimensions and `step` none. Received: ", matrix.dims(),
                    " and ", step.dims())));
    Tensor* basis = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, matrix.shape(), &basis));
    TfHipsKey key = {};
    key.seed = static_cast<uint64_t>(seed_);
    key.step = static_cast<uint32_t>(step.scalar<int64_t>()());
    key.tensor_id = static_cast<uint32_t>(tensor_id_);
    WithMemory(ctx, [&] {
      Orthonormalize(matrix.flat<float>().data(), matrix.dim_size(0), matrix.dim_size(1), key,
                     PoolOf(ctx), basis->flat<float>().data());
    });
  }

 private:
  int64_t seed_ = 0, tensor_id_ = 0;
};

// The factors of two inputs, the first of which is number `first`.
absl::Status ReadFactors(OpKernelContext* ctx, int first, LowRank* factors) {
  const Tensor& left = ctx->input(first);
  const Tensor& right = ctx->input(first + 1);
  if (left.dims() != 2 || right.dims() != 2 || left.dim_size(1) != right.dim_size(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("`left` and `right` must be matrices of equally many columns. Received: ",
                     left.shape().DebugString(), " and ", right.shape().DebugString()));
  }
  *factors = {left.flat<float>().data(), right.flat<float>().data(), left.dim_size(0),
              right.dim_size(0), left.dim_size(1)};
  return absl::OkStatus();
}

// matrix, factor -> the other factor: the left one of a right one, or with kIsRight the right one.
template <bool kIsRight>
class FactorKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& matrix = ctx->input(0);
    const Tensor& given = ctx->input(1);
    const int summed = kIsRight ? 0 : 1;
    OP_REQUIRES(
        ctx,
        matrix.dims() == 2 && given.dims() == 2 && matrix.dim_size(summed) == given.dim_size(0),
        absl::InvalidArgumentError(
            absl::StrCat("the factor must have a row for each ", kIsRight ? "row" : "column",
                         " of the matrix. Received: ", given.shape().DebugString(), " and ",
                         matrix.shape().DebugString())));
    const int64_t rows = matrix.dim_size(0), columns = matrix.dim_size(1);
    const int64_t rank = given.dim_size(1);
    Tensor* factor = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({kIsRight ? columns : rows, rank}), &factor));
    const auto compute = kIsRight ? RightFactor : LeftFactor;
    WithMemory(ctx, [&] {
      compute(matrix.flat<float>().data(), given.flat<float>().data(), rows, columns, rank,
              PoolOf(ctx), factor->flat<float>().data());
    });
  }
};

// left, right -> product.
class LowRankProductKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    LowRank factors;
    OP_REQUIRES_OK(ctx, ReadFactors(ctx, 0, &factors));
    Tensor* product = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({factors.rows, factors.columns}), &product));
    WithMemory(ctx, [&] { LowRankProduct(factors, PoolOf(ctx), product->flat<float>().data()); });
  }
};

// matrix, left, right -> rest.
class LowRankRestKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    LowRank factors;
    OP_REQUIRES_OK(ctx, ReadFactors(ctx, 1, &factors));
    const TensorShape shape({factors.rows, factors.columns});
    const Tensor& matrix = ctx->input(0);
    OP_REQUIRES(ctx, matrix.shape() == shape,
                absl::InvalidArgumentError(
                    absl::StrCat("`matrix` must have the shape of the product. Received: ",
                                 matrix.shape().DebugString(), " and ", shape.DebugString())));
    const float* values = matrix.flat<float>().data();
    Tensor* rest = nullptr;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, shape, &rest));
    WithMemory(ctx, [&] { LowRankRest(factors, values, PoolOf(ctx), rest->flat<float>().data()); });
  }
};

// The shape of the product of two inputs, the first of which is number `first`.
absl::Status ProductShape(InferenceContext* c, int first, ShapeHandle* product) {
  ShapeHandle left, right;
  DimensionHandle rank;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 2, &left));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first + 1), 2, &right));
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(left, 1), c->Dim(right, 1), &rank));
  *product = c->Matrix(c->Dim(left, 0), c->Dim(right, 0));
  return absl::OkStatus();
}

// The attribute `seed` holds the 64 bits of an unsigned one.
REGISTER_OP("TfHipsOrthonormal")
    .Attr("seed: int")
    .Attr("tensor_id: int >= 0")
    .Input("matrix: float")
    .Input("step: int64")
    .Output("basis: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle matrix, step;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &matrix));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &step));
      c->set_output(0, matrix);
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsOrthonormal").Device(tensorflow::DEVICE_CPU),
                        OrthonormalKernel);

template <bool kIsRight>
absl::Status FactorShape(InferenceContext* c) {
  ShapeHandle matrix, given;
  DimensionHandle summed;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &matrix));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &given));
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(matrix, kIsRight ? 0 : 1), c->Dim(given, 0), &summed));
  c->set_output(0, c->Matrix(c->Dim(matrix, kIsRight ? 1 : 0), c->Dim(given, 1)));
  return absl::OkStatus();
}

REGISTER_OP("TfHipsLowRankLeft")
    .Input("matrix: float")
    .Input("right: float")
    .Output("left: float")
    .SetShapeFn(FactorShape<false>);

REGISTER_KERNEL_BUILDER(Name("TfHipsLowRankLeft").Device(tensorflow::DEVICE_CPU),
                        FactorKernel<false>);

REGISTER_OP("TfHipsLowRankRight")
    .Input("matrix: float")
    .Input("left: float")
    .Output("right: float")
    .SetShapeFn(FactorShape<true>);

REGISTER_KERNEL_BUILDER(Name("TfHipsLowRankRight").Device(tensorflow::DEVICE_CPU),
                        FactorKernel<true>);

REGISTER_OP("TfHipsLowRankProduct")
    .Input("left: float")
    .Input("right: float")
    .Output("product: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle product;
      TF_RETURN_IF_ERROR(ProductShape(c, 0, &product));
      c->set_output(0, product);
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsLowRankProduct").Device(tensorflow::DEVICE_CPU),
                        LowRankProductKernel);

REGISTER_OP("TfHipsLowRankRest")
    .Input("matrix: float")
    .Input("left: float")
    .Input("right: float")
    .Output("rest: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle product;
      TF_RETURN_IF_ERROR(ProductShape(c, 1, &product));
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), product, &product));
      c->set_output(0, product);
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsLowRankRest").Device(tensorflow::DEVICE_CPU),
                        LowRankRestKernel);

}  // namespace
}  // namespace tf_hips
