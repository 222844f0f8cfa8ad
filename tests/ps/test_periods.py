# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds below a server that has another one above it, beside plain NumPy."""

import contextlib
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import DEADLINE_S, FEEDBACK, Party, together
from tests.ps.plainly import Plainly
from tests.ps.test_asynchronous import MODEL, NOISE, SITES, packet_of
from tests.ps.trees import Node, addresses_of, leaves_of, serving_tree
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.errors import ConfigError, NonFiniteError, PacketError, ProtocolError, TfHipsError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.rounds.periods import AHEAD, Above, PeriodicStore
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, Recorder

pytestmark = pytest.mark.heavy  # many rounds of two levels

Floats = npt.NDArray[np.float32]
Packet = npt.NDArray[np.uint8]
CHUNKS = range(len(MODEL.chunks))
PERIOD = 3


def store_of(
    rule: str, up: str = FEEDBACK, down: str = NOISE, above: str = FEEDBACK, **settings: Any
) -> PeriodicStore:
    way = Above("west", compressors.parse(above), compressors.parse(down), PERIOD, is_mean=True)
    codecs = compressors.parse(up), compressors.parse(down)
    return PeriodicStore(MODEL, SITES, *codecs, 7, rules.parse(rule), above=way, **settings)


class Upward:
    """What goes up of a server whose updates `Plainly` makes, in plain NumPy."""

    def __init__(self, plainly: Plainly, above: str, period: int, site: str = "west") -> None:
        self.plainly, self.model, self.period = plainly, plainly.model, period
        self.up = compressors.parse(above)
        self.seed = native.derive_seed(7, f"party/{site}")
        self.drift = [np.zeros(chunk.size, np.float32) for chunk in self.model.chunks]
        self.updates = [0] * len(self.model.chunks)
        self.on_way: dict[tuple[int, int], Floats] = {}

    def push(self, child: int, number: int, chunk: int, packet: Packet) -> tuple[bytes, Any]:
        """An update; its answer, and the packet that goes up, if it is the last of a period."""
        before = self.plainly.w[chunk]
        answer = self.plainly.push(child, number, chunk, packet)
        self.drift[chunk] = self.drift[chunk] + (before - self.plainly.w[chunk])
        self.updates[chunk] += 1
        period, late = divmod(self.updates[chunk], self.period)
        if late:
            return answer, None
        where, codec = self.model.chunks[chunk], self.up.at(period - 1).codec
        key = native.Key(self.seed, period - 1, where.tensor, where.offset)
        up = native.encode(codec, self.drift[chunk], key)
        sent = native.decode(codec, up, where.size)
        self.drift[chunk] = self.drift[chunk] - sent
        self.on_way[period - 1, chunk] = sent
        return answer, up.tobytes()

    def take(self, number: int, chunk: int, packet: Packet) -> None:
        """An answer from above."""
        answer = native.decode(
            self.plainly.down.at(number).codec, packet, self.model.chunks[chunk].size
        )
        self.plainly.w[chunk] = self.plainly.w[chunk] + self.on_way.pop((number, chunk)) - answer
        self.plainly.updates[chunk] += 1


def answer_of(down: str, number: int, chunk: int) -> Packet:
    """What a server above might say."""
    values = np.random.default_rng((9, number, chunk)).standard_normal(
        MODEL.chunks[chunk].size, np.float32
    )
    codec = compressors.parse(down).at(number).codec
    return native.encode(codec, values, native.Key(3, number, chunk))


Step = tuple[str, int, int, int]


def story(seed: int, num_rounds: int = 12) -> list[Step]:
    """Updates of children, and answers from above somewhere in between, as early as can be."""
    draw = random.Random(seed)
    owed = {child: [0, list(CHUNKS)] for child in range(len(SITES))}
    made, answered = dict.fromkeys(CHUNKS, 0), dict.fromkeys(CHUNKS, 0)
    steps: list[Step] = []
    while owed:
        can = [chunk for chunk in CHUNKS if answered[chunk] < made[chunk] // PERIOD]
        if can and draw.random() < 0.4:
            chunk = draw.choice(can)
            steps.append(("answer", 0, answered[chunk], chunk))
            answered[chunk] += 1
            continue
        child = draw.choice(sorted(owed))
        number, chunks = owed[child]
        chunk = chunks.pop(draw.randrange(len(chunks)))
        steps.append(("update", child, number, chunk))
        made[chunk] += 1
        if not chunks:
            owed[child] = [number + 1, list(CHUNKS)]
        if number + 1 == num_rounds and not chunks:
            del owed[child]
    return steps


def do(store: PeriodicStore, step: Step, up: str, down: str) -> None:
    kind, child, number, chunk = step
    if kind == "answer":
        store.finish(number, chunk, answer_of(down, number, chunk))
        return
    lane = store.of(child)
    lane.begin(number)
    assert lane.add(number, child, [(chunk, packet_of(up, child, number, chunk))]) == 1


def told(store: PeriodicStore, number: int) -> dict[int, bytes]:
    return {chunk: packet.tobytes() for chunk, packet in store.ups(number, 0)[1]}


def results_of(store: PeriodicStore, child: int) -> dict[int, bytes]:
    """Of the newest round, whether they may be told or not."""
    current = store.of(child).current
    return {
        chunk: packet.tobytes()
        for chunk, packet in enumerate(current.results)
        if packet is not None
    }


WAYS = [
    (FEEDBACK, NOISE, FEEDBACK),
    ("fp32", "fp32", "fp32"),
    ("fp16", "warmup(error_feedback(onebit), steps=2)", NOISE),
]


@pytest.mark.parametrize(("up", "down", "above"), WAYS)
@pytest.mark.parametrize(
    "rule",
    ["asgd(0.1)", "dc_asgd(0.1, 0.5)", "fedasync(0.6, staleness=polynomial, a=0.5)"],
)
def test_what_goes_up_equals_plain_numpy_bit_for_bit(
    rule: str, up: str, down: str, above: str
) -> None:
    plainly = Upward(Plainly(rule, MODEL, SITES, up, down, 7), above, PERIOD)
    store = store_of(rule, up, down, above)
    seen = 0
    for step in story(1):
        kind, child, number, chunk = step
        do(store, step, up, down)
        if kind == "answer":
            plainly.take(number, chunk, answer_of(down, number, chunk))
            continue
        packet = packet_of(up, child, number, chunk)
        answer, sent = plainly.push(child, number, chunk, packet)
        assert results_of(store, child)[chunk] == answer
        if sent is not None:
            seen += 1
            on_way = store._on_way[plainly.updates[chunk] // PERIOD - 1, chunk]
            assert on_way[1].tobytes() == sent
    assert seen == len(CHUNKS) * 12 * len(SITES) // PERIOD
    for chunk in CHUNKS:
        np.testing.assert_array_equal(store._moved[chunk].total, -plainly.plainly.w[chunk])
        np.testing.assert_array_equal(store._drift[chunk], plainly.drift[chunk])


class Kept(Recorder):
    """Records in a list, all durable up to a position."""

    is_keeping = True

    def __init__(self) -> None:
        self.records: list[tuple[Kind, dict[str, Any], bytes]] = []
        self.limit: int | None = None

    @property
    def durable(self) -> int:
        return len(self.records) if self.limit is None else self.limit

    def add(self, kind: Kind, data: Any = b"", **fields: Any) -> int:
        self.records.append((kind, fields, bytes(data)))
        return len(self.records)


def test_nothing_goes_up_that_is_not_durable() -> None:
    kept = Kept()
    store = store_of("asgd(0.1)", recorder=kept)
    kept.limit = 0
    for child in range(PERIOD):
        do(store, ("update", child, 0, 2), FEEDBACK, NOISE)
    assert (store.due(), told(store, 0)) == (None, {})
    kept.limit = None
    assert (store.due(), list(told(store, 0))) == (0, [2])


@pytest.mark.parametrize("place", [0, 7, 50, 111, 150])
@pytest.mark.parametrize("rule", ["dc_asgd(0.1, 0.5, adaptive=True, decay=0.9)", "fedbuff(3)"])
def test_a_store_that_is_restored_goes_on_with_the_same_bits(rule: str, place: int) -> None:
    """From a snapshot in the middle, while updates and answers go on, and what came after it."""
    steps = story(2)
    plain = store_of(rule)
    for step in steps:
        do(plain, step, FEEDBACK, NOISE)
    kept = Kept()
    store = store_of(rule, recorder=kept)
    for step in steps[:place]:
        do(store, step, FEEDBACK, NOISE)
    snapshot = store.capture()
    first, kept.records = len(kept.records), []
    end = place
    with contextlib.suppress(ProtocolError):  # what needs an update that waits for the snapshot
        for step in steps[place : place + 9]:
            do(store, step, FEEDBACK, NOISE)
            end += 1
    assert end > place
    entries = [(kind, fields, bytes(data)) for kind, fields, data in snapshot]
    store.release()
    for step in steps[end:]:
        do(store, step, FEEDBACK, NOISE)
    assert first + len(kept.records) == len(steps)
    again = store_of(rule)
    for kind, fields, data in entries:
        again.restore(kind, fields, data)
    for kind, fields, data in kept.records:
        if kind == Kind.PACKET:
            lane = again.of(fields["child"])
            lane.begin(fields["round"])
            lane.add(fields["round"], fields["child"], [(fields["chunk"], data)])
        else:
            again.restore(kind, fields, data)
    for one in (store, again):
        assert (one.next_up, one.num_waiting) == (plain.next_up, plain.num_waiting)
        assert told(one, one.next_up) == told(plain, plain.next_up)
        for chunk in CHUNKS:
            np.testing.assert_array_equal(one._moved[chunk].total, plain._moved[chunk].total)
            np.testing.assert_array_equal(one._drift[chunk], plain._drift[chunk])
            assert one._moved[chunk].version == plain._moved[chunk].version
        for child in range(len(SITES)):
            assert results_of(one, child) == results_of(plain, child)


def test_answers_wait_while_too_much_waits_for_the_server_above() -> None:
    store = store_of("asgd(0.1)")
    for number in range(AHEAD + 2):
        for child in range(len(SITES)):
            for chunk in CHUNKS:  # packets are taken in whatever waits
                do(store, ("update", child, number, chunk), FEEDBACK, NOISE)
    assert store.num_waiting == AHEAD + 2
    lane, newest = store.of(0), AHEAD + 1
    assert (lane.results(newest, 0), lane.is_merged(newest)) == ((0, []), False)
    assert lane.is_merged(newest - 1)  # it is over, whatever waits
    for number in range(2):
        for chunk in CHUNKS:
            store.finish(number, chunk, answer_of(NOISE, number, chunk))
            store.finish(number, chunk, answer_of(NOISE, number, chunk))  # the first one counts
    assert (store.next_up, store.num_waiting) == (2, AHEAD)
    assert len(lane.results(newest, 0)[1]) == len(CHUNKS)
    assert lane.is_merged(newest)
    with pytest.raises(ProtocolError, match="Chunk 1 of round 3 has not gone up"):
        for number in (2, 3):
            store.finish(number, 1, answer_of(NOISE, number, 1))


def test_an_update_that_is_refused_changes_nothing() -> None:
    store = store_of("asgd(1.0)", "fp32", "fp32", "fp32")
    values = np.full(MODEL.chunks[3].size, 3e38, np.float32)
    packet = native.encode(compressors.parse("fp32"), values, native.Key(0, 0, 0))
    store.of(0).begin(0)
    assert store.of(0).add(0, 0, [(3, packet)]) == 1
    drift = store._drift[3]
    with pytest.raises(NonFiniteError, match="an update must be finite"):
        store.of(1).add(0, 1, [(3, packet)])
    assert store._drift[3] is drift
    assert store._updates[3] == 1


@pytest.mark.parametrize("is_held", [False, True])
def test_after_an_answer_that_overflows_nothing_goes_up(is_held: bool) -> None:
    """Also of one that waits for a snapshot, and at a server that is killed before it says so."""
    kept = Kept()
    store = store_of("asgd(1.0)", "fp32", "fp32", "fp32", recorder=kept)

    def filled(chunk: int, value: float) -> Packet:
        values = np.full(MODEL.chunks[chunk].size, value, np.float32)
        return native.encode(compressors.parse("fp32"), values, native.Key(0, 0, 0))

    def update(child: int, number: int) -> None:
        store.of(child).begin(number)
        store.of(child).add(number, child, [(chunk, filled(chunk, 5e37)) for chunk in CHUNKS])

    for child, number in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)):
        update(child, number)
    assert sorted(told(store, 0)) == list(CHUNKS)
    whole = filled(3, 3e38)
    if is_held:
        snapshot = store.capture()
        store.finish(0, 3, whole)
        update(2, 1)
        assert list(snapshot)
        store.release()
        # What waited behind it is applied.
        assert len(store.of(2).current.order) == len(CHUNKS)
    else:
        with pytest.raises(NonFiniteError, match="an update must be finite"):
            store.finish(0, 3, whole)
    again = store_of("asgd(1.0)", "fp32", "fp32", "fp32")
    for kind, fields, data in kept.records:
        if kind == Kind.PACKET:
            lane = again.of(fields["child"])
            lane.begin(fields["round"])
            lane.add(fields["round"], fields["child"], [(fields["chunk"], data)])
        else:
            again.restore(kind, fields, data)
    for one in (store, again):
        with pytest.raises(NonFiniteError, match="an update must be finite"):
            one.due()


@pytest.mark.parametrize("is_held", [False, True])
def test_an_answer_that_is_none_is_not_recorded(is_held: bool) -> None:
    """Else a server that is restored would take it again, and could not be."""
    kept = Kept()
    store = store_of("asgd(0.1)", recorder=kept)
    for child in range(PERIOD):
        do(store, ("update", child, 0, 2), FEEDBACK, NOISE)
    if is_held:
        store.capture()
    before = len(kept.records)
    spoilt = answer_of(NOISE, 0, 2)
    spoilt[0] ^= 1
    with pytest.raises(PacketError, match=r"The server above, round 0, tensor 3 .*must start with"):
        store.finish(0, 2, spoilt)
    assert (len(kept.records), store.due(), list(told(store, 0))) == (before, 0, [2])
    store.finish(0, 2, answer_of(NOISE, 0, 2))
    store.release()
    assert len(kept.records) == before + 1
    assert told(store, 0) == {}


# Trees of real servers. What children send are small whole numbers, and float32 adds those exactly:
# so sums do not depend on the order of updates, and one that is lost or counts twice is seen.
SHAPES = ((3, 3, 1, 8), (8,), (72, 10), (10,))
OWN = {"rule": "asgd(1.0)", "period": 2}


def whole(member: Party, number: int) -> Packet:
    draw = np.random.default_rng((member.child, number))
    return np.concatenate(
        [
            native.encode(
                member.compressor,
                draw.integers(-4, 5, size).astype(np.float32),
                native.Key(0, 0, 0),
            )
            for size in member.sizes
        ]
    )


def values_of(packets: Packet) -> Floats:
    """All values of dense packets."""
    model, fp32 = Model(SHAPES), compressors.parse("fp32")
    cuts = np.cumsum(model.packet_bytes(fp32))[:-1]
    return np.concatenate(
        [
            native.decode(fp32, packet, chunk.size)
            for chunk, packet in zip(model.chunks, np.split(packets, cuts), strict=True)
        ]
    )


def step(member: Party, number: int) -> Floats:
    """One round of a child; what came down."""
    return values_of(member.client.exchange(number, whole(member, number)))


def drained(server: Server, number: int) -> None:
    """Waits until the server above has answered `number` rounds."""
    session = server._session
    eventually(lambda: session.store.next_up >= number, DEADLINE_S, changed=session.changed)


DENSE = {"sends": "fp32", "up": "fp32"}
WEST, EAST = Node("west", ("a", "b"), **DENSE), Node("east", ("c", "d"), **DENSE)


@pytest.mark.parametrize("top", ["fedavg(0.5)", "asgd(0.5)"])
def test_asynchronous_party_servers_below_another_one(certificates: Certificates, top: str) -> None:
    """Below a synchronous and an asynchronous one; children take turns, so all is known."""
    node = Node("", (WEST, EAST), **DENSE)
    with (
        serving_tree(certificates, node, rule=top, below=OWN) as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as members,
    ):
        assert [one.client._welcome.rule for one in members] == ["asgd(learning_rate=1)"] * 4
        total = np.zeros(sum(members[0].sizes), np.float32)  # of the global server
        at_party = dict.fromkeys(("west", "east"), total)
        answered = dict.fromkeys(at_party, total)  # what the global server's answers add up to
        received = dict.fromkeys(range(4), total)
        for number in range(4):
            moved = dict.fromkeys(at_party, total * 0)
            for site, children in (("west", members[:2]), ("east", members[2:])):
                for one in children:
                    gradient = values_of(whole(one, number))
                    moved[site] = moved[site] + gradient
                    at_party[site] = at_party[site] + gradient
                    received[one.child] = received[one.child] + step(one, number)
                    np.testing.assert_array_equal(received[one.child], at_party[site])
                if top.startswith("asgd"):
                    drained(servers[site], number + 1)
                    total = total + np.float32(0.5) * moved[site]
                    at_party[site] = at_party[site] - moved[site] + total - answered[site]
                    answered[site] = total
            if top.startswith("fedavg"):
                for site, own in moved.items():
                    drained(servers[site], number + 1)
                    mean = np.float32(0.25) * (moved["west"] + moved["east"])
                    at_party[site] = at_party[site] - own + mean
        together(*(member.client.leave for member in members))
        for server in servers.values():
            eventually(
                lambda s=server: s._session.is_over, DEADLINE_S, changed=server._session.changed
            )
            assert server._session.ended is None


def test_rounds_that_are_whole_go_up_before_the_server_leaves(certificates: Certificates) -> None:
    """Children of another server are slow; ours have long left when these come."""
    node = Node("", (WEST, "c"), **DENSE)
    with (
        serving_tree(certificates, node, rule="fedavg", below=OWN) as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as (a, b, c),
    ):
        sums = []
        for number in range(AHEAD):
            together(*(lambda m=m, n=number: step(m, n) for m in (a, b)))
            sums.append(values_of(whole(a, number)) + values_of(whole(b, number)))
        together(a.client.leave, b.client.leave)
        for number, moved in enumerate(sums):
            own = values_of(whole(c, number))
            mean = values_of(c.client.exchange(number, whole(c, number), 2.0))
            np.testing.assert_array_equal(mean, np.float32(0.5) * (moved + own))
        c.client.leave()
        top = servers[""]._session
        eventually(lambda: top.is_over, DEADLINE_S, changed=top.changed)
        assert top.ended is None


def test_a_synchronous_party_server_below_an_asynchronous_one(certificates: Certificates) -> None:
    """It averages its children by their workers, which are 1 and 2 here, and is one child above."""
    node = Node("", (WEST, "c"), **DENSE)
    with (
        serving_tree(certificates, node, rule="asgd(0.5)") as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as (a, b, c),
    ):
        assert a.client._welcome.rule == "asgd(learning_rate=0.5)"
        total = np.zeros(sum(a.sizes), np.float32)
        seen = {"west": total, "c": total}
        for number in range(4):
            one, two = values_of(whole(a, number)), values_of(whole(b, number))
            third = np.float32(1 / 3) * one + np.float32(2 / 3) * two
            total = total + np.float32(0.5) * third
            down = together(*(lambda m=m, n=number: step(m, n) for m in (a, b)))
            np.testing.assert_array_equal(*down)
            np.testing.assert_array_equal(down[0], total - seen["west"])
            seen["west"] = seen["west"] + down[0]
            if number % 2:
                total = total + np.float32(0.5) * values_of(whole(c, number // 2))
                down = step(c, number // 2)
                np.testing.assert_array_equal(down, total - seen["c"])
                seen["c"] = seen["c"] + down
        together(*(one.client.leave for one in (a, b, c)))


def test_a_party_that_is_lost_ends_nothing_for_others(certificates: Certificates) -> None:
    node = Node("", (WEST, "c"), **DENSE)
    with (
        serving_tree(certificates, node, rule="asgd(0.5)", below=OWN, lost_after_s=1.0) as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as (a, b, c),
    ):
        step(a, 0)
        a.client.close()
        for number in range(6):
            step(b, number)
        drained(servers["west"], 3)
        session = servers["west"]._session
        eventually(
            lambda: session.state.members.children[0].has_left, DEADLINE_S, changed=session.changed
        )
        step(b, 6)
        step(c, 0)
        together(b.client.leave, c.client.leave)
        eventually(lambda: session.is_over, DEADLINE_S, changed=session.changed)
        assert session.ended is None


def test_what_cannot_be_is_refused(certificates: Certificates) -> None:
    node = Node("", (WEST, "c"), **DENSE)
    with (
        serving_tree(certificates, node, below=OWN) as servers,
        leaves_of(certificates, node, addresses_of(servers), joins=False) as members,
        pytest.raises(TfHipsError, match=r"must give steps, as `fedavg` does\. Received: rule sum"),
    ):
        together(*(member.join for member in members))
    with (
        serving_tree(certificates, node, rule="asgd(0.5)", below={"quorum": 1}) as servers,
        leaves_of(certificates, node, addresses_of(servers), joins=False) as members,
        pytest.raises(TfHipsError, match="`quorum` and `close_at` are of synchronous rounds"),
    ):
        together(*(member.join for member in members))
    uplink = servers["west"]._config.uplink
    for settings, text in (
        ({"uplink": uplink, "rule": "momentum"}, "a synchronous `rule` must be a robust one alone"),
        ({"uplink": uplink, "period": 2}, "`period` needs `uplink` and an asynchronous `rule`"),
        ({"period": 2, "rule": "asgd"}, "`period` needs `uplink` and an asynchronous `rule`"),
        ({"uplink": uplink, "rule": "asgd", "period": 0}, "`period` must be from 1 to 1048576"),
    ):
        with pytest.raises(ConfigError, match=text):
            ServerConfig(("a",), insecure=True, **settings)
