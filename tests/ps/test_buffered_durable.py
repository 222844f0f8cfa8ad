# SPDX-License-Identifier: Apache-2.0
"""Robust rules before FedBuff in servers that are killed, after any record and in snapshots."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.ps.buffering import Oracle
from tests.ps.parties import SHAPES, Party, together
from tests.ps.served import MODEL, SITES, Delivery, Served, packet_of
from tests.ps.test_asynchronous_durable import (
    NUM_CHUNKS,
    TEXTS,
    THREE,
    AsynchronousServer,
    answer,
    eager,
    schedule,
)
from tests.ps.test_restart import Later
from tf_hips import log
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.disk import journal as journals
from tf_hips.ps.disk.file_format import Reader
from tf_hips.ps.robust.buffered import BufferedStore
from tf_hips.ps.rules.arrivals import Moved
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, from_payload
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # servers start, and are killed after any record

assert eager  # a fixture
RULES = ("median", "centred_clipping(f=0, tau=0.5)")


def text_of(rule: str) -> str:
    return f"{rule} >> fedbuff(2, 0.8, 0.5)"


def expected(rule: str, order: list[Delivery]) -> list[bytes]:
    oracle = Oracle(rule, 2, 0.8, 0.5, MODEL, SITES, *TEXTS, 7)
    found = [
        oracle.push(child, number, chunk, packet_of(TEXTS[0], number, child, chunk))
        for number, child, chunk in order
    ]
    assert min(oracle.steps) > 1
    return found


def begun(base: Path, rule: str) -> Served:
    served = Served(base, texts=TEXTS, rule=text_of(rule))
    if not served.is_restored:
        served.join()
        served.agree()
    return served


def chunks_of(served: Served) -> list[Moved]:
    store = served.session.store
    assert isinstance(store, BufferedStore)
    return list(store._moved.values())


def records_of(path: Path) -> list[tuple[int, dict[str, object], int]]:
    """Kind, fields and where it ends, of each record of a file."""
    reader = Reader(path)
    found = []
    for kind, body in reader.records():
        found.append((kind, from_payload(body)[0] if kind < 255 else {}, reader.end))
    reader.close()
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_server_killed_after_any_record_gives_the_same_answers(tmp_path: Path, rule: str) -> None:
    order = schedule(48)
    answers = expected(rule, order)
    with begun(tmp_path / "first", rule) as first:
        assert [answer(first, one) for one in order[:36]] == answers[:36]
        first.killed(tmp_path / "whole")
    path = tmp_path / "whole/state/job/journal-000001"
    records, data = records_of(path), path.read_bytes()
    places = [place for place, (kind, _, _) in enumerate(records) if kind == Kind.PACKET]
    assert len(places) == 36
    for place in places[::3]:
        base = tmp_path / f"cut{place}"
        shutil.copytree(tmp_path / "whole", base)
        end = records[place][2] + 5 * (place % 2)
        (base / "state/job/journal-000001").write_bytes(data[:end])
        num_packets = places.index(place) + 1
        with begun(base, rule) as second:
            # What came before it was killed is delivered again, and answered with the same bytes.
            assert [answer(second, one) for one in order[:num_packets]] == answers[:num_packets]
            assert [answer(second, one) for one in order[num_packets:]] == answers[num_packets:]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rule", RULES)
def test_a_snapshot_holds_the_rows_that_wait(tmp_path: Path, rule: str) -> None:
    order = schedule(60)
    answers = expected(rule, order)
    base, place = tmp_path / "0", 0
    held: list[tuple[bool, int]] = []  # of each snapshot: is it of an update that is coming; whose
    for end in (13, 15, 22, 29, 36, 44, 60):
        with begun(base, rule) as served:
            assert [answer(served, one) for one in order[:place]] == answers[:place]
            for one, wanted in zip(order[place:end], answers[place:end], strict=True):
                assert answer(served, one) == wanted
            place, base = end, tmp_path / str(end)
            served.killed(base)
        [snapshot] = (base / "state/job").glob("snapshot-*")
        held += [
            (bool(fields["is_coming"]), int(str(fields["child"])))
            for kind, fields, _ in records_of(snapshot)
            if kind == Kind.BUFFERED
        ]
    assert (False, 0) in held
    assert any(is_coming for is_coming, _ in held) == (rule != "median")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_come_during_a_snapshot_count_in_their_order(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [
        (number, child, chunk)
        for number in range(3)
        for child in range(len(SITES))
        for chunk in range(NUM_CHUNKS)
    ]
    answers = expected(rule, order)
    begins, ends = 2 * NUM_CHUNKS, 4 * NUM_CHUNKS
    may_go, is_writing = threading.Event(), threading.Event()
    add = journals.SnapshotWriter.add

    def slow(self: journals.SnapshotWriter, kind: int, pieces: list[wire.Buffer]) -> None:
        if kind == Kind.TOTAL:
            is_writing.set()
            assert may_go.wait(30)
        add(self, kind, pieces)

    with begun(tmp_path / "first", rule) as first:
        assert [answer(first, one) for one in order[:begins]] == answers[:begins]
        monkeypatch.setattr(journals.SnapshotWriter, "add", slow)
        for number, child, chunk in order[begins:ends]:
            lane = first.session.begin_round(first.caller(child), number)
            assert is_writing.wait(30)
            assert lane.add(number, child, [(chunk, packet_of(TEXTS[0], number, child, chunk))])
            assert chunk not in dict(lane.results(number, 0)[1])
        first.killed(tmp_path / "during")
        may_go.set()
        assert [answer(first, one) for one in order[begins:]] == answers[begins:]
    with begun(tmp_path / "during", rule) as second:
        assert [answer(second, one) for one in order] == answers


def test_a_step_needs_fewer_rows_after_a_child_has_left_and_again_when_restored(
    tmp_path: Path,
) -> None:
    order = [(number, 0, chunk) for number in range(6) for chunk in range(NUM_CHUNKS)]
    undisturbed: list[bytes] = []
    with begun(tmp_path / "first", "mean") as served:
        undisturbed += [answer(served, one) for one in order[: 2 * NUM_CHUNKS + 1]]
        served.session.leave(served.caller(1), None)
        served.killed(tmp_path / "left")
        undisturbed += [answer(served, one) for one in order[2 * NUM_CHUNKS + 1 :]]
        totals = [one.total for one in chunks_of(served)]
        # Rounds 2 to 5 made a step each, with one row.
        assert {one.version for one in chunks_of(served)} == {4}
        served.killed(tmp_path / "later")
    assert any(total.any() for total in totals)
    for name in ("left", "later"):
        with begun(tmp_path / name, "mean") as served:
            assert [answer(served, one) for one in order] == undisturbed
            for one, total in zip(chunks_of(served), totals, strict=True):
                np.testing.assert_array_equal(one.total, total)


def test_whom_a_server_has_refused_is_not_told_again_when_it_is_restored(tmp_path: Path) -> None:
    def refused(base: Path) -> list[tuple[int, str]]:
        return [
            (one["round"], one["child_site"])
            for one in log.read_events(base / "events")
            if one["event"] == "row_refused"
        ]

    codec = compressors.parse(TEXTS[0]).codec
    with begun(tmp_path / "first", "clip >> mean") as served:
        for chunk in range(NUM_CHUNKS):
            answer(served, (0, 0, chunk))
        lane = served.session.begin_round(served.caller(1), 0)
        for chunk, where in enumerate(MODEL.chunks):
            values = np.full(where.size, 1e18, np.float32)
            sent = native.encode(codec, values, native.Key(0, 0, 0))
            lane.add(0, 1, [(chunk, sent)])
        assert served.session._recorder.settle() is None
        [child] = [one for one in served.session.describe()["children"] if one["refused_rows"]]
        assert child["site"] == "b"
        served.killed(tmp_path / "killed")
    assert refused(tmp_path / "first") == [(0, "b")]
    with begun(tmp_path / "killed", "clip >> mean") as served:
        answer(served, (1, 0, 0))
        assert not any(one["refused_rows"] for one in served.session.describe()["children"])
    assert refused(tmp_path / "killed") == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*RULES, "clip >> mean"])
def test_each_bit_is_what_the_journal_of_a_server_that_was_killed_says(
    tmp_path: Path, rule: str
) -> None:
    """Three children, one of which is fast; the server dies by SIGKILL in between."""
    server = AsynchronousServer(tmp_path)
    server.rule = text_of(rule)
    server.start()
    try:
        members = [Party(server.address, site, None, compression=TEXTS[0]) for site in THREE]
        together(*(member.join for member in members))
        num_rounds = (60, 30, 10)

        def train(member: Party, last: int) -> list[bytes]:
            answers = member.train(0, last - 1)
            member.client.leave()
            return answers

        training = [
            Later(lambda member=member, last=last: train(member, last))
            for member, last in zip(members, num_rounds, strict=True)
        ]
        for number in (3, 20, 45):
            server.wait_for(
                Kind.PACKET,
                lambda found, number=number: any(one["round"] >= number for one in found),
            )
            server.restart()
        answers = [one.result() for one in training]
        assert server.process is not None
        assert server.process.wait(20) == 0
    finally:
        server.end()
    model = Model(SHAPES)
    reader = Reader(server.state / "local/journal-000001")
    records = [(kind, *from_payload(body)) for kind, body in reader.records() if kind < 255]
    reader.close()
    oracle = Oracle(rule, 2, 0.8, 0.5, model, THREE, TEXTS[0], TEXTS[0], 7)
    replayed = [[[b""] * len(model.chunks) for _ in range(last)] for last in num_rounds]
    num_present = len(THREE)
    for kind, fields, data in records:
        if kind == Kind.LEFT:
            num_present -= 1
            oracle.k = max(1, min(2, num_present))
        if kind == Kind.PACKET:
            child, number, chunk = fields["child"], fields["round"], fields["chunk"]
            values = np.frombuffer(data, np.uint8)
            replayed[child][number][chunk] = oracle.push(child, number, chunk, values)
    assert [[b"".join(one) for one in each] for each in replayed] == answers
    assert min(oracle.steps) > 20
