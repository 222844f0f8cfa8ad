# SPDX-License-Identifier: Apache-2.0
"""Rounds that close without some children: who counts, with which bits, and what late ones get."""

import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.quorums import (
    MODEL,
    SITES,
    ManualClock,
    Run,
    decoded,
    oracle_mean,
    oracle_sum,
    packet_of,
)
from tf_hips.errors import ConfigError, NonFiniteError, PeerError, ProtocolError, StateError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.disk import durable
from tf_hips.ps.rounds.partial import Partial
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.session import waiting
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.settings import ServerConfig, terms_of
from tf_hips.ps.terms import quorum as quorums
from tf_hips.ps.terms.quorum import DROP, NEXT, Arrivals, Quorum
from tf_hips.ps.terms.recorder import Recorder

pytestmark = pytest.mark.heavy  # many rounds with every order of arrival

FEEDBACK = "error_feedback(onebit)"
FIXED = Quorum(2, 1.0, late=NEXT)


def same(results: list[bytes] | None, expected: Any) -> bool:
    """Whether float32 results are these, bit for bit."""
    assert results is not None
    return [one.tobytes() for one in decoded("fp32", results)] == [
        one.tobytes() for one in expected
    ]


def test_a_round_closes_at_its_deadline_and_the_late_update_counts_in_the_next() -> None:
    with Run(FIXED).begin() as run:
        run.rounds(0, 0)
        run.deliver(0, 1)
        run.deliver(2, 1)
        run.clock.advance(0.9)
        assert run.results(0, 1) is None  # before the deadline
        run.clock.advance(0.2)
        expected = oracle_sum("fp32", 1, [0, 2], [])
        assert same(run.results(0, 1), expected)
        assert same(run.results(2, 1), expected)
        # Half of it has come: it gets nothing before the rest, and counts whole.
        run.deliver(1, 1, chunks=[0, 2])
        assert run.results(1, 1) is None
        for child in (0, 2):
            run.deliver(child, 2)
        run.clock.advance(2.0)
        assert same(run.results(0, 2), oracle_sum("fp32", 2, [0, 2], []))
        run.deliver(1, 1)
        assert same(run.results(1, 1), expected)
        run.deliver(1, 2)  # round 2 is over, too
        assert same(run.results(1, 2), oracle_sum("fp32", 2, [0, 2], []))
        run.rounds(3, 3)
        both = oracle_sum("fp32", 3, [0, 1, 2], [(1, 1), (1, 2)])
        assert all(same(run.results(child, 3), both) for child in range(3))
        assert not run.clock._due  # no timer is left of rounds that are closed
        assert [event["late"] for event in run.told("closed")] == [[], [], [], [["b", 1], ["b", 2]]]
        assert [event["absent"] for event in run.told("closed")] == [[], ["b"], ["b"], []]
        assert [(event["child_site"], event["round"]) for event in run.told("late")] == [
            ("b", 1),
            ("b", 2),
        ]


def test_a_late_update_takes_no_memory_once_it_has_counted() -> None:
    """Packets of a round go when it is merged; late ones went two rounds after that."""
    with Run(Quorum(2, 10.0)).begin() as run:
        run.rounds(0, 0)
        for child in (0, 1):
            store = run.deliver(child, 1)
        run.clock.advance(10.0)
        packets = [packet_of("fp32", 2, 1, chunk).copy() for chunk in range(len(MODEL.chunks))]
        held = [weakref.ref(packet) for packet in packets]
        store.add(1, 2, list(enumerate(packets)))
        del packets
        assert all(one() is not None for one in held)  # it waits for the next round
        run.rounds(2, 2)
        assert run.results(0, 2) is not None
        assert store.round == 2
        assert all(one() is None for one in held)


def test_a_dropped_update_is_answered_at_once_and_counts_nowhere() -> None:
    with Run(Quorum(2, 1.0, late=DROP)).begin() as run:
        run.rounds(0, 0)
        for child in (0, 1):
            run.deliver(child, 1)
        run.deliver(2, 1, chunks=[0, 1, 2])
        run.clock.advance(1.0)
        expected = oracle_sum("fp32", 1, [0, 1], [])
        run.clock.advance(0.25)
        assert same(run.results(2, 1), expected)  # with a chunk that has not come
        assert run.deliver(2, 1).delivered(1, 2) == frozenset(range(len(MODEL.chunks)))
        run.rounds(2, 2)
        assert same(run.results(0, 2), oracle_sum("fp32", 2, [0, 1, 2], []))
        [late] = run.told("late")
        assert late == {
            "round": 1,
            "child": 2,
            "child_site": "c",
            "late_s": 0.25,
            "goes": "drop",
        }
        told = run.session.describe()
        assert [one["late"] for one in told["children"]] == [0, 0, 1]
        assert [one["absent"] for one in told["children"]] == [0, 0, 1]
        assert (told["quorum"], told["deadline_s"]) == (2, 1.0)


def test_close_at_takes_the_first_arrivals() -> None:
    config = ServerConfig(parties=SITES, insecure=True, close_at=2, late=DROP)
    quorum = terms_of(config).quorum
    assert quorum == Quorum(2, 0.0, late=DROP)
    with Run(quorum).begin() as run:
        run.rounds(0, 0)  # the first round waits for all
        assert same(run.results(0, 0), oracle_sum("fp32", 0, [0, 1, 2], []))
        for number, pair in ((1, (2, 1)), (2, (0, 2)), (3, (1, 0))):
            run.deliver(pair[0], number)
            assert run.results(pair[0], number) is None
            run.deliver(pair[1], number)
            expected = oracle_sum("fp32", number, sorted(pair), [])
            assert all(same(run.results(child, number), expected) for child in range(3))


@pytest.mark.parametrize("late", [NEXT, DROP])
@pytest.mark.parametrize("seed", range(6))
def test_replicas_are_equal_whatever_the_arrivals(seed: int, late: str) -> None:
    """Children act in random order on a random clock; an oracle in NumPy follows the closings."""
    chance = random.Random(seed)
    last = 14
    with Run(Quorum(2, 1.0, late=late), down=FEEDBACK).begin() as run:
        due = [0, 0, 0]
        got: list[list[list[bytes]]] = [[], [], []]
        for _ in range(4000):
            child = chance.choices(range(3), (5, 3, 1))[0]
            if due[child] > last:
                run.clock.advance(0.3)
                if min(due) > last:
                    break
                continue
            run.deliver(child, due[child], chunks=chance.sample(range(4), chance.randint(1, 4)))
            results = run.results(child, due[child])
            if results is not None:
                got[child].append(results)
                due[child] += 1
            run.clock.advance(chance.choice((0.0, 0.05, 0.4)))
        assert min(due) == last + 1
        assert got[0] == got[1] == got[2]  # late ones, too
        closed = run.told("closed")
        assert [event["round"] for event in closed] == list(range(last + 1))
        assert any(event["absent"] for event in closed)
        counted = []
        replay = Run(None, down=FEEDBACK, up="fp32").begin()  # whose downlink encodes the oracle's
        with replay:
            for event in closed:
                number = event["round"]
                children = [SITES.index(site) for site in event["sites"]]
                keys = [(SITES.index(site), made) for site, made in event["late"]]
                assert len(children) >= 2
                counted += [*((child, number) for child in children), *keys]
                expected = oracle_sum("fp32", number, children, keys)
                store = replay_store(replay)
                store.begin(number)
                assert got[0][number] == encoded_alone(store, number, expected)
        assert len(counted) == len(set(counted))  # once
        if late == NEXT:
            names = [event for event, _ in run.events]
            end = len(names) - names[::-1].index("closed")
            after = {(one["child"], one["round"]) for _, one in run.events[end:]}
            missed = {(child, n) for child in range(3) for n in range(last + 1)} - set(counted)
            assert missed <= after  # no round has closed since they came


def replay_store(run: Run) -> Any:
    store = run.session.store
    assert store is not None
    return store


def encoded_alone(store: Any, number: int, sums: list[np.ndarray]) -> list[bytes]:
    """What a store makes of sums: its way down encodes them, with its residual."""
    zeros = [np.zeros_like(one) for one in sums]
    for child, values in ((0, sums), (1, zeros), (2, zeros)):
        for chunk, one in enumerate(values):
            packet = native.encode(compressors.parse("fp32").codec, one, native.Key(0, 0, 0))
            store.add(number, child, [(chunk, packet)])
    return [packet.tobytes() for _, packet in sorted(store.results(number, 0)[1])]


@pytest.mark.parametrize("says", [True, False])
def test_means_are_over_those_that_count(says: bool) -> None:
    """Who says no weight stands for 1."""
    with Run(FIXED, rule="mean").begin() as run:
        weights = {0: 1.0, 1: 5.0, 2: 2.0} if says else dict.fromkeys(range(3), 1.0)
        late = 4.0 if says else 1.0

        def deliver(child: int, number: int, weight: float) -> None:
            run.deliver(child, number, weight=weight if says else None)

        for child, weight in weights.items():
            deliver(child, 0, weight)
        for child in (0, 1):
            deliver(child, 1, weights[child])
        run.clock.advance(1.0)
        found = decoded("fp32", run.results(0, 1) or [])
        wanted = oracle_mean(1, {child: weights[child] for child in (0, 1)}, {})
        for one, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, expected, rtol=2e-6, atol=2e-6)
        deliver(2, 1, late)
        for child in (0, 1, 2):
            deliver(child, 2, weights[child])
        found = decoded("fp32", run.results(2, 2) or [])
        wanted = oracle_mean(2, weights, {(2, 1): late})
        for one, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, expected, rtol=2e-6, atol=2e-6)


def test_a_stage_of_a_warm_up_is_that_of_the_round_of_the_update() -> None:
    text = "warmup(topk(0.1), steps=2)"
    with Run(FIXED, up=text).begin() as run:
        run.rounds(0, 0)
        for child in (0, 1):
            run.deliver(child, 1)
        run.clock.advance(1.0)
        run.deliver(2, 1)
        for number in (2, 3):
            run.rounds(number, number)
        assert same(run.results(1, 2), oracle_sum(text, 2, [0, 1, 2], [(2, 1)]))


def test_the_deadline_is_that_of_median_and_mad() -> None:
    arrivals = Arrivals(3)
    generator = np.random.default_rng(1)
    offsets = generator.gamma(2.0, 1.0, 300)
    for count, offset in enumerate(offsets):
        assert (arrivals.deadline_s(4.0) is None) == (count < quorums.FIRST_ROUNDS * 3)
        arrivals.note(float(offset))
    window = offsets[-quorums.WINDOW_ROUNDS * 3 :]
    mad = np.median(np.abs(window - np.median(window)))
    assert arrivals.deadline_s(4.0) == pytest.approx(np.median(window) + 4.0 * mad, rel=1e-12)
    for _ in range(48):
        arrivals.note(2.0)
    assert arrivals.deadline_s(3.0) == pytest.approx(2.0 + 3.0 * 0.1)  # 5 % of the median
    for _ in range(48):
        arrivals.note(0.0)
    assert arrivals.deadline_s(3.0) == pytest.approx(3.0 * 0.05)


def test_an_adaptive_deadline_waits_for_all_until_it_knows_enough() -> None:
    with Run(Quorum(2, None, mads=5.0)).begin() as run:
        for number in range(4):
            run.deliver(0, number)
            run.clock.advance(0.5)
            run.deliver(1, number)
            run.clock.advance(1000.0)
            assert run.results(0, number) is None  # however long it takes
            run.deliver(2, number)
            run.clock.advance(0.5)
        # Offsets of each round: 0, 0.5, 1000.5. Median 0.5, MAD 0.5.
        assert run.session.describe()["deadline_s"] == pytest.approx(3.0)
        run.deliver(0, 4)
        run.deliver(1, 4)
        run.clock.advance(2.9)
        assert run.results(0, 4) is None
        run.clock.advance(0.2)
        assert same(run.results(0, 4), oracle_sum("fp32", 4, [0, 1], []))
        # One that comes back from far behind does not stretch the deadlines of all.
        for number in range(5, 45):
            for child in (0, 1):
                run.deliver(child, number)
            run.clock.advance(5.0)
        before = run.session.describe()["deadline_s"]
        run.clock.advance(36000.0)
        for number in range(4, 45):
            run.deliver(2, number)
            assert run.results(2, number) is not None
        assert len(run.told("late")) == 41
        assert run.session.describe()["deadline_s"] <= before + 0.5


def test_a_child_that_is_too_far_behind_is_told_what_to_do() -> None:
    with Run(Quorum(2, 1.0, late=DROP), past_bytes=0).begin() as run:
        run.rounds(0, 0)
        for number in range(1, 5):
            run.rounds(number, number, (0, 1))
            run.clock.advance(1.0)
        with pytest.raises(ProtocolError, match=r"one of 3 to 5\. .*too far behind.*--past-mb"):
            run.deliver(2, 1)
        run.rounds(5, 5, (0, 1))  # the others go on
        run.clock.advance(1.0)
        assert same(run.results(1, 5), oracle_sum("fp32", 5, [0, 1], []))


def test_a_lost_child_is_not_waited_for_and_may_come_back() -> None:
    with Run(Quorum(2, 1000.0, below_s=30.0)).begin() as run:
        session = run.session
        run.rounds(0, 0)
        session.leave(run.caller(2), "ValueError: no")
        run.clock.advance(0.0)
        assert session.ended is None
        run.rounds(1, 1, (0, 1))
        assert same(run.results(0, 1), oracle_sum("fp32", 1, [0, 1], []))  # at once
        assert [one["state"] for one in session.describe()["children"]][2] == "lost"
        run.processes[2] = "another"
        answer = run.join(2)
        assert answer["is_back"]
        session.agree_model(run.caller(2), [[3, 5], [], [70], [9]], 1)
        run.deliver(0, 2)
        run.deliver(1, 2)
        assert run.results(0, 2) is None  # it is waited for again
        run.deliver(2, 1)
        assert same(run.results(2, 1), oracle_sum("fp32", 1, [0, 1], []))
        run.deliver(2, 2)
        assert same(run.results(2, 2), oracle_sum("fp32", 2, [0, 1, 2], [(2, 1)]))


def test_below_quorum_the_run_ends_with_the_reasons() -> None:
    with Run(Quorum(2, 1.0, below_s=30.0)).begin() as run:
        run.rounds(0, 0)
        run.session.leave(run.caller(1), "ValueError: no")
        run.session.leave(run.caller(2), "OSError: disk")
        run.clock.advance(29.0)
        assert run.session.ended is None
        run.clock.advance(2.0)
        assert run.session.is_below_quorum
        with pytest.raises(PeerError) as caught:
            run.deliver(0, 1)
        assert "Below quorum for 30 s: 1 of 3 sites are there, 2 are needed" in str(caught.value)
        assert "ValueError: no" in str(caught.value)
        assert "OSError: disk" in str(caught.value)


@pytest.mark.parametrize(
    ("reason", "is_below"), [("Below quorum for 30 s: x", True), ("Its disk is full.", False)]
)
def test_a_run_that_ends_at_another_shard_ends_here(reason: str, is_below: bool) -> None:
    with Run(Quorum(2, 1.0, below_s=30.0)).begin() as run:
        run.rounds(0, 0)
        run.session.leave(run.caller(1), f"PeerError: Server x: The run has ended. {reason}")
        assert (run.session.ended, run.session.is_below_quorum) == (reason, is_below)


def test_who_comes_back_in_time_saves_the_run() -> None:
    with Run(Quorum(2, 1.0, below_s=30.0)).begin() as run:
        run.rounds(0, 0)
        run.session.leave(run.caller(1), "no")
        with run.session.changed:
            run.session._lose(2)
        run.clock.advance(29.0)
        run.deliver(2, 1)  # the same process calls again, which has not left
        run.clock.advance(29.0)
        run.deliver(0, 1)
        run.clock.advance(1.0)
        assert run.session.ended is None
        assert same(run.results(0, 1), oracle_sum("fp32", 1, [0, 2], []))


def test_before_the_end_of_the_first_round_all_are_needed() -> None:
    with Run(Quorum(2, 0.0)).begin() as run:
        run.deliver(0, 0)
        run.deliver(1, 0)
        run.clock.advance(100.0)
        assert run.results(0, 0) is None
        run.session.leave(run.caller(2), "no")
        assert run.session.ended is not None


def test_the_run_is_over_when_those_that_are_there_have_left() -> None:
    with Run(Quorum(2, 1.0)).begin() as run:
        run.rounds(0, 0)
        run.session.leave(run.caller(1), "no")
        run.session.leave(run.caller(0), None)
        assert not run.session.is_over
        run.session.leave(run.caller(2), None)
        assert run.session.is_over
        assert run.session.ended is None


def test_gathers_close_without_the_late_who_get_the_same_answer() -> None:
    with Run(FIXED).begin() as run:
        for child in (0, 1):
            assert run.gather(child, 0, bytes([child])) is None
        run.clock.advance(1000.0)
        assert run.gather(0, 0, b"\0") is None  # the beginning waits for all
        assert run.gather(2, 0, b"\2") == [b"\0", b"\1", b"\2"]
        run.rounds(0, 0)
        assert run.gather(0, 1, b"a0") is None
        assert run.gather(1, 1, b"") is None
        run.clock.advance(1.0)
        assert run.gather(0, 1, b"a0") is None or True
        assert run.gather(0, 1, b"a0") == [b"a0", b"", None]
        with pytest.raises(ProtocolError, match="was closed without site `c`, as `x`"):
            run.gather(2, 1, b"late", "other")
        assert run.session.ended is None
        assert run.gather(2, 1, b"late") == [b"a0", b"", None]
        assert run.gather(1, 2, b"b") is None  # and on
        assert run.gather(2, 2, b"c") is None
        assert run.gather(0, 2, b"a") == [b"a", b"b", b"c"]


def test_what_excludes_each_other_is_refused() -> None:
    common: dict[str, Any] = {"parties": SITES, "insecure": True}
    for options, text in (
        ({"quorum": 4}, "`quorum` must be from 1 to the number of parties, 3"),
        ({"late": "drop"}, "`late` needs a `quorum`"),
        ({"quorum": 3, "round_deadline": 1.0}, "`round_deadline` needs"),
        ({"quorum": 2, "close_at": 2}, "`close_at` closes a round"),
        ({"quorum": 2, "late": "never"}, "`late` must be next or drop"),
        ({"quorum": 2, "round_deadline": "soon"}, "`round_deadline` must be adaptive"),
        ({"quorum": 2, "round_deadline": 3.0, "deadline_mads": 2.0}, "is of adaptive deadlines"),
        ({"quorum": 2, "rule": "asgd"}, "asynchronous rules have none"),
        ({"quorum": 2, "below_quorum_s": 0.0}, "`below_quorum_s` must be > 0"),
        ({"quorum": 2, "below_quorum_s": 600.0}, "must be less than `round_timeout_s`"),
        ({"quorum": 2, "round_deadline": 9.0, "round_timeout_s": 9.0}, "must be less than"),
    ):
        with pytest.raises(ConfigError, match=text):
            ServerConfig(**common, **options)
    assert terms_of(ServerConfig(**common, quorum=3)).quorum is None
    with Run(FIXED) as run, pytest.raises(ProtocolError, match="asynchronous rules have none"):
        run.session.join(Caller(0, "p0", 1.0), 1, "fp32", "fp32", 7, "asgd")


def test_a_child_whose_step_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FAILED_AFTER_S", 0.0)
    with Run(Quorum(2, 1000.0)).begin() as run:
        run.rounds(0, 0)
        run.session.fail(run.caller(2), "ValueError: no")
        run.rounds(1, 1, (0, 1))
        with pytest.raises(PeerError, match="Waited"):
            store: Any = run.session.store
            run.session.wait_results(run.caller(0, 0.05), store, 1, 0, lambda: False, 0)
        run.clock.advance(0.0)
        assert same(run.results(0, 1), oracle_sum("fp32", 1, [0, 1], []))
        [lost] = run.told("lost")
        assert "its last step ended with an error. ValueError: no" in lost["reason"]
        run.deliver(2, 1)  # its script has caught the error
        assert [event["child"] for event in run.told("found")] == [2]


@pytest.mark.parametrize("is_eager", [False, True])
def test_what_is_known_of_absent_children_outlives_the_server(
    tmp_path: Path, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_eager:
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    first, quorum = tmp_path / "first", Quorum(2, 1.0, below_s=30.0)
    first.mkdir()
    with Run(quorum, base=first).begin() as run:
        run.rounds(0, 0)
        for child in (0, 1):
            run.deliver(child, 1)
            run.gather(child, 0, bytes([child]))
        run.clock.advance(1.0)
        run.deliver(2, 1, chunks=[1])  # late, and not whole
        run.session.leave(run.caller(2), "no")
        run.rounds(2, 2, (0, 1))
        run.clock.advance(0.0)
        run.rounds(3, 3, (0,))
        second = run.killed(tmp_path / "second")
    with Run(quorum, base=second) as run:
        assert run.session.describe()["children"][2]["state"] == "lost"
        assert run.gather(0, 0, b"\0") == [b"\0", b"\1", None]
        run.rounds(3, 3, (1,))
        assert same(run.results(1, 3), oracle_sum("fp32", 3, [0, 1], []))
        assert run.gather(2, 0, b"late") == [b"\0", b"\1", None]
        run.deliver(2, 1, chunks=[0, 2, 3])  # what it owes of its update
        assert same(run.results(2, 1), oracle_sum("fp32", 1, [0, 1], []))
        run.rounds(4, 4)
        assert same(run.results(0, 4), oracle_sum("fp32", 4, [0, 1, 2], [(2, 1)]))


def test_a_late_update_is_acknowledged_when_it_is_durable() -> None:
    class Slow(Recorder):
        is_keeping = True
        num_added = 0
        synced = 0

        def add(self, *_: Any, **fields: Any) -> int:
            self.num_added += 1
            return self.num_added

        @property
        def durable(self) -> int:
            return self.synced

    recorder = Slow()
    up = compressors.parse("fp32")
    partial = Partial((1, 2, 3), range(len(MODEL.chunks)), carries=True)
    store = Store(MODEL, SITES, up, up, 7, recorder=recorder, partial=partial)
    for child in (0, 1):
        for chunk in range(len(MODEL.chunks)):
            store.add(0, child, [(chunk, packet_of("fp32", child, 0, chunk))])
    recorder.synced = recorder.num_added
    store.merge(store.close(0, (0, 1), []))
    assert store.results(0, 0) == (0, [])  # who counts is not durable
    recorder.synced = recorder.num_added
    assert store.results(0, 0)[0] == len(MODEL.chunks)
    for chunk in range(len(MODEL.chunks)):
        assert store.awaits(0, 2)
        store.add(0, 2, [(chunk, packet_of("fp32", 2, 0, chunk))])
    assert store.awaits(0, 2)
    assert store.delivered(0, 2) == frozenset(range(len(MODEL.chunks)))
    recorder.synced = recorder.num_added
    assert not store.awaits(0, 2)


def test_a_state_is_of_one_kind_of_rounds(tmp_path: Path) -> None:
    with Run(FIXED, base=tmp_path).begin() as run:
        run.rounds(0, 0)
    for other in (None, Quorum(2, 1.0, late=DROP)):
        with pytest.raises(StateError, match="late="):
            Run(other, base=tmp_path)


def test_an_overflow_ends_the_run() -> None:
    with Run(FIXED).begin() as run:
        run.rounds(0, 0)
        codec = compressors.parse("fp32").codec
        for child in (0, 1):
            store: Any = run.session.begin_round(run.caller(child), 1)
            for chunk, where in enumerate(MODEL.chunks):
                huge = np.full(where.size, 3e38, np.float32)
                store.add(1, child, [(chunk, native.encode(codec, huge, native.Key(0, 0, 0)))])
            run.session.goes_on(child)
        run.clock.advance(1.0)
        with pytest.raises(NonFiniteError, match="the sum over all sites must be finite"):
            run.deliver(0, 1) and run.results(0, 1)
        assert run.session.ended is not None


@pytest.mark.parametrize(("late", "is_eager"), [(NEXT, False), (NEXT, True), (DROP, False)])
def test_a_restored_server_closes_the_same_rounds(
    tmp_path: Path, late: str, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after each call of a run with late updates; the rest gives the same bits."""
    if is_eager:
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    # (child, round, whether the deadline passes then); b is late in rounds 1 and 2.
    script = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (2, 1, 1), (0, 2, 0), (1, 1, 0)]
    script += [(2, 2, 1), (0, 3, 0), (1, 2, 0), (1, 3, 0), (2, 3, 0), (0, 4, 0), (1, 4, 0)]
    script += [(2, 4, 0)]
    quorum = Quorum(2, 1.0, late=late)

    def play(run: Run, steps: Any, num_again: int = 0) -> None:
        for place, (child, number, passes) in enumerate(steps):
            run.deliver(child, number)
            if passes and place >= num_again:
                run.clock.advance(1.0)

    with Run(quorum, down=FEEDBACK).begin() as whole:
        play(whole, script)
        expected = [whole.results(0, number) for number in range(5)]
        assert any(event["late"] for event in whole.told("closed")) == (late == NEXT)
    for cut in (4, 5, 7, 8, 10, 12):
        first = tmp_path / f"first-{cut}"
        first.mkdir()
        with Run(quorum, down=FEEDBACK, base=first).begin() as run:
            play(run, script[:cut])
            second = run.killed(tmp_path / f"second-{cut}")
        clock = ManualClock()
        with Run(quorum, down=FEEDBACK, base=second, clock=clock) as run:
            assert run.is_restored
            # What was being done is done once more: it is recognised.
            play(run, script[cut - 2 :], 2)
            run.clock.advance(1.0)
            settled = [run.results(0, number) for number in range(5)]
            assert settled == expected, cut
            assert [run.results(1, number) for number in range(5)] == expected
