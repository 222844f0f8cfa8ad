# SPDX-License-Identifier: Apache-2.0
"""What every algorithm of the registry promises beyond equal bytes.

A line in REGISTRY adds an algorithm to each of these tests; what it makes of values that are not
finite is written down in NOT_FINITE.
"""

import struct

import numpy as np
import pytest

from tests.ops.codecs import (
    Floats,
    bits,
    gradient,
    in_reach,
    strange,
    variants,
    variants_with_feedback,
)
from tf_hips.errors import PacketError
from tf_hips.ops import REGISTRY, Compressor, Key, error_feedback, native

pytestmark = pytest.mark.timeout(60)

KEY = Key(seed=3, step=4, tensor_id=5)
PREFIX_BYTES = 16

each = pytest.mark.parametrize("compressor", variants(), ids=lambda c: c.text)
each_with_feedback = pytest.mark.parametrize(
    "compressor", variants_with_feedback(), ids=lambda c: c.text
)


def through(compressor: Compressor, x: Floats, key: Key = KEY) -> Floats:
    """What a receiver gets of x."""
    return native.decode(compressor, native.encode(compressor, x, key), x.size)


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
    "compressor", [c for c in variants() if not c.is_unbiased], ids=lambda c: c.text
)
def test_biased_codecs_contract(compressor: Compressor) -> None:
    """What is lost is less than what was there: the condition of error feedback."""
    sparse = np.where(np.arange(3000) % 50 == 0, gradient(3000, 7), np.float32(0))
    for x in (gradient(3000, 7), sparse, np.full(3000, np.float32(0.3)), gradient(1) + 1):
        scaled = in_reach(compressor, x)
        decoded = through(compressor, scaled).astype(np.float64)
        lost, had = (np.linalg.norm(v) for v in (scaled - decoded, scaled.astype(np.float64)))
        assert lost < had if decoded.any() else lost == had


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
    packets = {native.encode(compressor, x.copy(), KEY).tobytes() for _ in range(3)}
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
    assert (decoded * np.sign(value) >= 0).all()
    reach = REGISTRY[compressor.name].reach
    smallest = 2.0**-126 if compressor.is_unbiased else 0
    held = 0 if reach is None else dict(compressor.params)[reach]
    assert np.abs(decoded - x).max() <= max(np.abs(x).max(), held, smallest)


NAN, INF = np.nan, np.inf
BLOCK = 7.25  # stands for the largest finite value of the block
# What arrives for NaN, infinity and -infinity among ordinary values, and whether these arrive as
# they would without; None: whatever follows from the means or ends that a codec computes, or from
# which elements it sends.
NOT_FINITE: dict[str, tuple[tuple[float, float, float], bool] | None] = {
    "bf16": ((NAN, INF, -INF), True),
    "bisparse": None,
    "dgc": None,
    "fp16": ((NAN, INF, -INF), True),
    "fp32": ((NAN, INF, -INF), True),
    "fp8": ((NAN, BLOCK, -BLOCK), True),
    "graddrop": None,
    "hips2bit": ((0, 0.5, -0.5), True),
    "int8": ((0, BLOCK, -BLOCK), True),
    "natural": ((INF, INF, -INF), True),
    "onebit": None,
    "qsgd": ((0, BLOCK, -BLOCK), True),
    "randomk": None,
    "tbq": ((0, 0.5, -0.5), True),
    "terngrad": None,
    "topk": None,
}


def test_every_algorithm_says_what_it_makes_of_values_that_are_not_finite() -> None:
    assert sorted(NOT_FINITE) == sorted(REGISTRY)


@pytest.mark.parametrize("name", [name for name, says in NOT_FINITE.items() if says is not None])
def test_values_that_are_not_finite(name: str) -> None:
    says = NOT_FINITE[name]
    assert says is not None
    compressor, places = Compressor(name), [5, 300, 700]
    x = gradient(1023)
    x[places] = 0
    x[::16] = BLOCK
    without = through(compressor, x)
    x[places] = [NAN, INF, -INF]
    decoded = through(compressor, x)
    np.testing.assert_allclose(decoded[places], np.array(says[0], np.float32), rtol=1e-6)
    if says[1]:
        np.testing.assert_array_equal(
            np.delete(bits(decoded), places), np.delete(bits(without), places)
        )


@each
def test_denormals_are_not_made_larger(compressor: Compressor) -> None:
    x = strange(1023)
    decoded = through(compressor, x).astype(np.float64)
    assert np.isfinite(decoded).all()
    # Random rounding may reach the next level up, which is 2^-125 for powers of two.
    assert np.abs(decoded).max() <= 2.0**-125


@each
def test_packets_of_other_versions_are_refused(compressor: Compressor) -> None:
    packet = native.encode(compressor, gradient(40), KEY)
    (version,) = struct.unpack_from("<H", packet, 4)
    for other in (0, version + 1, 0xFFFF):
        old = packet.copy()
        old[4:6] = np.frombuffer(struct.pack("<H", other), np.uint8)
        with pytest.raises(PacketError, match="version"):
            native.decode(compressor, old, 40)


@each
def test_packets_of_other_codecs_are_refused(compressor: Compressor) -> None:
    """Also of the same algorithm with other parameters."""
    packet = native.encode(compressor, gradient(40), KEY)
    for other in variants():
        if other != compressor:
            with pytest.raises(PacketError):
                native.decode(other, packet, 40)


@each
def test_any_body_decodes_or_is_refused(compressor: Compressor) -> None:
    """Hostile bytes behind an honest prefix: some floats, or a refusal; never a crash."""
    packet = native.encode(compressor, gradient(333), KEY)
    rng = np.random.default_rng(8)
    for _ in range(20):
        packet[PREFIX_BYTES:] = rng.integers(0, 256, packet.size - PREFIX_BYTES, np.uint8)
        try:
            decoded = native.decode(compressor, packet, 333)
        except PacketError:
            continue
        again = native.decode(compressor, packet, 333)
        np.testing.assert_array_equal(bits(decoded), bits(again))
