TF_HIPS_HOT void encode_fields([[maybe_unused]] const Params& params,
                               [[maybe_unused]] const TfHipsKey& key,
                               [[maybe_unused]] const float* __restrict__ in,
                               [[maybe_unused]] int64_t n,
                               const Layout& layout, uint8_t* __restrict__ body) {
  const uint8_t bitwidth = params.bitwidth;
  const Width width(static_cast<int64_t>(bitwidth));
  const uint8_t tail = static_cast<uint8_t>((int_rem(n, int_shl(1, static_cast<int64_t>(bitwidth)))) & 255);
  Tree<Max> max_tree;
  Tree<Min> min_tree;
  for (int64_t base = 0; base < n; base += kTile) {
    const int64_t count = std::min(kTile, n - base);
    max_tree.add(reduce_tile<Max>(in + base, count));
    min_tree.add(reduce_tile<Min>(in + base, count));
  }
  const float max = max_tree.finish(-99999.0f);
  const float min = min_tree.finish(99999.0f);
  const float gap = (max - min) / static_cast<float>(int_sub(int_shl(1, static_cast<int64_t>(bitwidth)), 1));
  for (int64_t base = 0; base < n; base += kTile) {
    const int64_t count = std::min(kTile, n - base);
    alignas(64) uint16_t noise_buffer[kNoiseSize];
    const uint16_t* noise_ = noise_tile(key, 0, base, count, noise_buffer);
    alignas(64) uint8_t tile[kTile];
    for (int64_t j = 0; j < count; ++j) {
      const float r = (in[base + j] - min) / gap + random_float(0.0f, 1.0f, noise_[j]);
      tile[j] = static_cast<uint8_t>(float_to_code(r, width.top));
    }
    pack_codes(tile, count, width.bits, body + layout.offset[4] + base / 8 * width.bits);
  }
  store_code(bitwidth, 8, body + layout.offset[0]);
  store_code(tail, 8, body + layout.offset[1]);
  store_float(min, body + layout.offset[2]);
  store_float(max, body + layout.offset[3]);
}

TF_HIPS_HOT void decode_fields([[maybe_unused]] const Params& params,
                               [[maybe_unused]] const uint8_t* __restrict__ body,
                               [[maybe_unused]] const Layout& layout,
                               float* __restrict__ out, [[maybe_unused]] int64_t n,
                               bool add) {
  const uint8_t bitwidth = params.bitwidth;
  const Width width(static_cast<int64_t>(bitwidth));
  const float min = load_float(body + layout.offset[2]);
  const float max = load_float(body + layout.offset[3]);
  const uint8_t* Q = body + layout.offset[4];
  const float gap = (max - min) / static_cast<float>(int_sub(int_shl(1, static_cast<int64_t>(bitwidth)), 1));
  for (int64_t base = 0; base < n; base += kTile) {
    const int64_t count = std::min(kTile, n - base);
    alignas(64) uint8_t Q_tile_[kTile];
    unpack_codes(Q + base / 8 * width.bits, count, width.bits, Q_tile_);
    if (add) {
      for (int64_t j = 0; j < count; ++j) {
        const uint8_t q = Q_tile_[j];
        out[base + j] += static_cast<float>(static_cast<int32_t>(q)) * gap + min;
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        const uint8_t q = Q_tile_[j];
        out[base + j] = static_cast<float>(static_cast<int32_t>(q)) * gap + min;
      }
    }
  }
}

