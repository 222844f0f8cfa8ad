# SPDX-License-Identifier: Apache-2.0
"""What every algorithm of the registry promises beyond equal bytes.

A line in REGISTRY adds an algorithm to each of these tests; what it makes of values that are not
finite is written down in NOT_FINITE.
"""

import math
import struct

import numpy as np
import pytest

from tests.ops.codecs import (
    Floats,
    all_variants,
    bits,
    encoded,
    gradient,
    in_reach,
    strange,
    variants,
    variants_with_feedback,
)
from tf_hips.errors import PacketError
from tf_hips.ops import REGISTRY, Compressor, Key, error_feedback, native

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]  # every promise for every codec

KEY = Key(seed=3, step=4, tensor_id=5)
PREFIX_BYTES = 16

each = pytest.mark.parametrize("compressor", all_variants(), ids=lambda c: c.text)
each_with_feedback = pytest.mark.parametrize(
    "compressor", variants_with_feedback(), ids=lambda c: c.text
)


def through(compressor: Compressor, x: Floats, key: Key = KEY) -> Floats:
    """What a receiver gets of x."""
    return native.decode(compressor, encoded(compressor, x, key), x.size)


def of_one_size(n: int) -> Floats:
    """Values between 1 and 2 with random signs: every codec is about equally unsure of each."""
    rng = np.random.default_rng(6)
    return (rng.uniform(1, 2, n) * rng.choice([-1, 1], n)).astype(np.float32)


@pytest.mark.parametrize(
    "compressor", [c for c in variants() if c.is_unbiased], ids=lambda c: c.text
)
def test_the_mean_over_seeds_is_the_gradient(compressor: Compressor) -> None:
    n, trials = 4000, 120
    x = of_one_size(n)
    decoded = np.stack([through(compressor, x, Key(seed, 1, 2)) for seed in range(trials)])
    error = decoded.astype(np.float64) - x
    # Noise is independent over elements and seeds, so means over both have this deviation.
    deviation = error.std() / np.sqrt(n * trials)
    floor = 1e-7
    assert abs(error.mean()) <= 4.5 * deviation + floor
    assert abs((error * np.sign(x)).mean()) <= 4.5 * deviation + floor
    each_element = error.mean(0) / (error.std(0).max() / np.sqrt(trials) + floor)
    assert np.abs(each_element).max() <= 5


@pytest.mark.parametrize(
    "compressor", [c for c in all_variants() if not c.is_unbiased], ids=lambda c: c.text
)
def test_biased_codecs_contract(compressor: Compressor) -> None:
    """What is lost is less than what was there: the condition of error feedback.

    Of a codec with state: of what its first step is given.
    """
    sparse = np.where(np.arange(3000) % 50 == 0, gradient(3000, 7), np.float32(0))
    for x in (gradient(3000, 7), sparse, np.full(3000, np.float32(0.3)), gradient(1) + 1):
        scaled = in_reach(compressor, x)
        decoded = through(compressor, scaled).astype(np.float64)
        lost, had = (np.linalg.norm(v) for v in (scaled - decoded, scaled.astype(np.float64)))
        assert lost < had if decoded.any() else lost == had


def number_sent(compressor: Compressor, n: int) -> int:
    """k of a sparse codec, as its specification says."""
    ratio = np.float32(dict(compressor.params)["ratio"])
    return min(n, max(1, int(np.ceil(np.float32(n) * ratio))))


def energy(x: Floats) -> float:
    """The sum of squares, rounded once."""
    return math.fsum(float(value) ** 2 for value in x)


ratios = pytest.mark.parametrize("ratio", [0.001, 0.01, 0.03, 0.5, 1.0])


@ratios
@pytest.mark.parametrize("n", [1, 7, 999, 4096])
def test_topk_loses_the_smallest_and_no_more_than_its_share(ratio: float, n: int) -> None:
    """||x - topk(x)||^2 <= (1 - k / n) ||x||^2, with equality where all are of one size."""
    compressor = Compressor("topk", (("ratio", ratio),))
    k = number_sent(compressor, n)
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n, np.float32)
    decoded = through(compressor, x)
    largest = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    np.testing.assert_array_equal(np.flatnonzero(decoded), largest)
    np.testing.assert_array_equal(decoded[largest], x[largest])
    # Squares of binary32 are exact in binary64, and so is each sum but for its last bit.
    assert n * energy(x - decoded) <= (n - k) * energy(x) * (1 + 2.0**-50)
    equal = np.float32(0.5) * rng.choice(np.array([-1, 1], np.float32), n)
    lost = energy(equal - through(compressor, equal))
    assert lost == (n - k) / 4
    assert n * lost == (n - k) * energy(equal)


def drawn(key: int, n: int, k: int) -> np.ndarray:
    """The elements that randomk draws: the finalizer of MurmurHash3, in Python's integers."""
    chosen = []
    for part in range(k):
        h = (part * 2654435769 + key) % 2**32
        h = (h ^ (h >> 16)) * 2246822507 % 2**32
        h = (h ^ (h >> 13)) * 3266489909 % 2**32
        h ^= h >> 16
        first, last = part * n // k, (part + 1) * n // k
        chosen.append(first + (h * (last - first) >> 32))
    return np.array(chosen)


@ratios
@pytest.mark.parametrize("n", [1, 7, 999, 4096])
def test_randomk_keeps_one_of_each_part_the_same_for_all_workers(ratio: float, n: int) -> None:
    compressor = Compressor("randomk", (("ratio", ratio),))
    k = number_sent(compressor, n)
    rows = np.random.default_rng(n).standard_normal((3, n), np.float32)
    packets = [native.encode(compressor, row, KEY) for row in rows]
    salt = int(packets[0][PREFIX_BYTES : PREFIX_BYTES + 4].view("<u4")[0])
    kept = drawn(salt, n, k)
    for row, packet in zip(rows, packets, strict=True):
        decoded = native.decode(compressor, packet, n)
        np.testing.assert_array_equal(np.flatnonzero(decoded), kept)
        np.testing.assert_array_equal(decoded[kept], row[kept])
        # A contraction for every key, not only in the mean: what is kept is lost no more.
        assert energy(row - decoded) < energy(row)
    merged = native.merge(compressor, packets, n)
    np.testing.assert_array_equal(merged[kept], rows[0][kept] + rows[1][kept] + rows[2][kept])
    assert np.count_nonzero(merged) == k


def test_randomk_draws_every_element_of_a_part_equally_often() -> None:
    """So the mean over keys of what is lost is (1 - k / n) ||x||^2, and of what arrives k / n x."""
    n, k, keys = 100, 25, 4000
    compressor = Compressor("randomk", (("ratio", k / n),))
    ones = np.ones(n, np.float32)
    hits = sum(through(compressor, ones, Key(7, step, 1)) for step in range(keys))
    assert hits.reshape(k, -1).sum(1).tolist() == [keys] * k
    expected = keys * k / n
    # chi^2 with 75 degrees of freedom exceeds 130 once in ten thousand times.
    assert ((hits - expected) ** 2 / expected).sum() < 130


@each_with_feedback
def test_what_was_sent_and_the_residual_are_the_gradients(compressor: Compressor) -> None:
    n, steps = 700, 40
    feedback = error_feedback(compressor)
    residual = np.zeros(n, np.float32)
    sent, given = np.zeros(n), np.zeros(n)
    for step in range(steps):
        x = in_reach(compressor, gradient(n, step))
        packet = native.encode(feedback, x, Key(1, step, 0), residual)
        sent += native.decode(feedback, packet, n)
        given += x
    scale = np.abs(given).max() + np.abs(residual).max()
    # Two roundings of binary32 per step, of values no larger than these.
    assert np.abs(sent + residual - given).max() <= steps * scale * 2.0**-22


def residual_norms(codec: Compressor, steps: int) -> list[float]:
    """Of error feedback around a codec, worked out here: compressors refuse what diverges."""
    rng = np.random.default_rng(9)
    residual = np.zeros(2000, np.float32)
    norms = []
    for step in range(steps):
        total = rng.standard_normal(2000, np.float32) + residual
        residual = total - through(codec, total, Key(1, step, 0))
        norms.append(float(np.linalg.norm(residual)))
    return norms


@pytest.mark.parametrize("name", [a.name for a in REGISTRY.values() if a.feedback_minimum])
def test_error_feedback_is_refused_where_residuals_grow(name: str) -> None:
    """And only there."""
    ((parameter, least),) = REGISTRY[name].feedback_minimum
    below = Compressor(name, ((parameter, least - 1),))
    with pytest.raises(ValueError, match="under error feedback"):
        error_feedback(below)
    growing, steady = (
        residual_norms(below, 60),
        residual_norms(Compressor(name, ((parameter, least),)), 60),
    )
    assert growing[59] > 1.3 * growing[9]
    assert max(steady) < 2.5 * steady[9]


@each
def test_the_same_key_gives_the_same_packet(compressor: Compressor) -> None:
    x = gradient(5000)
    packets = {encoded(compressor, x.copy(), KEY).tobytes() for _ in range(3)}
    assert len(packets) == 1


@each
def test_zero_stays_zero(compressor: Compressor) -> None:
    for n in (1, 5, 1030):
        np.testing.assert_array_equal(through(compressor, np.zeros(n, np.float32)), 0)


@each
@pytest.mark.parametrize("value", [0.3, -7.5, 1e-42, -3e35])
def test_equal_elements_stay_equal_in_the_mean(compressor: Compressor, value: float) -> None:
    """Finite, of the right sign, and no further away than the value itself."""
    x = np.full(1030, np.float32(value))
    decoded = through(compressor, x).astype(np.float64)
    if compressor.name == "fp16" and abs(value) > 65504:
        assert (decoded == np.sign(value) * np.inf).all()
        return
    assert np.isfinite(decoded).all()
    if compressor.name == "terngrad":
        # Beyond 99999 one end of its range is where its reductions begin.
        assert abs(value) > 99999 or (decoded == x).all()
        return
    if REGISTRY[compressor.name].mixes:
        # They are so together: less is lost than there was, or all where the block is too small.
        lost, had = (np.linalg.norm(v) for v in (decoded - x, x.astype(np.float64)))
        assert lost < had if decoded.any() else lost == had
        return
    assert (decoded * np.sign(value) >= 0).all()
    reach = REGISTRY[compressor.name].reach
    smallest = 2.0**-126 if compressor.is_unbiased else 0
    held = 0 if reach is None else dict(compressor.params)[reach]
    assert np.abs(decoded - x).max() <= max(np.abs(x).max(), held, smallest)


@pytest.mark.parametrize("name", REGISTRY)
def test_what_rounds_each_element_by_a_share_of_it_says_so(name: str) -> None:
    """And only that: others lose small ones beside large ones, or what is large."""
    rng = np.random.default_rng(11)
    x = (of_one_size(3000) * 10.0 ** rng.uniform(-36, 37, 3000)).astype(np.float32)
    lost = np.abs(through(Compressor(name), x).astype(np.float64) - x)
    assert bool((lost < np.abs(x)).all()) == REGISTRY[name].rounds_each


@pytest.mark.parametrize("name", [a.name for a in REGISTRY.values() if a.is_sparse])
def test_what_is_sent_depends_on_the_key_alone_where_all_draw_alike(name: str) -> None:
    one, other = (np.flatnonzero(through(Compressor(name), gradient(3000, k) + 9)) for k in (1, 2))
    assert 0 < one.size < 3000
    assert np.array_equal(one, other) == REGISTRY[name].draws_alike


@pytest.mark.parametrize("name", REGISTRY)
def test_equal_elements_arrive_unequal_where_blocks_are_mixed(name: str) -> None:
    """Else as two values at most: beside a level above one below, beside what is sent 0."""
    decoded = through(Compressor(name), np.full(1030, np.float32(0.3)))
    assert (np.unique(decoded).size > 2) == REGISTRY[name].mixes


NAN, INF = np.nan, np.inf
BLOCK = 7.25  # the largest finite value of each block; the least of the chunk is -BLOCK
# What arrives for NaN, infinity and -infinity, each alone among ordinary values, and whether these
# arrive as they would without. Of codecs that mix: as what it is encoded. Of sparse codecs: where
# the element is sent if it is large.
NOT_FINITE: dict[str, tuple[tuple[float, float, float], bool]] = {
    "bf16": ((NAN, INF, -INF), True),
    "bisparse": ((0, INF, -INF), False),
    "dgc": ((0, INF, -INF), False),
    "eden": ((0, BLOCK, -BLOCK), False),
    "fp16": ((NAN, INF, -INF), True),
    "fp32": ((NAN, INF, -INF), True),
    "fp8": ((NAN, BLOCK, -BLOCK), True),
    "graddrop": ((0, INF, -INF), False),
    "hips2bit": ((0, 0.5, -0.5), True),
    "int8": ((0, BLOCK, -BLOCK), True),
    "natural": ((INF, INF, -INF), True),
    "onebit": ((NAN, INF, -INF), False),
    "qsgd": ((0, BLOCK, -BLOCK), True),
    "randomk": ((NAN, INF, -INF), True),
    "tbq": ((0, 0.5, -0.5), True),
    "terngrad": ((-BLOCK, NAN, NAN), False),
    "topk": ((0, INF, -INF), False),
}


def test_every_algorithm_says_what_it_makes_of_values_that_are_not_finite() -> None:
    assert sorted(NOT_FINITE) == sorted(REGISTRY)


@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("which", range(3), ids=["nan", "inf", "-inf"])
def test_values_that_are_not_finite(name: str, which: int) -> None:
    compressor, place = Compressor(name), 37
    arrives, leaves_others = NOT_FINITE[name]
    x = gradient(1023)
    if REGISTRY[name].draws_alike:
        place = int(np.flatnonzero(through(compressor, np.ones_like(x)))[3])
    x[::16], x[8::16], x[place] = BLOCK, -BLOCK, 0
    without = through(compressor, x)
    x[place] = (NAN, INF, -INF)[which]
    decoded = through(compressor, x)
    if REGISTRY[name].mixes:
        x[place] = arrives[which]
        np.testing.assert_array_equal(bits(decoded), bits(through(compressor, x)))
        return
    np.testing.assert_allclose(decoded[place], np.float32(arrives[which]), rtol=1e-6)
    if leaves_others:
        np.testing.assert_array_equal(
            np.delete(bits(decoded), place), np.delete(bits(without), place)
        )


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_onebit_spoils_the_side_of_a_value_that_is_not_finite(value: float) -> None:
    x = gradient(1023)
    x[37] = 0
    without = through(Compressor("onebit"), x)
    x[37] = value
    decoded = through(Compressor("onebit"), x)
    spoilt = x < 0 if value < 0 else ~(x < 0)
    np.testing.assert_array_equal(decoded[spoilt], np.float32(value))
    whole = ~spoilt & (value > 0 or np.isnan(value))
    np.testing.assert_array_equal(decoded[whole], without[whole])


def test_onebit_makes_sums_that_overflow_infinite() -> None:
    x = np.array([3e38, 3e38, -1, -3], np.float32)
    assert through(Compressor("onebit"), x).tolist() == [INF, INF, -2, -2]


@pytest.mark.parametrize("values", [(INF,), (-INF,), (INF, -INF), (NAN, INF), (1e38, -3e38)])
def test_terngrad_makes_a_chunk_nan_whose_range_is_not_finite(values: tuple[float, ...]) -> None:
    x = gradient(1023)
    x[[37, 700][: len(values)]] = values
    assert np.isnan(through(Compressor("terngrad"), x)).all()


@pytest.mark.parametrize("place", [0, 37, 511, 1022])
def test_terngrad_keeps_the_others_in_their_range_beside_nan(place: int) -> None:
    x = gradient(1023)
    x[place] = NAN
    decoded = through(Compressor("terngrad"), x)
    assert np.isfinite(decoded).all()
    assert np.nanmin(x) <= decoded.min() == decoded[place] <= decoded.max() <= np.nanmax(x) + 1e-6
    assert (through(Compressor("terngrad"), np.full(5, np.float32(NAN))) == 99999).all()


def test_thresholds_that_are_nan_send_nothing() -> None:
    x = np.array([NAN, INF, -INF], np.float32)
    for name in ("graddrop", "bisparse"):
        assert not through(Compressor(name, (("ratio", 1.0),)), np.full_like(x, NAN)).any()
    np.testing.assert_array_equal(through(Compressor("topk", (("ratio", 1.0),)), x), x)


@each
def test_denormals_are_not_made_larger(compressor: Compressor) -> None:
    x = strange(1023)
    decoded = through(compressor, x).astype(np.float64)
    assert np.isfinite(decoded).all()
    # Random rounding may reach the next level up, which is 2^-125 for powers of two.
    assert np.abs(decoded).max() <= 2.0**-125


@each
def test_packets_of_other_versions_are_refused(compressor: Compressor) -> None:
    packet = encoded(compressor, gradient(40), KEY)
    (version,) = struct.unpack_from("<H", packet, 4)
    for other in (0, version + 1, 0xFFFF):
        old = packet.copy()
        old[4:6] = np.frombuffer(struct.pack("<H", other), np.uint8)
        with pytest.raises(PacketError, match="version"):
            native.decode(compressor, old, 40)


@each
def test_packets_of_other_codecs_are_refused(compressor: Compressor) -> None:
    """Also of the same algorithm with other parameters."""
    packet = encoded(compressor, gradient(40), KEY)
    for other in all_variants():
        if other != compressor:
            with pytest.raises(PacketError):
                native.decode(other, packet, 40)


@each
def test_any_body_decodes_or_is_refused(compressor: Compressor) -> None:
    """Hostile bytes behind an honest prefix: some floats, or a refusal; never a crash."""
    packet = encoded(compressor, gradient(333), KEY)
    rng = np.random.default_rng(8)
    for _ in range(20):
        packet[PREFIX_BYTES:] = rng.integers(0, 256, packet.size - PREFIX_BYTES, np.uint8)
        try:
            decoded = native.decode(compressor, packet, 333)
        except PacketError:
            continue
        again = native.decode(compressor, packet, 333)
        np.testing.assert_array_equal(bits(decoded), bits(again))
