# SPDX-License-Identifier: Apache-2.0
"""Whatever the bytes, a packet decodes or is refused: PacketError, or InvalidArgumentError."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.codecs import all_variants, encoded, gradient, variants_with_feedback
from tf_hips.errors import PacketError
from tf_hips.ops import CHUNK, Compressor, Key, error_feedback, graph, native, parse

pytestmark = pytest.mark.tf

KEY = Key(seed=1, step=2, tensor_id=3)
compressors = st.sampled_from(all_variants())
sizes = st.integers(0, 200)


@st.composite
def changed_packets(draw: st.DrawFn) -> tuple[Compressor, int, bytes]:
    """A packet with some bytes changed, cut off, or put in."""
    compressor, n = draw(compressors), draw(sizes)
    packet = bytearray(encoded(compressor, gradient(n), KEY))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(packet) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "header"]))
        if kind == "flip" and packet:
            packet[position] ^= draw(st.integers(1, 255))
        elif kind == "header" and len(packet) >= 16:
            packet[position % 16] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == "cut":
            del packet[position : position + draw(st.integers(1, 40))]
        else:
            packet[position:position] = draw(st.binary(min_size=1, max_size=40))
    return compressor, n, bytes(packet)


def decode_all_ways(compressor: Compressor, n: int, packet: bytes) -> None:
    """Decodes natively and in TensorFlow: equal values from both, or both refuse."""
    tensor = tf.constant(np.frombuffer(packet, np.uint8))
    try:
        decoded = native.decode(compressor, packet, n)
    except PacketError as error:
        assert "Received" in str(error) or "body" in str(error)
        with pytest.raises(tf.errors.InvalidArgumentError):
            graph.decode(compressor, tensor, n)
        with pytest.raises(tf.errors.InvalidArgumentError):
            graph.merge(compressor, tensor[tf.newaxis], n)
        with pytest.raises(PacketError):
            native.merge(compressor, [packet], n)
        return
    again = graph.decode(compressor, tensor, n).numpy()
    np.testing.assert_array_equal(again.view(np.uint32), decoded.view(np.uint32))


@given(changed_packets())
@settings(max_examples=300)
def test_changed_packets(case: tuple[Compressor, int, bytes]) -> None:
    decode_all_ways(*case)


@given(compressors, sizes, st.binary(max_size=300))
@settings(max_examples=100)
def test_random_bytes(compressor: Compressor, n: int, packet: bytes) -> None:
    decode_all_ways(compressor, n, packet)


@given(compressors, st.integers(0, 50), st.integers(0, 50))
@settings(max_examples=60)
def test_the_number_of_elements_is_checked(compressor: Compressor, n: int, claimed: int) -> None:
    packet = encoded(compressor, gradient(n), KEY)
    if n == claimed:
        assert native.decode(compressor, packet, claimed).size == n
    else:
        with pytest.raises(PacketError):
            native.decode(compressor, packet, claimed)


@given(compressors, compressors)
@settings(max_examples=60)
def test_packets_of_another_codec_are_refused(made: Compressor, read: Compressor) -> None:
    packet = encoded(made, gradient(9), KEY)
    if made == read:
        native.decode(read, packet, 9)
        return
    with pytest.raises(PacketError, match="hash"):
        native.decode(read, packet, 9)
    with pytest.raises(tf.errors.InvalidArgumentError, match="hash"):
        graph.decode(read, tf.constant(packet), 9)


def test_a_fault_in_a_later_packet_is_found_before_anything_is_written() -> None:
    compressor = parse("onebit")
    n = CHUNK + 10
    packet = native.encode(compressor, gradient(n), KEY)
    packet[compressor.chunk_packet_bytes(CHUNK) + 8] ^= 1
    out = np.full(n, 7, np.float32)
    with pytest.raises(PacketError, match="packet 2 of 2"):
        native.decode(compressor, packet, n, out=out)
    assert (out == 7).all()


def test_the_faulty_row_is_named() -> None:
    compressor = parse("terngrad")
    good = native.encode(compressor, gradient(20), KEY)
    bad = good.copy()
    bad[0] ^= 1
    with pytest.raises(PacketError, match="row 1 of 3"):
        native.merge(compressor, [good, bad, good], 20)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 1 of `packets`"):
        graph.merge(compressor, tf.constant(np.stack([good, bad, good])), 20)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 2 of `packets`"):
        graph.merge_encode(
            parse("error_feedback(terngrad)"),
            tf.constant(np.stack([good, good, bad])),
            20,
            tf.zeros([20]),
            seed=1,
            step=0,
            tensor_id=0,
        )


@given(st.sampled_from(variants_with_feedback()), st.binary(max_size=600))
@settings(max_examples=200)
def test_any_gradient_survives(compressor: Compressor, data: bytes) -> None:
    x = np.frombuffer(data[: len(data) // 4 * 4], np.float32)
    packet = native.encode(compressor, x, KEY)
    residual = np.zeros_like(x)
    feedback = error_feedback(compressor)
    assert native.encode(feedback, x, KEY, residual).tobytes() == packet.tobytes()
    assert np.isfinite(residual).all()
    assert native.decode(compressor, packet, x.size).shape == x.shape
