// SPDX-License-Identifier: Apache-2.0
// Codecs that were loaded while the program runs, by the name that ops carry in their attribute
// `codec`: "my@0123456789abcdef", name and content of the specification.
//
// Thread-safe. A codec that was added stays: its table must live as long as the program.

#ifndef TF_HIPS_CC_TF_LOADED_CODECS_H_
#define TF_HIPS_CC_TF_LOADED_CODECS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tf_hips/cc/runtime/codec.h"

namespace tf_hips {

// Null when no codec of that name was added in this process.
const TfHipsCodec* FindLoadedCodec(const std::string& name);

// What to tell the user of an op whose codec is not there.
absl::Status NotLoaded(const std::string& name);

}  // namespace tf_hips

extern "C" {

// Makes a codec known under `name`. Returns 0, or TF_HIPS_BAD_ARGUMENT when the table is missing or
// of another version of the interface. Adding a name again replaces nothing and returns 0.
__attribute__((visibility("default"))) int32_t tf_hips_ops_add_codec(const char* name,
                                                                     const TfHipsCodec* codec);

}  // extern "C"

#endif  // TF_HIPS_CC_TF_LOADED_CODECS_H_
