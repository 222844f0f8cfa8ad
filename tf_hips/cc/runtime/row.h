// SPDX-License-Identifier: Apache-2.0
// A row: 16 floats in registers, for the loops that compll/backends/row_code.py writes, once for
// each kind of machine that has a header here. Each operation gives the bits that the scalar one of
// convert.h gives.

#ifndef TF_HIPS_CC_RUNTIME_ROW_H_
#define TF_HIPS_CC_RUNTIME_ROW_H_

#include <cstdint>
#include <type_traits>

#include "tf_hips/cc/runtime/row_avx2.h"
#include "tf_hips/cc/runtime/row_avx512.h"
#include "tf_hips/cc/runtime/row_neon.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

// Whether a row at this place is a line of memory.
TF_HIPS_INLINE bool is_line(const float* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; }

// Whether call(width), the width as a constant of the type of its argument, was possible and said
// yes: rows take codes of these widths from memory as they are.
template <typename Call>
TF_HIPS_INLINE bool with_packed_width(int64_t bits, const Call& call) {
  switch (bits) {
    case 1:
      return call(std::integral_constant<int, 1>());
    case 2:
      return call(std::integral_constant<int, 2>());
    case 4:
      return call(std::integral_constant<int, 4>());
    case 8:
      return call(std::integral_constant<int, 8>());
    default:
      return false;
  }
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_ROW_H_
