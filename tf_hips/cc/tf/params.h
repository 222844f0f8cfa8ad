// SPDX-License-Identifier: Apache-2.0
// Which codec an op is of, and the values of its parameters: from the attributes of the op.
//
// Works on whatever has GetAttr(name, pointer): kernels while they are made, and shape functions.
// Thread-safe.

#ifndef TF_HIPS_CC_TF_PARAMS_H_
#define TF_HIPS_CC_TF_PARAMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/denormals.h"
#include "tf_hips/cc/runtime/packet.h"
#include "tf_hips/cc/tf/loaded_codecs.h"

namespace tf_hips {

// One attribute per parameter, under its name. Values in the order of codec.params.
template <typename Context>
absl::Status ReadNamedParams(const Context& context, const TfHipsCodec& codec,
                             std::vector<double>* params) {
  for (int32_t i = 0; i < codec.num_params; ++i) {
    const TfHipsParam& param = codec.params[i];
    int64_t integer = 0;
    float real = 0;
    const absl::Status status = param.is_integer ? context.GetAttr(param.name, &integer)
                                                 : context.GetAttr(param.name, &real);
    if (!status.ok()) return status;
    params->push_back(param.is_integer ? static_cast<double>(integer) : static_cast<double>(real));
  }
  return absl::OkStatus();
}

// The attributes `integers` and `floats`: parameters of each kind, in order.
template <typename Context>
absl::Status ReadListedParams(const Context& context, const TfHipsCodec& codec,
                              std::vector<double>* params) {
  std::vector<int64_t> integers;
  std::vector<float> floats;
  if (absl::Status status = context.GetAttr("integers", &integers); !status.ok()) return status;
  if (absl::Status status = context.GetAttr("floats", &floats); !status.ok()) return status;
  size_t next_integer = 0, next_float = 0;
  for (int32_t i = 0; i < codec.num_params; ++i) {
    if (codec.params[i].is_integer && next_integer < integers.size()) {
      params->push_back(static_cast<double>(integers[next_integer++]));
    } else if (!codec.params[i].is_integer && next_float < floats.size()) {
      params->push_back(static_cast<double>(floats[next_float++]));
    }
  }
  if (static_cast<int64_t>(params->size()) == codec.num_params &&
      params->size() == integers.size() + floats.size()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(codec.name, " must be given ", codec.num_params,
                                                 " parameters. Received: ", integers.size(),
                                                 " integers and ", floats.size(), " floats"));
}

// A null codec becomes the one that the attribute `codec` names; it stays null when that one is
// neither loaded nor built in. An InvalidArgument names the codec and the bounds of a parameter.
template <typename Context>
absl::Status ReadCodec(const Context& context, const TfHipsCodec** codec_out,
                       std::vector<double>* params, std::string* name) {
  // Attributes are binary32: a denormal one counts as it is, in TensorFlow's threads too.
  const ScopedExactDenormals exact;
  params->clear();
  const bool is_named = *codec_out == nullptr;
  if (is_named) {
    if (absl::Status status = context.GetAttr("codec", name); !status.ok()) return status;
    *codec_out = FindLoadedCodec(*name);
    if (*codec_out == nullptr) *codec_out = tf_hips_find_codec(name->c_str());
    if (*codec_out == nullptr) return absl::OkStatus();
  }
  const TfHipsCodec& codec = **codec_out;
  const absl::Status status =
      is_named ? ReadListedParams(context, codec, params) : ReadNamedParams(context, codec, params);
  if (!status.ok()) return status;
  for (int32_t i = 0; i < codec.num_params; ++i) {
    const TfHipsParam& param = codec.params[i];
    const double value = (*params)[i];
    if (!(value >= param.minimum && value <= param.maximum)) {
      return absl::InvalidArgumentError(
          absl::StrCat("`", param.name, "` of ", codec.name, " must be in [", param.minimum, ", ",
                       param.maximum, "]. Received: ", param.name, "=", value));
    }
  }
  return absl::OkStatus();
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_TF_PARAMS_H_
