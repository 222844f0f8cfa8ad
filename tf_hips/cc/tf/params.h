// SPDX-License-Identifier: Apache-2.0
// Reads a codec's parameters from the attributes of an op.
//
// Works on whatever has GetAttr(name, pointer): kernels while they are made, and shape functions.
// Thread-safe.

#ifndef TF_HIPS_CC_TF_PARAMS_H_
#define TF_HIPS_CC_TF_PARAMS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tf_hips/cc/runtime/api.h"
#include "tf_hips/cc/runtime/packet.h"

namespace tf_hips {

// Values in the order of codec.params; an InvalidArgument names the codec and the bounds.
template <typename Context>
absl::Status ReadParams(const Context& context, const TfHipsCodec& codec,
                        std::vector<double>* params) {
  params->assign(codec.num_params, 0.0);
  for (int32_t i = 0; i < codec.num_params; ++i) {
    const TfHipsParam& param = codec.params[i];
    int64_t integer = 0;
    float real = 0;
    const absl::Status status = param.is_integer ? context.GetAttr(param.name, &integer)
                                                 : context.GetAttr(param.name, &real);
    if (!status.ok()) return status;
    (*params)[i] = param.is_integer ? static_cast<double>(integer) : static_cast<double>(real);
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
