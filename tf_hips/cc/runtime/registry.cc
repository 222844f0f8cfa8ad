// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "tf_hips/cc/runtime/api.h"

namespace {

// Filled while the library is loaded, which the loader does on one thread; only read afterwards.
// Never destroyed, so that no order of destructors matters.
std::vector<const TfHipsCodec*>& Codecs() {
  static auto* codecs = new std::vector<const TfHipsCodec*>;
  return *codecs;
}

}  // namespace

extern "C" {

void tf_hips_register_codec(const TfHipsCodec* codec) {
  auto& codecs = Codecs();
  const auto before = [](const TfHipsCodec* a, const TfHipsCodec* b) {
    return std::strcmp(a->name, b->name) < 0;
  };
  codecs.insert(std::upper_bound(codecs.begin(), codecs.end(), codec, before), codec);
}

int32_t tf_hips_abi_version(void) { return TF_HIPS_ABI_VERSION; }

int32_t tf_hips_num_codecs(void) { return static_cast<int32_t>(Codecs().size()); }

const TfHipsCodec* tf_hips_codec_at(int32_t index) {
  return index >= 0 && index < tf_hips_num_codecs() ? Codecs()[index] : nullptr;
}

const TfHipsCodec* tf_hips_find_codec(const char* name) {
  if (name == nullptr) return nullptr;
  for (const TfHipsCodec* codec : Codecs()) {
    if (std::strcmp(codec->name, name) == 0) return codec;
  }
  return nullptr;
}

}  // extern "C"
