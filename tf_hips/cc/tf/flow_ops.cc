// SPDX-License-Identifier: Apache-2.0
// What a step needs around its collectives: values that no optimiser looks through, work that lets
// other work go first, and one look at all gradients.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tf_hips/cc/tf/pool.h"
#include "tsl/platform/denormal.h"
#include "tsl/platform/setround.h"

namespace tf_hips {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// A task of this size takes some microseconds, many times what it costs to hand it over.
constexpr int64_t kTaskBytes = int64_t{1} << 18;

// Values out as they came in, without a copy. Being stateful it is never folded, merged or dropped.
class OpaqueKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    for (int i = 0; i < ctx->num_inputs(); ++i) ctx->set_output(i, ctx->input(i));
  }

  bool IsExpensive() override { return false; }
};

// Calls what it is given, in order, on a thread of its own; without one at once.
class Caller {
 public:
  static Caller& Get() {
    static Caller* const caller = new Caller;  // as long as the process: ends with no destructor
    return *caller;
  }

  void Call(AsyncOpKernel::DoneCallback done) {
    if (!has_thread_) return done();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(done));
    }
    came_.notify_one();
  }

 private:
  Caller() {
    try {
      std::thread([this] { Run(); }).detach();
      has_thread_ = true;
    } catch (const std::exception&) {
      // A process at its limit of threads, or of memory, loses nothing but the order of its work.
    }
  }

  void Run() {
    // As in TensorFlow's own threads: where their queues are full, it computes here.
    const tsl::port::ScopedFlushDenormal flush;
    const tsl::port::ScopedSetRound round(FE_TONEAREST);
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      came_.wait(lock, [this] { return !waiting_.empty(); });
      const AsyncOpKernel::DoneCallback done = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      done();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<AsyncOpKernel::DoneCallback> waiting_;
  bool has_thread_ = false;  // set by the constructor alone; `Run` does not look at it
};

// A value out as it came in; what follows is queued behind what could be run already. What a kernel
// makes ready on TensorFlow's own threads goes to the front of their queues, what another thread
// makes ready to the back.
class YieldKernel : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    ctx->set_output(0, ctx->input(0));
    Caller::Get().Call(std::move(done));
  }
};

// The bits of a float's exponent: all of them set means NaN or infinity.
template <typename Word, Word exponent>
bool AllFiniteWords(const char* data, int64_t num_bytes) {
  const auto* words = reinterpret_cast<const Word*>(data);
  const int64_t n = num_bytes / static_cast<int64_t>(sizeof(Word));
  // Without a branch, so that the compiler makes vectors of it.
  Word is_bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    is_bad |= static_cast<Word>((words[i] & exponent) == exponent);
  }
  return is_bad == 0;
}

bool AllFinite(tensorflow::DataType dtype, const char* data, int64_t num_bytes) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return AllFiniteWords<uint16_t, 0x7c00>(data, num_bytes);
    case tensorflow::DT_BFLOAT16:
      return AllFiniteWords<uint16_t, 0x7f80>(data, num_bytes);
    case tensorflow::DT_FLOAT:
      return AllFiniteWords<uint32_t, 0x7f800000>(data, num_bytes);
    default:
      return AllFiniteWords<uint64_t, 0x7ff0000000000000>(data, num_bytes);
  }
}

// Which of `tensors` is the first with an element that is NaN or infinite, or their number where
// there is none; one pass, at the speed of memory.
int64_t FirstNonFinite(OpKernelContext* ctx, const std::vector<const Tensor*>& tensors) {
  struct Task {
    int64_t place;
    tensorflow::DataType dtype;
    const char* data;
    int64_t num_bytes;
  };
  std::vector<Task> tasks;
  int64_t num_bytes = 0;
  const auto count = static_cast<int64_t>(tensors.size());
  for (int64_t place = 0; place < count; ++place) {
    const Tensor& tensor = *tensors[place];
    const absl::string_view bytes = tensor.tensor_data();
    const auto size = static_cast<int64_t>(bytes.size());
    for (int64_t begin = 0; begin < size; begin += kTaskBytes) {
      const int64_t length = std::min(kTaskBytes, size - begin);
      tasks.push_back({place, tensor.dtype(), bytes.data() + begin, length});
    }
    num_bytes += size;
  }
  std::atomic<int64_t> first{count};
  const auto look = [&](int64_t i) {
    const Task& task = tasks[i];
    if (AllFinite(task.dtype, task.data, task.num_bytes)) return;
    int64_t found = first.load(std::memory_order_relaxed);
    while (task.place < found &&
           !first.compare_exchange_weak(found, task.place, std::memory_order_relaxed)) {
    }
  };
  if (num_bytes <= kTaskBytes) {
    for (size_t i = 0; i < tasks.size(); ++i) look(static_cast<int64_t>(i));
  } else {
    PoolOf(ctx)(static_cast<int64_t>(tasks.size()), look);
  }
  return first.load(std::memory_order_relaxed);
}

class FirstNonFiniteKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<const Tensor*> tensors;
    for (int i = 0; i < ctx->num_inputs(); ++i) tensors.push_back(&ctx->input(i));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({}), &output));
    output->scalar<int64_t>()() = FirstNonFinite(ctx, tensors);
  }
};

// Hands on a tensor whose elements are all finite, without a copy, and fails on another.
class FiniteKernel : public OpKernel {
 public:
  explicit FiniteKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("complaint", &complaint_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& number = ctx->input(1);
    OP_REQUIRES(ctx, number.dims() == 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "`number` must be a scalar. Received: shape ", number.shape().DebugString())));
    OP_REQUIRES(ctx, FirstNonFinite(ctx, {&ctx->input(0)}) == 1,
                absl::InvalidArgumentError(absl::StrCat(complaint_, number.scalar<int64_t>()())));
    ctx->set_output(0, ctx->input(0));
  }

 private:
  std::string complaint_;
};

REGISTER_OP("TfHipsOpaque")
    .Attr("T: list(type) >= 1")
    .Input("values: T")
    .Output("same: T")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsOpaque").Device(tensorflow::DEVICE_CPU), OpaqueKernel);
// Hands on what lies on the device, so it needs nothing of CUDA.
REGISTER_KERNEL_BUILDER(Name("TfHipsOpaque").Device(tensorflow::DEVICE_GPU), OpaqueKernel);

// Stateful, else Grappler would make a NoOp of one that operations wait for and none reads.
REGISTER_OP("TfHipsYield")
    .Attr("T: type")
    .Input("value: T")
    .Output("same: T")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsYield").Device(tensorflow::DEVICE_CPU), YieldKernel);
REGISTER_KERNEL_BUILDER(Name("TfHipsYield").Device(tensorflow::DEVICE_GPU), YieldKernel);

REGISTER_OP("TfHipsFirstNonFinite")
    .Attr("T: list({half, bfloat16, float, double}) >= 1")
    .Input("values: T")
    .Output("place: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsFirstNonFinite").Device(tensorflow::DEVICE_CPU),
                        FirstNonFiniteKernel);

// The message of the error is `complaint`, followed by `number`.
REGISTER_OP("TfHipsFinite")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("complaint: string")
    .Input("value: T")
    .Input("number: int64")
    .Output("same: T")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle number;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &number));
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("TfHipsFinite").Device(tensorflow::DEVICE_CPU), FiniteKernel);

}  // namespace
}  // namespace tf_hips
