// SPDX-License-Identifier: Apache-2.0
// TensorFlow's own threads as a ParallelFor.

#ifndef TF_HIPS_CC_TF_POOL_H_
#define TF_HIPS_CC_TF_POOL_H_

#include <cstdint>
#include <functional>

#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/threadpool.h"
#include "tf_hips/cc/runtime/parallel.h"

namespace tf_hips {

// The pool of the kernel's device; a single task stays on the kernel's thread.
inline ParallelFor PoolOf(tensorflow::OpKernelContext* ctx) {
  auto* workers = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  return [workers](int64_t num_tasks, const std::function<void(int64_t)>& task) {
    const auto one_by_one =
        tensorflow::thread::ThreadPool::SchedulingParams::Fixed(/*block_size=*/1);
    workers->ParallelFor(num_tasks, one_by_one, [&task](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) task(i);
    });
  };
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_TF_POOL_H_
