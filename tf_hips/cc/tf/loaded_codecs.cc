// SPDX-License-Identifier: Apache-2.0
#include "tf_hips/cc/tf/loaded_codecs.h"

#include <map>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "tf_hips/cc/runtime/api.h"

namespace tf_hips {
namespace {

struct Loaded {
  std::mutex mutex;
  std::map<std::string, const TfHipsCodec*> codecs;
};

// Never destroyed: kernels may still look while the process ends.
Loaded& AllCodecs() {
  static auto* loaded = new Loaded;
  return *loaded;
}

}  // namespace

const TfHipsCodec* FindLoadedCodec(const std::string& name) {
  Loaded& all = AllCodecs();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.codecs.find(name);
  return found == all.codecs.end() ? nullptr : found->second;
}

absl::Status NotLoaded(const std::string& name) {
  const std::string stem = name.substr(0, name.find('@'));
  return absl::FailedPreconditionError(absl::StrCat(
      "the codec ", name, " is not loaded in this process: call tf_hips.load(\"", stem,
      ".pse\") with the specification that the graph was made with, before the graph runs"));
}

}  // namespace tf_hips

extern "C" int32_t tf_hips_ops_add_codec(const char* name, const TfHipsCodec* codec) {
  if (name == nullptr || codec == nullptr || codec->abi_version != TF_HIPS_ABI_VERSION) {
    return TF_HIPS_BAD_ARGUMENT;
  }
  tf_hips::Loaded& all = tf_hips::AllCodecs();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.codecs.emplace(name, codec);
  return TF_HIPS_OK;
}
