// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/runtime/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace tf_hips {
namespace {

constexpr int kMaxThreads = 64;

int NumThreads() {
  if (const char* text = std::getenv("TF_HIPS_NUM_THREADS")) {
    const int wanted = std::atoi(text);
    if (wanted >= 1) return std::min(wanted, kMaxThreads);
  }
  cpu_set_t allowed;
  // It fails where the machine has more processors than the set has bits.
  const int num = sched_getaffinity(0, sizeof(allowed), &allowed) == 0
                      ? CPU_COUNT(&allowed)
                      : static_cast<int>(std::min(std::thread::hardware_concurrency(), 1u << 16));
  return std::min(std::max(num, 1), kMaxThreads);
}

// One call of PoolParallelFor. Whoever has time takes the next index; the caller waits for the last
// one to finish. Shared, because a worker may look at it after the caller has returned: it then
// finds no index left.
struct Call {
  Call(int64_t num_tasks, const std::function<void(int64_t)>& task)
      : num_tasks(num_tasks), task(task) {}

  void Work() {
    int64_t done = 0;
    for (int64_t i; (i = next.fetch_add(1)) < num_tasks; ++done) task(i);
    if (done == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    finished += done;
    if (finished == num_tasks) all_done.notify_all();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return finished == num_tasks; });
  }

  const int64_t num_tasks;
  const std::function<void(int64_t)>&
      task;  // used only while an index is left, so while the caller waits
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t finished = 0;
};

class Pool {
 public:
  Pool() {
    const int num_workers = NumThreads() - 1;
    for (int i = 0; i < num_workers; ++i) {
      try {
        std::thread([this] { Serve(); }).detach();
        ++num_workers_;
      } catch (const std::exception&) {
        break;  // a process at its limit of threads, or of memory, works with those it has
      }
    }
  }

  void Run(int64_t num_tasks, const std::function<void(int64_t)>& task) {
    const int64_t wanted = std::min<int64_t>(num_workers_, num_tasks - 1);
    int64_t helpers = 0;
    std::shared_ptr<Call> call;
    try {
      call = std::make_shared<Call>(num_tasks, task);
      std::lock_guard<std::mutex> lock(mutex_);
      for (; helpers < wanted; ++helpers) queue_.push_back(call);
    } catch (const std::bad_alloc&) {
      // Whoever has been asked by then helps. No exception may reach a caller in C.
      if (call == nullptr) {
        for (int64_t i = 0; i < num_tasks; ++i) task(i);
        return;
      }
    }
    for (int64_t i = 0; i < helpers; ++i) wake_.notify_one();
    call->Work();
    call->Wait();
  }

 private:
  void Serve() {
    for (;;) {
      std::shared_ptr<Call> call;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return !queue_.empty(); });
        call = std::move(queue_.front());
        queue_.pop_front();
      }
      call->Work();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Call>> queue_;
  int num_workers_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};
std::atomic_flag making_the_pool =
    ATOMIC_FLAG_INIT;  // no mutex: a fork could leave it locked for ever

// A forked child inherits the pool's memory but not its threads: it forgets that pool and makes a
// new one.
void ForgetThePool() {
  the_pool.store(nullptr);
  making_the_pool.clear();
}

// While the library is loaded. With the first pool it would be too late: another thread could fork
// just before, and its child would wait for ever for a pool that nobody makes.
[[maybe_unused]] const int kForgets = pthread_atfork(nullptr, nullptr, ForgetThePool);

// Null where there is no memory for one.
Pool* ThePool() {
  if (Pool* pool = the_pool.load(std::memory_order_acquire)) return pool;
  while (making_the_pool.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  if (the_pool.load(std::memory_order_relaxed) == nullptr) {
    Pool* made = nullptr;
    try {
      made = new Pool;
    } catch (const std::exception&) {  // its queue takes memory, too
    }
    the_pool.store(made, std::memory_order_release);
  }
  making_the_pool.clear(std::memory_order_release);
  return the_pool.load(std::memory_order_relaxed);
}

}  // namespace

void PoolParallelFor(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  Pool* const pool = num_tasks > 1 ? ThePool() : nullptr;
  if (pool != nullptr) {
    pool->Run(num_tasks, task);
  } else {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  }
}

}  // namespace tf_hips
