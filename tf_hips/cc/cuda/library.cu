// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <string>

#include "tf_hips/cc/cuda/device.cuh"
#include "tf_hips/cc/cuda/library_cuda.h"

namespace tf_hips {
namespace cuda {
namespace {

// Compute capabilities, as 100 times the major number and 10 times the minor one, for which nvcc
// makes code. What is newer runs the PTX of the newest.
constexpr int kCapabilities[] = {__CUDA_ARCH_LIST__};

std::string shown(int capability) {
  return std::to_string(capability / 100) + "." + std::to_string(capability / 10 % 10);
}

bool is_known(int capability) {
  for (const int known : kCapabilities) {
    if (known <= capability) return true;
  }
  return false;
}

// Of a driver or a runtime library, 1000 times the major number and 10 times the minor one.
std::string version(cudaError_t (*ask)(int*)) {
  int number = 0;
  if (ask(&number) != cudaSuccess || number == 0) return "none";
  return std::to_string(number / 1000) + "." + std::to_string(number / 10 % 100);
}

std::string refusal() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    return std::string(cudaGetErrorString(error)) +
           " (CUDA of the driver: " + version(cudaDriverGetVersion) +
           ", of the library: " + version(cudaRuntimeGetVersion) + ")";
  }
  if (count < 1) return "CUDA finds no GPU";
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const int capability = 100 * major + 10 * minor;
    if (is_known(capability)) continue;
    std::string text = "GPU " + std::to_string(device) + " has compute capability " +
                       shown(capability) + ", and the library code for";
    for (const int known : kCapabilities) text += " " + shown(known);
    return text + " (CUDA_VISIBLE_DEVICES can hide a GPU)";
  }
  return "";
}

}  // namespace
}  // namespace cuda
}  // namespace tf_hips

extern "C" {

const char* tf_hips_cuda_refusal(void) {
  static const std::string text = tf_hips::cuda::refusal();
  return text.c_str();
}

const char* tf_hips_cuda_error_text(void) { return tf_hips::cuda::error_text(); }

}  // extern "C"
