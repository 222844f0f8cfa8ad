// SPDX-License-Identifier: Apache-2.0
// The passes of robust.h over the rows of a matrix. Stateless; a wrong shape is an InvalidArgument.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tf_hips/cc/runtime/robust.h"
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

constexpr int64_t kRobustChunk = int64_t{1} << 20;

int64_t NumRobustChunks(int64_t d) { return (d + kRobustChunk - 1) / kRobustChunk; }

// Input 0 as pointers to its rows.
absl::Status ReadRows(OpKernelContext* ctx, std::vector<const float*>* rows, int64_t* d) {
  const Tensor& given = ctx->input(0);
  if (given.dims() != 2 || given.dim_size(0) < 1 || given.dim_size(0) > TF_HIPS_ROBUST_MAX_ROWS) {
    return absl::InvalidArgumentError(
        absl::StrCat("`rows` must be a matrix of 1 to ", TF_HIPS_ROBUST_MAX_ROWS,
                     " rows. Received: shape ", given.shape().DebugString()));
  }
  *d = given.dim_size(1);
  for (int64_t i = 0; i < given.dim_size(0); ++i) {
    rows->push_back(given.flat<float>().data() + i * *d);
  }
  return absl::OkStatus();
}

absl::Status RobustStatus(int32_t status) {
  if (status == 0) return absl::OkStatus();
  if (status == TF_HIPS_ROBUST_OUT_OF_MEMORY) {
    return absl::ResourceExhaustedError("there is no memory to aggregate rows");
  }
  return absl::InvalidArgumentError(
      "`drop` must leave a value of each coordinate, and be 0 of a median or a majority");
}

// rows -> result, sums of squares by chunk and row.
class RobustCoordinateKernel : public OpKernel {
 public:
  explicit RobustCoordinateKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string rule;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rule", &rule));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("drop", &drop_));
    rule_ = rule == "median"         ? TF_HIPS_MEDIAN
            : rule == "trimmed_mean" ? TF_HIPS_TRIMMED
            : rule == "majority"     ? TF_HIPS_MAJORITY
                                     : TF_HIPS_NEAREST;
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<const float*> rows;
    int64_t d = 0;
    OP_REQUIRES_OK(ctx, ReadRows(ctx, &rows, &d));
    const auto n = static_cast<int32_t>(rows.size());
    Tensor* result = nullptr;
    Tensor* squares = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({d}), &result));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({NumRobustChunks(d), n}), &squares));
    OP_REQUIRES_OK(ctx,
                   RobustStatus(RobustCoordinate(rows.data(), n, d, nullptr, 0, rule_, drop_,
                                                 result->flat<float>().data(),
                                                 squares->flat<double>().data(), PoolOf(ctx))));
  }

 private:
  int32_t rule_ = TF_HIPS_MEDIAN, drop_ = 0;
};

// rows -> sums of squares, and of differences of each two rows, by chunk.
class RobustDistancesKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<const float*> rows;
    int64_t d = 0;
    OP_REQUIRES_OK(ctx, ReadRows(ctx, &rows, &d));
    const auto n = static_cast<int32_t>(rows.size());
    Tensor* squares = nullptr;
    Tensor* distances = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({NumRobustChunks(d), n}), &squares));
    const TensorShape pairs({NumRobustChunks(d), int64_t{n} * (n - 1) / 2});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, pairs, &distances));
    OP_REQUIRES_OK(ctx,
                   RobustStatus(RobustDistances(rows.data(), n, d, squares->flat<double>().data(),
                                                distances->flat<double>().data(), PoolOf(ctx))));
  }
};

// rows, weights -> weights rows.
class RobustMixKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<const float*> rows;
    int64_t d = 0;
    OP_REQUIRES_OK(ctx, ReadRows(ctx, &rows, &d));
    const auto n = static_cast<int32_t>(rows.size());
    const Tensor& weights = ctx->input(1);
    OP_REQUIRES(ctx,
                weights.dims() == 2 && weights.dim_size(1) == n && weights.dim_size(0) >= 1 &&
                    weights.dim_size(0) <= TF_HIPS_ROBUST_MAX_ROWS,
                absl::InvalidArgumentError(absl::StrCat("`weights` must be a matrix of ", n,
                                                        " columns. Received: shape ",
                                                        weights.shape().DebugString())));
    const auto m = static_cast<int32_t>(weights.dim_size(0));
    Tensor* mixed = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({m, d}), &mixed));
    std::vector<float*> out;
    for (int64_t k = 0; k < m; ++k) out.push_back(mixed->flat<float>().data() + k * d);
    OP_REQUIRES_OK(ctx, RobustStatus(RobustMix(rows.data(), n, d, weights.flat<float>().data(), m,
                                               out.data(), PoolOf(ctx))));
  }
};

REGISTER_OP("TfHipsRobustCoordinate")
    .Attr("rule: {'median', 'trimmed_mean', 'nearest', 'majority'}")
    .Attr("drop: int >= 0 = 0")
    .Input("rows: float")
    .Output("result: float")
    .Output("squares: double")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
      c->set_output(0, c->Vector(c->Dim(rows, 1)));
      c->set_output(1, c->Matrix(InferenceContext::kUnknownDim, c->Dim(rows, 0)));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsRobustCoordinate").Device(tensorflow::DEVICE_CPU),
                        RobustCoordinateKernel);

REGISTER_OP("TfHipsRobustDistances")
    .Input("rows: float")
    .Output("squares: double")
    .Output("distances: double")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
      const DimensionHandle n = c->Dim(rows, 0);
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, n));
      c->set_output(1, c->Matrix(InferenceContext::kUnknownDim,
                                 c->ValueKnown(n) ? c->Value(n) * (c->Value(n) - 1) / 2
                                                  : InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsRobustDistances").Device(tensorflow::DEVICE_CPU),
                        RobustDistancesKernel);

REGISTER_OP("TfHipsRobustMix")
    .Input("rows: float")
    .Input("weights: float")
    .Output("mixed: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows, weights;
      DimensionHandle n;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &weights));
      TF_RETURN_IF_ERROR(c->Merge(c->Dim(rows, 0), c->Dim(weights, 1), &n));
      c->set_output(0, c->Matrix(c->Dim(weights, 0), c->Dim(rows, 1)));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsRobustMix").Device(tensorflow::DEVICE_CPU), RobustMixKernel);

}  // namespace
}  // namespace tf_hips
