# SPDX-License-Identifier: Apache-2.0
"""What eden promises, by its specification's NumPy reference; every back end has the same bits.

What all codecs promise is in tests/ops/test_conformance.py and test_promises.py.
"""

import math
import re

import numpy as np
import pytest
from numpy.typing import ArrayLike

from tests.ops.codecs import SPECS, Floats, reference
from tf_hips.ops import Compressor, eden, parse

# What is lost of the energy of normal elements with 1 to 4 bits: 1 / D - 1, D being the share of
# the energy that the best levels keep; of 1 bit pi / 2 - 1.
LOST = (math.pi / 2 - 1, 0.13312, 0.03578, 0.00959)
# What others lose of 2^15 of them.
OTHERS = {
    "onebit": 0.363,
    "terngrad(bitwidth=1)": 16.8,
    "terngrad(bitwidth=2)": 1.38,
    "qsgd(bits=2)": 1.59,
    "terngrad(bitwidth=4)": 0.053,
    "qsgd(bits=4)": 0.037,
}


def through(compressor: Compressor, x: Floats, seed: int = 0) -> Floats:
    """What a receiver gets of x."""
    codec = reference(compressor)
    return codec.decode(codec.encode(x, seed=seed), x.size).astype(np.float64)


def lost(compressor: Compressor, x: Floats, seeds: int = 1) -> float:
    """The share of the energy of x that is lost, in the mean over seeds."""
    errors = [np.linalg.norm(through(compressor, x, seed) - x) for seed in range(seeds)]
    return float(np.mean(np.square(errors)) / np.linalg.norm(x.astype(np.float64)) ** 2)


def normal(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def written(kind: str, bits: int) -> list[float]:
    """The levels or centroids of a specification, from its text: of one width, smallest first."""
    text = (SPECS / "eden.pse").read_text(encoding="utf-8").partition("void EdenDecode")[0]
    half, found = 1 << (bits - 1), []
    for number, value in re.findall(rf"float {kind}(\d) = (.*);", text):
        arms = dict(re.findall(r"bits == (\d) \? ([\d.]+)", value))
        found.append((int(number), arms.get(str(bits), value.rpartition(": ")[2])))
    if kind == "c" and bits == 4:
        high = re.findall(r"float high = (.*);", text)[0]
        found += [(7 - k, value) for k, value in enumerate(re.findall(r"\d\.\d+", high))]
    used = half if kind == "c" else half - 1
    return [float(value) for _, value in sorted(found)[:used]]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_those_of_lloyd_and_max(bits: int) -> None:
    """Each ends halfway between centroids, which are the means of what is normal in it."""
    centroids = written("c", bits)
    levels = written("t", bits) if bits > 1 else []
    assert len(centroids) == len(levels) + 1 == 1 << (bits - 1)
    ends = [0.0, *levels, 40.0]
    for k, centroid in enumerate(centroids):
        low, high = ends[k : k + 2]
        mean = (density(low) - density(high)) / (below(high) - below(low))
        assert abs(centroid - mean) < 2e-8
        assert k == 0 or abs(low - (centroids[k - 1] + centroid) / 2) < 2e-8
    kept = sum(
        2 * c * c * (below(high) - below(low))
        for c, low, high in zip(centroids, ends, ends[1:], strict=False)
    )
    assert abs(1 / kept - 1 - LOST[bits - 1]) < 1e-5


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_what_is_lost_of_normal_elements(bits: int) -> None:
    assert lost(eden(bits=bits), normal(1 << 15)) == pytest.approx(LOST[bits - 1], rel=0.02)
    # And of what is far from normal before it is rotated.
    rng = np.random.default_rng(1)
    cubes = normal(1 << 15, 2) ** 3
    ones = rng.choice(np.array([-1, 1], np.float32), 1 << 15)
    for x in (cubes, ones):
        assert lost(eden(bits=bits), x) == pytest.approx(LOST[bits - 1], rel=0.06)


def test_what_others_lose_of_normal_elements() -> None:
    """The figures of docs/api.md."""
    x = normal(1 << 15)
    found = {text: lost(parse(text), x) for text in OTHERS}
    print({text: round(share, 3) for text, share in found.items()})
    for text, share in OTHERS.items():
        assert found[text] == pytest.approx(share, rel=0.05), text


@pytest.mark.parametrize("bits", [1, 4])
def test_a_block_keeps_what_it_has_in_its_own_direction(bits: int) -> None:
    x = normal(1 << 14, 3) ** 3
    found = through(eden(bits=bits, block=256), x).reshape(-1, 256)
    rows = x.astype(np.float64).reshape(-1, 256)
    np.testing.assert_allclose((found * rows).sum(1), (rows**2).sum(1), rtol=1e-5)


def test_errors_of_several_encoders_do_not_add_up() -> None:
    x = normal(1 << 14, 4)
    mean = np.mean([through(eden(), x, seed) for seed in range(16)], axis=0)
    share = np.sum((mean - x) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert share == pytest.approx(LOST[0] / 16, rel=0.05)


def one_of(n: int, at: int = -1) -> Floats:
    """Zeros, but for one element."""
    x = np.zeros(n, np.float32)
    x[at] = 1
    return x


def joined(first: ArrayLike, then: ArrayLike) -> Floats:
    return np.concatenate([first, then]).astype(np.float32)


# Last blocks of no power of two of elements, which are mixed as whole ones are.
LAST_BLOCKS: dict[str, Floats] = {
    "first of 1023": one_of(1023, 0),
    "last of 1023": one_of(1023),
    "last of 1535": one_of(1535),
    "middle of 513": one_of(513, 256),
    "1022 normal, and 10^4": joined(normal(1022), [1e4]),
    "9 small, 1 large": joined(normal(9) / 100, [1]),
    "8 small, 2 large": joined(normal(8) / 100, [1, -1]),
    "512 zeros, 256 normal": joined(np.zeros(512), normal(256)),
    "99 normal, and 10": joined(normal(99), [10]),
    "1023 normal": normal(1023),
}


def test_last_blocks_lose_what_whole_ones_do() -> None:
    """And what error feedback keeps of them does not grow: it would if they lost more than all."""
    for name, x in LAST_BLOCKS.items():
        found = [lost(eden(bits=bits), x, seeds=8) for bits in (1, 4)]
        residual = np.zeros_like(x)
        for seed in range(20):
            total = x + residual
            residual = (total - through(eden(), total, seed)).astype(np.float32)
        kept = np.linalg.norm(residual) / np.linalg.norm(x)
        print(name, [round(share, 4) for share in found], f"residual {kept:.2f}")
        assert found[0] < 0.65, name
        assert found[1] < 0.015, name
        assert kept < 1.5, name


def test_few_elements_of_a_block_lose_more_with_one_bit() -> None:
    """The figures of docs/api.md: two equal elements; 1 in 100 normal, also in the mean of 32."""
    two = one_of(1024, 5) + one_of(1024, 900)
    x = normal(1 << 15, 8)
    x[np.random.default_rng(9).random(x.size) > 0.01] = 0
    found = [(lost(eden(bits=bits), two, 8), lost(eden(bits=bits), x)) for bits in (1, 2, 4)]
    mean = np.mean([through(eden(), x, seed) for seed in range(32)], axis=0)
    of_mean = np.sum((mean - x) ** 2) / np.sum(x.astype(np.float64) ** 2)
    print([[round(share, 3) for share in both] for both in found], round(of_mean, 3))
    expected = [(1.0, 0.50), (0.09, 0.11), (0.010, 0.0084)]
    np.testing.assert_allclose(found, expected, rtol=0.1)
    # Twice as much as if nothing were lost in all of them.
    assert of_mean == pytest.approx(0.032, rel=0.1)


def test_one_element_in_a_block_arrives_as_it_is() -> None:
    x = np.zeros(4 * 1024, np.float32)
    x[[3, 1500, 2047 + 9, 3 * 1024 + 4]] = 1, -2, 3e-30, 3e30
    found = through(eden(), x)
    np.testing.assert_allclose(found[x != 0], x[x != 0], rtol=1e-6)
    largest = np.abs(x).reshape(-1, 1024).max(1)
    assert (np.abs(found - x).reshape(-1, 1024).max(1) <= 1e-6 * largest).all()


def test_small_elements_beside_a_large_one_are_lost_with_one_bit() -> None:
    """Why it is not marked as unbiased: no seed brings them back."""
    x = normal(1024, 5)
    x[7] = 3000
    mean = np.mean([through(eden(), x, seed) for seed in range(50)], axis=0)
    others = np.arange(1024) != 7
    assert np.linalg.norm(mean[others]) < 0.2 * np.linalg.norm(x[others])
    assert not eden().is_unbiased


def test_the_body_is_salt_scales_and_codes() -> None:
    x = normal(2500, 6)
    codec = reference(eden(bits=2))
    packet = codec.encode(x, seed=9)
    assert packet.size == codec.wire_bytes(x.size) == 16 + 4 + 4 * 3 + 2500 * 2 // 8
    one_bit = reference(eden()).wire_bytes(1 << 20)
    assert 4 * (1 << 20) / one_bit == pytest.approx(31.0, abs=0.05)
    double = packet.copy()
    double[20:32] = (packet[20:32].view("<f4") * np.float32(2)).view(np.uint8)
    np.testing.assert_array_equal(codec.decode(double, 2500), 2 * codec.decode(packet, 2500))
    # The salt is of the chunk: other signs, other codes.
    assert (codec.encode(x, seed=10)[16:20] != packet[16:20]).any()
