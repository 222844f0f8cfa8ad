# SPDX-License-Identifier: Apache-2.0
"""Codes against other implementations of their formats: ml_dtypes, NumPy, MXNet's layout."""

import ml_dtypes
import numpy as np
import pytest

from tests.ops.codecs import Floats, gradient
from tf_hips.ops import Compressor, Key, native, parse

KEY = Key(seed=1, step=2, tensor_id=3)
PREFIX_BYTES = 16


def body(compressor: Compressor, x: Floats) -> np.ndarray:
    """The body of the packet of x, as bytes."""
    return native.encode(compressor, x, KEY)[PREFIX_BYTES:]


def floats() -> Floats:
    """All bits, all 16-bit floats and what lies half way between them, ordinary values."""
    rng = np.random.default_rng(2)
    words = rng.integers(0, 2**32, 50_000, np.uint32).view(np.float32)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[~np.isnan(halves)]
    edges = np.array([65519.99, 65520, np.nan, np.inf, -np.inf, 3.3961775e38], np.float32)
    half_way = halves * np.float32(1 + 2.0**-11)
    return np.concatenate([words, halves, half_way, edges, gradient(5000)])


@pytest.mark.parametrize(
    ("name", "kind", "nan"),
    [("fp16", np.float16, 0x7E00), ("bf16", ml_dtypes.bfloat16, 0x7FC0)],
)
def test_16_bits(name: str, kind: type, nan: int) -> None:
    x = floats()
    with np.errstate(all="ignore"):
        expected = x.astype(kind)
    codes = body(parse(name), x).view(np.uint16)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(codes[~is_nan], expected.view(np.uint16)[~is_nan])
    assert set(codes[is_nan].tolist()) == {nan}
    decoded = native.decode(parse(name), native.encode(parse(name), x, KEY), x.size)
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_8_bits(name: str, kind: type) -> None:
    block = 64
    compressor = parse(f"fp8({name}, {block})")
    rng = np.random.default_rng(3)
    wide = (2.0 ** rng.uniform(-30, 20, 20_000) * rng.choice([-1, 1], 20_000)).astype(np.float32)
    x = np.concatenate([wide, gradient(20_001)])
    blocks = -(-x.size // block)
    data = body(compressor, x)
    scales, codes = data[: 4 * blocks].view(np.float32), data[4 * blocks :]
    scaled = x * np.repeat(np.float32(1) / scales, block)[: x.size]
    np.testing.assert_array_equal(codes, scaled.astype(kind).view(np.uint8))

    # Every code decodes as the format says, but infinities, which are never sent, as NaN.
    packet = native.encode(compressor, np.ones(256 * block, np.float32), KEY)
    packet[PREFIX_BYTES + 4 * 256 :] = np.repeat(np.arange(256, dtype=np.uint8), block)
    packet[PREFIX_BYTES : PREFIX_BYTES + 4 * 256] = np.ones(256, np.float32).view(np.uint8)
    meant = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    meant[np.isinf(meant)] = np.nan
    decoded = native.decode(compressor, packet, 256 * block)
    np.testing.assert_array_equal(decoded[::block], meant)


def test_hips2bit_has_the_bytes_of_mxnet() -> None:
    n = 37
    x = gradient(n)
    x[:5] = [0.6, -0.6, 0.4, 0.5, -0.5]
    expected = np.zeros(4 * -(-n // 16), np.uint8)
    for i, value in enumerate(x):
        code = 3 if value >= 0.5 else 2 if value <= -0.5 else 0
        expected[i // 4] |= code << (6 - 2 * (i % 4))
    np.testing.assert_array_equal(body(parse("hips2bit"), x), expected)
    assert expected[0] == 0b11100011


def test_natural_is_exact_on_powers_of_two() -> None:
    x = np.concatenate([2.0 ** np.arange(-126, 128), [0]]).astype(np.float32)
    packet = native.encode(parse("natural"), -x, KEY)
    np.testing.assert_array_equal(native.decode(parse("natural"), packet, x.size), -x)


def test_tbq_layout() -> None:
    x = np.array([1, -1, 0, 0.5, -0.5], np.float32)
    codes = [2, 0, 1, 2, 0]
    expected = sum(code << 2 * k for k, code in enumerate(codes))
    assert int.from_bytes(body(parse("tbq"), x).tobytes(), "little") == expected


def test_int8_and_qsgd_layouts() -> None:
    x = np.array([127, -127, 1, 0, -3, *[0] * 14], np.float32)
    data = body(parse("int8(16)"), x)
    np.testing.assert_array_equal(data[:8].view(np.float32), [1, 0])
    assert data[8:13].tolist() == [255, 1, 129, 128, 125]
    assert data[8 + 16 :].tolist() == [128] * 3
    x = np.array([7, -7, 3, 0, -1, *[0] * 11], np.float32)
    data = body(parse("qsgd(4, 16)"), x)
    assert data[:4].view(np.float32) == 1
    assert data[4:7].tolist() == [14 | 0 << 4, 10 | 7 << 4, 6 | 7 << 4]
