// SPDX-License-Identifier: Apache-2.0
// What a library of kernels tells of itself, besides its codecs and passes. Thread-safe.

#ifndef TF_HIPS_CC_CUDA_LIBRARY_CUDA_H_
#define TF_HIPS_CC_CUDA_LIBRARY_CUDA_H_

#ifdef __cplusplus
extern "C" {
#endif

// Why the kernels of this library cannot run here: CUDA finds no driver, an older one than the
// library needs, no GPU, or one that the library has no code for. "" where they can. CUDA is asked
// once, without a context on any GPU; GPUs that CUDA_VISIBLE_DEVICES hides do not count.
__attribute__((visibility("default"))) const char* tf_hips_cuda_refusal(void);

// What CUDA said when a function of this library last returned TF_HIPS_CUDA_FAILED to this thread;
// "" before.
__attribute__((visibility("default"))) const char* tf_hips_cuda_error_text(void);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TF_HIPS_CC_CUDA_LIBRARY_CUDA_H_
