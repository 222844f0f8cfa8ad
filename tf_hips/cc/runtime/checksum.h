// SPDX-License-Identifier: Apache-2.0
// CRC-32 as zlib, gzip and PNG have it (ISO 3309, polynomial 0x04C11DB7, bits reflected), at the
// speed of memory where the processor multiplies without carries.
#ifndef TF_HIPS_CC_RUNTIME_CHECKSUM_H_
#define TF_HIPS_CC_RUNTIME_CHECKSUM_H_

#include <stdint.h>

#include "tf_hips/cc/runtime/api.h"

#ifdef __cplusplus
extern "C" {
#endif

// The checksum of n bytes that follow those of which `crc` is the checksum; 0: of none.
TF_HIPS_EXPORT uint32_t tf_hips_crc32(uint32_t crc, const void* data, int64_t n);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TF_HIPS_CC_RUNTIME_CHECKSUM_H_
