// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 on the device: the noise of tf_hips/cc/runtime/rng.h, which says what it is.

#ifndef TF_HIPS_CC_CUDA_PHILOX_CUH_
#define TF_HIPS_CC_CUDA_PHILOX_CUH_

#include "tf_hips/cc/cuda/device.cuh"

namespace tf_hips {
namespace cuda {

struct PhiloxBlock {
  uint32_t word[4];
};

// The keys of the ten rounds of a call site, the same for all elements of a call; and the exponent
// of 128 as 16 bits, here because an instruction of a GPU has room for one constant.
struct PhiloxKeys {
  uint32_t first[10], second[10];
  uint32_t exponent;
};

TF_HIPS_INLINE PhiloxKeys philox_keys(const TfHipsKey& key, uint32_t site) {
  PhiloxKeys keys;
  keys.exponent = 0x4300u;
  uint32_t k0 = static_cast<uint32_t>(key.seed);
  uint32_t k1 = static_cast<uint32_t>(key.seed >> 32) ^ site;
  TF_HIPS_UNROLL
  for (int round = 0; round < 10; ++round) {
    keys.first[round] = k0;
    keys.second[round] = k1;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return keys;
}

// Block `number` of a call site.
TF_HIPS_INLINE PhiloxBlock philox(const TfHipsKey& key, const PhiloxKeys& keys, uint64_t number) {
  uint32_t c0 = static_cast<uint32_t>(number), c1 = static_cast<uint32_t>(number >> 32);
  uint32_t c2 = key.step, c3 = key.tensor_id;
  TF_HIPS_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ keys.first[round];
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ keys.second[round];
    c3 = static_cast<uint32_t>(p0);
  }
  return {{c0, c1, c2, c3}};
}

// Word number k, at most 3. Registers have no numbers at run time: a block that is indexed would
// lie in memory.
TF_HIPS_INLINE uint32_t word_of(const PhiloxBlock& block, int k) {
  const uint32_t low = k % 2 == 0 ? block.word[0] : block.word[1];
  const uint32_t high = k % 2 == 0 ? block.word[2] : block.word[3];
  return k < 2 ? low : high;
}

TF_HIPS_INLINE uint16_t lane_of(const PhiloxBlock& block, int lane) {
  return static_cast<uint16_t>(word_of(block, lane / 2) >> (lane % 2 * 16));
}

// The 16 random bits of one element.
TF_HIPS_INLINE uint16_t noise_at(const TfHipsKey& key, uint32_t site, int64_t index) {
  const uint64_t element = key.offset + static_cast<uint64_t>(index);
  return lane_of(philox(key, philox_keys(key, site), element / 8), static_cast<int>(element % 8));
}

// The 32 random bits of one element.
TF_HIPS_INLINE uint32_t wide_noise_at(const TfHipsKey& key, uint32_t site, int64_t index) {
  const uint64_t element = key.offset + static_cast<uint64_t>(index);
  return word_of(philox(key, philox_keys(key, site), element / 4), static_cast<int>(element % 4));
}

// 16 random bits, in one half of a word: to cut them out costs a GPU as much as to use them there.
struct Noise {
  uint32_t word;
  bool is_high;
  uint32_t exponent;  // that of 128

  TF_HIPS_INLINE operator uint16_t() const {
    return static_cast<uint16_t>(is_high ? word >> 16 : word);
  }
};

// Those of eight elements.
struct NoiseOfEight {
  uint32_t word[4];
  uint32_t exponent;

  TF_HIPS_INLINE Noise operator[](int u) const { return {word[u / 2], u % 2 != 0, exponent}; }
};

// Whether eight elements of a tile have noise of one block: their numbers are multiples of 8.
TF_HIPS_INLINE bool is_noise_whole(const TfHipsKey& key) { return key.offset % 8 == 0; }

// The 16 random bits of eight elements from `first` on. `is_full`: they are in one block.
template <bool is_full>
TF_HIPS_INLINE NoiseOfEight noise8(const TfHipsKey& key, const PhiloxKeys& keys, int64_t first) {
  const uint64_t element = key.offset + static_cast<uint64_t>(first);
  const PhiloxBlock block = philox(key, keys, element / 8);
  NoiseOfEight out = {{block.word[0], block.word[1], block.word[2], block.word[3]}, keys.exponent};
  const int skipped = static_cast<int>(element % 8);
  if (is_full || skipped == 0) return out;
  const PhiloxBlock next = philox(key, keys, element / 8 + 1);
  uint32_t word[8];
  TF_HIPS_UNROLL
  for (int k = 0; k < 4; ++k) word[k] = block.word[k], word[4 + k] = next.word[k];
  TF_HIPS_UNROLL
  for (int k = 0; k < 6; ++k) word[k] = (skipped & 4) != 0 ? word[k + 2] : word[k];
  TF_HIPS_UNROLL
  for (int k = 0; k < 5; ++k) word[k] = (skipped & 2) != 0 ? word[k + 1] : word[k];
  TF_HIPS_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint64_t pair = static_cast<uint64_t>(word[k + 1]) << 32 | word[k];
    out.word[k] = static_cast<uint32_t>(pair >> (skipped % 2 * 16));
  }
  return out;
}

// 32 random bits each: two blocks, or three.
template <bool is_full>
TF_HIPS_INLINE void wide_noise8(const TfHipsKey& key, const PhiloxKeys& keys, int64_t first,
                                uint32_t (&out)[8]) {
  const uint64_t element = key.offset + static_cast<uint64_t>(first);
  const PhiloxBlock low = philox(key, keys, element / 4);
  const PhiloxBlock high = philox(key, keys, element / 4 + 1);
  if (!is_full && element % 4 != 0) {
    const PhiloxBlock next = philox(key, keys, element / 4 + 2);
    const int skipped = static_cast<int>(element % 4);
    TF_HIPS_UNROLL
    for (int u = 0; u < 8; ++u) {
      const int k = skipped + u;
      out[u] = k < 4 ? word_of(low, k) : k < 8 ? word_of(high, k - 4) : word_of(next, k - 8);
    }
    return;
  }
  TF_HIPS_UNROLL
  for (int u = 0; u < 4; ++u) {
    out[u] = low.word[u];
    out[4 + u] = high.word[u];
  }
}

// random_float(0, 1, noise): 128 + noise / 65536, of which these are the bits, less 128; both are
// exact. To convert an integer would take a GPU as long as four such steps.
TF_HIPS_INLINE float random_unit(uint16_t noise) {
  return bits_float(int64_t{0x43000000u | noise}) - 128.0f;
}

TF_HIPS_INLINE float random_unit(Noise noise) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(
             __byte_perm(noise.word, noise.exponent, noise.is_high ? 0x5432u : 0x5410u)) -
         128.0f;
#else
  return random_unit(static_cast<uint16_t>(noise));
#endif
}

TF_HIPS_INLINE float random_float(float low, float high, uint16_t noise) {
  return low + (high - low) * random_unit(noise);
}

// low + (noise * (high - low) >> bits), wrapping.
TF_HIPS_INLINE int64_t scaled_noise(int64_t low, int64_t high, uint32_t noise, int bits) {
  return int_add(low, int_shr(int_mul(int_sub(high, low), static_cast<int64_t>(noise)), bits));
}

// random_int(low, low + span, noise) for a span of at most 2^16.
TF_HIPS_INLINE int32_t random_int32(int32_t low, uint32_t span, uint16_t noise) {
  return low + static_cast<int32_t>(span * noise >> 16);
}

TF_HIPS_INLINE int64_t random_int(int64_t low, int64_t high, uint16_t noise) {
  return scaled_noise(low, high, noise, 16);
}

TF_HIPS_INLINE int64_t wide_random_int(int64_t low, int64_t high, uint32_t noise) {
  return scaled_noise(low, high, noise, 32);
}

}  // namespace cuda
}  // namespace tf_hips

#endif  // TF_HIPS_CC_CUDA_PHILOX_CUH_
