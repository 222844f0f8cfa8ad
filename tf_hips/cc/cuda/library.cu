// SPDX-License-Identifier: Apache-2.0
// What libtf_hips_cuda.so tells of itself, besides its codecs.

#include <cuda_runtime.h>

#include <cstdint>

// Number of GPUs; 0 also where there is no driver.
extern "C" __attribute__((visibility("default"))) int32_t tf_hips_cuda_num_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
