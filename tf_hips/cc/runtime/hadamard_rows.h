// SPDX-License-Identifier: Apache-2.0
// The part of hadamard.h that is the same text for each kind of machine, and so has no guard: it is
// included once in each of their namespaces, where Row, its operations and row_butterflies are.
// TF_HIPS_ROWS_INLINE and TF_HIPS_ROWS_APART say for which machine functions are.

// Two stages of four rows: of strides that these lie apart, and twice that.
TF_HIPS_ROWS_INLINE void two_stages(Row (&row)[4]) {
  const Row a = row[0] + row[1], b = row[0] - row[1];
  const Row c = row[2] + row[3], d = row[2] - row[3];
  row[0] = a + c, row[1] = b + d, row[2] = a - c, row[3] = b - d;
}

template <bool kIsLast>
TF_HIPS_ROWS_INLINE void put_row(float* at, Row x, Row scale) {
  row_store(at, kIsLast ? x * scale : x);
}

// The stages of strides from 16 * `stride` on, one or two of them, of `rows` rows in place.
template <bool kIsLast>
TF_HIPS_ROWS_INLINE void stages_of_rows(int64_t stride, int64_t rows, Row scale, float* out) {
  const int64_t step = 16 * stride;
  if (2 * stride == rows) {
    for (int64_t k = 0; k < step; k += 16) {
      float* const at = out + k;
      const Row a = row_at(at), b = row_at(at + step);
      put_row<kIsLast>(at, a + b, scale);
      put_row<kIsLast>(at + step, a - b, scale);
    }
    return;
  }
  for (int64_t begin = 0; begin < 16 * rows; begin += 4 * step) {
    for (int64_t k = 0; k < step; k += 16) {
      float* const at = out + begin + k;
      Row row[4] = {row_at(at), row_at(at + step), row_at(at + 2 * step), row_at(at + 3 * step)};
      two_stages(row);
      for (int64_t l = 0; l < 4; ++l) put_row<kIsLast>(at + l * step, row[l], scale);
    }
  }
}

// All stages of one block of `rows` rows, a power of two; `out` may be `in`.
TF_HIPS_ROWS_INLINE void hadamard_block(const float* in, int64_t rows, float factor, float* out) {
  const Row scale = row_of(factor);
  if (rows == 1) {
    row_store(out, row_butterflies(row_at(in)) * scale);
    return;
  }
  if (rows == 2) {
    const Row a = row_butterflies(row_at(in)), b = row_butterflies(row_at(in + 16));
    row_store(out, (a + b) * scale);
    row_store(out + 16, (a - b) * scale);
    return;
  }
  const bool is_last = rows == 4;
  for (int64_t k = 0; k < 16 * rows; k += 64) {
    Row row[4];
    for (int64_t l = 0; l < 4; ++l) row[l] = row_butterflies(row_at(in + k + 16 * l));
    two_stages(row);
    for (int64_t l = 0; l < 4; ++l) row_store(out + k + 16 * l, is_last ? row[l] * scale : row[l]);
  }
  for (int64_t stride = 4; stride < rows; stride *= 4) {
    if (4 * stride >= rows) {
      stages_of_rows<true>(stride, rows, scale, out);
    } else {
      stages_of_rows<false>(stride, rows, scale, out);
    }
  }
}

// `count` blocks of `rows` rows each, one behind another.
TF_HIPS_ROWS_APART void hadamard_blocks(const float* in, int64_t count, int64_t rows, float factor,
                                        float* out) {
  for (int64_t k = 0; k < count; ++k) {
    hadamard_block(in + 16 * rows * k, rows, factor, out + 16 * rows * k);
  }
}
