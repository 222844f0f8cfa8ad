# SPDX-License-Identifier: Apache-2.0
"""Codecs that keep state from step to step: every algorithm of the registry that has some, in all
faces; and a loaded one.

A line in REGISTRY adds an algorithm to each of these tests. Merges and bad packets of all codecs
are in tests/ops/test_conformance.py, test_promises.py and test_properties.py.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import compll
from tests.ops.codecs import Floats, bits, gradient, reference, stateful_variants, strange
from tf_hips.ops import (
    CHUNK,
    REGISTRY,
    Compressor,
    Key,
    dgc,
    error_feedback,
    graph,
    jit,
    load,
    native,
    parse,
    registry,
    topk,
)

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

MOMENTUM = Path(__file__).parents[1] / "compll/momentum.pse"
STEPS = 3

DEFAULTS = [Compressor(name) for name, a in REGISTRY.items() if a.state_names]

each = pytest.mark.parametrize("compressor", stateful_variants(), ids=lambda c: c.text)
each_default = pytest.mark.parametrize("compressor", DEFAULTS, ids=lambda c: c.text)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Compressor]:
    yield load(MOMENTUM)(decay=0.5)
    # Other tests list the names that are known.
    registry._newest.pop("momentum")


def zeros(compressor: Compressor, n: int) -> Floats:
    return np.zeros(compressor.state_shape([n]), np.float32)


def key(step: int) -> Key:
    return Key(seed=11, step=step, tensor_id=2)


def assert_faces_agree(
    compressor: Compressor, definition: compll.Reference, given: list[Floats]
) -> Floats:
    """Over the steps of a run; returns what is kept in the end."""
    n = given[0].size
    expected, here, there = (zeros(compressor, n) for _ in range(3))
    encode = tf.function(graph.encode, autograph=False)
    for step, x in enumerate(given):
        with np.errstate(all="ignore"):
            packet = definition.encode(x, seed=11, step=step, tensor_id=2, state=expected)
        assert native.encode(compressor, x, key(step), here).tobytes() == packet.tobytes()
        in_graph, there = encode(
            compressor,
            tf.constant(x),
            seed=11,
            step=tf.constant(step, tf.int64),
            tensor_id=2,
            kept=tf.constant(there),
        )
        assert in_graph.numpy().tobytes() == packet.tobytes()
        np.testing.assert_array_equal(bits(here), bits(expected))
        np.testing.assert_array_equal(bits(there.numpy()), bits(expected))
        assert packet.size == compressor.wire_bytes(n)
        values = definition.decode(packet, n)
        np.testing.assert_array_equal(bits(native.decode(compressor, packet, n)), bits(values))
        decoded = graph.decode(compressor, in_graph, n).numpy()
        np.testing.assert_array_equal(bits(decoded), bits(values))
    assert np.isfinite(expected).all()
    return expected


@each_default
@pytest.mark.parametrize("n", [10**6 + 3, pytest.param(10**7 + 3, marks=pytest.mark.slow)])
def test_faces_agree_on_large_tensors(compressor: Compressor, n: int) -> None:
    given = [gradient(n, step) for step in range(2)]
    assert_faces_agree(compressor, reference(compressor), given)


@pytest.mark.parametrize(
    ("compressor", "n"),
    [
        pytest.param(
            *(one, n),
            id=f"{n}-{one.text}",
            marks=pytest.mark.slow if n > CHUNK and one not in DEFAULTS else (),
        )
        for one in stateful_variants()
        for n in (0, 1, 7, 8, 1023, CHUNK + 5)
    ],
)
def test_faces_agree(compressor: Compressor, n: int) -> None:
    steps = STEPS if n < CHUNK else 2
    given = [gradient(n, step) for step in range(steps)]
    kept = assert_faces_agree(compressor, reference(compressor), given)
    if n == CHUNK + 5:  # the last chunk saw its own part
        alone = zeros(compressor, 5)
        for step, x in enumerate(given):
            native.encode(compressor, x[CHUNK:], Key(11, step, 2, CHUNK), alone)
        np.testing.assert_array_equal(kept[:, CHUNK:], alone)


@each
def test_faces_agree_on_values_of_every_kind(compressor: Compressor) -> None:
    """And nothing that is not finite stays: what comes later is as if 0 had been kept."""
    broken = gradient(1023)
    broken[[5, 300, 700, 900]] = [np.nan, np.inf, -np.inf, 3e38]
    given = [gradient(1023, 4), broken, strange(1023), np.full(1023, np.float32(np.nan))]
    assert_faces_agree(compressor, reference(compressor), [*given, np.full(1023, np.float32(2))])


def test_a_parameter_that_is_denormal_is_one_codec_in_all_threads() -> None:
    """TensorFlow's threads flush denormals: a server refused what was encoded in them."""
    tiny = dgc(momentum=1e-40)
    assert_faces_agree(tiny, reference(tiny), [gradient(7, step) for step in range(STEPS)])
    # The native face, too, may be called in one of them.
    packet = tf.function(
        lambda x: tf.numpy_function(
            lambda x: native.encode(tiny, x, key(0), zeros(tiny, 7)), [x], tf.uint8
        )
    )(tf.constant(gradient(7)))
    expected = native.encode(tiny, gradient(7), key(0), zeros(tiny, 7))
    np.testing.assert_array_equal(packet.numpy(), expected)


def test_a_loaded_codec_has_state_too(loaded: Compressor) -> None:
    assert loaded.state_names == ("velocity", "residual")
    definition = compll.Reference(compll.compile_spec(MOMENTUM), decay=0.5)
    for n in (0, 7, 1023):
        assert_faces_agree(loaded, definition, [gradient(n, step) for step in range(STEPS)])
    assert loaded.for_sums == parse("fp32")


@each
def test_equal_elements_are_told_apart(compressor: Compressor) -> None:
    """Of equals the first are sent, and only these are forgotten."""
    x, kept = np.full(100, np.float32(-0.25)), zeros(compressor, 100)
    sent = native.decode(compressor, native.encode(compressor, x, key(0), kept), 100)
    np.testing.assert_array_equal(kept[1] == 0, sent != 0)
    np.testing.assert_array_equal(np.flatnonzero(sent), np.arange(np.count_nonzero(sent)))


@each
def test_what_was_sent_and_what_is_kept_is_what_momentum_makes(compressor: Compressor) -> None:
    """Worked out here in binary64, with the masking that the packets show."""
    n, steps = 500, 40
    params = dict(compressor.params)
    kept, sent, given = zeros(compressor, n), np.zeros(n), np.zeros(n)
    velocity = np.zeros(n)
    for step in range(steps):
        x = gradient(n, step)
        decoded = native.decode(compressor, native.encode(compressor, x, key(step), kept), n)
        if params["nesterov"]:
            velocity = params["momentum"] * (velocity + x)
            given += velocity + x
        else:
            velocity = params["momentum"] * velocity + x
            given += velocity
        sent += decoded
        velocity = np.where(decoded != 0, 0, velocity)
    scale = np.abs(given).max() + np.abs(sent).max()
    assert np.abs(sent + kept[1] - given).max() <= steps * scale * 2.0**-20
    assert np.abs(kept[0] - velocity).max() <= steps * np.abs(velocity).max() * 2.0**-20 + 1e-6


def test_without_momentum_it_is_topk_with_error_feedback() -> None:
    plain, fed = dgc(0.05, momentum=0.0), error_feedback(topk(0.05))
    kept, residual = zeros(plain, 300), np.zeros(300, np.float32)
    for step in range(10):
        x = gradient(300, step)
        mine = native.decode(plain, native.encode(plain, x, key(step), kept), 300)
        theirs = native.decode(fed, native.encode(fed, x, key(step), residual), 300)
        np.testing.assert_array_equal(bits(mine + 0), bits(theirs + 0))
        np.testing.assert_array_equal(kept[1] + 0, residual + 0)


@each
def test_shapes_are_static(compressor: Compressor) -> None:
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([5, 7]), tf.TensorSpec([2, 35])])
    def shapes(x: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        packet, kept = graph.encode(compressor, x, seed=1, step=2, tensor_id=0, kept=state)
        assert packet.shape == [compressor.wire_bytes(35)]
        assert kept.shape == [2, 35]
        return kept

    assert shapes(tf.ones([5, 7]), tf.zeros([2, 35])).shape == [2, 35]
    assert compressor.state_shape([5, 7]) == (2, 35)


def test_a_state_of_another_shape_is_refused() -> None:
    encode = tf.function(
        lambda x, state: graph.encode(dgc(), x, seed=1, step=2, tensor_id=0, kept=state),
        input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)],
    )
    message = r"`state` of dgc must have the shape \[2,4\]. Received: shape \[1,4\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        encode(tf.zeros(4), tf.zeros([1, 4]))
    with pytest.raises(ValueError, match=r"`kept` must have 8 elements\. Received: 4"):
        native.encode(dgc(), np.zeros(4, np.float32), key(0), np.zeros(4, np.float32))
    for face in (
        lambda: native.encode(dgc(), np.zeros(4, np.float32), key(0)),
        lambda: graph.encode(dgc(), tf.zeros(4), seed=1, step=2, tensor_id=0),
    ):
        with pytest.raises(
            ValueError, match="if and only if the compressor has error feedback, momentum or state"
        ):
            face()


def test_the_number_of_threads_changes_nothing() -> None:
    """Three chunks, in processes with one thread and with four."""
    program = (
        "import hashlib, numpy as np; from tf_hips.ops import Key, dgc, native\n"
        "n = 2 * 2**20 + 77; s = np.zeros((2, n), np.float32); h = hashlib.sha256()\n"
        "x = np.random.default_rng(1).standard_normal(n, np.float32)\n"
        "for step in range(2): h.update(native.encode(dgc(), x, Key(1, step, 0), s))\n"
        "print(h.hexdigest(), hashlib.sha256(s).hexdigest())"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TF_HIPS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for threads in ("1", "4")
    ]
    assert shown[0] == shown[1] != ""


@each
def test_momentum_is_not_applied_to_sums(compressor: Compressor) -> None:
    """What encodes a sum has none, and sends all that four workers sent."""
    sums, n = compressor.for_sums, 4000
    assert sums.for_sums == sums
    assert sums.codec.state_names == ()
    with pytest.raises(ValueError, match="sums must be encoded without momentum"):
        native.merge_encode(compressor, [b""], 1, key(0), np.zeros(2, np.float32))
    packets = [
        native.encode(compressor, gradient(n, worker), key(0), zeros(compressor, n))
        for worker in range(4)
    ]
    total = native.merge(compressor, packets, n)
    kept = np.zeros(sums.state_shape([n]), np.float32)
    packet, kept = graph.recode_sum(
        compressor,
        tf.constant(np.stack(packets)),
        n,
        tf.constant(kept),
        seed=1,
        step=0,
        tensor_id=0,
    )
    np.testing.assert_array_equal(native.decode(sums, packet.numpy(), n), total)
    assert not kept.numpy().any()


def test_the_registry_knows_the_states() -> None:
    """As the tables of the library have them."""
    from tf_hips.ops.loaded import _Table

    for name, algorithm in REGISTRY.items():
        address, _ = native._codec(Compressor(name))
        held = _Table.from_address(address)
        names = tuple(held.state_names[i].decode() for i in range(held.num_states))
        assert names == algorithm.state_names == jit.algorithm(name).state_names
        assert bool(held.encode_state) == bool(names)
        assert ctypes.sizeof(_Table) > 0


def test_error_feedback_around_state_is_refused(loaded: Compressor) -> None:
    for compressor in (dgc(), loaded):
        with pytest.raises(ValueError, match="must wrap a codec without state: one with state"):
            error_feedback(compressor)
    with pytest.raises(ValueError, match="must wrap a codec without state"):
        parse("error_feedback(dgc)")


def test_arguments_are_checked() -> None:
    assert dgc().text == "dgc(ratio=0.01, momentum=0.9, nesterov=0, clip_norm=0)"
    assert parse("dgc(ratio=0.1, clip_norm=2)") == dgc(0.1, clip_norm=2.0)
    assert dgc(nesterov=True) == dgc(nesterov=1)
    assert not dgc().is_unbiased
    for wrong in (
        *({"ratio": 0.0}, {"ratio": 1.5}, {"momentum": 1.0}, {"momentum": -0.1}),
        *({"clip_norm": -1.0}, {"clip_norm": float("nan")}, {"nesterov": 2}),
    ):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be (in|True)"):
            dgc(**wrong)
    with pytest.raises(TypeError, match="`nesterov` must be an integer"):
        dgc(nesterov=0.5)


def test_bytes_are_those_of_topk() -> None:
    for n in (0, 1, 100, CHUNK + 5):
        assert dgc(0.05).wire_bytes(n) == topk(0.05).wire_bytes(n)
        assert dgc(0.05, clip_norm=3.0).wire_bytes(n) == topk(0.05).wire_bytes(n)


def test_gradients_are_clipped_together() -> None:
    """To clip_norm over the root of the number of encoders; the packets are those of the rest."""
    x, y = np.full(4, np.float32(3)), np.full(5, np.float32(-4))
    norm = float(np.sqrt((x**2).sum() + (y**2).sum()))
    clipped = graph.clip(dgc(clip_norm=2.0), [tf.constant(x), tf.constant(y)], 16)
    for value, before in zip(clipped, (x, y), strict=True):
        np.testing.assert_allclose(value, before * (2.0 / 4 / norm), rtol=1e-6)
    for compressor, encoders in ((dgc(), 1), (dgc(clip_norm=4 * norm), 15)):
        kept = graph.clip(compressor, [tf.constant(x), tf.constant(y)], encoders)
        np.testing.assert_array_equal(kept[0], x)
        np.testing.assert_array_equal(kept[1], y)
    # Finite numbers are clipped also where their squares overflow; what is not finite stays where
    # it is, and spoils no other gradient.
    clipped = graph.clip(dgc(clip_norm=2.0), [tf.constant(x * 1e30), tf.constant(y * 1e30)], 16)
    for value, before in zip(clipped, (x, y), strict=True):
        np.testing.assert_allclose(value, before * (2.0 / 4 / norm), rtol=1e-6)
    x[1] = np.nan
    # The factor alone would be a denormal, which TensorFlow takes for 0.
    huge = [tf.constant([3e38, 3e38]), tf.constant([1.0])]
    clipped, small = graph.clip(dgc(clip_norm=1.0), huge, 4)
    np.testing.assert_allclose(clipped, [0.5 / np.sqrt(2)] * 2, rtol=1e-6)
    assert small.numpy().tolist() == [0.0]

    kept = graph.clip(dgc(clip_norm=2.0), [tf.constant(x), tf.constant(y)], 16)
    np.testing.assert_array_equal(kept[0], x)
    np.testing.assert_array_equal(kept[1], y)
