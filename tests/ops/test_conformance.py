# SPDX-License-Identifier: Apache-2.0
"""Every algorithm of the registry, in all its faces: the same bytes, the same floats.

A line in REGISTRY adds an algorithm to each of these tests. What codecs with state encode is
compared in tests/ops/test_state.py.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.codecs import (
    SPECS,
    Floats,
    all_variants,
    bits,
    encoded,
    gradient,
    in_reach,
    reference,
    strange,
    variants,
    variants_with_feedback,
)
from tf_hips.ops import CHUNK, REGISTRY, Compressor, Key, error_feedback, graph, library, native

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

KEY = Key(seed=0x9E3779B97F4A7C15, step=5, tensor_id=3)
SIZES = [0, 1, 7, 8, 1023]
LARGE = [10**6 + 3, CHUNK + 5, pytest.param(10**7 + 3, marks=pytest.mark.slow)]
DEFAULTS = [Compressor(name) for name, a in REGISTRY.items() if not a.state_names]

each = pytest.mark.parametrize("compressor", variants(), ids=lambda c: c.text)
with_state_too = pytest.mark.parametrize("compressor", all_variants(), ids=lambda c: c.text)
each_with_feedback = pytest.mark.parametrize(
    "compressor", variants_with_feedback(), ids=lambda c: c.text
)
each_default = pytest.mark.parametrize("compressor", DEFAULTS, ids=lambda c: c.text)


@functools.cache
def traced(function: Callable[..., Any], compressor: Compressor) -> Callable[..., Any]:
    """A graph for each shape and key, which tests of other values use again."""
    return tf.function(functools.partial(function, compressor), autograph=False)


def by_tensorflow(
    function: Callable[..., Any], compressor: Compressor, n: int
) -> Callable[..., Any]:
    """In a graph; for a few elements without one, as each shape's takes longer than all else."""
    if 0 < n < 1000:
        return functools.partial(function, compressor)
    return traced(function, compressor)


def graph_encode(
    compressor: Compressor, x: Floats, kept: Floats | None = None
) -> tuple[Floats, Floats | None]:
    """Encodes in a graph, where TensorFlow's threads flush denormals."""
    packet, new_residual = by_tensorflow(graph.encode, compressor, x.size)(
        tf.constant(x),
        seed=KEY.seed,
        step=KEY.step,
        tensor_id=KEY.tensor_id,
        offset=KEY.offset,
        kept=None if kept is None else tf.constant(kept),
    )
    return packet.numpy(), None if new_residual is None else new_residual.numpy()


def assert_faces_agree(compressor: Compressor, x: Floats) -> None:
    expected = reference(compressor).encode(
        x, seed=KEY.seed, step=KEY.step, tensor_id=KEY.tensor_id, offset=KEY.offset
    )
    packet = native.encode(compressor, x, KEY)
    assert packet.tobytes() == expected.tobytes()
    assert graph_encode(compressor, x)[0].tobytes() == expected.tobytes()
    assert packet.size == compressor.wire_bytes(x.size) == reference(compressor).wire_bytes(x.size)

    values = bits(reference(compressor).decode(expected, x.size))
    np.testing.assert_array_equal(bits(native.decode(compressor, packet, x.size)), values)
    decoded = by_tensorflow(graph.decode, compressor, x.size)(tf.constant(packet), x.size)
    np.testing.assert_array_equal(bits(decoded.numpy()), values)


@each
@pytest.mark.parametrize("n", SIZES)
def test_faces_agree(compressor: Compressor, n: int) -> None:
    assert_faces_agree(compressor, gradient(n))


@each_default
@pytest.mark.parametrize("n", LARGE)
def test_faces_agree_on_large_tensors(compressor: Compressor, n: int) -> None:
    assert_faces_agree(compressor, gradient(n))


@each
def test_faces_agree_on_denormals(compressor: Compressor) -> None:
    assert_faces_agree(compressor, strange(1023))


@each
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_faces_agree_beside_a_value_that_is_not_finite(
    compressor: Compressor, value: float
) -> None:
    x = gradient(1023)
    x[[5, 700]] = value
    assert_faces_agree(compressor, x)


@each
def test_faces_agree_on_equal_elements(compressor: Compressor) -> None:
    for value in (0.3, -7.5, -0.0, 1e-42, -3e35, np.nan, np.inf, -np.inf):
        assert_faces_agree(compressor, np.full(1023, np.float32(value)))


@with_state_too
def test_packets_of_other_versions_are_refused_in_a_graph(compressor: Compressor) -> None:
    packet = encoded(compressor, gradient(40), KEY)
    packet[4] += 1
    for use in (graph.decode, lambda c, p, n: graph.merge(c, p[tf.newaxis], n)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="version"):
            use(compressor, tf.constant(packet), 40)


@each_with_feedback
def test_shapes_are_static(compressor: Compressor) -> None:
    feedback = error_feedback(compressor)
    size = compressor.wire_bytes(35)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([5, 7]), tf.TensorSpec([35])])
    def shapes(x: tf.Tensor, flat: tf.Tensor) -> tf.Tensor:
        packet, _ = graph.encode(compressor, x, seed=1, step=2, tensor_id=0)
        kept, residual = graph.encode(feedback, x, seed=1, step=2, tensor_id=0, kept=x)
        rows = tf.stack([packet, kept])
        again, flat_residual = graph.merge_encode(
            feedback, rows, 35, flat, seed=1, step=2, tensor_id=0
        )
        assert packet.shape == kept.shape == again.shape == [size]
        assert residual.shape == [5, 7]
        assert flat_residual.shape == [35]
        assert graph.decode(compressor, packet, 35).shape == [35]
        assert graph.merge(compressor, rows, 35).shape == [35]
        return again

    assert shapes(tf.ones([5, 7]), tf.zeros([35])).shape == [size]


@each
def test_shapes_that_are_unknown_until_the_graph_runs(compressor: Compressor) -> None:
    encode = tf.function(
        lambda x: graph.encode(
            compressor, x, seed=KEY.seed, step=KEY.step, tensor_id=KEY.tensor_id
        )[0],
        input_signature=[tf.TensorSpec(None)],
        autograph=False,
    )
    x = gradient(12)
    packet = native.encode(compressor, x, KEY)
    np.testing.assert_array_equal(encode(x), packet)
    np.testing.assert_array_equal(encode(x.reshape(3, 4)), packet)


@with_state_too
def test_a_wrong_static_shape_is_refused_when_the_graph_is_made(compressor: Compressor) -> None:
    with pytest.raises(ValueError, match="must be equal"):
        tf.function(
            lambda: graph.decode(compressor, tf.zeros([40], tf.uint8), 35), autograph=False
        )()


@with_state_too
@pytest.mark.parametrize("n", [0, 8, 1023])
def test_merge_is_the_sum_in_order(compressor: Compressor, n: int) -> None:
    packets = [encoded(compressor, gradient(n, seed), KEY) for seed in range(3)]
    total = reference(compressor).decode(packets[0], n)
    for packet in packets[1:]:
        total = total + reference(compressor).decode(packet, n)
    merged = native.merge(compressor, packets, n)
    np.testing.assert_array_equal(bits(merged), bits(total))
    in_graph = by_tensorflow(graph.merge, compressor, n)(tf.constant(np.stack(packets)), n)
    np.testing.assert_array_equal(bits(in_graph.numpy()), bits(total))

    one_by_one = native.decode(compressor, packets[0], n)
    for packet in packets[1:]:
        native.decode(compressor, packet, n, out=one_by_one, add=True)
    np.testing.assert_array_equal(bits(one_by_one), bits(total))


@with_state_too
def test_any_number_of_rows_is_added_in_order(compressor: Compressor) -> None:
    """Loops add some rows at a time, a range of 4096 elements after the other."""
    n = 2 * 4096 + 1029
    packets = [encoded(compressor, gradient(n, seed), KEY) for seed in range(17)]
    total = native.decode(compressor, packets[0], n)
    for count, packet in enumerate(packets[1:], start=2):
        native.decode(compressor, packet, n, out=total, add=True)
        merged = native.merge(compressor, packets[:count], n)
        np.testing.assert_array_equal(bits(merged), bits(total), err_msg=f"{count} rows")


@each_with_feedback
@pytest.mark.parametrize("wrap", [lambda c: c, error_feedback], ids=["plain", "feedback"])
def test_merge_encode_is_merge_then_encode(compressor: Compressor, wrap: object) -> None:
    n = 1023
    wrapped = wrap(compressor)
    packets = [native.encode(compressor, gradient(n, seed), KEY) for seed in range(3)]
    residual = gradient(n, 9) if wrapped.has_residual else None
    expected_residual = None if residual is None else residual.copy()
    fused_residual = None if residual is None else residual.copy()
    total = native.merge(compressor, packets, n)
    expected = native.encode(wrapped, total, KEY, expected_residual)
    fused = native.merge_encode(wrapped, packets, n, KEY, fused_residual)
    in_graph, graph_residual = tf.function(graph.merge_encode, autograph=False)(
        wrapped,
        tf.constant(np.stack(packets)),
        n,
        None if residual is None else tf.constant(residual),
        seed=KEY.seed,
        step=KEY.step,
        tensor_id=KEY.tensor_id,
    )
    assert fused.tobytes() == expected.tobytes() == in_graph.numpy().tobytes()
    if residual is not None:
        np.testing.assert_array_equal(bits(fused_residual), bits(expected_residual))
        np.testing.assert_array_equal(bits(graph_residual.numpy()), bits(expected_residual))


@each_with_feedback
@pytest.mark.parametrize("n", [0, 7, 1023])
def test_error_feedback_conserves(compressor: Compressor, n: int) -> None:
    feedback = error_feedback(compressor)
    x, before = gradient(n, 1), gradient(n, 2)
    residual = before.copy()
    packet = native.encode(feedback, x, KEY, residual)
    # What is encoded is gradient + residual, and what stays is what decoding does not give back.
    total = x + before
    assert packet.tobytes() == native.encode(compressor, total, KEY).tobytes()
    decoded = native.decode(feedback, packet, n)
    np.testing.assert_array_equal(bits(residual), bits(total - decoded))
    # decoded + residual == gradient + old residual, but for the rounding of that one difference.
    lost = decoded.astype(np.float64) + residual - total
    assert np.all(np.abs(lost) <= np.spacing(np.abs(residual)) / 2)

    in_graph, graph_residual = graph_encode(feedback, x, kept=before)
    assert in_graph.tobytes() == packet.tobytes()
    np.testing.assert_array_equal(bits(graph_residual), bits(residual))


@each_default
def test_error_feedback_on_two_chunks(compressor: Compressor) -> None:
    n = CHUNK + 5
    x, before = gradient(n, 1), gradient(n, 2)
    residual = before.copy()
    packet = native.encode(error_feedback(compressor), x, KEY, residual)
    expected = x + before - native.decode(compressor, packet, n)
    np.testing.assert_array_equal(bits(residual), bits(expected))
    in_graph, graph_residual = graph_encode(error_feedback(compressor), x, kept=before)
    assert in_graph.tobytes() == packet.tobytes()
    np.testing.assert_array_equal(bits(graph_residual), bits(residual))


@each_with_feedback
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_residuals_stay_finite(compressor: Compressor, value: float) -> None:
    x = gradient(100)
    x[17] = value
    residual = np.zeros(100, np.float32)
    native.encode(error_feedback(compressor), x, KEY, residual)
    assert np.isfinite(residual).all()
    assert residual[17] == 0


@each_with_feedback
def test_mean_error_vanishes_with_error_feedback(compressor: Compressor) -> None:
    n = 500
    feedback = error_feedback(compressor)
    x = in_reach(compressor, gradient(n, 4))
    # A codec that sends one element in a hundred is done with all of them after a hundred steps.
    first = native.decode(compressor, native.encode(compressor, x, Key(1, 0, 0)), n)
    share = max(1, np.count_nonzero(first)) / np.count_nonzero(x)
    steps = max(200, int(15 / share))
    residual, total = np.zeros(n, np.float32), np.zeros(n, np.float64)
    errors, largest = {}, 0.0
    for step in range(steps):
        packet = native.encode(feedback, x, Key(seed=1, step=step, tensor_id=0), residual)
        total += native.decode(feedback, packet, n)
        if step in (0, 19, steps - 1):
            errors[step] = np.linalg.norm(total / (step + 1) - x)
        largest = max(largest, float(np.linalg.norm(residual)))
    # The mean's error is the last residual over the number of steps; residuals stay bounded.
    assert errors[steps - 1] <= largest / steps + 1e-5 * np.linalg.norm(x)
    assert errors[steps - 1] <= errors[0] / 5 + 1e-5 * np.linalg.norm(x)
    assert errors[steps - 1] <= errors[19] / 2 + 1e-5 * np.linalg.norm(x)
    assert largest <= max(30, 5 / share) * np.linalg.norm(x)


@pytest.mark.parametrize(
    "compressor", [c for c in variants() if c.is_unbiased], ids=lambda c: c.text
)
def test_unbiased_codecs_are(compressor: Compressor) -> None:
    n, trials = 200, 400
    x = gradient(n, 5)
    decoded = np.stack(
        [
            native.decode(compressor, native.encode(compressor, x, Key(seed, 0, 0)), n)
            for seed in range(trials)
        ]
    ).astype(np.float64)
    # The largest spread serves all: values near a level are seen to move too rarely to show theirs.
    spread = decoded.std(0).max() / np.sqrt(trials)
    assert np.abs(decoded.mean(0) - x).max() <= 5 * spread
    assert abs((decoded.mean(0) - x).mean()) <= 5 * spread / np.sqrt(n)


@each
@pytest.mark.parametrize("field", ["seed", "step", "tensor_id", "offset"])
def test_every_part_of_the_key_counts(compressor: Compressor, field: str) -> None:
    x = gradient(1023)
    key = dataclasses.replace(KEY, **{field: getattr(KEY, field) + 8})
    packet = native.encode(compressor, x, key)
    # Each key would be a graph of its own.
    eager, _ = graph.encode(compressor, tf.constant(x), **dataclasses.asdict(key))
    assert eager.numpy().tobytes() == packet.tobytes()
    assert reference(compressor).encode(x, **dataclasses.asdict(key)).tobytes() == packet.tobytes()
    text = (SPECS / f"{compressor.name}.pse").read_text(encoding="utf-8")
    if "sample(" in text:
        # The key decides a threshold; near ones select the same elements.
        keys = [dataclasses.replace(KEY, **{field: 4096 * (1 + k)}) for k in range(12)]
        assert len({native.encode(compressor, x, key).tobytes() for key in keys}) > 1
        return
    is_random = "random<" in text
    assert (packet.tobytes() != native.encode(compressor, x, KEY).tobytes()) == is_random


@each_default
def test_a_chunk_may_be_encoded_on_its_own(compressor: Compressor) -> None:
    x = gradient(CHUNK + 100)
    whole = native.encode(compressor, x, KEY)
    first = compressor.chunk_packet_bytes(CHUNK)
    second = native.encode(compressor, x[CHUNK:], dataclasses.replace(KEY, offset=CHUNK))
    assert whole[first:].tobytes() == second.tobytes()
    np.testing.assert_array_equal(
        native.decode(compressor, whole[first:], 100),
        native.decode(compressor, whole, x.size)[CHUNK:],
    )


class _Param(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("is_integer", ctypes.c_int32),
        ("default_value", ctypes.c_double),
        ("minimum", ctypes.c_double),
        ("maximum", ctypes.c_double),
    ]


class _Codec(ctypes.Structure):
    """The data of TfHipsCodec, up to its functions."""

    _fields_ = [
        ("abi_version", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("spec_hash", ctypes.c_uint32),
        ("num_params", ctypes.c_int32),
        ("params", ctypes.POINTER(_Param)),
        ("is_fixed_size", ctypes.c_int32),
        ("is_sparse", ctypes.c_int32),
    ]


def test_registry_says_what_the_library_says() -> None:
    cdll = library.native()
    cdll.tf_hips_codec_at.restype = ctypes.POINTER(_Codec)
    codecs = [cdll.tf_hips_codec_at(i).contents for i in range(cdll.tf_hips_num_codecs())]
    assert [codec.name.decode() for codec in codecs] == sorted(REGISTRY)
    assert sorted(path.stem for path in SPECS.glob("*.pse")) == sorted(REGISTRY)
    for codec in codecs:
        facts = [
            (p.name.decode(), bool(p.is_integer), p.default_value, p.minimum, p.maximum)
            for p in codec.params[: codec.num_params]
        ]
        assert facts == [
            (p.name, isinstance(p.default, int), *map(p.checked, (p.default, p.minimum, p.maximum)))
            for p in REGISTRY[codec.name.decode()].parameters
            if p.is_codec
        ]
        assert codec.is_fixed_size == 1
        assert bool(codec.is_sparse) == REGISTRY[codec.name.decode()].is_sparse


def test_the_row_with_a_bad_body_is_named() -> None:
    codec = Compressor("terngrad")
    good = native.encode(codec, gradient(16), KEY)
    bad = good.copy()
    bad[16] = 3  # the width that TernGrad repeats in its body
    rows = tf.constant(np.stack([good, good, bad, bad]))
    message = "row 2 of `packets` does not decode: .*contradicts the codec's parameters"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        graph.merge(codec, rows, 16)
    feedback = error_feedback(codec)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        graph.merge_encode(feedback, rows, 16, tf.zeros(16), seed=1, step=2, tensor_id=0)


def test_false_rows_cost_no_memory() -> None:
    """Terabytes are not asked for when the rows cannot hold that many elements."""
    codec = Compressor("onebit")
    row = native.encode(codec, gradient(16), KEY)
    merge = tf.function(
        lambda rows: graph.merge(codec, rows, 1 << 44),
        input_signature=[tf.TensorSpec([None, None], tf.uint8)],
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 0 of `packets` does not decode"):
        merge(tf.constant(row[None]))


@pytest.mark.parametrize("wrong", [1.5, True, np.float32(2), tf.constant(2.0)], ids=repr)
def test_seeds_and_steps_are_integers(wrong: object) -> None:
    x = tf.zeros(4)
    with pytest.raises(TypeError, match="`step` must be an integer"):
        graph.encode(Compressor("onebit"), x, seed=1, step=wrong, tensor_id=0)
    with pytest.raises(TypeError, match="`seed` must be an integer"):
        graph.encode(Compressor("onebit"), x, seed=wrong, step=1, tensor_id=0)
