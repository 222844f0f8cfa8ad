# SPDX-License-Identifier: Apache-2.0
"""Rounds of children that wait for nobody, without a server: beside plain NumPy, in any order."""

import random
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.plainly import RULES, Plainly
from tf_hips.errors import NonFiniteError, PacketError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.rounds.asynchronous import AsynchronousStore
from tf_hips.ps.rules import arrivals
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, Recorder

pytestmark = pytest.mark.heavy  # every rule with every codec

FEEDBACK = "error_feedback(onebit)"
NOISE = "error_feedback(terngrad(bitwidth=2))"
MODEL = Model(((3, 5), (), (0,), (2000,), (17,)))
SITES = ("a", "b", "c")


def store_of(
    rule: str, up: str = FEEDBACK, down: str = NOISE, **settings: Any
) -> AsynchronousStore:
    codecs = compressors.parse(up), compressors.parse(down)
    return AsynchronousStore(MODEL, SITES, *codecs, 7, rules.parse(rule), **settings)


def packet_of(text: str, child: int, number: int, chunk: int) -> npt.NDArray[np.uint8]:
    generator = np.random.default_rng((child, number, chunk))
    values = generator.standard_normal(MODEL.chunks[chunk].size, np.float32)
    return native.encode(compressors.parse(text).at(number).codec, values, native.Key(0, 0, 0))


def schedule(num_rounds: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Child, round and chunk of packets: a fast child, a slow one, one that comes and goes."""
    draw = random.Random(seed)
    owed = {child: [0, list(range(len(MODEL.chunks)))] for child in range(len(SITES))}
    order = []
    while len(order) < num_rounds * len(MODEL.chunks):
        child = draw.choices(range(len(SITES)), [6, 3, 1])[0]
        number, chunks = owed[child]
        chunk = chunks.pop(draw.randrange(len(chunks)))
        order.append((child, number, chunk))
        if not chunks:
            owed[child] = [number + 1, list(range(len(MODEL.chunks)))]
    return order


def deliver(store: AsynchronousStore, order: list[tuple[int, int, int]], up: str) -> list[bytes]:
    answers = []
    for child, number, chunk in order:
        lane = store.of(child)
        lane.begin(number)
        after = len(lane.results(number, 0)[1])
        assert lane.add(number, child, [(chunk, packet_of(up, child, number, chunk))]) == 1
        [(place, answer)] = lane.results(number, after)[1]
        assert place == chunk
        answers.append(answer.tobytes())
    return answers


def test_every_asynchronous_rule_has_a_reference() -> None:
    assert all(rules.parse(text).is_asynchronous for text in RULES)
    tested = {rules.parse(text).name for text in RULES}
    assert tested >= {name for name in rules.NAMES if rules.parse(name).is_asynchronous}


@pytest.mark.parametrize(
    ("up", "down"),
    [(FEEDBACK, NOISE), ("fp32", "fp32"), ("warmup(error_feedback(onebit), steps=2)",) * 2],
)
@pytest.mark.parametrize("rule", RULES)
def test_answers_equal_plain_numpy_bit_for_bit(rule: str, up: str, down: str) -> None:
    order = schedule(24)
    plainly = Plainly(rule, MODEL, SITES, up, down, 7)
    store = store_of(rule, up, down)
    found = deliver(store, order, up)
    for (child, number, chunk), answer in zip(order, found, strict=True):
        assert answer == plainly.push(child, number, chunk, packet_of(up, child, number, chunk))
    for chunk, moved in store._moved.items():
        np.testing.assert_array_equal(moved.total, -plainly.w[chunk])
        for child, weights in enumerate(plainly.children):
            received = store.of(child).received[chunk]
            np.testing.assert_array_equal(0 if received is None else received, -weights[chunk])
    # Memory: the total, a reference for each child, slots.
    arrays = [moved.total for moved in store._moved.values()]
    arrays += [one for moved in store._moved.values() for one in moved.slots.arrays]
    arrays += [one for child in (0, 1, 2) for one in store.of(child).received if one is not None]
    allowed = 1 + len(SITES) + arrivals.num_slots(rules.parse(rule))
    assert sum(one.size for one in arrays) <= MODEL.num_elements * allowed


def test_a_child_catches_up_with_all_that_others_have_moved() -> None:
    """Exact both ways: after its answer it has what the server has."""
    store = store_of("asgd(0.1)", "fp32", "fp32")
    order = schedule(30)
    deliver(store, order, "fp32")
    last = max(place for place, one in enumerate(order) if one[2] == 3)
    received = store.of(order[last][0]).received[3]
    assert received is not None
    np.testing.assert_allclose(received, store._moved[3].total, rtol=1e-6, atol=1e-6)
    assert store.residual_rms() > 0  # others have not been back


def test_a_round_counts_once_and_is_answered_again() -> None:
    store = store_of("dc_asgd")
    lane = store.of(1)
    packets = [(chunk, packet_of(FEEDBACK, 1, 0, chunk)) for chunk in range(len(MODEL.chunks))]
    assert lane.add(0, 1, packets[:2]) == 2
    with pytest.raises(ProtocolError, match=r"cannot begin before round 0 is answered: 2 of 4"):
        lane.begin(1)
    assert lane.missing(0) == {"b": 2}
    assert lane.add(0, 1, packets) == 2
    answers = lane.results(0, 0)
    assert lane.add(0, 1, packets) == 0
    assert [one.tobytes() for _, one in lane.results(0, 0)[1]] == [
        one.tobytes() for _, one in answers[1]
    ]
    assert [moved.version for moved in store._moved.values()] == [1] * 4
    assert (lane.missing(0), lane.is_merged(0)) == ({}, True)
    assert lane.begin(1)
    assert not lane.begin(1)
    # A child that comes back does round 0 again, and gets what it got then.
    assert not lane.begin(0)
    assert (lane.is_past(0), lane.oldest, lane.round) == (True, 0, 1)
    assert (lane.add(0, 1, packets), lane.missing(0), lane.is_merged(0)) == (0, {}, True)
    assert lane.delivered(0, 1) == frozenset(range(4))
    assert lane.past_results(0) == answers[1]
    with pytest.raises(ProtocolError, match=r"must be one of 0 to 2\. Received: round 3"):
        lane.begin(3)
    assert (store.round, store.progress(1), store.progress(0)) == (1, (0, 4), (-1, 0))
    lane.past.need(1)
    for call in (lane.past_results, lane.refusals, lane.missing):
        with pytest.raises(ProtocolError, match=r"Rounds 1 to 1 of site `b` are kept\. Received"):
            call(0)
    with pytest.raises(ProtocolError, match="takes no weights"):
        lane.weigh(1, 1, 2.0)


def test_a_packet_that_comes_over_two_connections_at_once_counts_once() -> None:
    """The second one comes while the first one is decoded, without the lock."""
    store = store_of("dc_asgd")
    packet, decode, news = packet_of(FEEDBACK, 1, 0, 0), store._decoded, []

    def decoding(*arguments: Any) -> Any:
        store._decoded = decode  # type: ignore[method-assign]
        news.append(store.of(1).add(0, 1, [(0, packet)]))
        return decode(*arguments)

    store._decoded = decoding  # type: ignore[method-assign]
    news.append(store.of(1).add(0, 1, [(0, packet)]))
    assert news == [1, 0]
    assert store._moved[0].version == 1


@pytest.mark.parametrize("rule", RULES)
def test_what_is_refused_changes_nothing(rule: str) -> None:
    order = schedule(12)
    half = len(order) // 2
    undisturbed = deliver(store_of(rule, "fp32"), order, "fp32")
    store = store_of(rule, "fp32")
    found = deliver(store, order[:half], "fp32")
    child, number, chunk = order[half]
    lane = store.of(child)
    lane.begin(number)
    size = MODEL.chunks[chunk].size
    fp32 = compressors.parse("fp32")
    for value, text in ((np.nan, "a gradient must be finite"), (3.4e38, "an update must be fin")):
        packet = native.encode(fp32, np.full(size, value, np.float32), native.Key(0, 0, 0))
        if value > 0 and rules.parse(rule).name in ("asgd", "fedasync", "momentum", "fedbuff"):
            continue  # a tenth of it is a number
        with pytest.raises(NonFiniteError, match=text):
            lane.add(number, child, [(chunk, packet)])
    with pytest.raises(PacketError, match=r"Site `.`, round \d+, tensor"):
        lane.add(number, child, [(chunk, packet[:-1])])
    assert chunk not in lane.delivered(number, child)
    assert found + deliver(store, order[half:], "fp32") == undisturbed


def test_of_a_sum_that_overflows_it_is_said_that_it_is_one() -> None:
    """FedBuff keeps no rows: who comes last may have sent nothing of it."""
    store = store_of("fedbuff(3, 1.0, 0)", "fp32")
    fp32, size = compressors.parse("fp32"), MODEL.chunks[0].size

    def send(child: int, value: float) -> None:
        packet = native.encode(fp32, np.full(size, value, np.float32), native.Key(0, 0, 0))
        store.of(child).begin(0)
        store.of(child).add(0, child, [(0, packet)])

    send(0, 3.3e38)
    with pytest.raises(
        NonFiniteError,
        match=r"Site `b`.*the sum of 2 updates since the last step, of which this is the last.*"
        r"largest value of the sum before it is 3.3e\+38; the largest value of this gradient is 1e",
    ):
        send(1, 1e38)


def test_threads_apply_packets_in_the_order_of_their_records() -> None:
    """Many threads on few chunks; what was recorded explains every bit."""
    records: list[tuple[int, int, int]] = []

    class Listening(Recorder):
        is_keeping = True

        def add(self, kind: Kind, data: Any = b"", **fields: Any) -> int:
            if kind == Kind.PACKET:
                records.append((fields["child"], fields["round"], fields["chunk"]))
            return 0

    rule, num_rounds = "adam(0.01, asynchronous=True)", 40
    store = store_of(rule, recorder=Listening())
    answers: dict[tuple[int, int, int], bytes] = {}

    def train(child: int) -> None:
        lane = store.of(child)
        for number in range(num_rounds):
            lane.begin(number)
            for chunk in range(len(MODEL.chunks)):
                lane.add(number, child, [(chunk, packet_of(FEEDBACK, child, number, chunk))])
            for chunk, answer in lane.results(number, 0)[1]:
                answers[child, number, chunk] = answer.tobytes()

    threads = [threading.Thread(target=train, args=(child,)) for child in range(len(SITES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(records) == len(answers) == 3 * num_rounds * len(MODEL.chunks)
    plainly = Plainly(rule, MODEL, SITES, FEEDBACK, NOISE, 7)
    for one in records:
        assert answers[one] == plainly.push(*one, packet_of(FEEDBACK, *one))
