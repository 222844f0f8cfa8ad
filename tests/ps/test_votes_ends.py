# SPDX-License-Identifier: Apache-2.0
"""Votes of children that are gone when they are asked, or come when it is decided."""

import itertools
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ps.quorums import PATIENCE_S
from tests.ps.test_votes_durable import SECRET, Served, packets_of
from tests.support.eventually import eventually
from tf_hips.errors import ProtocolError
from tf_hips.ps.robust.asked import ASK_S, ASK_TIMES, MOST_TIMES
from tf_hips.ps.robust.ballots import REFUSED, digest_of
from tf_hips.ps.robust.choices import Choices
from tf_hips.ps.robust.election import Electing
from tf_hips.ps.robust.rejections import Rejections
from tf_hips.ps.robust.voted import VotingStore
from tf_hips.ps.terms.past import Past
from tf_hips.ps.terms.quorum import RETURN_S
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.robust import detox


@pytest.fixture(autouse=True)
def _same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: SECRET)


def all_vote(one: Served, number: int) -> VotingStore:
    """All say their digests of a round, and hang up."""
    store = one.store(number)
    for child in range(7):
        packets = packets_of(number, child)
        store.vote(number, child, digest_of(part.data for part in packets))
        one.session.goes_on(child)
    return store


def deliver(store: VotingStore, number: int, child: int) -> None:
    store.add(number, child, list(enumerate(packets_of(number, child))))


def test_who_has_hung_up_before_it_is_asked_is_passed_over(tmp_path: Path) -> None:
    with Served(tmp_path) as one:
        store = all_vote(one, 0)
        seats = detox.groups(7, 3, SECRET, 0)
        firsts = [members[0] for members in seats]
        assert [child for child in range(7) if store.asks(0, child)] == sorted(firsts)
        for child in firsts[1:]:
            store.told(0, child, int)
            deliver(store, 0, child)
        one.clock.advance(ASK_S)
        second = seats[0][1]
        assert store.asks(0, firsts[0]) and store.asks(0, second)
        deliver(store, 0, second)
        one.result(0)


@pytest.mark.parametrize("trickles", [False, True])
def test_who_agrees_and_never_sends_is_counted_and_keeps_one_round_waiting(
    tmp_path: Path, trickles: bool
) -> None:
    liar = 0  # first of its group, so that it would be asked first in each round
    received = itertools.count()
    told: list[tuple[str, dict[str, Any]]] = []
    with Served(tmp_path) as one:
        one.session.state.electing.tell = lambda event, **fields: told.append((event, fields))
        num_waits = 0
        for number in range(6):
            store = all_vote(one, number)
            [seats] = [one for one in detox.groups(7, 3, SECRET, number) if liar in one]
            if len(seats) == 1:
                deliver(store, number, liar)  # there is no other to ask
            for child in [child for child in range(1, 7) if store.asks(number, child)]:
                store.told(number, child, int)
                deliver(store, number, child)
            if store.asks(number, liar):
                store.told(number, liar, received.__next__ if trickles else int)
                one.clock.advance(ASK_S * (ASK_TIMES if trickles else 1))
                num_waits += 1
                deliver(store, number, seats[1])
            assert store._is_decided(number)
            one.result(number)
        assert num_waits == 1
        counts = [child["passed_over"] for child in one.session.describe()["children"]]
        assert counts == [1, 0, 0, 0, 0, 0, 0]
    assert [(event, fields["sites"]) for event, fields in told] == [("passed_over", ["a"])]


def test_who_was_passed_over_and_is_first_all_the_same_is_not_counted(tmp_path: Path) -> None:
    with Served(tmp_path) as one:
        store = all_vote(one, 0)
        asked = [child for child in range(7) if store.asks(0, child)]
        for child in asked:
            store.told(0, child, int)
            store.passes_over(0, child, is_lost=False)  # its call broke off
            deliver(store, 0, child)
        one.result(0)
        assert not any(count.passed_over for count in store.counts)


def test_a_restored_server_does_not_wait_for_who_was_asked_and_is_gone(tmp_path: Path) -> None:
    with Served(tmp_path / "first") as one:
        all_vote(one, 0)
        base = one.killed(tmp_path / "killed")
    with Served(base) as one:
        store = one.store(0)
        asked = {child for child in range(7) if store.asks(0, child)}
        assert len(asked) == 3
        one.clock.advance(ASK_S + RETURN_S - 0.1)
        assert {child for child in range(7) if store.asks(0, child)} == asked
        one.clock.advance(0.1)
        seats = detox.groups(7, 3, SECRET, 0)
        both = {child for members in seats for child in members[:2]}
        assert {child for child in range(7) if store.asks(0, child)} == both
        for members in seats:
            deliver(store, 0, members[len(members[:2]) - 1])
        one.result(0)


def test_no_timer_is_left_of_a_round_that_is_decided(tmp_path: Path) -> None:
    with Served(tmp_path) as one:
        for number in range(3):
            store = all_vote(one, number)
            for child in [child for child in range(7) if store.asks(number, child)]:
                store.told(number, child, int)
                deliver(store, number, child)
            assert store._is_decided(number)
            assert not one.clock._due


def test_who_ends_its_call_of_a_round_that_is_not_kept_is_no_error(tmp_path: Path) -> None:
    with Served(tmp_path) as one:
        kept = one.session.store
        assert isinstance(kept, VotingStore)
        kept.past = Past(0)
        for number in range(4):
            store = all_vote(one, number)
            for child in [child for child in range(7) if store.asks(number, child)]:
                deliver(store, number, child)
        assert kept.oldest > 0
        kept.passes_over(0, 1, is_lost=False)
        assert not kept.asks(0, 1)


def test_who_is_whole_just_after_its_round_was_closed_has_proven_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tmp_path, vote="exact", quorum=True) as one:
        for _ in one.steps(0):
            pass
        one.session.goes_on(0)  # which closes the round
        store = one.store(1)
        seats = detox.groups(7, 3, SECRET, 1)
        late = seats[1][2]
        for child in [*seats[0][:1], *seats[1][:2], *seats[2]]:
            deliver(store, 1, child)
        take_whole, check = store._take_whole, store._combining.check
        has_come: list[bool] = []

        def closes_first(number: int, child: int, packets: list) -> None:  # type: ignore[type-arg]
            if child == late:
                store.close(number, store.whole(number), [])
            take_whole(number, child, packets)

        def looks_meanwhile(*what: object) -> None:
            """Of the first group, which is open until its packets have been looked at."""
            if not has_come:
                has_come.append(True)
                deliver(store, 1, late)
            check(*what)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "_take_whole", closes_first)
        monkeypatch.setattr(store._combining, "check", looks_meanwhile)
        deliver(store, 1, seats[0][1])
        assert has_come and store.is_closed(1)
        assert one.session._recorder.settle() is None
        eventually(lambda: store.is_merged(1), PATIENCE_S, changed=one.session.changed)
        assert [found.proven for found in store.counts] == [0] * 7


class _Gate:
    """A condition at which a thread waits before it takes the lock."""

    def __init__(self, real: threading.Condition, wait: Callable[[], None]) -> None:
        self._real, self._wait = real, wait

    def __enter__(self) -> bool:
        self._wait()
        return self._real.__enter__()

    def __exit__(self, *error: object) -> None:
        self._real.__exit__(*error)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_no_packets_win_that_have_not_been_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two liars has no majority yet when it is whole, and has one a moment later."""
    with Served(tmp_path, vote="exact") as one:
        store = one.store(0)
        groups = detox.groups(7, 3, SECRET, 0)
        first, second = groups[0][:2]
        broken = [(chunk, b"\x01") for chunk in range(3)]
        has_majority = threading.Event()
        thread = threading.Thread(target=store.add, args=(0, first, broken))
        has_begun = threading.Event()

        def waits() -> None:
            if threading.current_thread() is thread and first in store._of(0).said:
                has_begun.set()
                assert has_majority.wait(PATIENCE_S)

        look = store._why_unusable

        def lets_the_first_go_on(number: int, child: int, packets: Any) -> str | None:
            if child == second:
                has_majority.set()
                thread.join(PATIENCE_S)
            return look(number, child, packets)

        monkeypatch.setattr(store, "changed", _Gate(store.changed, waits))
        monkeypatch.setattr(store, "_why_unusable", lets_the_first_go_on)
        thread.start()
        assert has_begun.wait(PATIENCE_S)
        store.add(0, second, broken)
        group = store._of(0).groups[0]
        assert group.is_dropped and group.winner is None
        for child in [*groups[0][2:], *groups[1], *groups[2]]:
            deliver(store, 0, child)
        one.result(0)


def test_who_is_lost_when_it_is_asked_is_passed_over_at_once(tmp_path: Path) -> None:
    """Nobody waits for what can never come until it has been silent for long."""
    with Served(tmp_path, quorum=True) as one:
        for _ in one.steps(0):
            pass
        store = all_vote(one, 1)
        first, second, *_ = detox.groups(7, 3, SECRET, 1)[0]
        assert store.asks(1, first) and not store.asks(1, second)
        with one.session.changed:
            one.session._lose(first)
        one.clock.advance(0.0)
        assert store.asks(1, second)


def test_who_has_said_what_it_has_cannot_refuse_it_any_more(tmp_path: Path) -> None:
    """A ballot stands; who has refused its update before it is kept until its round is over."""
    with Served(tmp_path) as one:
        groups = detox.groups(7, 3, SECRET, 0)
        store, refuses = one.store(0), groups[0][2]
        assert [store.weigh(0, refuses, REFUSED_WEIGHT) for _ in range(2)] == [True, False]
        all_vote(one, 0)
        assert not store.weigh(0, groups[1][0], REFUSED_WEIGHT)
        for members in groups:
            deliver(store, 0, members[0])
        one.result(0)
        assert store._of(0).said[refuses] == REFUSED
        assert [group.winner for group in store._of(0).groups] == [one[0] for one in groups]
        for number in range(1, 4):
            for _ in one.steps(number):
                pass
        one.session._state.archive()
        assert not store._refusing


def test_who_sends_a_byte_now_and_then_does_not_hold_up_a_quorum(tmp_path: Path) -> None:
    with Served(tmp_path, quorum=True) as one:
        store = all_vote(one, 0)
        seats = detox.groups(7, 3, SECRET, 0)
        [alone] = seats[2]
        for members in seats[:2]:
            deliver(store, 0, members[0])
        came = itertools.count()
        store.told(0, alone, lambda: next(came))
        one.clock.advance(MOST_TIMES * ASK_S - 0.1)
        assert not store._is_decided(0)
        one.clock.advance(0.1)
        assert store._of(0).groups[2].is_dropped
        one.result(0)


@pytest.mark.parametrize("comes", [True, False])
def test_a_group_waits_for_who_has_said_nothing_when_all_who_agree_are_silent(
    tmp_path: Path, comes: bool
) -> None:
    """Two liars agree with the slowest of their group, and never send: it has the packets, too."""
    with Served(tmp_path, quorum=True) as one:
        store, seats = one.store(0), detox.groups(7, 3, SECRET, 0)
        [*silent, slow], *others = seats
        for child in range(7):
            if child != slow:
                store.vote(0, child, digest_of(part.data for part in packets_of(0, child)))
        for members in others:
            deliver(store, 0, members[0])
        for child in silent:
            assert store.asks(0, child)
            store.told(0, child, int)
            one.clock.advance(ASK_S)
        group = store._of(0).groups[0]
        assert group.asked == silent and not group.is_settled
        if comes:
            store.vote(0, slow, digest_of(part.data for part in packets_of(0, slow)))
            deliver(store, 0, slow)
        else:
            assert not store.asks(0, slow)
        store.merge(store.close(0, store.whole(0), ()))
        assert (group.winner, group.is_dropped) == ((slow, False) if comes else (None, True))
        one.result(0)


def test_a_child_may_not_say_for_ever_that_it_is_another() -> None:
    sites = ("a", "b")
    electing = Electing(sites, Rejections(sites), Choices(sites))
    for number in range(64):
        electing.check_replica(1, {"machine": str(number)})
        electing.hear(1, {"machine": str(number)})
        electing.check_replica(1, {"machine": str(number)})  # what is said again is no change
    with pytest.raises(ProtocolError, match=r"at most 64 times.*site `b`"):
        electing.check_replica(1, {"machine": "another"})
    electing.check_replica(0, {"machine": "mine"})
