# SPDX-License-Identifier: Apache-2.0
"""`momentum(...)`: what is sent is a running mean, in plain Python and in graphs the same bits."""

import contextlib
import ctypes
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_hips
from tests.ops.codecs import Floats, bits, gradient, strange, variants, variants_with_feedback
from tests.support import hurried
from tf_hips.ops import (
    Compressor,
    Key,
    dgc,
    error_feedback,
    graph,
    load,
    momentum,
    native,
    onebit,
    parse,
    registry,
    smoothing,
    topk,
    warmup,
)
from tf_hips.ops.compressor import CHUNK, file_of

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

TEXT = "momentum(error_feedback(onebit), beta=0.9)"
INNERS = [
    *(one for one in variants() if not one.params or one.name == "topk"),
    *(error_feedback(one) for one in variants_with_feedback() if not one.params),
]
RUN = [
    *(parse(text) for text in ("fp32", "natural", "topk(ratio=0.1)", "randomk(ratio=0.1)")),
    *(error_feedback(text) for text in ("onebit", "topk(ratio=0.1)", "qsgd", "fp16")),
]
STATEFUL = Path(__file__).parents[1] / "compll/momentum.pse"
MINE = Path(__file__).with_name("mine.pse")


def running_mean(m: Floats, g: Floats, beta: float) -> Floats:
    """m after a finite gradient, in float32, one operation after the other."""
    b = np.float32(beta)
    new = (b * m).astype(np.float32) + ((np.float32(1) - b) * g).astype(np.float32)
    return np.where(np.abs(new) <= 2.0**-96, np.float32(0), new)


def test_the_text_makes_the_value_again() -> None:
    value = tf_hips.momentum(tf_hips.error_feedback(tf_hips.onebit()))
    assert value.text == TEXT
    assert parse(TEXT) == parse("momentum(error_feedback(onebit))") == value
    assert parse("momentum(error_feedback(onebit), 0.5)") == momentum("error_feedback(onebit)", 0.5)
    assert parse("momentum(topk(ratio=0.1), beta=0)") == momentum(topk(0.1), beta=0)
    assert file_of("momentum(error_feedback(my.pse(0.1)), beta=0.5)") == "my.pse"


@pytest.mark.parametrize("inner", INNERS, ids=lambda c: c.text)
def test_it_is_the_compressor_inside_with_a_row_more(inner: Compressor) -> None:
    value = momentum(inner)
    assert parse(value.text) == value and hash(parse(value.text)) == hash(value)
    assert value.codec == inner.codec
    assert value.state_names == ("momentum", *inner.state_names)
    assert value.state_shape([3, 5]) == (1 + len(inner.state_names), 15)
    assert value.has_state and value.has_momentum and not value.has_residual
    assert not value.is_unbiased  # of m and not of the gradient
    assert value.is_sparse == inner.is_sparse and value.draws_alike == inner.draws_alike
    assert value.wire_bytes(1000) == inner.wire_bytes(1000)
    assert value.for_sums == inner
    assert not inner.has_momentum


def floats(n: int, seed: int, m: bool) -> Floats:
    """Floats of all sizes; of m the largest are finite, and few are so small that they become 0."""
    rng = np.random.default_rng((n, seed))
    values = np.ldexp(rng.standard_normal(n, np.float32), rng.integers(-100 if m else -149, 125, n))
    for place, value in enumerate((-0.0, 1e-45, -3e-39, 2.0**-96, -(2.0**-95), 3.4028235e38)):
        values[place::41] = value
    if m:
        return np.nan_to_num(values)
    for place, word in enumerate((0x7FC00001, 0xFF812345, 0x7F800000, 0xFF800000, 0x80000000)):
        values.view(np.uint32)[n - 1 - place :: -997] = word
    return values


@contextlib.contextmanager
def denormals_flushed() -> Iterator[None]:
    """This thread takes denormals for 0 and makes 0 of them, as TensorFlow's threads do."""
    libm = ctypes.CDLL("libm.so.6")
    before = (ctypes.c_uint32 * 8)()  # fenv_t of x86-64; the last word is MXCSR
    assert libm.fegetenv(before) == 0
    flushing = (ctypes.c_uint32 * 8)(*before)
    flushing[7] |= 0x8040
    libm.fesetenv(flushing)
    try:
        yield
    finally:
        libm.fesetenv(before)


def by_native(value: Compressor, x: Floats, kept: Floats) -> tuple[bytes, Floats]:
    new = kept.copy()
    return native.encode(value, x, Key(1, 2, 3), new).tobytes(), new


def by_native_that_flushes(value: Compressor, x: Floats, kept: Floats) -> tuple[bytes, Floats]:
    with denormals_flushed():
        return by_native(value, x, kept)


def by_graph(value: Compressor, x: Floats, kept: Floats) -> tuple[bytes, Floats]:
    packet, new = tf.function(
        lambda x, kept: graph.encode(value, x, seed=1, step=2, tensor_id=3, kept=kept),
        autograph=False,
    )(tf.constant(x), tf.constant(kept))
    return packet.numpy().tobytes(), new.numpy()


FACES = [by_native, by_graph]
if platform.machine() == "x86_64":
    FACES.append(by_native_that_flushes)


@pytest.mark.parametrize(
    "n", [0, 1, 7, 16, 1001, CHUNK + 5, pytest.param(10**6 + 3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("face", FACES)
def test_each_face_does_what_is_defined(
    face: Callable[[Compressor, Floats, Floats], tuple[bytes, Floats]], n: int
) -> None:
    """Bit for bit: signs of 0, where NaN are, what overflows, and what is kept as NaN."""
    for seed, beta in enumerate((0.0, 0.1, 0.9, 0.9999)):
        value = momentum("fp32", beta=beta)
        x, m = floats(n, seed, m=False), floats(n, seed + 9, m=True)
        x[2::5], m[2::5] = 3.4028235e38, 3.4028235e38
        m[3::977], m[4::977] = np.inf, np.nan
        before = x.copy()
        packet, new = face(value, x, m[np.newaxis])
        sent = smoothing.moved(value, m, x)
        np.testing.assert_array_equal(bits(x), bits(before))
        np.testing.assert_array_equal(bits(new[0]), bits(m))
        assert packet == native.encode(value.for_sums, sent, Key(1, 2, 3)).tobytes()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the mode is set in a word of x86-64")
def test_the_mode_of_the_thread_is_seen() -> None:
    """Else a test above would show nothing."""
    with denormals_flushed():
        assert np.float32(1e-40) * np.float32(1) == 0
    assert np.float32(1e-40) * np.float32(1) != 0


@pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "as on a GPU"])
@pytest.mark.parametrize("inner", RUN, ids=lambda c: c.text)
def test_plain_python_and_graphs_make_the_same_bits(
    inner: Compressor, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the compressor inside, given the running mean; denormals and infinities, too."""
    monkeypatch.setattr(graph, "on_gpu", lambda: on_gpu)
    value, n, seed = momentum(inner, beta=0.75), 301, 5

    @tf.function(autograph=False)
    def traced(x: tf.Tensor, kept: tf.Tensor, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # A factor that TensorFlow would like to join with those of the momentum.
        packet, new = graph.encode(value, x * 0.5, seed=seed, step=step, tensor_id=1, kept=kept)
        return packet, new

    kept = np.zeros(value.state_shape([n]), np.float32)
    eager = in_graph = tf.constant(kept)
    m = np.zeros(n, np.float32)
    residual = np.zeros(n, np.float32) if inner.has_state else None
    for step in range(8):
        x = gradient(n, step) if step % 3 else strange(n)
        if step == 5:
            x[:4] = np.nan, np.inf, -np.inf, 1.5e38
        packet = native.encode(value, x, Key(seed, step, 1), kept)
        there, eager = graph.encode(value, x, seed=seed, step=step, tensor_id=1, kept=eager)
        with_factor, in_graph = traced(tf.constant(x * np.float32(2)), in_graph, tf.constant(step))
        for same in (there, with_factor):
            assert same.numpy().tobytes() == packet.tobytes()
        for same in (eager, in_graph):
            np.testing.assert_array_equal(bits(same.numpy()), bits(kept))
        assert np.isfinite(kept).all()

        m = running_mean(m, x, 0.75)
        sent = np.where(np.isfinite(x), m, x)
        m = np.where(np.isfinite(m), m, np.float32(0))
        np.testing.assert_array_equal(bits(kept[0]), bits(m))
        assert native.encode(inner, sent, Key(seed, step, 1), residual).tobytes() == (
            packet.tobytes()
        )
        if residual is not None:
            np.testing.assert_array_equal(bits(kept[1]), bits(residual))


def test_the_operation_is_told_the_parameters_of_every_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built-in ones, and one of the user's; in order, integers and floats apart."""
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    for inner in (*variants(), error_feedback(load(MINE)(2.0, 5))):
        value, n = momentum(inner), 77
        x, kept = gradient(n), np.zeros(value.state_shape([n]), np.float32)
        packet, new = graph.encode(value, x, seed=3, step=1, tensor_id=2, kept=kept)
        expected = native.encode(value, x, Key(3, 1, 2), kept)
        assert packet.numpy().tobytes() == expected.tobytes(), value
        np.testing.assert_array_equal(bits(new.numpy()), bits(kept))


def test_what_is_not_finite_is_sent_and_not_kept() -> None:
    """In the second chunk, which the first must not hide."""
    value, n = parse("momentum(fp32, beta=0.5)"), CHUNK + 9
    kept = np.zeros(value.state_shape([n]), np.float32)
    x = np.ones(n, np.float32)
    native.encode(value, x, Key(0, 0, 0), kept)
    x[-3:] = np.nan, np.inf, 4.0
    sent = native.decode(value, native.encode(value, x, Key(0, 1, 0), kept), n)
    np.testing.assert_array_equal(sent[:-3], np.full(n - 3, 0.75))
    np.testing.assert_array_equal(sent[-3:], [np.nan, np.inf, 2.25])
    np.testing.assert_array_equal(kept[0, -3:], [0.0, 0.0, 2.25])


def test_the_mean_of_what_is_sent_is_that_of_gradients() -> None:
    """A gradient that stays is sent as it is after a while, and a first one as a tenth of it."""
    value, n = parse(TEXT), 64
    x, kept, total = gradient(n), np.zeros(value.state_shape([n]), np.float32), np.zeros(n)
    for step in range(400):
        total += native.decode(value, native.encode(value, x, Key(0, step, 0), kept), n)
        if step == 0:
            np.testing.assert_allclose(kept[0], 0.1 * x, rtol=1e-6)
    np.testing.assert_allclose(kept[0], x, rtol=1e-5)
    # What is missing is what the residual holds back, and 0.9 + 0.81 + ... gradients.
    np.testing.assert_allclose(total + kept[1], (400 - 9) * x, rtol=1e-4, atol=1e-3)


def test_sums_are_encoded_without_it() -> None:
    value, n = parse(TEXT), 100
    rows = [
        native.encode(value, gradient(n, row), Key(row, 0, 0), np.zeros((2, n), np.float32))
        for row in range(3)
    ]
    packet, kept = graph.recode_sum(
        value, np.stack(rows), n, tf.zeros([n]), seed=1, step=0, tensor_id=0
    )
    residual = np.zeros(n, np.float32)
    expected = native.merge_encode(value.for_sums, rows, n, Key(1, 0, 0), residual)
    assert packet.numpy().tobytes() == expected.tobytes()
    np.testing.assert_array_equal(kept.numpy(), residual)
    with pytest.raises(ValueError, match=r"without momentum, such as by error_feedback\(onebit\)"):
        native.merge_encode(value, rows, n, Key(1, 0, 0), np.zeros((2, n), np.float32))


def test_a_warmup_and_a_mixture_stand_around_it() -> None:
    """All stages have it, exact ones too, and so have small tensors."""
    value = parse("mixed(warmup(momentum(error_feedback(onebit)), steps=3), below=64)")
    assert parse(value.text) == value
    assert value.at(2).of_size(64).text == "momentum(error_feedback(fp32), beta=0.9)"
    assert value.at(3).of_size(64).text == TEXT
    assert value.at(3).of_size(63).text == "momentum(fp16, beta=0.9)"
    assert value.of_size(63).state_shape([63]) == (1, 63)
    assert value.for_sums.text == (
        "mixed(warmup(error_feedback(onebit), steps=3, stages=1), below=64)"
    )
    assert value.for_sums.of_size(63).text == "fp16"
    n = 64
    kept, m = np.zeros((2, n), np.float32), np.zeros(n, np.float32)
    for step in range(5):
        x = gradient(n, step)
        native.encode(value.of_size(n), x, Key(0, step, 0), kept)
        m = running_mean(m, x, 0.9)
        np.testing.assert_array_equal(kept[0], m)
        assert kept[1].any() == (step >= 3)
    sparse = warmup(momentum(error_feedback(topk(0.01))), 8)
    assert [stage.has_momentum for _, stage in sparse.stages] == [True] * 5
    assert sparse.at(0).text.startswith("momentum(error_feedback(topk(ratio=0.3")


def test_what_it_cannot_stand_around_is_refused() -> None:
    loaded = load(STATEFUL)(decay=0.5)
    registry._newest.pop("momentum")
    for text, words in (
        ("momentum", "must wrap one compressor that has no momentum, as in"),
        ("momentum(momentum(onebit))", "must wrap one compressor that has no momentum"),
        ("momentum(dgc)", "must wrap a codec without state.*Received: dgc"),
        (f"momentum({loaded.text})", "must wrap a codec without state"),
        ("error_feedback(momentum(onebit))", r"write momentum\(error_feedback\(onebit\), ...\)"),
        ("momentum(warmup(onebit, steps=2))", r"write warmup\(momentum\(...\), ...\)"),
        ("momentum(mixed(onebit, below=2))", r"write mixed\(momentum\(...\), ...\)"),
        ("momentum(error_feedback(powersgd))", "must wrap what makes packets"),
        ("momentum(budget(1, 2))", "must wrap a compressor"),
        ("momentum(onebit, beta=1)", r"`beta` must be in \[0.0, 0.9999\]. Received: beta=1$"),
        ("momentum(onebit, beta=-0.1)", "`beta` must be in"),
        ("momentum(onebit, gamma=0.1)", "takes beta. Received: gamma"),
    ):
        with pytest.raises(ValueError, match=words):
            parse(text)
    with pytest.raises(ValueError, match="must wrap one compressor without momentum"):
        momentum(momentum(onebit()))
    with pytest.raises(ValueError, match="must wrap a codec without state"):
        momentum(dgc())
    with pytest.raises(ValueError, match="`momentum` takes beta"):
        Compressor("momentum", (("gamma", 1),), onebit())
    with pytest.raises(TypeError, match="`beta` must be a number"):
        momentum(onebit(), beta="much")  # type: ignore[arg-type]


def test_what_is_kept_must_fit() -> None:
    value, x = parse(TEXT), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="`kept` must be given if and only if"):
        native.encode(value, x, Key(0, 0, 0))
    with pytest.raises(ValueError, match="`kept` must be given if and only if"):
        graph.encode(value, x, seed=0, step=0, tensor_id=0)
    with pytest.raises(ValueError, match="`kept` must have 8 elements"):
        native.encode(value, x, Key(0, 0, 0), x.copy())
    with pytest.raises(ValueError, match=r"must have the shape \[2, 4\]. Received: shape \(4,\)"):
        graph.encode(value, x, seed=0, step=0, tensor_id=0, kept=tf.zeros([4]))
    encode = tf.function(
        lambda x, kept: graph.encode(value, x, seed=0, step=0, tensor_id=0, kept=kept),
        input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)],
    )
    for shape in ([4], [1, 4], [2, 3]):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"must have the shape \[2,4\]"):
            encode(x, tf.zeros(shape))
    assert encode(x.reshape(2, 2), tf.zeros([2, 4]))[1].shape == [2, 4]
    # Where there is no room for packets nothing is taken in.
    kept = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="`out` must be writable and have at least"):
        native.encode(value, x + 1, Key(0, 0, 0), kept, np.empty(1, np.uint8))
    assert not kept.any()


def test_packets_may_overflow_where_those_of_the_compressor_inside_may() -> None:
    """Whoever looks must not be misled by the first step, in which m is short."""
    from tf_hips.strategies.withheld import may_overflow

    for text in ("bf16", "terngrad(bitwidth=2)", "onebit", "fp32"):
        assert may_overflow(parse(f"momentum({text})")) == may_overflow(parse(text)), text
    assert may_overflow(momentum("bf16"))


def test_shapes_are_static_and_momentum_is_one_operation() -> None:
    value = parse(TEXT)
    traced = tf.function(
        lambda x, kept: graph.encode(value, x, seed=0, step=0, tensor_id=0, kept=kept)
    ).get_concrete_function(tf.TensorSpec([5, 7]), tf.TensorSpec([2, 35]))
    packet, new = traced.structured_outputs
    assert packet.shape == [value.wire_bytes(35)] and new.shape == [2, 35]
    kinds = {op.type for op in traced.graph.get_operations()}
    assert "TfHips>EncodeMomentum" in kinds and not kinds & {"Mul", "Pack", "Unpack"}, kinds
