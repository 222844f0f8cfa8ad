# SPDX-License-Identifier: Apache-2.0
"""Servers of children that vote, killed at any moment of it: the same bits, the same groups."""

import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.quorums import ManualClock
from tests.ps.voters import MODEL, SEED, SHAPES, SITES, gradient
from tests.support.eventually import eventually
from tf_hips import log, robust
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.disk import durable
from tf_hips.ps.disk.durable import Keeper
from tf_hips.ps.robust.asked import ASK_S
from tf_hips.ps.robust.ballots import digest_of
from tf_hips.ps.robust.voted import VotingStore
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.terms.quorum import Quorum
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.terms.tree import Place
from tf_hips.robust import detox
from tf_hips.robust.detox import Detox

pytestmark = pytest.mark.heavy  # servers are restored at every point

FP32 = compressors.parse("fp32")
PATIENCE_S = 10.0
SECRET = 12


@pytest.fixture(autouse=True)
def _same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: SECRET)


def packets_of(number: int, child: int, *, lies: bool = False) -> list[npt.NDArray[np.uint8]]:
    """What a child sends of a round, by chunk."""
    seats = detox.groups(len(SITES), 3, SECRET, number)
    group = next(k for k, members in enumerate(seats) if child in members)
    row = gradient(number, group) * np.float32(-9 if lies else 1)
    parts = np.split(row, np.cumsum([chunk.size for chunk in MODEL.chunks])[:-1])
    return [native.encode(FP32, part, native.Key(0, 0, 0)) for part in parts]


class Served:
    """A session of seven children in a folder; a liar says the digest of the others."""

    def __init__(
        self, base: Path, *, vote: str = "digest", liar: int | None = None, quorum: bool = False
    ) -> None:
        self.base, self.liar, self.vote = base, liar, vote
        self.clock = ManualClock()
        least = Quorum(6, 1.0, late="drop") if quorum else None
        rule = rules.parse(f"detox(r=3, vote={vote}) >> median").text
        terms = self.terms(rule, least)
        self.events = log.EventLog(base / "events", run="job", role="server", site="x", rank=0)
        self.keeper = Keeper(str(base / "state"), "job", terms, self.events, self.clock)
        restored = self.keeper.restore()
        self.is_restored = restored is not None
        self.session = restored or self.keeper.begin()
        if self.is_restored:
            return
        threads = [threading.Thread(target=self.join, args=(k,)) for k in range(len(SITES))]
        for thread in threads:
            thread.start()
        self.begin()
        for thread in threads:
            thread.join(PATIENCE_S)
        for child in range(len(SITES)):
            self.session.agree_model(self.caller(child), SHAPES)

    def terms(self, rule: str, quorum: Quorum | None) -> Terms:
        return Terms(SITES, None, None, 1 << 30, 60.0, rule=rule, quorum=quorum)

    def begin(self) -> None:
        """All are joining."""

    def join(self, child: int) -> None:
        self.session.join(self.caller(child), 1, "fp32", "fp32", SEED, None)

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.session._presence.stop()
        if self.session._closing is not None:
            self.session._closing.stop()
        self.keeper.close()
        self.events.close()

    def caller(self, child: int) -> Caller:
        return Caller(child, f"p{child}", PATIENCE_S)

    def store(self, number: int, child: int = 0) -> VotingStore:
        found = self.session.begin_round(self.caller(child), number)
        assert isinstance(found, VotingStore)
        return found

    def killed(self, base: Path) -> Path:
        """A copy of what a server that is killed now would leave."""
        assert self.session._recorder.settle() is None
        shutil.copytree(self.base / "state", base / "state")
        return base

    def steps(self, number: int, children: tuple[int, ...] = tuple(range(7))) -> Iterator[None]:
        """One round, a ballot or a packet at a time; goes on with what has come before."""
        store = self.store(number)
        for child in children:
            if self.vote == "digest":
                packets = packets_of(number, child)
                if store.vote(number, child, digest_of(one.data for one in packets)):
                    self.session.goes_on(child)
                    yield
        while owed := self._owed(store, number, children):
            child, chunk = owed[0]
            packets = packets_of(number, child, lies=child == self.liar)
            store.add(number, child, [(chunk, packets[chunk])])
            yield

    def _owed(self, store: VotingStore, number: int, children: tuple[int, ...]) -> list[Any]:
        if store.is_merged(number):
            return []
        return [
            (child, chunk)
            for child in children
            if self.vote != "digest" or store.asks(number, child)
            for chunk in sorted(set(store.chunks) - store.delivered(number, child))
        ]

    def result(self, number: int) -> bytes:
        """What comes down of a round that is over."""
        store = self.store(number)
        assert self.session._recorder.settle() is None
        assert store.is_merged(number)
        news = sorted(store.results(number, 0)[1], key=lambda one: one[0])
        return b"".join(packet.tobytes() for _, packet in news)


def undisturbed(base: Path, **options: Any) -> tuple[list[bytes], int]:
    """Results of three rounds, and how many steps the second one has."""
    with Served(base, **options) as one:
        counts, results = [], []
        for number in range(3):
            counts.append(sum(1 for _ in one.steps(number)))
            results.append(one.result(number))
        return results, counts[1]


@pytest.mark.parametrize(
    ("vote", "liar"),
    [pytest.param("digest", None, marks=pytest.mark.slow), ("digest", 2), ("exact", 4)],
)
def test_a_server_killed_in_the_middle_of_a_vote_goes_on_with_the_same_bits(
    tmp_path: Path, vote: str, liar: int | None
) -> None:
    wanted, count = undisturbed(tmp_path / "whole", vote=vote, liar=liar)
    honest = Detox(3, robust.median())
    row = honest.run([np.zeros(1, np.float32)] * 7, seed=SECRET, step=1)
    assert len(row.votes) == 3 and count >= (16 if vote == "digest" else 21)
    for cut in range(0, count + 1, 2 if vote == "digest" and liar is not None else 6):
        base = tmp_path / f"cut{cut}"
        with Served(base, vote=vote, liar=liar) as one:
            for _ in one.steps(0):
                pass
            for _, _ in zip(range(cut), one.steps(1), strict=False):
                pass
            base = one.killed(tmp_path / f"killed{cut}")
        with Served(base, vote=vote, liar=liar) as one:
            assert one.is_restored
            assert one.session.state.electing.secret == SECRET
            for number in (1, 2):
                for _ in one.steps(number):
                    pass
            assert [one.result(1), one.result(2)] == wanted[1:], f"cut after {cut}"


@pytest.mark.parametrize("vote", ["digest", "tolerant"])
def test_a_decision_that_was_not_recorded_is_made_again(tmp_path: Path, vote: str) -> None:
    """Killed between the last packet and the record of what was decided, twice."""
    wanted, _ = undisturbed(tmp_path / "whole", vote=vote)
    base = tmp_path / "first"
    for number in range(3):
        with Served(base, vote=vote) as one:
            recorder: Any = one.session._recorder
            add = recorder.add
            recorder.add = lambda kind, *data, add=add, **fields: (
                0 if kind == Kind.TALLIED else add(kind, *data, **fields)
            )
            for _ in one.steps(number):
                pass
            base = one.killed(tmp_path / f"killed{number}")
        with Served(base, vote=vote) as one:
            assert one.is_restored
            assert one.result(number) == wanted[number]
            base = one.killed(tmp_path / f"again{number}")


def test_a_snapshot_keeps_the_secret_and_what_replicas_have_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = undisturbed(tmp_path / "whole")
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    with Served(tmp_path / "first") as one:
        with one.session.changed:
            for child in range(7):
                facts = {"cpu": "other" if child == 6 else "x"}
                one.session.state.electing.hear(child, facts)
                one.session._recorder.add(Kind.REPLICA, child=child, facts=facts)
        why = one.session.state.electing.why_unlike(6)
        assert why is not None
        for number in range(2):
            for _ in one.steps(number):
                pass
        with one.session.changed:
            store: Any = one.session.store
            eventually(lambda: not store._is_held, PATIENCE_S, changed=one.session.changed)
        recorder: Any = one.session._recorder
        if recorder._writer is not None:
            recorder._writer.join(PATIENCE_S)
        base = one.killed(tmp_path / "killed")
    assert list(base.glob("state/job/snapshot-*"))
    monkeypatch.setattr(secrets, "randbits", lambda bits: 1)  # a restored one draws none
    with Served(base) as one:
        assert one.session.state.electing.why_unlike(6) == why
        for _ in one.steps(2):
            pass
        with one.session.changed:  # a snapshot may hold the round back
            last = one.store(2)
            eventually(lambda: last.is_merged(2), PATIENCE_S, changed=one.session.changed)
        assert [one.result(1), one.result(2)] == wanted[1:]


def test_a_group_that_was_given_up_stays_so(tmp_path: Path) -> None:
    """With a quorum, a group is dropped whose members do not send what they agree on."""
    with Served(tmp_path / "first", quorum=True) as one:
        for _ in one.steps(0):
            pass
        store = one.store(1)
        seats = detox.groups(7, 3, SECRET, 1)
        silent = seats[0]
        for child in range(7):
            packets = packets_of(1, child)
            store.vote(1, child, digest_of(part.data for part in packets))
            one.session.goes_on(child)
        for child in silent:
            assert store.asks(1, child) == (child == silent[0])
            break
        for child in range(7):
            if child not in silent and store.asks(1, child):
                for chunk, packet in enumerate(packets_of(1, child)):
                    store.add(1, child, [(chunk, packet)])
        assert not store.is_merged(1)
        for asked in silent:
            assert store.asks(1, asked)  # the one before it has sent nothing
            store.told(1, asked, int)
            one.clock.advance(ASK_S)
        assert one.session._recorder.settle() is None
        assert store.is_merged(1)
        rows = [gradient(1, k) for k in (1, 2)]
        found = one.result(1)
        base = one.killed(tmp_path / "killed")
    mean = robust.median(f=0)(rows)
    values = np.frombuffer(b"".join([found[16:176], found[192:252], found[268:]]), np.float32)
    np.testing.assert_array_equal(values, mean)
    with Served(base, quorum=True) as one:
        assert one.result(1) == found


PLACE = Place(2, (("x", 2), *((site, 1) for site in SITES)), "fp32", "fp32", "mean", "s", 2, 5)


class _OfAParty(Served):
    """The same below another server, which gives back what comes up, twice as long."""

    def terms(self, rule: str, quorum: Quorum | None) -> Terms:
        return Terms(SITES, None, None, 1 << 30, 60.0, site="west", quorum=quorum, robust=rule)

    def begin(self) -> None:
        session = self.session
        with session.changed:
            members = session.state.members
            eventually(lambda: members.are_complete, PATIENCE_S, changed=session.changed)
        session.start(PLACE)

    def ups(self, number: int) -> tuple[bytes, float | None]:
        """What goes up of a round that is decided, and what it stands for."""
        store = self.store(number)
        assert self.session._recorder.settle() is None
        packets = sorted(store.ups(number, 0)[1], key=lambda one: one[0])
        assert len(packets) == len(store.chunks)
        return b"".join(packet.tobytes() for _, packet in packets), store.weight(number)

    def hear(self, number: int) -> None:
        """The server above answers."""
        store = self.store(number)
        for chunk, packet in sorted(store.ups(number, 0)[1], key=lambda one: one[0]):
            values = native.decode(FP32, packet, MODEL.chunks[chunk].size)
            store.finish(number, chunk, native.encode(FP32, values * 2, native.Key(0, 0, 0)))


@pytest.mark.parametrize("vote", ["digest", "exact"])
def test_a_party_server_killed_in_the_middle_of_a_vote_sends_the_same_up(
    tmp_path: Path, vote: str
) -> None:
    def undisturbed_round(one: _OfAParty, number: int) -> tuple[bytes, float | None, bytes]:
        for _ in one.steps(number):
            pass
        up = one.ups(number)
        one.hear(number)
        return (*up, one.result(number))

    with _OfAParty(tmp_path / "whole", vote=vote, liar=2) as one:
        wanted = [undisturbed_round(one, number) for number in range(3)]
    assert [weight for _, weight, _ in wanted] == [3.0] * 3
    found = np.frombuffer(wanted[1][0], np.uint8)
    rows = [gradient(1, group) for group in range(3)]
    parts = np.split(robust.median(f=0)(rows), np.cumsum([one.size for one in MODEL.chunks])[:-1])
    np.testing.assert_array_equal(
        found, np.concatenate([native.encode(FP32, part, native.Key(0, 0, 0)) for part in parts])
    )
    for cut in (3, 8, 12, 30):
        base = tmp_path / f"cut{cut}"
        with _OfAParty(base, vote=vote, liar=2) as one:
            assert undisturbed_round(one, 0) == wanted[0]
            for _, _ in zip(range(cut), one.steps(1), strict=False):
                pass
            base = one.killed(tmp_path / f"killed{cut}")
        with _OfAParty(base, vote=vote, liar=2) as one:
            assert one.is_restored
            members = one.session.state.members
            assert members.place == PLACE and members.groups_of(0) == (2, 5)
            assert [undisturbed_round(one, number) for number in (1, 2)] == wanted[1:]
            base = one.killed(tmp_path / f"again{cut}")
        with _OfAParty(base, vote=vote, liar=2) as one:  # and what had come down is there
            assert one.result(1) == wanted[1][2]


@pytest.mark.parametrize("vote", ["digest", "exact", "tolerant"])
def test_a_group_that_refuses_its_own_update_is_no_row(tmp_path: Path, vote: str) -> None:
    """As the members of a loop do whose weights are not finite; one alone is outvoted."""
    zeros = [np.zeros(chunk.size, np.float32) for chunk in MODEL.chunks]
    nothing = [native.encode(FP32, part, native.Key(0, 0, 0)) for part in zeros]
    with Served(tmp_path / "first", vote=vote) as one:
        seats = detox.groups(7, 3, SECRET, 0)
        store = one.store(0)
        refusing = {*seats[0][:2], seats[1][0]}
        for child in range(7):
            packets = nothing if child in refusing else packets_of(0, child)
            one.session.begin_round(one.caller(child), 0, -0.0 if child in refusing else 4.0)
            if vote == "digest":
                store.vote(0, child, digest_of(part.data for part in packets))
            else:
                store.add(0, child, list(enumerate(packets)))
        for child in range(7):
            if store.asks(0, child):
                assert child not in refusing
                store.add(0, child, list(enumerate(packets_of(0, child))))
        found = one.result(0)
        assert [group.is_dropped for group in store._of(0).groups] == [True, False, False]
        counts = [number for number, count in enumerate(store.counts) if count.outvoted]
        assert counts == [seats[1][0]]
        assert not any(count.proven for count in store.counts)
        base = one.killed(tmp_path / "killed")
    rows = [gradient(0, group) for group in (1, 2)]
    values = np.frombuffer(b"".join([found[16:176], found[192:252], found[268:]]), np.float32)
    np.testing.assert_array_equal(values, robust.median(f=0)(rows))
    with Served(base, vote=vote) as one:
        assert one.result(0) == found


@pytest.mark.parametrize("is_closed", [False, True])
def test_rows_of_a_tolerant_vote_are_decoded_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    with Served(tmp_path, vote="tolerant", quorum=is_closed) as one:
        for _ in one.steps(0):
            pass
        one.session.goes_on(0)
        one.clock.advance(0.0)
        store = one.store(1)
        decode, has_looked = store._combining.row, []

        def row(*what: Any) -> Any:
            entered = threading.Event()

            def enter() -> None:
                with one.session.changed:
                    entered.set()

            thread = threading.Thread(target=enter, daemon=True)
            thread.start()
            has_looked.append(entered.wait(PATIENCE_S))
            thread.join(PATIENCE_S)
            return decode(*what)

        monkeypatch.setattr(store._combining, "row", row)
        away = {detox.groups(7, 3, SECRET, 1)[0][1]} if is_closed else set()
        for child in set(range(7)) - away:
            for chunk, packet in enumerate(packets_of(1, child)):
                store.add(1, child, [(chunk, packet)])
        if is_closed:
            one.session.goes_on(0)
            one.clock.advance(1.0)
        assert has_looked == [True] * (7 - len(away))
        rows = [gradient(1, group) for group in range(3)]
        found = one.result(1)
        values = np.frombuffer(b"".join([found[16:176], found[192:252], found[268:]]), np.float32)
        np.testing.assert_array_equal(values, robust.median(f=0)(rows))
