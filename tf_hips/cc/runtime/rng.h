// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011).
//
// Key: the seed's low and high word. Counter: element / 8 (low, high), step, tensor. A block serves
// eight elements with 16 bits each; element e takes lane e % 8: word lane / 2, low half first. The
// k-th call site of a function (from 0) uses key high word XOR k. A `sample` takes 32 bits per
// element: word e % 4 of block e / 4. Pure functions: the same arguments give the same noise
// everywhere.

#ifndef TF_HIPS_CC_RUNTIME_RNG_H_
#define TF_HIPS_CC_RUNTIME_RNG_H_

#include <cstdint>
#include <cstring>

#include "tf_hips/cc/runtime/codec.h"
#include "tf_hips/cc/runtime/reduce.h"
#include "tf_hips/cc/runtime/target.h"
#include "tf_hips/cc/runtime/vectors.h"

namespace tf_hips {

struct PhiloxBlock {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

TF_HIPS_INLINE void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3,
                                 uint32_t k0, uint32_t k1) {
  const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
  const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
  c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
  c1 = static_cast<uint32_t>(p1);
  c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
  c3 = static_cast<uint32_t>(p0);
}

TF_HIPS_INLINE PhiloxBlock philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                      uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    philox_round(c0, c1, c2, c3, k0, k1);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// Noise of one tile of elements, and up to seven on each side.
constexpr int64_t kNoiseBlocks = kTile / 8 + 1;
constexpr int64_t kNoiseSize = kNoiseBlocks * 8;

// The words, 16 bytes a block, of `blocks` blocks (at most kNoiseBlocks) from number `first` on.
TF_HIPS_APART void noise_words(const TfHipsKey& key, uint32_t site, uint64_t first, int64_t blocks,
                               void* words) {
  const uint32_t k0 = static_cast<uint32_t>(key.seed);
  const uint32_t k1 = static_cast<uint32_t>(key.seed >> 32) ^ site;
  const PhiloxInput input = {first, key.step, key.tensor_id, k0, k1};
  const int64_t done = noise_wide(input, blocks, words);
  // What is left, round by round over all blocks, one array per word: loops that compile to vector
  // code.
  const uint64_t next = first + static_cast<uint64_t>(done);
  const int64_t left = blocks - done;
  const uint32_t low = static_cast<uint32_t>(next), high = static_cast<uint32_t>(next >> 32);
  alignas(64) uint32_t c0[kNoiseBlocks], c1[kNoiseBlocks], c2[kNoiseBlocks], c3[kNoiseBlocks];
  for (int64_t b = 0; b < left; ++b) {
    c0[b] = low + static_cast<uint32_t>(b);
    c1[b] = high + (c0[b] < low ? 1u : 0u);
    c2[b] = key.step;
    c3[b] = key.tensor_id;
  }
  for (uint32_t round = 0; round < 10; ++round) {
    const uint32_t r0 = k0 + round * kPhiloxWeyl0;
    const uint32_t r1 = k1 + round * kPhiloxWeyl1;
    for (int64_t b = 0; b < left; ++b) philox_round(c0[b], c1[b], c2[b], c3[b], r0, r1);
  }
  for (int64_t b = 0; b < left; ++b) {
    const uint32_t block[4] = {c0[b], c1[b], c2[b], c3[b]};
    std::memcpy(static_cast<uint8_t*>(words) + 16 * (done + b), block, sizeof block);
  }
}

// Fills `buffer` (of kNoiseSize) with the 16 random bits of elements base .. base + count - 1 of
// this call, count at most kTile; returns where those of element `base` begin.
TF_HIPS_INLINE const uint16_t* noise_tile(const TfHipsKey& key, uint32_t site, int64_t base,
                                          int64_t count, uint16_t* buffer) {
  const uint64_t element = key.offset + static_cast<uint64_t>(base);
  const int64_t blocks = (static_cast<int64_t>(element % 8) + count + 7) / 8;
  noise_words(key, site, element / 8, blocks, buffer);
  return buffer + element % 8;
}

// The same with 32 bits each: element e takes word e % 4 of block e / 4. `buffer`: of kNoiseSize.
TF_HIPS_INLINE const uint32_t* wide_noise_tile(const TfHipsKey& key, uint32_t site, int64_t base,
                                               int64_t count, uint32_t* buffer) {
  const uint64_t element = key.offset + static_cast<uint64_t>(base);
  const int64_t blocks = (static_cast<int64_t>(element % 4) + count + 3) / 4;
  for (int64_t done = 0; done < blocks; done += kNoiseBlocks) {
    noise_words(key, site, element / 4 + static_cast<uint64_t>(done),
                blocks - done < kNoiseBlocks ? blocks - done : kNoiseBlocks, buffer + 4 * done);
  }
  return buffer + element % 4;
}

TF_HIPS_INLINE int64_t wide_random_int(int64_t low, int64_t high, uint32_t noise) {
  const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  const int64_t product = static_cast<int64_t>(span * noise);
  return static_cast<int64_t>(static_cast<uint64_t>(low) + static_cast<uint64_t>(product >> 32));
}

// The 32 random bits of one element, for noise that is not drawn in order.
TF_HIPS_INLINE uint32_t wide_noise_at(const TfHipsKey& key, uint32_t site, int64_t index) {
  const uint64_t element = key.offset + static_cast<uint64_t>(index);
  const PhiloxBlock block = philox4x32(
      static_cast<uint32_t>(element / 4), static_cast<uint32_t>(element / 4 >> 32), key.step,
      key.tensor_id, static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32) ^ site);
  return block.word[element % 4];
}

// The 16 random bits of one element, for noise that is not drawn in order.
TF_HIPS_INLINE uint16_t noise_at(const TfHipsKey& key, uint32_t site, int64_t index) {
  const uint64_t element = key.offset + static_cast<uint64_t>(index);
  const PhiloxBlock block = philox4x32(
      static_cast<uint32_t>(element / 8), static_cast<uint32_t>(element / 8 >> 32), key.step,
      key.tensor_id, static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32) ^ site);
  return static_cast<uint16_t>(block.word[element % 8 / 2] >> (element % 2 * 16));
}

TF_HIPS_INLINE float random_float(float low, float high, uint16_t noise) {
  const float part = static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-16f;
  // The same bits; compilers may not know that -0 is not among them.
  const bool is_unit = low == 0.0f && high == 1.0f;
  if (__builtin_constant_p(is_unit) && is_unit) return part;
  return low + (high - low) * part;
}

// random_int(low, low + span, noise) for a span of at most 2^16. Of the largest one compilers would
// multiply and shift back.
TF_HIPS_INLINE int32_t random_int32(int32_t low, uint32_t span, uint16_t noise) {
  if (__builtin_constant_p(span) && span == 65536u) return low + noise;
  return low + static_cast<int32_t>(span * noise >> 16);
}

TF_HIPS_INLINE int64_t random_int(int64_t low, int64_t high, uint16_t noise) {
  const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  const int64_t product = static_cast<int64_t>(span * noise);
  return static_cast<int64_t>(static_cast<uint64_t>(low) + static_cast<uint64_t>(product >> 16));
}

}  // namespace tf_hips

#endif  // TF_HIPS_CC_RUNTIME_RNG_H_
