# SPDX-License-Identifier: Apache-2.0
"""`mixed(...)`: large tensors by a compressor, small ones as fp16."""

import numpy as np
import pytest

import tf_hips
from tf_hips.comm import plan
from tf_hips.errors import ConfigError
from tf_hips.ops import native
from tf_hips.ops.compressor import (
    CHUNK,
    check_for_sums,
    check_makes_packets,
    check_unmixed,
    parse,
)
from tf_hips.ps.session.settings import ServerConfig, terms_of
from tf_hips.ps.terms.model import Model

TEXT = "mixed(error_feedback(onebit), below=1000)"
WARM = "mixed(warmup(error_feedback(onebit), steps=3, stages=1), below=64)"


@pytest.mark.parametrize("text", [TEXT, WARM, "mixed(dgc(ratio=0.1), below=5)"])
def test_the_text_makes_the_value_again(text: str) -> None:
    value = parse(text)
    assert parse(value.text) == value
    assert value.is_mixed
    assert value.of_size(10**6) == value.inner
    assert not value.of_size(10**6).is_mixed


def test_the_function_and_the_text_are_the_same() -> None:
    assert tf_hips.mixed(tf_hips.error_feedback(tf_hips.onebit()), below=1000) == parse(TEXT)
    assert parse("mixed(error_feedback(onebit), 1000)") == parse(TEXT)


def test_the_size_of_the_tensor_decides() -> None:
    value = parse(TEXT)
    assert [value.of_size(n).text for n in (0, 1, 999, 1000)] == [
        "fp16",
        "fp16",
        "fp16",
        "error_feedback(onebit)",
    ]
    assert parse("onebit").of_size(1) == parse("onebit")
    for n in (1, 999, 1000, 3 * CHUNK + 5):
        assert value.wire_bytes(n) == value.of_size(n).wire_bytes(n)
    assert value.wire_bytes_of((30, 30)) == parse("fp16").wire_bytes(900)


def test_a_rest_of_a_large_tensor_is_no_small_tensor() -> None:
    model = Model(((CHUNK + 7,), (7,), (1000,)))
    onebit, fp16 = parse("onebit"), parse("fp16")
    assert model.packet_bytes(parse(TEXT)) == (
        onebit.wire_bytes(CHUNK),
        onebit.wire_bytes(7),
        fp16.wire_bytes(7),
        onebit.wire_bytes(1000),
    )


def test_a_warmup_stands_inside() -> None:
    value = parse(WARM)
    assert value.is_warmup
    assert [(first, one.text) for first, one in value.stages] == [
        (0, "mixed(error_feedback(fp32), below=64)"),
        (3, "mixed(error_feedback(onebit), below=64)"),
    ]
    assert value.at(2).of_size(64).text == "error_feedback(fp32)"
    assert value.of_size(64).at(3).text == "error_feedback(onebit)"
    assert value.of_size(63).at(0).text == value.at(0).of_size(63).text == "fp16"


def test_sums_are_mixed_where_packets_are() -> None:
    assert parse(TEXT).for_sums == parse(TEXT)
    value = parse("mixed(dgc(ratio=0.01), below=10)")
    assert value.for_sums.text == f"mixed({parse('dgc(ratio=0.01)').for_sums.text}, below=10)"
    assert check_for_sums(value.for_sums) == value.for_sums


def test_what_it_promises_is_what_both_keep() -> None:
    assert parse(TEXT).has_residual
    assert parse(TEXT).of_size(3).state_names == ()
    assert parse("terngrad").is_unbiased
    assert not parse("mixed(terngrad, below=3)").is_unbiased
    assert parse("natural").rounds_each
    assert not parse("mixed(natural, below=3)").rounds_each


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixed(onebit)", "`below` must be"),
        ("mixed(onebit, below=0)", "`below` must be"),
        ("mixed(onebit, below=1.5)", "`below` must be"),
        ("mixed(onebit, above=3)", "takes below. Received: above=3"),
        ("mixed(onebit, 3, 4)", "takes 1 arguments"),
        ("mixed(mixed(onebit, below=3), below=4)", "must wrap one compressor that is not mixed"),
        ("mixed()", "must wrap one compressor that is not mixed"),
        ("mixed(powersgd, below=3)", "must wrap what makes packets"),
        ("error_feedback(mixed(onebit, below=3))", "must stand inside of `mixed`"),
        ("warmup(mixed(onebit, below=3), steps=4)", "must stand inside of `mixed`"),
        ("mixd(onebit, below=3)", "mixed"),
    ],
)
def test_what_is_no_mixture_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_it_is_for_the_slow_tier_only() -> None:
    """No plan of a party has it; a server takes it both ways."""
    value = parse(TEXT)
    config = ServerConfig(("a",), insecure=True, compression=TEXT, downlink="same")
    terms = terms_of(config)
    assert (terms.compression, terms.downlink) == (TEXT, TEXT)
    with pytest.raises(ConfigError, match="`compression` must not be mixed"):
        plan._canonical(TEXT)
    for check in (check_unmixed, check_makes_packets):
        with pytest.raises(ValueError, match="`compressor` must not be mixed"):
            check(value)
    assert check_makes_packets(value, may_be_mixed=True) == value
    with pytest.raises(ValueError, match="must not be mixed"):
        value.chunk_packet_bytes(5)


def test_nothing_encodes_or_decodes_without_asking_for_the_size() -> None:
    value, x = parse(TEXT), np.ones(2000, np.float32)
    key = native.Key(0, 0, 0)
    residual = np.zeros_like(x)
    packets = native.encode(value.of_size(x.size), x, key, kept=residual)
    for call in (
        lambda: native.encode(value, x, key, kept=residual),
        lambda: native.decode(value, packets, x.size),
        lambda: native.merge(value, [packets], x.size),
        lambda: native.merge_encode(value, [packets], x.size, key, kept=residual),
    ):
        with pytest.raises(ValueError, match=r"give `compressor.of_size\(n\)`"):
            call()
