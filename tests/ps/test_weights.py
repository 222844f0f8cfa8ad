# SPDX-License-Identifier: Apache-2.0
"""The first weights: bytes in order, resumed anywhere, restored with their types and shapes."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ps.parties import Party, serving, together
from tests.ps.relay import Relay
from tests.ps.served import Served
from tests.support.certs import Certificates
from tf_hips.errors import ProtocolError
from tf_hips.ps.terms.weights import FirstWeights, Refill, cut_weights, equal_bytes, kind_of
from tf_hips.ps.transport.wire import MESSAGE_BYTES

pytestmark = pytest.mark.heavy  # servers, and links that are cut

ARRAYS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.array([], np.int64),
    np.array([True, False]),
    np.array([1.5, 2.5], ml_dtypes.bfloat16),
    np.array([7], np.float64),
]
CONTENT = b"".join(array.tobytes() for array in ARRAYS)


@given(st.integers(0, len(CONTENT)))
def test_weights_can_be_cut_from_any_byte(start: int) -> None:
    assert b"".join(cut_weights(ARRAYS, start)) == CONTENT[start:]


def test_weights_are_cut_into_whole_messages() -> None:
    arrays = [np.zeros(MESSAGE_BYTES // 4 - 1, np.float32), np.zeros(9 + MESSAGE_BYTES, np.uint8)]
    sizes = [len(message) for message in cut_weights(arrays, 0)]
    assert sizes == [MESSAGE_BYTES, MESSAGE_BYTES, 5]
    assert [len(message) for message in cut_weights(arrays, MESSAGE_BYTES)] == [MESSAGE_BYTES, 5]
    assert list(cut_weights([], 0)) == []


@given(st.lists(st.integers(0, len(CONTENT)), max_size=5))
def test_weights_are_restored_with_types_and_shapes_as_they_come(cuts: list[int]) -> None:
    restored: list[np.ndarray] = []
    refill = Refill([(array.dtype, array.shape) for array in ARRAYS], restored.append)
    ends = [*sorted(cuts), len(CONTENT)]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        refill.take(CONTENT[begin:end])
        assert refill.held == end
        # One is given away with its last byte, and one without bytes with the one before it.
        sizes = np.cumsum([array.nbytes for array in ARRAYS])
        assert len(restored) == np.count_nonzero(sizes <= end)
    for one, other in zip(ARRAYS, restored, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert equal_bytes(one, other)
    with pytest.raises(ValueError, match=r"must belong to an array\. Received: 1 too many"):
        refill.take(b"x")


def test_bytes_are_compared_and_not_numbers() -> None:
    zeros = np.zeros(MESSAGE_BYTES // 4 + 1, np.float32)
    other = zeros.copy()
    assert equal_bytes(zeros, other)
    other[-1] = -0.0
    assert not equal_bytes(zeros, other)
    nan = np.full(3, np.nan, np.float32)
    assert equal_bytes(nan, nan.copy())
    assert equal_bytes(np.broadcast_to(np.float32(2), (2, 3)), np.full((2, 3), 2, np.float32))


def test_a_kind_is_type_and_shape() -> None:
    assert kind_of(np.dtype("<f4"), (3, 4)) == "<f4[3, 4]"
    assert kind_of(np.dtype(ml_dtypes.bfloat16), ()) == "bfloat16[]"
    with pytest.raises(ValueError, match="must be numbers"):
        kind_of(np.dtype(object), (1,))


def test_bytes_come_while_a_snapshot_holds_those_before() -> None:
    weights = FirstWeights()
    weights.describe(["|u1[10]"], 10)
    weights.take(0, b"0123")
    (early,) = weights.pieces()
    weights.take(4, b"456789")
    (late,) = weights.pieces()
    weights.take(2, b"23")
    assert [(at, bytes(piece)) for at, piece in (early, late)] == [(0, b"0123"), (0, b"0123456789")]


def test_bytes_come_in_order_and_once() -> None:
    weights = FirstWeights()
    weights.describe(["|u1[10]"], 10)
    assert weights.take(0, b"0123") == 4
    assert weights.take(2, b"23456") == 7
    assert weights.take(0, b"01") == 2
    assert weights.held == 7
    for position, data in [(8, b"8"), (7, b"7890"), (11, b"")]:
        with pytest.raises(ProtocolError, match="in order, from byte 7"):
            weights.take(position, data)
    assert not weights.has_message(0)
    weights.take(7, b"789")
    assert (weights.has_message(0), weights.message(3)) == (True, b"3456789")
    with pytest.raises(ProtocolError, match="begun with other weights"):
        weights.describe(["|u1[11]"], 11)
    assert weights.difference(["|u1[10]"], 10) is None
    assert weights.difference(["|u1[10]"], 9) == "there are 10 bytes there and 9 here"


@pytest.mark.parametrize(("site", "direction"), [("a", "up"), ("b", "down")])
def test_a_cut_first_synchronisation_goes_on(
    certificates: Certificates, site: str, direction: str
) -> None:
    generator = np.random.default_rng(1)
    first = [generator.integers(0, 256, 12 << 20, np.uint8), np.array(3)]
    second = [np.zeros(12 << 20, np.uint8), np.array(0)]
    with serving(certificates) as server, Relay(server.port) as relay:
        addresses = {"a": server.address, "b": server.address, site: relay.address}
        a, b = (Party(addresses[one], one, certificates.party(one)) for one in ("a", "b"))
        together(a.join, b.join)
        relay.cut_after(direction, 9 << 20)
        _, synced = together(
            lambda: a.client.first_sync(first), lambda: b.client.first_sync(second)
        )
        assert relay.num_cuts == 1
        for one, other in zip(first, synced, strict=True):
            np.testing.assert_array_equal(one, other)
        wire = {"a": a, "b": b}[site].client.wire_bytes()
        spent = wire.sent if direction == "up" else wire.received
        assert 12 << 20 < spent < 20 << 20
        a.client.close()
        b.client.close()


def test_another_process_of_the_first_child_sends_all_first_weights_again(tmp_path: Path) -> None:
    """Where it went on, weights could be half those of one process and half another's."""
    with Served(tmp_path) as one:
        one.join()
        one.agree()
        first = one.caller(0)
        one.session.begin_sync(first, ["|u1[9]"], 9)
        one.session.upload(first, 0, b"0123")
        assert one.session.begin_sync(first, ["|u1[9]"], 9) == (4, False)
        second = one.caller(0, "another")
        one.session.join(second, 2, *one.texts, 7, None)
        assert one.session.begin_sync(second, ["|u1[9]"], 9) == (0, False)
        with pytest.raises(ProtocolError, match="must be the same when they come again"):
            one.session.upload(second, 0, bytes(9))
        one.session.upload(second, 0, b"012345678")
        assert one.session.begin_sync(second, ["|u1[9]"], 9) == (9, True)  # as all others
        assert b"".join(one.session.download(one.caller(1), 0)) == b"012345678"


def test_first_weights_have_an_end(tmp_path: Path) -> None:
    """Beyond it a call would get empty messages for ever."""
    with Served(tmp_path) as one:
        one.join()
        one.agree()
        one.session.begin_sync(one.caller(0), ["<f4[1]"], 4)
        one.session.upload(one.caller(0), 0, bytes(4))
        assert list(one.session.download(one.caller(1), 4)) == []
        with pytest.raises(ProtocolError, match=r"The weights have 4 bytes\. Received: byte 5"):
            next(itertools.chain(one.session.download(one.caller(1), 5), [b""]))


@pytest.mark.parametrize("bad", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("step", [1, 3, 64])
def test_a_weight_that_is_not_finite_is_found_wherever_messages_are_cut(
    bad: int, step: int
) -> None:
    arrays = [
        np.arange(3, dtype=np.float32),
        np.full(3, -1, np.int32),  # all bits are set
        np.arange(2, dtype=ml_dtypes.bfloat16),
        np.arange(2, dtype=np.float16),
        np.arange(2, dtype=">f8"),
    ]
    if bad != 1:
        arrays[bad][-1] = -np.inf if bad % 2 else np.nan
    content = b"".join(array.tobytes() for array in arrays)
    weights = FirstWeights()
    kinds = [kind_of(array.dtype, array.shape) for array in arrays]
    weights.describe(kinds, len(content))
    ends = np.cumsum([array.nbytes for array in arrays])
    while weights.held < len(content):
        position = max(0, weights.held - 2)  # some of it comes again
        data = content[position : weights.held + step]
        found = weights.nonfinite(position, data)
        if found is not None:
            assert found == f"{bad}, {kinds[bad]}"
            assert weights.held < ends[bad] <= weights.held + step
            return
        weights.take(position, data)
    assert bad == 1


def test_kinds_that_nobody_knows_are_not_looked_at() -> None:
    for kind in ("x", "<f4", "<f4[1,,2, x]", "<O8[2]", "float8_e5m2[4]", "<z9[1]", "<f4[1 2]"):
        weights = FirstWeights()
        weights.describe([kind, "<f4[1]"], 8)
        assert weights.nonfinite(0, b"\xff" * 8) is None
    weights = FirstWeights()
    weights.describe(["<f4[]"], 4)
    assert weights.nonfinite(0, b"\xff" * 9) == "0, <f4[]"


def test_below_a_robust_rule_the_first_weights_must_be_finite(certificates: Certificates) -> None:
    with serving(certificates, rule="median") as server:
        a, b = (Party(server.address, site, certificates.party(site)) for site in ("a", "b"))
        together(a.join, b.join)
        spoilt = [np.zeros((2, 2), np.float32), np.array([1.0, np.inf], np.float32)]
        told = r"must be finite\. Received: NaN or an infinity in weight 1, <f4\[2\], of site `a`"
        with pytest.raises(ProtocolError, match=told):
            a.client.first_sync(spoilt)
        assert server._session.state.weights.held == 0
        a.client.leave("no")
        b.client.leave("no")


def test_elsewhere_an_infinity_may_be_meant(certificates: Certificates) -> None:
    with serving(certificates) as server:
        a, b = (Party(server.address, site, certificates.party(site)) for site in ("a", "b"))
        together(a.join, b.join)
        weights = [np.zeros((2, 2), np.float32), np.array([1.0, np.inf], np.float32)]
        _, found = together(
            lambda: a.client.first_sync(weights), lambda: b.client.first_sync(weights)
        )
        np.testing.assert_array_equal(found[1], weights[1])
        a.client.leave("no")
        b.client.leave("no")
