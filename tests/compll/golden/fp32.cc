TF_HIPS_HOT void encode_fields([[maybe_unused]] const Params& params,
                               [[maybe_unused]] const TfHipsKey& key,
                               [[maybe_unused]] const float* __restrict__ in,
                               [[maybe_unused]] int64_t n,
                               const Layout& layout, uint8_t* __restrict__ body) {
  for (int64_t base = 0; base < n; base += kTile) {
    const int64_t count = std::min(kTile, n - base);
    store_floats(in + base, count, body + layout.offset[0] + base * 4);
  }
}

TF_HIPS_HOT void decode_fields([[maybe_unused]] const Params& params,
                               [[maybe_unused]] const uint8_t* __restrict__ body,
                               [[maybe_unused]] const Layout& layout,
                               float* __restrict__ out, [[maybe_unused]] int64_t n,
                               bool add) {
  const uint8_t* gradient = body + layout.offset[0];
  for (int64_t base = 0; base < n; base += kTile) {
    const int64_t count = std::min(kTile, n - base);
    alignas(64) float gradient_tile[kTile];
    load_floats(gradient + base * 4, count, gradient_tile);
    if (add) {
      for (int64_t j = 0; j < count; ++j) {
        out[base + j] += gradient_tile[j];
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        out[base + j] = gradient_tile[j];
      }
    }
  }
}

