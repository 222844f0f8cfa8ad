# SPDX-License-Identifier: Apache-2.0
"""`warmup(...)`: which compressor a step has, what is refused, and that nothing is lost between."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.codecs import (
    bits,
    gradient,
    in_reach,
    stateful_variants,
    variants,
    variants_with_feedback,
)
from tests.support import hurried
from tf_hips import ops
from tf_hips.ops import (
    REGISTRY,
    Compressor,
    Key,
    dgc,
    error_feedback,
    graph,
    load,
    native,
    onebit,
    parse,
    stages,
    terngrad,
    topk,
    warmup,
)

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

EVERYTHING = [
    *variants(),
    *stateful_variants(),
    *(error_feedback(compressor) for compressor in variants_with_feedback()),
]
MOMENTUM = Path(__file__).parents[1] / "compll/momentum.pse"
MINE = Path(__file__).with_name("mine.pse")


@pytest.fixture(scope="module")
def momentum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compressor]:
    with pytest.MonkeyPatch.context() as patch:
        hurried.cache_of_its_own(tmp_path_factory.mktemp("momentum"), patch)
        yield load(MOMENTUM)(decay=0.5)


def texts(compressor: Compressor) -> list[tuple[int, str]]:
    return [(first, stage.text) for first, stage in compressor.stages]


def test_shares_come_down_as_in_the_paper() -> None:
    """75, 93.75, 98.4, 99.6 and 99.9 % are dropped (Lin et al., 2018, section 3.3)."""
    assert texts(warmup(error_feedback(topk(0.001)), 400)) == [
        (0, "error_feedback(topk(ratio=0.2512))"),
        (100, "error_feedback(topk(ratio=0.0631))"),
        (200, "error_feedback(topk(ratio=0.01585))"),
        (300, "error_feedback(topk(ratio=0.003981))"),
        (400, "error_feedback(topk(ratio=0.001))"),
    ]
    assert [stage.params[0][1] for _, stage in warmup(dgc(0.001), 4).stages] == pytest.approx(
        [0.25, 0.0625, 0.015625, 0.004, 0.001], rel=0.03
    )
    # Boundaries are rounded up, so that each stage has a step.
    assert [first for first, _ in warmup(topk(0.1), 10, 3).stages] == [0, 4, 7, 10]
    assert [first for first, _ in warmup(topk(0.1), 5, 5).stages] == [0, 1, 2, 3, 4, 5]
    assert [first for first, _ in warmup(topk(0.1), 2).stages] == [0, 1, 2]
    assert texts(warmup(topk(0.25), 2, 1, start=0.5))[0] == (0, "topk(ratio=0.3536)")
    assert texts(warmup(topk(1.0), 2))[0] == (0, "topk(ratio=1)")


def test_others_begin_with_exact_values() -> None:
    assert texts(warmup(onebit(), 7)) == [(0, "fp32"), (7, "onebit")]
    assert texts(warmup(error_feedback(terngrad(4)), 7)) == [
        (0, "error_feedback(fp32)"),
        (7, "error_feedback(terngrad(bitwidth=4))"),
    ]


@pytest.mark.parametrize("inner", EVERYTHING, ids=lambda c: c.text)
def test_every_compressor_can_be_warmed_up(inner: Compressor) -> None:
    """Text and back; all stages keep the same; nothing is lost from one to the next."""
    value = warmup(inner, 6)
    assert parse(value.text) == value
    assert hash(parse(f" {value.text} ")) == hash(value)
    assert value.codec == inner.codec
    assert value.stages[-1] == (6, inner)
    for step in range(9):
        stage = value.at(step)
        assert not stage.is_warmup
        assert stage.at(step) == stage
        assert stage.state_names == value.state_names == inner.state_names
        assert stage.has_residual == value.has_residual
        assert stage.clip_norm == value.clip_norm
        if value.has_state:
            assert stage.state_shape([3, 5]) == value.state_shape([3, 5])
        # What encodes sums changes in the same step.
        assert value.for_sums.at(step).state_names == stage.for_sums.state_names
    assert value.wire_bytes(1000) == inner.wire_bytes(1000)
    assert value.at(0).wire_bytes(10**6) >= inner.wire_bytes(10**6)
    assert value.is_unbiased == inner.is_unbiased

    n = 300
    kept = np.zeros(value.state_shape([n]), np.float32) if value.has_state else None
    given, sent = np.zeros(n), np.zeros(n)
    for step in range(9):
        x = in_reach(inner, gradient(n, step))
        packet = native.encode(value, x, Key(3, step, 1), kept)
        assert packet.size == value.at(step).wire_bytes(n)
        sent += native.decode(value.at(step), packet, n)
        given += x
        if value.at(step).codec.name == "fp32":
            np.testing.assert_allclose(sent, given, rtol=1e-6)
            assert kept is None or not kept.any()
    if value.has_residual:
        np.testing.assert_allclose(sent + kept, given, atol=1e-4 * (1 + np.abs(given).max()))


@pytest.mark.parametrize("inner", [onebit(), error_feedback(topk(0.1)), dgc(0.1)], ids=str)
def test_a_graph_and_plain_python_choose_the_same_stage(inner: Compressor) -> None:
    value, n = warmup(inner, 2, 1), 100
    here = np.zeros(value.state_shape([n]), np.float32) if value.has_state else None
    there = None if here is None else tf.constant(here)
    for step in range(4):
        x = gradient(n, step)
        # As in TensorFlow's numbers, and while a graph is built.
        number = tf.constant(step, tf.int64) if step % 2 else step
        packet, there = graph.encode(value, x, seed=3, step=number, tensor_id=1, kept=there)
        expected = native.encode(value, x, Key(3, step, 1), here)
        assert packet.numpy().tobytes() == expected.tobytes()
        decoded = graph.decode(value.at(step), packet, n)
        np.testing.assert_array_equal(
            bits(decoded.numpy()), bits(native.decode(value.at(step), expected, n))
        )
    if not value.for_sums.has_state:
        rows = [native.encode(value, gradient(n, of), Key(of, 1, 0)) for of in range(2)]
        again = native.merge_encode(value, rows, n, Key(9, 1, 0))
        place = {"seed": 9, "step": 1, "tensor_id": 0}
        same, _ = graph.merge_encode(value, np.stack(rows), n, **place)
        recoded, _ = graph.recode_sum(value, np.stack(rows), n, None, **place)
        assert again.tobytes() == same.numpy().tobytes() == recoded.numpy().tobytes()


def test_who_decodes_says_which_stage() -> None:
    value = warmup(onebit(), 3)
    packet = native.encode(value, gradient(8), Key(1, 0, 0))
    for decode in (
        lambda: native.decode(value, packet, 8),
        lambda: native.merge(value, [packet], 8),
        lambda: graph.decode(value, tf.constant(packet), 8),
        lambda: graph.merge(value, tf.constant([packet]), 8),
    ):
        with pytest.raises(ValueError, match=r"with the stage .* give `compressor.at\(step\)`"):
            decode()
    encode = tf.function(
        lambda step: graph.encode(value, tf.zeros(8), seed=1, step=step, tensor_id=0)
    )
    with pytest.raises(ValueError, match="the step of a warm-up must be known when a graph"):
        encode(tf.constant(1, tf.int64))


def test_sums_have_the_same_stages() -> None:
    for inner in (onebit(), error_feedback(topk(0.01))):
        assert warmup(inner, 5).for_sums == warmup(inner, 5)
    # Of four times the ratio in every stage: a sum of four packets goes on at once.
    value = warmup(dgc(0.001, momentum=0.5), 400)
    sums = value.for_sums
    assert sums.text == ("warmup(error_feedback(topk(ratio=0.004)), steps=400, stages=4, start=4)")
    assert parse(sums.text) == sums == sums.for_sums
    assert [first for first, _ in sums.stages] == [first for first, _ in value.stages]
    for step in (0, 100, 200, 300, 400):
        share = dict(sums.at(step).codec.params)["ratio"]
        of_packets = dict(value.at(step).codec.params)["ratio"]
        assert share == pytest.approx(min(1.0, 4 * of_packets), rel=1e-3)
    assert warmup(dgc(0.3), 9).for_sums == error_feedback(topk(1.0))


def test_two_ways_change_when_either_does() -> None:
    up, down = warmup(onebit(), 5), warmup(error_feedback(topk(0.1)), 8, 2)
    assert stages.joint(up, down) == [
        (first, up.at(first), down.at(first)) for first in (0, 4, 5, 8)
    ]
    assert stages.joint(onebit(), topk(0.1)) == [(0, onebit(), topk(0.1))]


def test_loaded_codecs(
    momentum: Compressor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"`warmup` must wrap a codec with a parameter `ratio`"):
        warmup(momentum, 5)
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    value = parse(f"warmup({MINE}(salt=1, scale=0.5), steps=3)", files=True)
    assert texts(value)[0] == (0, "fp32")
    assert parse(value.text) == value
    assert value.codec.name.startswith("mine@")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warmup", "must wrap one compressor that is no warm-up, as in"),
        ("warmup()", "must wrap one compressor that is no warm-up, as in"),
        ("warmup(steps=3)", "must read like"),
        ("warmup(onebit)", "`steps` must be given"),
        ("warmup(onebit, steps=0)", r"`steps` must be in \[1, 4294967295\]. Received: steps=0"),
        ("warmup(onebit, steps=2.5)", "`steps` must be an integer"),
        ("warmup(onebit, steps=5, stages=2)", "must be 1 for a codec without a parameter `ratio`"),
        ("warmup(onebit, steps=5, start=0.5)", "must be 1 for a codec without a parameter"),
        ("warmup(topk, steps=3, stages=4)", "`stages` must be at most `steps`, 3. Received: st"),
        ("warmup(topk, steps=90, stages=33)", r"`stages` must be in \[1, 32\]"),
        ("warmup(topk(ratio=0.1), steps=5, start=0.05)", "`start` must be at least the codec's r"),
        ("warmup(topk, steps=5, phases=4)", "`warmup` takes steps, stages, start. .* phases=4"),
        ("warmup(topk, 5, 2, 1, 1)", "`warmup` takes 3 arguments"),
        ("warmup(topk, 5, steps=4)", "must be given once"),
        ("warmup(warmup(onebit, steps=3), steps=3)", "compressor that is no warm-up"),
        ("error_feedback(warmup(onebit, steps=3))", r"inside of `warmup`: .*_feedback\(onebit\)"),
        ("warmup(onebti, steps=3)", "did you mean 'onebit'"),
        ("warmpu(onebit, steps=3)", "did you mean 'warmup'"),
        ("warmup(onebit, steps=3", "must read like"),
    ],
)
def test_bad_texts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_arguments() -> None:
    assert parse("warmup(topk(0.1), 8, 2)") == warmup(topk(0.1), steps=8, stages=2)
    assert parse("warmup( qsgd(3, 64) ,steps = 4 )") == warmup(ops.qsgd(3, 64), 4)
    assert warmup(topk(0.1), 8).text == "warmup(topk(ratio=0.1), steps=8, stages=4)"
    with pytest.raises(TypeError, match="`compressor` must be a compressor such as"):
        warmup(None, 3)
    with pytest.raises(TypeError, match="`steps` must be an integer"):
        warmup(onebit(), 3.0)
    with pytest.raises(ValueError, match="no warm-up"):
        warmup(warmup(onebit(), 3), 3)
    with pytest.raises(ValueError, match="no warm-up"):
        Compressor("warmup", (("steps", 3),))
    with pytest.raises(ValueError, match="given once"):
        Compressor("warmup", (("steps", 3), ("steps", 3)), onebit())
    assert set(REGISTRY).isdisjoint({"warmup", "error_feedback"})
