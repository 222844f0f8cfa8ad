// SPDX-License-Identifier: Apache-2.0
// What blocks of Philox4x32-10 (rng.h) have in common that are made in one call.

#ifndef TF_HIPS_CC_RUNTIME_PHILOX_H_
#define TF_HIPS_CC_RUNTIME_PHILOX_H_

#include <cstdint>

#include "tf_hips/cc/runtime/target.h"

namespace tf_hips {

// What the key and the position give to the generator, before its lanes.
struct PhiloxInput {
  uint64_t first;  // number of the first block
  uint32_t step, tensor_id, k0, k1;
};

// Blocks of a call differ in the low word of their counters alone. So half of the first round and
// half of the products of the second are the same for all.
struct PhiloxShared {
  TF_HIPS_INLINE explicit PhiloxShared(const PhiloxInput& input) {
    const uint64_t p1 = uint64_t{0xCD9E8D57} * input.step;
    const uint32_t first0 =
        static_cast<uint32_t>(p1 >> 32) ^ static_cast<uint32_t>(input.first >> 32) ^ input.k0;
    const uint64_t p0 = uint64_t{0xD2511F53} * first0;
    first2 = input.tensor_id ^ input.k1;
    second0 = static_cast<uint32_t>(p1) ^ (input.k0 + 0x9E3779B9u);
    second2 = static_cast<uint32_t>(p0 >> 32) ^ (input.k1 + 0xBB67AE85u);
    second3 = static_cast<uint32_t>(p0);
  }
  uint32_t first2;                     // what word 2 is joined with in the first round
  uint32_t second0, second2, second3;  // words 0 and 2 in the second round, and word 3 behind it
};

// How many of `blocks` have counters that differ in the low word alone: all, or none.
TF_HIPS_INLINE int64_t blocks_of_one_word(const PhiloxInput& input, int64_t blocks) {
  return (input.first + static_cast<uint64_t>(blocks)) >> 32 == input.first >> 32 ? blocks : 0;
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_PHILOX_H_
