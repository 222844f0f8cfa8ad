// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/tf/cuda_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tf_hips/cc/cuda/library_cuda.h"
#include "tf_hips/cc/runtime/api.h"

namespace tf_hips {
namespace {

constexpr char kRemedy[] =
    "run `make build CUDA=1` where nvcc is, or place the op on a CPU (tf.device(\"CPU\"))";

struct Added {
  std::mutex mutex;
  std::map<std::string, const TfHipsCudaCodec*> codecs;
};

// Never destroyed: kernels may still look while the process ends.
Added& AllLibraries() {
  static auto* added = new Added;
  return *added;
}

// The folder of the library that holds this function, "/" at its end.
std::string OwnFolder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&tf_hips_ops_add_cuda_codec), &info) == 0) return "./";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "./" : path.substr(0, slash + 1);
}

// Whether a table is of the codec that the op has; packets would be others, or memory read wrong.
absl::Status CheckFits(const TfHipsCodec& codec, const TfHipsCudaCodec& found,
                       const std::string& path) {
  if (found.abi_version == TF_HIPS_CUDA_ABI_VERSION && found.spec_hash == codec.spec_hash &&
      found.num_params == codec.num_params && found.num_states == codec.num_states) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      codec.name, " in ", path,
      " must be made of the same sources as the ops. Received: another version; ", kRemedy));
}

absl::StatusOr<const TfHipsCudaCodec*> Open(const TfHipsCodec& codec, const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " must load. Received: ", dlerror(), "; ", kRemedy));
  }
  using Refusal = decltype(&tf_hips_cuda_refusal);
  if (auto* refusal = reinterpret_cast<Refusal>(dlsym(library, "tf_hips_cuda_refusal"));
      refusal != nullptr && *refusal() != '\0') {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " must have a driver and a GPU that it can use. Received: ", refusal(),
                     "; place the op on a CPU (tf.device(\"CPU\"))"));
  }
  using Getter = const TfHipsCudaCodec* (*)();
  const std::string symbol = absl::StrCat("tf_hips_cuda_codec_", codec.name);
  auto* const get = reinterpret_cast<Getter>(dlsym(library, symbol.c_str()));
  if (get == nullptr) {
    return absl::UnimplementedError(absl::StrCat(codec.name, " must have kernels for GPUs in ",
                                                 path, ". Received: none; ", kRemedy));
  }
  if (absl::Status status = CheckFits(codec, *get(), path); !status.ok()) return status;
  return get();
}

}  // namespace

absl::StatusOr<const TfHipsCudaCodec*> FindCudaCodec(const TfHipsCodec& codec,
                                                     const std::string& name) {
  if (!name.empty()) {
    Added& all = AllLibraries();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.codecs.find(name);
    if (found == all.codecs.end()) {
      return absl::UnimplementedError(
          absl::StrCat(name, " must have kernels for GPUs. Received: none in this process; place ",
                       "the op on a CPU (tf.device(\"CPU\"))"));
    }
    if (absl::Status status = CheckFits(codec, *found->second, name); !status.ok()) return status;
    return found->second;
  }
  const std::string folder = OwnFolder();
  const std::string alone = absl::StrCat(folder, codec.name, "_cuda.so");
  if (access(alone.c_str(), R_OK) == 0) return Open(codec, alone);
  const std::string path = absl::StrCat(folder, "libtf_hips_cuda.so");
  if (access(path.c_str(), R_OK) == 0) return Open(codec, path);
  return absl::FailedPreconditionError(
      absl::StrCat("codecs for GPUs must be built: ", kRemedy, ". Received: no ", path));
}

}  // namespace tf_hips

extern "C" int32_t tf_hips_ops_add_cuda_codec(const char* name, const TfHipsCudaCodec* codec) {
  if (name == nullptr || codec == nullptr || codec->abi_version != TF_HIPS_CUDA_ABI_VERSION) {
    return TF_HIPS_BAD_ARGUMENT;
  }
  tf_hips::Added& all = tf_hips::AllLibraries();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.codecs.emplace(name, codec);
  return TF_HIPS_OK;
}
