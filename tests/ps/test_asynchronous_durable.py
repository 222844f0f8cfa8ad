# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds in servers that are killed: at every record, in snapshots, by SIGKILL."""

import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import SHAPES, Party, parties, serving, together
from tests.ps.plainly import Plainly
from tests.ps.served import FEEDBACK, MODEL, NOISE, SITES, Delivery, Served, packet_of
from tests.ps.served import SHAPES as MODEL_SHAPES
from tests.ps.test_restart import Later, ServerProcess
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.errors import NonFiniteError, PeerError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.disk import durable
from tf_hips.ps.disk import journal as journals
from tf_hips.ps.disk.file_format import Reader
from tf_hips.ps.rules import arrivals
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, from_payload
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # servers start, and are killed after any record

TEXTS = (FEEDBACK, NOISE)
RULES = (
    "dc_asgd(0.1, 0.5, adaptive=True, decay=0.9)",
    "dc_asgd(0.1, 0.5, compat=True)",
    "fedbuff(3, 0.8, 0.5)",
    "fedasync(0.6, staleness=polynomial, a=0.5)",
    "adam(0.01, asynchronous=True)",
)
NUM_CHUNKS = len(MODEL.chunks)


def schedule(num_packets: int) -> list[Delivery]:
    """Round, child and chunk; child 0 is three times as fast as child 1."""
    draw = random.Random(3)
    owed: dict[int, tuple[int, list[int]]] = {one: (0, list(range(NUM_CHUNKS))) for one in (0, 1)}
    order: list[Delivery] = []
    for _ in range(num_packets):
        child = draw.choices((0, 1), (3, 1))[0]
        number, chunks = owed[child]
        order.append((number, child, chunks.pop(draw.randrange(len(chunks)))))
        if not chunks:
            owed[child] = (number + 1, list(range(NUM_CHUNKS)))
    return order


def expected(rule: str, order: list[Delivery]) -> list[bytes]:
    plainly = Plainly(rule, MODEL, SITES, *TEXTS, 7)
    return [
        plainly.push(child, number, chunk, packet_of(TEXTS[0], number, child, chunk))
        for number, child, chunk in order
    ]


def answer(served: Served, delivery: Delivery) -> bytes:
    """Delivers one packet, once more if it was delivered before; its answer."""
    number, child, chunk = delivery
    lane = served.session.begin_round(served.caller(child), number)
    finished(served)
    lane.add(number, child, [(chunk, packet_of(TEXTS[0], number, child, chunk))])
    assert served.session._recorder.settle() is None
    answers = lane.past_results(number) if lane.is_past(number) else lane.results(number, 0)[1]
    return dict(answers)[chunk].tobytes()


def finished(served: Served) -> None:
    """Waits until no snapshot is being written."""
    writer = served.session._recorder._writer  # type: ignore[attr-defined]
    if writer is not None:
        writer.join(10)
        assert not writer.is_alive()


@pytest.mark.parametrize("rule", RULES)
def test_a_server_killed_after_any_record_gives_the_same_answers(tmp_path: Path, rule: str) -> None:
    order = schedule(30)
    answers = expected(rule, order)
    with Served(tmp_path / "first", texts=TEXTS, rule=rule) as first:
        first.join()
        first.agree()
        assert [answer(first, one) for one in order[:20]] == answers[:20]
        first.killed(tmp_path / "whole")
    path = tmp_path / "whole/state/job/journal-000001"
    reader = Reader(path)
    kinds, ends = [], []
    for kind, _ in reader.records():
        kinds.append(kind)
        ends.append(reader.end)
    reader.close()
    data = path.read_bytes()
    for place in range(3, len(ends)):  # after all have joined and told their models
        base = tmp_path / f"cut{place}"
        shutil.copytree(tmp_path / "whole", base)
        (base / "state/job/journal-000001").write_bytes(data[: ends[place] + 5 * (place % 2)])
        num_packets = kinds[:place].count(Kind.PACKET)
        with Served(base, texts=TEXTS, rule=rule) as second:
            # What came before it was killed is delivered again, and answered with the same bytes.
            assert [answer(second, one) for one in order[:num_packets]] == answers[:num_packets]
            assert [answer(second, one) for one in order[num_packets:]] == answers[num_packets:]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot at the beginning of every round of every child."""
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rule", RULES)
def test_a_snapshot_is_the_state(tmp_path: Path, rule: str) -> None:
    order = schedule(44)
    answers = expected(rule, order)
    base, place, num_snapshots = tmp_path / "0", 0, 0
    for end in (13, 14, 15, 22, 29, 36, 44):
        with Served(base, texts=TEXTS, rule=rule) as served:
            if place == 0:
                served.join()
                served.agree()
            assert [answer(served, one) for one in order[:place]] == answers[:place]
            for one, wanted in zip(order[place:end], answers[place:end], strict=True):
                assert answer(served, one) == wanted
            place, base = end, tmp_path / str(end)
            served.killed(base)
        num_snapshots += len(list((base / "state/job").glob("snapshot-*")))
    assert num_snapshots == 7
    [snapshot] = (base / "state/job").glob("snapshot-*")
    reader = Reader(snapshot)
    records = [(kind, from_payload(body)[1]) for kind, body in reader.records() if kind < 255]
    reader.close()
    kinds = (Kind.TOTAL, Kind.SLOT, Kind.RECEIVED)
    arrays = 1 + len(SITES) + arrivals.num_slots(rules.parse(rule))
    num_bytes = sum(len(data) for kind, data in records if kind in kinds)
    assert num_bytes == 4 * MODEL.num_elements * arrays


@pytest.mark.usefixtures("eager")
def test_updates_wait_for_a_snapshot_and_packets_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, order = RULES[0], schedule(40)
    answers = expected(rule, order)
    may_go, is_writing = threading.Event(), threading.Event()
    add = journals.SnapshotWriter.add

    def slow(self: journals.SnapshotWriter, kind: int, pieces: list[wire.Buffer]) -> None:
        if kind == Kind.TOTAL:
            is_writing.set()
            assert may_go.wait(30)
        add(self, kind, pieces)

    begins = next(place for place, one in enumerate(order) if one[0] == 1)
    with Served(tmp_path, texts=TEXTS, rule=rule) as first:
        first.join()
        first.agree()
        assert [answer(first, one) for one in order[:begins]] == answers[:begins]
        monkeypatch.setattr(journals.SnapshotWriter, "add", slow)
        number, child, _ = order[begins]
        lane = first.session.begin_round(first.caller(child), number)
        assert is_writing.wait(30)
        held = []
        for place, (number, child, chunk) in enumerate(order[begins:], begins):
            if number > 1 or (number == 1 and child == 1):
                break
            lane = first.session.begin_round(first.caller(child), number)
            packet = packet_of(TEXTS[0], number, child, chunk)
            assert lane.add(number, child, [(chunk, packet)]) == 1
            assert lane.add(number, child, [(chunk, packet)]) == 0
            assert chunk not in dict(lane.results(number, 0)[1])
            held.append(place)
        assert len(held) >= 4
        first.killed(tmp_path / "during")
        may_go.set()
        finished(first)
        for place in held:
            assert answer(first, order[place]) == answers[place]
        first.killed(tmp_path / "after")
        rest = held[-1] + 1
        assert [answer(first, one) for one in order[rest:]] == answers[rest:]
    for name in ("during", "after"):
        with Served(tmp_path / name, texts=TEXTS, rule=rule) as second:
            assert [answer(second, one) for one in order[rest:]] == answers[rest:]


def test_the_first_weights_stay_for_as_long_as_somebody_may_begin_with_them(tmp_path: Path) -> None:
    with Served(tmp_path, texts=TEXTS, rule=RULES[0]) as served:
        served.join()
        served.agree()
        served.session.begin_sync(served.caller(0), ["<f4[2]"], 8)
        served.session.upload(served.caller(0), 0, b"01234567")
        for number in range(3):
            for chunk in range(NUM_CHUNKS):
                answer(served, (number, 0, chunk))
        served.session.back_up(served.caller(0), served.session.token, 2, 0)
        served.session.begin_round(served.caller(0), 3)
        assert served.session._state.weights.held == 8
        served.killed(tmp_path / "killed")
    with Served(tmp_path / "killed", texts=TEXTS, rule=RULES[0]) as served:
        session = served.session
        assert b"".join(session.download(served.caller(1), 0)) == b"01234567"
        for number in range(2):
            for chunk in range(NUM_CHUNKS):
                answer(served, (number, 1, chunk))
        session.back_up(served.caller(1), session.token, 1, 0)
        session.begin_round(served.caller(1), 2)
        assert session._state.weights.held == 0
        store = session.store
        assert store is not None
        assert [store.of(child).oldest for child in (0, 1)] == [2, 1]
        with pytest.raises(
            ProtocolError, match="of this run, of exact value 1 and of round 3 at most"
        ):
            session.back_up(served.caller(1), session.token, 4, 0)


@pytest.mark.parametrize("is_killed", [False, True], ids=["child", "child-and-server"])
def test_a_child_that_comes_back_gets_what_it_got(tmp_path: Path, is_killed: bool) -> None:
    """It does the rounds since its backup again, while the other one goes on."""
    order = schedule(44)
    answers = expected(RULES[0], order)
    newest = max(number for number, child, _ in order[:30] if child == 0)
    assert newest > 3

    def comes_back(served: Served) -> None:
        session, new = served.session, served.caller(0, "new")
        told = session.join(new, 2, *TEXTS, 7, RULES[0])
        assert (told["is_back"], told["newest"]) == (True, newest)
        with pytest.raises(ProtocolError, match=f"rounds 2 to {newest}, whose results are kept"):
            session.agree_model(new, MODEL_SHAPES, 1)
        session.agree_model(new, MODEL_SHAPES, 2)
        with pytest.raises(ProtocolError, match="is in this run already"):
            session.begin_round(served.caller(0, "p0"), newest)
        served.processes[0] = "new"
        for known, one in enumerate(order[:30]):
            if one[1] == 0 and one[0] >= 2:
                assert answer(served, one) == answers[known]
        assert [answer(served, one) for one in order[30:]] == answers[30:]

    with Served(tmp_path, texts=TEXTS, rule=RULES[0]) as first:
        first.join()
        first.agree()
        assert [answer(first, one) for one in order[:20]] == answers[:20]
        first.session.back_up(first.caller(0), first.session.token, 2, 0)
        assert [answer(first, one) for one in order[20:30]] == answers[20:30]
        if not is_killed:
            comes_back(first)
            return
        first.killed(tmp_path / "killed")
    with Served(tmp_path / "killed", texts=TEXTS, rule=RULES[0]) as second:
        comes_back(second)


def test_children_begin_with_rounds_of_their_own(tmp_path: Path) -> None:
    """As parties do that go on from checkpoints of their own."""
    first_rounds = (7, 3)
    order = [(number + first_rounds[child], child, chunk) for number, child, chunk in schedule(30)]
    answers = expected(RULES[0], order)
    with Served(tmp_path, texts=TEXTS, rule=RULES[0]) as first:
        first.join()
        for child, number in enumerate(first_rounds):
            first.session.agree_model(first.caller(child), MODEL_SHAPES, number)
        told = first.session.describe()
        assert [(one["round"], one["lag"]) for one in told["children"]] == [(6, 1), (2, 5)]
        assert [answer(first, one) for one in order[:15]] == answers[:15]
        first.killed(tmp_path / "killed")
    with Served(tmp_path / "killed", texts=TEXTS, rule=RULES[0]) as second:
        assert [answer(second, one) for one in order] == answers
        with pytest.raises(ProtocolError, match="must be one of 3 to"):
            second.session.begin_round(second.caller(1), 2)


THREE = ("a", "b", "c")


class AsynchronousServer(ServerProcess):
    """`tf-hips server --rule`, for three parties."""

    rule = RULES[0]

    def command(self, *more: str) -> list[str]:
        options = ["--parties", ",".join(THREE), "--insecure", "--once", "--rule", self.rule]
        options += ["--lost-after", "20", "--state", str(self.state), *more]
        if not self.is_eager:
            return [sys.executable, "-m", "tf_hips.cli", "server", *options]
        program = (
            "from tf_hips import cli\n"
            "from tf_hips.ps.disk import durable\n"
            "durable.SNAPSHOT_AFTER_BYTES = durable.SNAPSHOT_AFTER_SNAPSHOTS = 0\n"
            f"cli.main({['server', *options]!r})"
        )
        return [sys.executable, "-c", program]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AsynchronousServer]:
    made = AsynchronousServer(tmp_path)
    made.start()
    yield made
    made.end()


def test_children_of_different_speed_and_a_server_killed_in_between(
    server: AsynchronousServer,
) -> None:
    """Each bit that came down is what plain NumPy makes of the journal, in its order."""
    members = [Party(server.address, site, None, compression=FEEDBACK) for site in THREE]
    together(*(member.join for member in members))
    num_rounds = (45, 20, 5)
    sent: dict[tuple[int, int], bytes] = {}

    def train(member: Party, last: int) -> list[bytes]:
        answers = []
        for number in range(last):
            packets = member.packets(number)
            sent[member.child, number] = packets.tobytes()
            answers.append(member.client.exchange(number, packets).tobytes())
        member.client.leave()
        return answers

    training: list[Later] = []
    # One child is ahead of the others before they begin.
    for number, begin in ((3, slice(0, 1)), (25, slice(1, None))):
        training += [
            Later(lambda member=member, last=last: train(member, last))
            for member, last in list(zip(members, num_rounds, strict=True))[begin]
        ]
        server.wait_for(
            Kind.PACKET,
            lambda found, number=number: any(one["round"] >= number for one in found),
        )
        server.restart()
    answers = [one.result() for one in training]
    assert server.process is not None
    assert server.process.wait(20) == 0

    reader = Reader(server.state / "local/journal-000001")
    records = [from_payload(body) for kind, body in reader.records() if kind == Kind.PACKET]
    reader.close()
    model = Model(SHAPES)
    came = Counter((one["child"], one["round"], one["chunk"]) for one, _ in records)
    assert came == Counter(
        (child, number, chunk)
        for child, last in enumerate(num_rounds)
        for number in range(last)
        for chunk in range(len(model.chunks))
    )
    plainly = Plainly(RULES[0], model, THREE, FEEDBACK, FEEDBACK, 7)
    replayed = [[[b""] * len(model.chunks) for _ in range(last)] for last in num_rounds]
    size = [compressors.parse(FEEDBACK).wire_bytes(chunk.size) for chunk in model.chunks]
    for fields, packet in records:
        child, number, chunk = fields["child"], fields["round"], fields["chunk"]
        start = sum(size[:chunk])
        assert bytes(packet) == sent[child, number][start : start + size[chunk]]
        values = np.frombuffer(packet, np.uint8)
        replayed[child][number][chunk] = plainly.push(child, number, chunk, values)
    assert [[b"".join(one) for one in each] for each in replayed] == answers
    # They did not take turns: some child overtook another.
    order = [(one["child"], one["round"]) for one, _ in records]
    assert order != sorted(order, key=lambda one: one[1])
    restored = [one for one in log.read_events(server.logs) if one["event"] == "restored"]
    assert len(restored) == 2


def test_no_update_is_lost_or_doubled_while_a_server_makes_snapshots_and_is_killed(
    tmp_path: Path,
) -> None:
    """Gradients are whole numbers, so sums are exact in any order, and each counts once."""
    made = AsynchronousServer(tmp_path)
    made.rule, made.is_eager = "asgd(learning_rate=1)", True
    made.start()
    fp32 = compressors.parse("fp32")
    sizes = [chunk.size for chunk in Model(SHAPES).chunks]
    members = [Party(made.address, site, None, compression="fp32") for site in THREE]
    num_rounds = (50, 40, 30)

    def gradients(child: int, number: int) -> list[np.ndarray]:
        draw = np.random.default_rng((child, number))
        return [draw.integers(-9, 10, size).astype(np.float32) for size in sizes]

    def push(member: Party, number: int, values: list[np.ndarray]) -> list[np.ndarray]:
        key = native.Key(0, number, 0)
        packets = np.concatenate([native.encode(fp32, one, key) for one in values])
        answer = member.client.exchange(number, packets)
        cuts = np.cumsum([fp32.wire_bytes(size) for size in sizes])[:-1]
        return [
            native.decode(fp32, part, size)
            for part, size in zip(np.split(answer, cuts), sizes, strict=True)
        ]

    def train(member: Party, last: int) -> list[np.ndarray]:
        moved = [np.zeros(size, np.float32) for size in sizes]
        for number in range(last):
            answer = push(member, number, gradients(member.child, number))
            moved = [one + other for one, other in zip(moved, answer, strict=True)]
        return moved

    try:
        together(*(member.join for member in members))
        training = [
            Later(lambda member=member, last=last: train(member, last))
            for member, last in zip(members, num_rounds, strict=True)
        ]

        def snapshots() -> list[int]:
            """Rounds of the last child."""
            events = log.read_events(made.logs)
            return [event["round"] for event in events if event["event"] == "snapshot"]

        for number in (2, 8):
            eventually(lambda number=number: max(snapshots(), default=-1) >= number)
            made.restart()
        moved = [one.result() for one in training]
        # Each asks once more, for what the others have done since.
        nothing = [np.zeros(size, np.float32) for size in sizes]
        for member, last, has in zip(members, num_rounds, moved, strict=True):
            for one, rest in zip(has, push(member, last, nothing), strict=True):
                one += rest
        total = [
            np.sum([gradients(child, number)[chunk] for child in range(3)
                    for number in range(num_rounds[child])], axis=0)
            for chunk in range(len(sizes))
        ]  # fmt: skip
        for has in moved:
            for one, other in zip(has, total, strict=True):
                np.testing.assert_array_equal(one, other)
        for member in members:
            member.client.leave()
        assert made.process is not None
        assert made.process.wait(20) == 0
    finally:
        made.end()


def test_nobody_waits_and_who_leaves_or_is_lost_does_not_end_it(certificates: Certificates) -> None:
    rule = "fedasync(0.6)"
    with (
        serving(certificates, parties=THREE, rule=rule, once=True, lost_after_s=1.5) as server,
        parties(server, certificates, sites=THREE) as (a, b, c),
    ):
        a.train(0, 5)
        c.train(0, 0)
        told = {one["site"]: one for one in server._session.describe()["children"]}
        assert [told[site]["round"] for site in THREE] == [5, 0, 0]
        assert [told[site]["lag"] for site in THREE] == [0, 6, 5]
        b.client.leave("it has other plans")
        c.client.close()
        session = server._session
        eventually(lambda: session.describe()["children"][2]["state"] == "left")
        a.train(6, 8)
        assert not session.is_over
        with pytest.raises(ProtocolError, match="Site `c` has left this run"):
            late = Party(server.address, "c", certificates.party("c"))
            late.client._process = late.client.link._process = c.client._process
            late.join()
        a.client.leave()
        assert session.is_over
        assert session.ended is None


def test_a_run_whose_children_are_all_lost_ends_with_the_reason(
    certificates: Certificates,
) -> None:
    with (
        serving(certificates, rule="asgd", once=True, lost_after_s=1.5) as server,
        parties(server, certificates) as (a, b),
    ):
        a.train(0, 1)
        b.train(0, 0)
        a.client.close()
        b.client.close()
        assert "was lost: its connection closed" in str(server.wait())


def test_a_run_cannot_do_without_the_first_weights(certificates: Certificates) -> None:
    with (
        serving(certificates, rule="asgd", lost_after_s=1.5) as server,
        parties(server, certificates) as (a, b),
    ):
        fetching = Later(lambda: b.client.first_sync([np.zeros(3, np.float32)]))
        a.client.close()
        with pytest.raises(PeerError, match="Site `a` was lost"):
            fetching.result()


def test_a_nan_of_one_child_is_its_own(certificates: Certificates) -> None:
    settings: dict[str, Any] = {"compression": "fp32"}
    with (
        serving(certificates, rule="dc_asgd") as server,
        parties(server, certificates, **settings) as (a, b),
    ):
        a.train(0, 0)
        bad = a.packets(1)
        bad[20:24] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
        with pytest.raises(NonFiniteError, match=r"Site `a`, round 1, tensor 0.*must be finite"):
            a.client.exchange(1, bad)
        b.train(0, 2)
        a.train(1, 1)
        key = native.Key(0, 0, 0)
        huge = np.concatenate(
            [native.encode(a.compressor, np.full(size, 3e38, np.float32), key) for size in a.sizes]
        )
        with pytest.raises(NonFiniteError, match=r"Site `a`, round 2.*an update must be finite"):
            a.client.exchange(2, huge)
        a.train(2, 2)
