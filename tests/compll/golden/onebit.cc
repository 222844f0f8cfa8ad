TF_HIPS_HOT void encode_fields([[maybe_unused]] const Params& params,
                               [[maybe_unused]] const TfHipsKey& key,
                               [[maybe_unused]] const float* __restrict__ in,
                               [[maybe_unused]] int64_t n,
                               const Layout& layout, uint8_t* __restrict__ body) {
  int64_t numNegative_part = 0;
  Tree<Sum> negativeSum_tree;
  Tree<Sum> otherSum_tree;
  for (int64_t base = 0; base < n; base += kTile) {
    const int64_t count = std::min(kTile, n - base);
    uint32_t total = 0;
    for (int64_t j = 0; j < count; ++j) {
      const float g = in[base + j];
      total += (static_cast<uint8_t>(g < 0.0f));
    }
    numNegative_part = int_add(numNegative_part, total);
    alignas(64) float tile[kTile];
    for (int64_t j = 0; j < count; ++j) {
      const float g2 = in[base + j];
      tile[j] = g2 < 0.0f ? g2 : 0.0f;
    }
    negativeSum_tree.add(reduce_tile<Sum>(tile, count));
    alignas(64) float tile2[kTile];
    for (int64_t j = 0; j < count; ++j) {
      const float g3 = in[base + j];
      tile2[j] = g3 < 0.0f ? 0.0f : g3;
    }
    otherSum_tree.add(reduce_tile<Sum>(tile2, count));
    alignas(64) uint8_t tile3[kTile];
    for (int64_t j = 0; j < count; ++j) {
      const float g4 = in[base + j];
      tile3[j] = static_cast<uint8_t>(g4 < 0.0f);
    }
    pack_codes(tile3, count, 1, body + layout.offset[2] + base / 8);
  }
  const int64_t numNegative = numNegative_part;
  const float negativeSum = negativeSum_tree.finish(0.0f);
  const float otherSum = otherSum_tree.finish(0.0f);
  const int64_t numOther = int_sub(n, numNegative);
  const float negative = numNegative > 0 ? negativeSum / static_cast<float>(numNegative) : 0.0f;
  const float other = numOther > 0 ? otherSum / static_cast<float>(numOther) : 0.0f;
  store_float(negative, body + layout.offset[0]);
  store_float(other, body + layout.offset[1]);
}

TF_HIPS_HOT void decode_fields([[maybe_unused]] const Params& params,
                               [[maybe_unused]] const uint8_t* __restrict__ body,
                               [[maybe_unused]] const Layout& layout,
                               float* __restrict__ out, [[maybe_unused]] int64_t n,
                               bool add) {
  const float negative = load_float(body + layout.offset[0]);
  const float other = load_float(body + layout.offset[1]);
  const uint8_t* codes_ = body + layout.offset[2];
  for (int64_t base = 0; base < n; base += kTile) {
    const int64_t count = std::min(kTile, n - base);
    alignas(64) uint8_t codes_tile[kTile];
    unpack_codes(codes_ + base / 8, count, 1, codes_tile);
    if (add) {
      for (int64_t j = 0; j < count; ++j) {
        const uint8_t code = codes_tile[j];
        out[base + j] += (code != 0) ? negative : other;
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        const uint8_t code = codes_tile[j];
        out[base + j] = (code != 0) ? negative : other;
      }
    }
  }
}

