# SPDX-License-Identifier: Apache-2.0
"""Rounds without a server: packets are delivered step by step, in any order, twice, and broken."""

import functools
import itertools
import random
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips.errors import NonFiniteError, PacketError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.terms.model import Model, first_difference

FEEDBACK = "error_feedback(onebit)"
MODEL = Model(((3, 5), (), (0,), (CHUNK + 9,), (17,)))
SITES = ("a", "b", "c")
Packet = npt.NDArray[np.uint8]
Delivery = tuple[int, int, int]


def store_of(
    uplink: str = FEEDBACK, downlink: str = FEEDBACK, model: Model = MODEL, sites=SITES
) -> Store:
    return Store(model, sites, compressors.parse(uplink), compressors.parse(downlink), 7)


def gradient(child: int, number: int, chunk: int, model: Model = MODEL) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng((child, number, chunk))
    return generator.standard_normal(model.chunks[chunk].size, np.float32)


def encode(text: str, values: npt.NDArray[np.float32]) -> Packet:
    compressor = compressors.parse(text).codec
    return native.encode(compressor, values, native.Key(0, 0, 0))


@functools.cache
def packet_of(text: str, child: int, number: int, chunk: int) -> Packet:
    return encode(text, gradient(child, number, chunk))


def all_deliveries(num_rounds: int) -> list[list[Delivery]]:
    return [
        [
            (number, child, chunk)
            for child in range(len(SITES))
            for chunk in range(len(MODEL.chunks))
        ]
        for number in range(num_rounds)
    ]


def deliver(store: Store, deliveries: list[list[Delivery]], uplink: str = FEEDBACK) -> list[bytes]:
    """Runs whole rounds; the results, by round and chunk number."""
    results = []
    for number, each in enumerate(deliveries):
        store.begin(number)
        for _, child, chunk in each:
            store.add(number, child, [(chunk, packet_of(uplink, child, number, chunk))])
        assert store.is_merged(number)
        results += [packet.tobytes() for _, packet in sorted_results(store, number)]
    return results


def sorted_results(store: Store, number: int) -> list[tuple[int, Packet]]:
    return sorted(store.results(number, 0)[1], key=lambda pair: pair[0])


def test_the_chunks_of_a_model() -> None:
    table = [(chunk.tensor, chunk.offset, chunk.size) for chunk in MODEL.chunks]
    assert table == [(0, 0, 15), (1, 0, 1), (3, 0, CHUNK), (3, CHUNK, 9), (4, 0, 17)]
    assert MODEL.dense_bytes == 4 * (15 + 1 + CHUNK + 9 + 17)
    assert MODEL.describe(0) == "tensor 0 of shape [3, 5]"
    assert MODEL.describe(3) == (
        f"tensor 3 of shape [{CHUNK + 9}], elements {CHUNK} to {CHUNK + 8}"
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [1],
        [["3"]],
        [[-1]],
        [[1.0]],
        [[True]],
        [[1] * 33],
        [[1 << 41]],
        [[1 << 30, 1 << 30]],
    ],
)
def test_other_values_are_no_model(value: object) -> None:
    with pytest.raises(ProtocolError):
        Model.from_json(value)


def test_the_first_difference_is_named() -> None:
    one = ((3, 5), (2,))
    assert first_difference(one, one, "tensor") is None
    assert first_difference(one, ((3, 5), (4,), (1,)), "tensor") == (
        "tensor 1 is [2] there and [4] here"
    )
    assert first_difference(one, ((3, 5),), "tensor") == "there are 2 of tensor there and 1 here"


@pytest.mark.parametrize("text", [FEEDBACK, "error_feedback(terngrad(bitwidth=2))"])
def test_results_are_the_sum_in_child_order_encoded_again(text: str) -> None:
    store = store_of("fp32", text)
    downlink = compressors.parse(text)
    residuals = [np.zeros(chunk.size, np.float32) for chunk in MODEL.chunks]
    seed = native.derive_seed(7, "server")
    for number, each in enumerate(all_deliveries(3)):
        store.begin(number)
        for _, child, chunk in each:
            store.add(number, child, [(chunk, packet_of("fp32", child, number, chunk))])
        for chunk, packet in sorted_results(store, number):
            where = MODEL.chunks[chunk]
            total = gradient(0, number, chunk)
            for child in (1, 2):
                total = total + gradient(child, number, chunk)
            key = native.Key(seed, number, where.tensor, where.offset)
            expected = native.encode(downlink, total, key, kept=residuals[chunk])
            np.testing.assert_array_equal(packet, expected)


def test_the_order_of_arrival_is_irrelevant_bit_for_bit() -> None:
    deliveries = all_deliveries(3)
    expected = deliver(store_of(), deliveries)
    shuffler = random.Random(5)
    for _ in range(3):
        shuffled = [shuffler.sample(each, len(each)) for each in deliveries]
        assert deliver(store_of(), shuffled) == expected


def test_threads_do_not_change_the_result() -> None:
    deliveries = all_deliveries(2)
    expected = deliver(store_of(), deliveries)
    store = store_of()
    results = []
    for number, each in enumerate(deliveries):
        store.begin(number)
        threads = [
            threading.Thread(
                target=lambda n=number, c=child, mine=each: [
                    store.add(n, c, [(chunk, packet_of(FEEDBACK, c, n, chunk))])
                    for _, one, chunk in mine
                    if one == c
                ]
            )
            for child in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        results += [packet.tobytes() for _, packet in sorted_results(store, number)]
    assert results == expected


def test_a_chunk_is_merged_when_all_have_delivered_it() -> None:
    store = store_of()
    packets = [encode(FEEDBACK, gradient(child, 0, 3)) for child in range(3)]
    for child in (2, 0):
        assert store.add(0, child, [(3, packets[child])]) == 1
        assert store.results(0, 0) == (0, [])
    assert store.missing(0) == {"a": 1, "b": 0, "c": 1}
    store.add(0, 1, [(3, packets[1])])
    after, news = store.results(0, 0)
    assert (after, [chunk for chunk, _ in news]) == (1, [3])
    assert store.results(0, 1) == (1, [])
    assert not store.is_merged(0)


def test_a_packet_counts_once() -> None:
    expected = deliver(store_of(), all_deliveries(2))
    doubled = [list(itertools.chain(each, each[:7])) for each in all_deliveries(2)]
    for each in doubled:
        each.insert(3, each[0])
    assert deliver(store_of(), doubled) == expected
    store = store_of()
    packet = encode(FEEDBACK, gradient(0, 0, 0))
    other = encode(FEEDBACK, -gradient(0, 0, 0))
    assert [store.add(0, 0, [(0, one)]) for one in (packet, packet, other)] == [1, 0, 0]


def test_a_packet_that_comes_over_two_connections_at_once_counts_once() -> None:
    """The second one comes while the first one is looked at, without the lock."""
    store, combining = store_of(sites=("a", "b")), store_of()._combining
    packets = [packet_of(FEEDBACK, child, 0, 0) for child in (0, 1)]
    store.add(0, 0, [(0, packets[0])])
    news = []

    def check(*arguments: Any) -> None:
        store._combining.check = combining.check  # type: ignore[method-assign]
        news.append(store.add(0, 1, [(0, packets[1])]))

    store._combining.check = check  # type: ignore[method-assign]
    news.append(store.add(0, 1, [(0, packets[1])]))
    assert news == [1, 0]
    assert store.results(0, 0)[0] == 1  # chunk
    assert store._rounds[0].num_merged == 1


def test_what_comes_down_first_counts() -> None:
    """It may come again over another connection, when children have been told."""
    store = store_of()
    one, other = (packet_of(FEEDBACK, child, 0, 0) for child in (0, 1))
    for packet in (one, other):
        store.finish(0, 0, packet)
    assert [packet.tobytes() for _, packet in sorted_results(store, 0)] == [one.tobytes()]


def test_rounds_follow_each_other_and_the_last_two_are_kept() -> None:
    store = store_of()
    for number in (1, 2, 7):
        with pytest.raises(ProtocolError, match="round"):
            store.begin(number)
    deliver(store, all_deliveries(1))
    kept = sorted_results(store, 0)
    store.begin(1)
    store.begin(0)
    assert [p.tobytes() for _, p in sorted_results(store, 0)] == [p.tobytes() for _, p in kept]
    with pytest.raises(ProtocolError, match="cannot begin before round 1 is merged: 0 of 5"):
        store.begin(2)
    deliver(store, all_deliveries(3))
    assert store.round == 2
    store.archive()
    with pytest.raises(ProtocolError, match=r"Rounds 1 to 2 are kept. Received: round 0"):
        store.results(0, 0)
    with pytest.raises(ProtocolError, match=r"one of 1 to 3. Received: round 0"):
        store.begin(0)


def good(chunk: int) -> Packet:
    return encode(FEEDBACK, gradient(1, 0, chunk))


def patched(packet: Packet, at: int, value: int) -> Packet:
    packet = packet.copy()
    packet[at] ^= value
    return packet


BAD_PACKETS = {
    "truncated": lambda: good(4)[:-1],
    "header-cut": lambda: good(4)[:15],
    "empty": lambda: good(4)[:0],
    "too-long": lambda: np.concatenate([good(4), good(4)[:1]]),
    "twice": lambda: np.concatenate([good(4), good(4)]),
    "other-chunk": lambda: good(0),
    "magic": lambda: patched(good(4), 0, 1),
    "version": lambda: patched(good(4), 4, 1),
    "flags": lambda: patched(good(4), 6, 1),
    "hash": lambda: patched(good(4), 8, 1),
    "count": lambda: patched(good(4), 12, 1),
    "fp32": lambda: encode("fp32", gradient(1, 0, 4)),
    "terngrad": lambda: encode("terngrad", gradient(1, 0, 4)),
}


@pytest.mark.parametrize("name", BAD_PACKETS)
def test_a_bad_packet_is_refused_by_name_and_the_round_goes_on(name: str) -> None:
    bad = BAD_PACKETS[name]()
    expected = deliver(store_of(), all_deliveries(2))
    store = store_of()
    with pytest.raises(PacketError, match=r"Site `b`, round 0, tensor 4 of shape \[17\]: "):
        store.add(0, 1, [(4, bad)])
    assert store.delivered(0, 1) == frozenset()
    assert deliver(store, all_deliveries(2)) == expected


def test_a_packet_of_another_stage_is_refused_and_the_round_goes_on() -> None:
    text = "warmup(topk(ratio=0.1), steps=2, stages=2)"
    value = compressors.parse(text)
    # Two stages send equally many of so few elements: it is not the length that tells.
    assert value.at(1).chunk_packet_bytes(1) == value.at(2).chunk_packet_bytes(1)
    store = store_of(text, "fp32")
    for number in range(3):
        store.begin(number)
        other = native.encode(value.at(number + 1), gradient(1, number, 1), native.Key(0, 0, 0))
        if number < 2:
            with pytest.raises(PacketError, match=rf"Site `b`, round {number}, tensor 1 of shape"):
                store.add(number, 1, [(1, other)])
        for child in range(len(SITES)):
            for chunk in range(len(MODEL.chunks)):
                x = gradient(child, number, chunk)
                packet = native.encode(value, x, native.Key(0, number, 0))
                assert packet.size == store.packet_limits(number)[chunk]
                assert store.add(number, child, [(chunk, packet)]) == 1
        assert store.is_merged(number)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float) -> None:
    store = store_of("fp32")
    values = gradient(1, 0, 4)
    values[3] = value
    with pytest.raises(NonFiniteError, match=r"Site `b`, round 0, tensor 4 .* 1 values that"):
        store.add(0, 1, [(4, encode("fp32", values))])
    expected = deliver(store_of("fp32"), all_deliveries(1), "fp32")
    assert deliver(store, all_deliveries(1), "fp32") == expected


def test_a_sum_that_overflows_is_refused_and_can_be_sent_again() -> None:
    store = store_of("fp32")
    huge = np.full(17, 3e38, np.float32)
    store.add(0, 0, [(4, encode("fp32", huge / 2))])
    store.add(0, 2, [(4, encode("fp32", huge / 2))])
    with pytest.raises(NonFiniteError, match=r"Site `b`, .* the largest value, 3e\+38"):
        store.add(0, 1, [(4, encode("fp32", huge))])
    assert len(store.refusals(0)) == 1
    assert store.missing(0) == {"a": 0, "b": 0, "c": 0}
    expected = deliver(store_of("fp32"), all_deliveries(2), "fp32")
    assert deliver(store, all_deliveries(2), "fp32") == expected


def test_a_model_without_tensors_is_merged_at_once() -> None:
    store = store_of(model=Model(()))
    assert store.is_merged(0)
    store.begin(1)
    assert store.results(1, 0) == (0, [])


def test_memory_is_bounded_over_many_rounds() -> None:
    model = Model(((64,),))
    store = store_of(model=model, sites=("a",))
    for number in range(50):
        store.begin(number)
        store.archive()
        store.add(number, 0, [(0, encode(FEEDBACK, gradient(0, number, 0, model)))])
    assert len(store._rounds) == 2
    assert all(not each for kept in store._rounds.values() for each in kept.packets)
