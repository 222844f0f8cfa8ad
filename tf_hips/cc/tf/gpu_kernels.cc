// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/tf/gpu_kernels.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/tf/arguments.h"
#include "tf_hips/cc/tf/cuda_library.h"
#include "tf_hips/cc/tf/loaded_codecs.h"
#include "tf_hips/cc/tf/params.h"
#include "xla/stream_executor/stream.h"

namespace tf_hips {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// CUDA has refused a kernel of this thread.
absl::Status CudaError(const GpuCodec& codec, const char* doing) {
  return absl::InternalError(
      absl::StrCat(doing, " with ", codec.codec().name,
                   " failed: CUDA could not start a kernel: ", codec.cuda().error_text()));
}

absl::Status EncodeError(int32_t status, const GpuCodec& codec) {
  if (status == TF_HIPS_CUDA_FAILED) return CudaError(codec, "encoding");
  return absl::InvalidArgumentError(
      absl::StrCat("encoding with ", codec.codec().name, " failed: ", tf_hips_status_text(status)));
}

// What a call needs of TensorFlow.
struct Call {
  void* stream = nullptr;
  Tensor scratch;

  void* memory() { return scratch.flat<uint8_t>().data(); }
  int64_t bytes() const { return scratch.NumElements(); }
};

// Stream and scratch memory for n elements.
absl::Status Begin(OpKernelContext* ctx, const GpuCodec& codec, int64_t n, Call* call) {
  tensorflow::DeviceContext* const device = ctx->op_device_context();
  if (device == nullptr || device->stream() == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(ctx->op_kernel().type_string(), " must run on a device that has a stream"));
  }
  call->stream = device->stream()->platform_specific_handle().stream;
  const int64_t bytes = codec.cuda().scratch_bytes(codec.params(), n);
  if (bytes < 0) return EncodeError(static_cast<int32_t>(-bytes), codec);
  return ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &call->scratch);
}

// Output 0, for the packets of n elements.
absl::Status AllocatePackets(OpKernelContext* ctx, const GpuCodec& codec, int64_t n,
                             Tensor** packets) {
  const int64_t bytes = codec.cuda().wire_bytes(codec.params(), n);
  if (bytes < 0) return EncodeError(static_cast<int32_t>(-bytes), codec);
  return ctx->allocate_output(0, TensorShape({bytes}), packets);
}

// Encodes to output 0; without a residual the pointers behind `gradient` are null. `report`: null
// where nobody asks.
absl::Status Encode(OpKernelContext* ctx, const GpuCodec& codec, const TfHipsKey& key,
                    const float* gradient, const float* residual, float* new_residual,
                    uint64_t* report, int64_t n, Call* call) {
  Tensor* packets = nullptr;
  if (absl::Status status = AllocatePackets(ctx, codec, n, &packets); !status.ok()) return status;
  const int32_t status =
      codec.cuda().encode(codec.params(), &key, gradient, residual, new_residual, report, n,
                          packets->flat<uint8_t>().data(), packets->NumElements(), call->memory(),
                          call->bytes(), call->stream);
  return status == TF_HIPS_OK ? absl::OkStatus() : EncodeError(status, codec);
}

// `what` of a decode that failed: "`packet`", or a row of it.
absl::Status DecodeError(int32_t status, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, " does not decode: ", tf_hips_status_text(status)));
}

// What a report is about: the input `packet`, a row of `packets`, or what the op has encoded.
enum class About { kPacket, kRows, kOwn };

// What a report (codec_cuda.h) says. `name`: of the codec.
absl::Status Told(uint64_t report, About about, const char* name) {
  if (report == TF_HIPS_CUDA_FINE) return absl::OkStatus();
  const auto status = static_cast<int32_t>(report & 0xFF);
  const uint64_t chunk = report >> 8 & 0xFFFFFFFF, row = report >> 40;
  std::string whose = "`packet`";
  if (about == About::kRows) whose = absl::StrCat("row ", row, " of `packets`");
  if (about == About::kOwn) whose = absl::StrCat("encoding with ", name, " failed: its own packet");
  return DecodeError(status, absl::StrCat(whose, ", chunk ", chunk, ","));
}

// Memory for `num` reports.
absl::Status AllocateReports(OpKernelContext* ctx, int64_t num, Tensor* reports) {
  return ctx->allocate_temp(tensorflow::DT_UINT64, TensorShape({num}), reports);
}

// Sums the rows of `packets`, one if it is a vector, to out[0..n).
absl::Status Decode(const GpuCodec& codec, const Tensor& packets, float* out, int64_t n, Call* call,
                    uint64_t* report) {
  const bool has_rows = packets.dims() == 2;
  const int64_t rows = has_rows ? packets.dim_size(0) : 1;
  const int64_t bytes = packets.dim_size(packets.dims() - 1);
  if (rows > TF_HIPS_CUDA_MAX_ROWS) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`packets` must have at most ", TF_HIPS_CUDA_MAX_ROWS, " rows on a GPU. Received: ", rows));
  }
  std::vector<const uint8_t*> pointers(static_cast<size_t>(rows));
  const uint8_t* const data = packets.flat<uint8_t>().data();
  for (int64_t row = 0; row < rows; ++row) pointers[row] = data + row * bytes;
  const int32_t done =
      codec.cuda().decode(codec.params(), pointers.data(), bytes, static_cast<int32_t>(rows), out,
                          n, TF_HIPS_SET, report, call->memory(), call->bytes(), call->stream);
  if (done == TF_HIPS_OK) return absl::OkStatus();
  if (done == TF_HIPS_CUDA_FAILED) return CudaError(codec, "decoding");
  return DecodeError(done, has_rows ? "row 0 of `packets`" : "`packet`");
}

// Before memory is taken: packets that are too long or too short must not cost any.
absl::Status CheckLength(const GpuCodec& codec, const Tensor& packets, int64_t n) {
  const bool has_rows = packets.dims() == 2;
  const int64_t bytes = packets.dim_size(packets.dims() - 1);
  const int64_t wanted = codec.cuda().wire_bytes(codec.params(), n);
  int32_t status = TF_HIPS_OK;
  if (wanted < 0) {
    status = static_cast<int32_t>(-wanted);
  } else if (bytes != wanted) {
    status = bytes < wanted ? TF_HIPS_TRUNCATED : TF_HIPS_TOO_LONG;
  }
  if (status == TF_HIPS_OK) return absl::OkStatus();
  return DecodeError(status, absl::StrCat(has_rows ? "row 0 of `packets`" : "`packet`", ", of ",
                                          bytes, " bytes where ", wanted, " are needed,"));
}

// Ends an op when the GPU's reports have come to the host, with what the first that complains says.
// `about`: of each report.
void EndWithReports(OpKernelContext* ctx, const GpuCodec& codec, const Tensor& reports,
                    std::vector<About> about, tensorflow::AsyncOpKernel::DoneCallback done) {
  auto told = std::make_shared<Tensor>();
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  on_host.set_gpu_compatible(true);
  OP_REQUIRES_OK_ASYNC(
      ctx, ctx->allocate_temp(tensorflow::DT_UINT64, reports.shape(), told.get(), on_host), done);
  // The copy waits for the stream, on the device; this thread goes on.
  ctx->op_device_context()->CopyDeviceTensorToCPU(
      &reports, "reports", static_cast<tensorflow::Device*>(ctx->device()), told.get(),
      [ctx, told, reports, about = std::move(about), name = codec.codec().name,
       done = std::move(done)](const absl::Status& status) {
        absl::Status found = status;
        for (size_t k = 0; k < about.size() && found.ok(); ++k) {
          found = Told(told->flat<uint64_t>()(static_cast<int64_t>(k)), about[k], name);
        }
        ctx->SetStatus(found);
        done();
      });
}

absl::Status CheckSameShape(const Tensor& residual, const Tensor& gradient) {
  if (gradient.shape() == residual.shape()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`residual` must have the gradient's shape ", gradient.shape().DebugString(),
                   ". Received: shape ", residual.shape().DebugString()));
}

}  // namespace

absl::Status GpuCodec::Read(OpKernelConstruction* ctx, const TfHipsCodec* codec) {
  std::string name;
  absl::Status status = ReadCodec(*ctx, &codec, &params_, &name);
  if (!status.ok()) return status;
  if (codec == nullptr) return NotLoaded(name);
  absl::StatusOr<const TfHipsCudaCodec*> found = FindCudaCodec(*codec, name);
  if (!found.ok()) return found.status();
  codec_ = codec;
  cuda_ = *found;
  return absl::OkStatus();
}

GpuEncodeKernel::GpuEncodeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : OpKernel(ctx) {
  OP_REQUIRES_OK(ctx, codec_.Read(ctx, codec));
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void GpuEncodeKernel::Compute(OpKernelContext* ctx) {
  const Tensor& gradient = ctx->input(0);
  TfHipsKey key;
  OP_REQUIRES_OK(ctx, ReadKey(ctx->input(1), ctx->input(2), tensor_id_, offset_, &key));
  const int64_t n = gradient.NumElements();
  Call call;
  OP_REQUIRES_OK(ctx, Begin(ctx, codec_, n, &call));
  OP_REQUIRES_OK(ctx, Encode(ctx, codec_, key, gradient.flat<float>().data(), nullptr, nullptr,
                             nullptr, n, &call));
}

GpuEncodeFeedbackKernel::GpuEncodeFeedbackKernel(OpKernelConstruction* ctx,
                                                 const TfHipsCodec* codec)
    : AsyncOpKernel(ctx) {
  OP_REQUIRES_OK(ctx, codec_.Read(ctx, codec));
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void GpuEncodeFeedbackKernel::ComputeAsync(OpKernelContext* ctx, DoneCallback done) {
  const Tensor& gradient = ctx->input(0);
  const Tensor residual = ctx->input(1);
  OP_REQUIRES_OK_ASYNC(ctx, CheckSameShape(residual, gradient), done);
  TfHipsKey key;
  OP_REQUIRES_OK_ASYNC(ctx, ReadKey(ctx->input(2), ctx->input(3), tensor_id_, offset_, &key), done);
  Tensor* new_residual = nullptr;
  OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(1, residual.shape(), &new_residual), done);
  const int64_t n = gradient.NumElements();
  const bool may_fail = codec_.cuda().own_may_fail != 0;
  Call call;
  Tensor report;
  OP_REQUIRES_OK_ASYNC(ctx, Begin(ctx, codec_, n, &call), done);
  if (may_fail) OP_REQUIRES_OK_ASYNC(ctx, AllocateReports(ctx, 1, &report), done);
  OP_REQUIRES_OK_ASYNC(ctx,
                       Encode(ctx, codec_, key, gradient.flat<float>().data(),
                              residual.flat<float>().data(), new_residual->flat<float>().data(),
                              may_fail ? report.flat<uint64_t>().data() : nullptr, n, &call),
                       done);
  if (!may_fail) return done();
  EndWithReports(ctx, codec_, report, {About::kOwn}, std::move(done));
}

GpuEncodeStateKernel::GpuEncodeStateKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : OpKernel(ctx) {
  OP_REQUIRES_OK(ctx, codec_.Read(ctx, codec));
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void GpuEncodeStateKernel::Compute(OpKernelContext* ctx) {
  const Tensor& gradient = ctx->input(0);
  const Tensor state = ctx->input(1);
  const int64_t n = gradient.NumElements();
  const TensorShape wanted({codec_.cuda().num_states, n});
  OP_REQUIRES(ctx, state.shape() == wanted,
              absl::InvalidArgumentError(absl::StrCat(
                  "`state` of ", codec_.codec().name, " must have the shape ", wanted.DebugString(),
                  ". Received: shape ", state.shape().DebugString())));
  OP_REQUIRES(ctx, codec_.cuda().encode_state != nullptr,
              EncodeError(TF_HIPS_NOT_PROVIDED, codec_));
  TfHipsKey key;
  OP_REQUIRES_OK(ctx, ReadKey(ctx->input(2), ctx->input(3), tensor_id_, offset_, &key));
  Tensor* new_state = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(1, wanted, &new_state));
  Tensor* packets = nullptr;
  OP_REQUIRES_OK(ctx, AllocatePackets(ctx, codec_, n, &packets));
  Call call;
  OP_REQUIRES_OK(ctx, Begin(ctx, codec_, n, &call));
  const int32_t status = codec_.cuda().encode_state(
      codec_.params(), &key, gradient.flat<float>().data(), state.flat<float>().data(),
      new_state->flat<float>().data(), n, packets->flat<uint8_t>().data(), packets->NumElements(),
      call.memory(), call.bytes(), call.stream);
  OP_REQUIRES(ctx, status == TF_HIPS_OK, EncodeError(status, codec_));
}

GpuDecodeKernel::GpuDecodeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : AsyncOpKernel(ctx) {
  OP_REQUIRES_OK(ctx, codec_.Read(ctx, codec));
  OP_REQUIRES_OK(ctx, ReadElements(ctx, &num_elements_));
}

void GpuDecodeKernel::ComputeAsync(OpKernelContext* ctx, DoneCallback done) {
  const Tensor& packet = ctx->input(0);
  OP_REQUIRES_OK_ASYNC(ctx, CheckVector(packet, "packet"), done);
  OP_REQUIRES_OK_ASYNC(ctx, CheckLength(codec_, packet, num_elements_), done);
  Tensor* gradient = nullptr;
  OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, TensorShape({num_elements_}), &gradient), done);
  Call call;
  Tensor report;
  OP_REQUIRES_OK_ASYNC(ctx, Begin(ctx, codec_, num_elements_, &call), done);
  OP_REQUIRES_OK_ASYNC(ctx, AllocateReports(ctx, 1, &report), done);
  OP_REQUIRES_OK_ASYNC(ctx,
                       Decode(codec_, packet, gradient->flat<float>().data(), num_elements_, &call,
                              report.flat<uint64_t>().data()),
                       done);
  EndWithReports(ctx, codec_, report, {About::kPacket}, std::move(done));
}

GpuMergeKernel::GpuMergeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : AsyncOpKernel(ctx) {
  OP_REQUIRES_OK(ctx, codec_.Read(ctx, codec));
  OP_REQUIRES_OK(ctx, ReadElements(ctx, &num_elements_));
}

void GpuMergeKernel::ComputeAsync(OpKernelContext* ctx, DoneCallback done) {
  const Tensor& packets = ctx->input(0);
  OP_REQUIRES_OK_ASYNC(ctx, CheckRowsShape(packets, codec_.codec()), done);
  OP_REQUIRES_OK_ASYNC(ctx, CheckLength(codec_, packets, num_elements_), done);
  Tensor* sum = nullptr;
  OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, TensorShape({num_elements_}), &sum), done);
  Call call;
  Tensor report;
  OP_REQUIRES_OK_ASYNC(ctx, Begin(ctx, codec_, num_elements_, &call), done);
  OP_REQUIRES_OK_ASYNC(ctx, AllocateReports(ctx, 1, &report), done);
  OP_REQUIRES_OK_ASYNC(ctx,
                       Decode(codec_, packets, sum->flat<float>().data(), num_elements_, &call,
                              report.flat<uint64_t>().data()),
                       done);
  EndWithReports(ctx, codec_, report, {About::kRows}, std::move(done));
}

GpuMergeEncodeKernel::GpuMergeEncodeKernel(OpKernelConstruction* ctx, const TfHipsCodec* codec)
    : AsyncOpKernel(ctx) {
  OP_REQUIRES_OK(ctx, codec_.Read(ctx, codec));
  OP_REQUIRES_OK(ctx, ReadElements(ctx, &num_elements_));
  OP_REQUIRES_OK(ctx, ReadKeyAttrs(ctx, &tensor_id_, &offset_));
}

void GpuMergeEncodeKernel::ComputeAsync(OpKernelContext* ctx, DoneCallback done) {
  const Tensor& packets = ctx->input(0);
  OP_REQUIRES_OK_ASYNC(ctx, CheckRowsShape(packets, codec_.codec()), done);
  OP_REQUIRES_OK_ASYNC(ctx, CheckLength(codec_, packets, num_elements_), done);
  const Tensor residual = ctx->input(1);
  OP_REQUIRES_OK_ASYNC(ctx, CheckVector(residual, "residual"), done);
  OP_REQUIRES_ASYNC(
      ctx, residual.NumElements() == num_elements_,
      absl::InvalidArgumentError(absl::StrCat("`residual` must have ", num_elements_,
                                              " elements. Received: ", residual.NumElements())),
      done);
  TfHipsKey key;
  OP_REQUIRES_OK_ASYNC(ctx, ReadKey(ctx->input(2), ctx->input(3), tensor_id_, offset_, &key), done);
  Tensor* new_residual = nullptr;
  OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(1, residual.shape(), &new_residual), done);
  const bool may_fail = codec_.cuda().own_may_fail != 0;
  Tensor sum, reports;
  OP_REQUIRES_OK_ASYNC(
      ctx, ctx->allocate_temp(tensorflow::DT_FLOAT, TensorShape({num_elements_}), &sum), done);
  Call call;
  OP_REQUIRES_OK_ASYNC(ctx, Begin(ctx, codec_, num_elements_, &call), done);
  OP_REQUIRES_OK_ASYNC(ctx, AllocateReports(ctx, may_fail ? 2 : 1, &reports), done);
  OP_REQUIRES_OK_ASYNC(ctx,
                       Decode(codec_, packets, sum.flat<float>().data(), num_elements_, &call,
                              reports.flat<uint64_t>().data()),
                       done);
  // Of wrong packets the sum is garbage, and so is what is made of it; the first report says so.
  OP_REQUIRES_OK_ASYNC(
      ctx,
      Encode(ctx, codec_, key, sum.flat<float>().data(), residual.flat<float>().data(),
             new_residual->flat<float>().data(),
             may_fail ? reports.flat<uint64_t>().data() + 1 : nullptr, num_elements_, &call),
      done);
  std::vector<About> about = {About::kRows};
  if (may_fail) about.push_back(About::kOwn);
  EndWithReports(ctx, codec_, reports, std::move(about), std::move(done));
}

}  // namespace tf_hips
