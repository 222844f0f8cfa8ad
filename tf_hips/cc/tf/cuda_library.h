// SPDX-License-Identifier: Apache-2.0
// The codecs for GPUs, found when a kernel for a GPU is made: a library beside that of the ops,
// which is opened then and not before. So the library of the ops needs no CUDA, and a machine
// without one never looks for it.
//
// Looked at in this order: what tf_hips_ops_add_cuda_codec was given under the codec's name;
// NAME_cuda.so, which `make cuda` leaves in a folder of `compll gen`; libtf_hips_cuda.so, which
// `make build CUDA=1` makes. Thread-safe. Nothing is ever closed.

#ifndef TF_HIPS_CC_TF_CUDA_LIBRARY_H_
#define TF_HIPS_CC_TF_CUDA_LIBRARY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "tf_hips/cc/cuda/codec_cuda.h"
#include "tf_hips/cc/runtime/codec.h"

namespace tf_hips {

// The table of a codec's kernels. `name`: as the attribute `codec` says it, empty for a codec that
// has ops of its own. An error says what to do.
absl::StatusOr<const TfHipsCudaCodec*> FindCudaCodec(const TfHipsCodec& codec,
                                                     const std::string& name);

}  // namespace tf_hips

extern "C" {

// Makes the kernels of a codec known under `name`. Returns 0, or TF_HIPS_BAD_ARGUMENT when the
// table is missing or of another version of the interface. Adding a name again replaces nothing and
// returns 0.
__attribute__((visibility("default"))) int32_t
tf_hips_ops_add_cuda_codec(const char* name, const TfHipsCudaCodec* codec);

}  // extern "C"

#endif  // TF_HIPS_CC_TF_CUDA_LIBRARY_H_
