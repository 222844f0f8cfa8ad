// SPDX-License-Identifier: Apache-2.0
// Runs independent tasks on several threads.
//
// A ParallelFor calls `task(i)` once for each i in [0, num_tasks), in any order and on any thread,
// and returns when all calls have returned. Inside TensorFlow it is TensorFlow's pool; elsewhere
// PoolParallelFor. Tasks must not throw.

#ifndef TF_HIPS_CC_RUNTIME_PARALLEL_H_
#define TF_HIPS_CC_RUNTIME_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace tf_hips {

using ParallelFor =
    std::function<void(int64_t num_tasks, const std::function<void(int64_t)>& task)>;

// The pool of the process: as many threads as processors it may run on (TF_HIPS_NUM_THREADS
// overrides), the caller among them. Made on first use, again in a forked child (threads do not
// survive a fork), and never destroyed. Calls from several threads share the workers; a single task
// runs on the caller's thread alone.
void PoolParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task);

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_PARALLEL_H_
