// SPDX-License-Identifier: Apache-2.0
// The pool of a process that forks: a child has none of its threads. Prints what failed; the exit
// status is how much.

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

#include "tf_hips/cc/runtime/parallel.h"

namespace {

bool has_begun = false, is_late = false;

int Missing() {
  std::atomic<int> left{9};
  tf_hips::PoolParallelFor(9, [&](int64_t) { --left; });
  return left;
}

int Check(const char* what, int status) {
  if (status != 0) std::printf("failed: %s, status %x\n", what, static_cast<unsigned>(status));
  return status != 0 ? 1 : 0;
}

}  // namespace

extern "C" int __register_atfork(void (*)(), void (*)(), void (*)(), void*);

// In the C library's place: what is registered after main has begun, another thread's fork may come
// before.
extern "C" int pthread_atfork(void (*prepare)(), void (*parent)(), void (*child)()) noexcept {
  is_late |= has_begun;
  return __register_atfork(prepare, parent, child, nullptr);
}

int main() {
  has_begun = true;
  int failures = Check("all tasks are done", Missing());
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // ends it
    _exit(Missing());
  }
  int status = -1;
  waitpid(child, &status, 0);
  failures += Check("a child has a pool of its own", status);
  return failures + Check("it is known before anything can fork", is_late ? 1 : 0);
}
