# SPDX-License-Identifier: Apache-2.0
"""One run without sockets: who is in it, who comes twice, who is lost."""

import concurrent.futures
import logging
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.eventually import eventually
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.ps.calls.wait_limits import Limits
from tf_hips.ps.server import uplink
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.tree import MAX_LEAVES, far_larger

PATIENCE_S = 10.0


class Run:
    """A session of sites `a` and `b`, and threads that call it."""

    def __init__(self, lost_after_s: float = 60.0) -> None:
        self.session = Session(Terms(("a", "b"), None, None, 1 << 30, lost_after_s))
        self.pool = concurrent.futures.ThreadPoolExecutor(8)

    def join(
        self, child: int, process: str, patience_s: float = PATIENCE_S
    ) -> tuple[Caller, concurrent.futures.Future[dict[str, object]]]:
        """Begins to join; returns when the session has taken the call in."""
        caller = Caller(child, process, patience_s)
        before = self._num_joining(child, process)
        future = self.pool.submit(self.session.join, caller, 2, "onebit", "same", 7)
        eventually(
            lambda: self.session.is_started or self._num_joining(child, process) > before,
            PATIENCE_S,
            changed=self.session.changed,
        )
        return caller, future

    def _num_joining(self, child: int, process: str) -> int:
        known = self.session._members.children.get(child)
        return known.num_joining if known is not None and known.process == process else 0


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.session.end("The test is over.")
    made.pool.shutdown()


def test_one_process_of_a_site_is_in_the_run(run: Run) -> None:
    _, first = run.join(0, "old")
    _, second = run.join(0, "new")
    with pytest.raises(ProtocolError, match="Site `a` is in this run already"):
        first.result(PATIENCE_S)
    _, other = run.join(1, "other")
    assert second.result(PATIENCE_S)["child"] == 0
    assert other.result(PATIENCE_S)["child"] == 1
    session = run.session
    watch = session.watch(Caller(0, "new", PATIENCE_S))
    there = threading.Thread(target=lambda: list(watch), daemon=True)
    there.start()
    eventually(lambda: session._presence.is_there(0), PATIENCE_S, changed=session.changed)
    # It waits for the end of the one that is there.
    _, late = run.join(0, "old", patience_s=0.1)
    with pytest.raises(ProtocolError, match="Site `a` is in this run already"):
        late.result(PATIENCE_S)


def test_calls_of_an_older_process_are_refused(run: Run) -> None:
    futures = [run.join(child, process)[1] for child, process in [(0, "new"), (1, "other")]]
    for future in futures:
        future.result(PATIENCE_S)
    for call in (
        lambda caller: run.session.leave(caller, "killed"),
        lambda caller: run.session.agree_model(caller, [[3]]),
        lambda caller: run.session.begin_sync(caller, [], 0),
    ):
        with pytest.raises(ProtocolError, match="Site `a` is in this run already"):
            call(Caller(0, "old", PATIENCE_S))
    assert not run.session.is_over
    run.session.agree_model(Caller(0, "new", PATIENCE_S), [[3]])


def test_all_begin_with_the_same_round(run: Run) -> None:
    (a, first), (b, second) = run.join(0, "a"), run.join(1, "b")
    for future in (first, second):
        future.result(PATIENCE_S)
    for wrong in (-1, 1 << 40):
        with pytest.raises(ProtocolError, match=r"`round` must be from 0 to 2\^31"):
            run.session.agree_model(a, [[3]], wrong)
    run.session.agree_model(a, [[3]], 12)
    message = "the same step. Received: site `a` begins with round 12, and site `b` with round 0"
    with pytest.raises(ProtocolError, match=message):
        run.session.agree_model(b, [[3]])
    run.session.agree_model(b, [[3]], 12)
    run.session.agree_model(b, [[3]], 12)  # once more, over a new connection
    with pytest.raises(ProtocolError, match="the same step"):
        run.session.agree_model(b, [[3]], 13)
    with pytest.raises(ProtocolError, match=r"one of 12 to 13. Received: round 0"):
        run.session.begin_round(a, 0)
    assert run.session.begin_round(a, 12).round == 12


def test_a_join_over_a_new_connection_outlives_the_old_one(run: Run) -> None:
    old, first = run.join(0, "p")
    _, second = run.join(0, "p")
    run.session.hang_up(old)
    with pytest.raises(PeerError, match="has hung up"):
        first.result(PATIENCE_S)
    run.join(1, "other")
    assert second.result(PATIENCE_S)["parties"] == ["a", "b"]


def test_a_join_that_is_given_up_is_forgotten(run: Run) -> None:
    calls = [run.join(0, "p") for _ in range(2)]
    for caller, future in calls:
        run.session.hang_up(caller)
        with pytest.raises(PeerError, match="has hung up"):
            future.result(PATIENCE_S)
    _, other = run.join(1, "other", patience_s=0.1)
    with pytest.raises(PeerError, match="the parties `a` have not joined"):
        other.result(PATIENCE_S)


def started(run: Run) -> None:
    """Both parties are in."""
    for future in [run.join(child, f"p{child}")[1] for child in (0, 1)]:
        future.result(PATIENCE_S)


def told(run: Run, caller: Caller) -> list[str]:
    """What a watching child hears of the end of the run."""
    return [text for text, _ in run.session.watch(caller)]


def watch(run: Run, child: int) -> tuple[Caller, concurrent.futures.Future[list[str]]]:
    """Begins to watch; returns when the session knows that the child is there."""
    caller = Caller(child, f"p{child}", PATIENCE_S)
    future = run.pool.submit(told, run, caller)
    eventually(
        lambda: caller in run.session._presence._calls.get(child, []),
        PATIENCE_S,
        changed=run.session.changed,
    )
    return caller, future


@pytest.mark.heavy
def test_a_child_that_hangs_up_and_stays_away_is_lost() -> None:
    run = Run(lost_after_s=0.5)
    started(run)
    _, here = watch(run, 0)
    gone, end = watch(run, 1)
    run.session.hang_up(gone)
    assert end.result(PATIENCE_S) == []
    reason = "Site `b` was lost: its connection closed and it did not come back within 0.5 s."
    assert here.result(PATIENCE_S) == [reason]
    assert run.session.is_known_to_all()
    with pytest.raises(PeerError, match=r"The run has ended\. Site `b` was lost"):
        run.session.agree_model(Caller(0, "p0", PATIENCE_S), [[3]])
    assert told(run, Caller(1, "p1", PATIENCE_S)) == [reason]


@pytest.mark.heavy
def test_a_child_that_never_shows_itself_is_lost() -> None:
    run = Run(lost_after_s=0.5)
    started(run)
    _, here = watch(run, 1)
    assert "Site `a` was lost" in here.result(PATIENCE_S)[0]


def test_a_child_that_comes_back_is_not_lost(run: Run) -> None:
    started(run)
    first, end = watch(run, 1)
    presence = run.session._presence
    run.session.hang_up(first)
    assert end.result(PATIENCE_S) == []
    timer = presence._timers[1]
    second, _ = watch(run, 1)
    assert timer.finished.is_set()
    with run.session.changed:
        presence._time_is_up(1, timer)  # it had fired already, and waited for the lock
    assert not run.session.is_over
    # The end of an older connection may be noticed after the newer one has come.
    third, _ = watch(run, 1)
    run.session.hang_up(second)
    eventually(lambda: presence._calls[1] == [third], PATIENCE_S, changed=run.session.changed)
    assert 1 not in presence._timers


def test_who_has_left_may_be_away(run: Run) -> None:
    started(run)
    _, end = watch(run, 0)
    run.session.leave(Caller(0, "p0", PATIENCE_S), None)
    assert end.result(PATIENCE_S) == []
    assert 0 not in run.session._presence._timers
    assert run.session.ended is None
    run.session.leave(Caller(1, "p1", PATIENCE_S), None)
    assert run.session.is_over
    assert not run.session._presence._timers


def test_packets_that_come_end_what_had_failed(run: Run) -> None:
    """Also in a round that has begun, where no new call says so."""
    futures = [run.join(child, process)[1] for child, process in [(0, "a"), (1, "b")]]
    for future in futures:
        future.result(PATIENCE_S)
    for child, process in [(0, "a"), (1, "b")]:
        run.session.fail(Caller(child, process, PATIENCE_S), "too large")
    assert run.session.have_all_failed
    run.session.goes_on(1)
    assert run.session._waiting.failures() == {0: "too large"}


def test_a_tree_has_so_many_leaves_and_no_more(run: Run) -> None:
    leaves = [tuple((f"{site}{one}", 1) for one in range(MAX_LEAVES // 2)) for site in "xy"]
    callers = [Caller(child, f"p{child}", 0.1) for child in (0, 1)]
    too_many = (*leaves[1], ("z", 1))
    with pytest.raises(PeerError):  # the other one has not joined
        run.session.join(callers[0], len(leaves[0]), "onebit", "same", 7, None, leaves[0])
    first = run.pool.submit(
        run.session.join,
        Caller(0, "p0", PATIENCE_S), len(leaves[0]), "onebit", "same", 7, None, leaves[0],
    )  # fmt: skip
    eventually(lambda: run._num_joining(0, "p0") > 0, PATIENCE_S, changed=run.session.changed)
    with pytest.raises(ProtocolError, match=rf"at most {MAX_LEAVES} leaves\. Received: 4097 with"):
        run.session.join(callers[1], len(too_many), "onebit", "same", 7, None, too_many)
    second = run.session.join(callers[1], len(leaves[1]), "onebit", "same", 7, None, leaves[1])
    assert first.result(PATIENCE_S)["child"] == 0
    assert second["child"] == MAX_LEAVES // 2


def test_children_wait_longer_than_both_waits_of_their_server() -> None:
    own, above = Limits(7.0, 5.0, 100), Limits(600.0, 60.0, 50)
    here, told = own.under(above), own.told(above)
    assert here.join_timeout_s > above.join_timeout_s
    assert here.round_timeout_s > above.round_timeout_s
    assert (told.join_timeout_s, told.round_timeout_s) == (
        2 * here.join_timeout_s,
        2 * here.round_timeout_s,
    )
    assert told.max_gather_bytes == 50


def test_who_claims_far_more_leaves_is_named_below_a_robust_rule(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of as many workers as the others have, so that only leaves show it."""
    sites, claimed = ("a", "b", "c"), tuple((f"x{n}", 1) for n in range(9))
    session = Session(Terms(sites, None, None, 1 << 30))
    with concurrent.futures.ThreadPoolExecutor(len(sites)) as pool:
        joining = [
            pool.submit(
                session.join,
                Caller(child, f"p{child}", PATIENCE_S),
                9,
                "onebit",
                "same",
                7,
                "median(f=1)",
                claimed if site == "c" else None,
            )
            for child, site in enumerate(sites)
        ]
        for one in joining:
            one.result(PATIENCE_S)
    [told] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    session.end("The test is over.")
    assert "Site c says that it stands for 9 parties; the median of the others is 1." in told


@pytest.mark.parametrize(("rule", "is_told"), [("median(f=1)", True), ("mean", False)])
def test_who_claims_far_more_workers_is_named_below_a_robust_rule(
    rule: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sites = ("a", "b", "c", "d", "e")
    session = Session(Terms(sites, None, None, 1 << 30))
    with concurrent.futures.ThreadPoolExecutor(len(sites)) as pool:
        joining = [
            pool.submit(
                session.join,
                Caller(child, f"p{child}", PATIENCE_S),
                1000 if site == "d" else 1,
                "onebit",
                "same",
                7,
                rule,
            )
            for child, site in enumerate(sites)
        ]
        for one in joining:
            one.result(PATIENCE_S)
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    session.end("The test is over.")
    assert len(told) == is_told
    assert all("Site d says that it has 1000 workers; the median of" in one for one in told)


@pytest.mark.parametrize(
    ("rule", "compression", "is_told"),
    [
        ("multi_krum(f=1)", "error_feedback(terngrad(bitwidth=2))", True),
        ("multi_krum(f=1) >> fedavg", "warmup(terngrad(bitwidth=3), steps=4)", True),
        ("multi_krum(f=1)", "error_feedback(terngrad(bitwidth=4))", False),
        ("multi_krum(f=1)", "error_feedback(onebit)", False),
        ("mean", "terngrad", False),
    ],
)
def test_a_codec_that_hides_liars_is_a_warning(
    rule: str, compression: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told = _told_to_five(rule, compression, caplog)
    assert len(told) == is_told
    assert all("may not find liars among packets of terngrad(" in one for one in told)


@pytest.mark.parametrize(
    ("rule", "is_told"),
    [
        ("nnm(f=1) >> mean", True),
        ("nnm >> mean >> fedavg", True),
        ("bucketing(s=2) >> mean", True),
        ("nnm(f=1) >> clip >> mean", False),
        ("arc(f=1) >> mean", False),
        ("nnm(f=1) >> median", False),
        ("mean", False),  # says of nobody that it bears it
        ("detox(r=3) >> mean", False),
    ],
)
def test_a_chain_that_bears_nobody_is_a_warning(
    rule: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    what = "bears nobody that lies: one row moves the mean at its end"
    told = [one for one in _told_to_five(rule, "fp32", caplog) if what in one]
    assert len(told) == is_told


def _told_to_five(rule: str, compression: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a server that five parties join, told no rule itself."""
    sites = ("a", "b", "c", "d", "e")
    session = Session(Terms(sites, None, None, 1 << 30))
    with concurrent.futures.ThreadPoolExecutor(len(sites)) as pool:
        joining = [
            pool.submit(
                session.join,
                Caller(child, f"p{child}", PATIENCE_S),
                1,
                compressors.parse(compression).text,
                "same",
                7,
                rules.parse(rule).text,
            )
            for child in range(len(sites))
        ]
        for one in joining:
            one.result(PATIENCE_S)
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    session.end("The test is over.")
    return told


def test_far_larger_is_against_the_lesser_median_of_the_others() -> None:
    assert far_larger([1, 1, 8, 1, 9]) == [(4, 1)]
    assert far_larger([100, 1, 1, 90, 1]) == [(0, 1), (3, 1)]
    assert far_larger([4, 32, 40]) == [(2, 4)]
    assert far_larger([5]) == []


class Joining:
    """Parties `a`, `b` and `c` that join one after the other, each on some terms."""

    def __init__(self, rule: str) -> None:
        terms = Terms(("a", "b", "c"), None, None, 1 << 30, rule=rules.parse(rule).text)
        self.session = Session(terms)
        self.pool = concurrent.futures.ThreadPoolExecutor(8)

    def join(
        self,
        child: int,
        *,
        seed: int = 7,
        compression: str = "fp32",
        workers: int = 1,
    ) -> concurrent.futures.Future[dict[str, object]]:
        """Begins to join; returns when it is taken in, or refused."""
        caller = Caller(child, f"p{child}", PATIENCE_S)
        future = self.pool.submit(self.session.join, caller, workers, compression, "same", seed)
        children = self.session._members.children
        eventually(
            lambda: future.done() or child in children, PATIENCE_S, changed=self.session.changed
        )
        return future


@pytest.mark.parametrize(
    ("rule", "lie", "text"),
    [
        ("median(f=1)", {"seed": 8}, "`seed`. Site `a` has 7. Received: seed=8 from site `c`"),
        ("median(f=1)", {"compression": "onebit"}, "`compression`. Site `a` has fp32"),
        ("detox(r=3) >> median", {"workers": 2}, "1 of site `a`, 2 of site `c`"),
    ],
)
def test_below_a_robust_rule_who_comes_first_on_other_terms_is_put_out(
    rule: str, lie: dict[str, Any], text: str
) -> None:
    run = Joining(rule)
    liar, b = run.join(2, **lie), run.join(1)
    assert not b.done()
    a = run.join(0)
    with pytest.raises(ProtocolError) as caught:
        liar.result(PATIENCE_S)
    assert text in str(caught.value)
    with pytest.raises(ProtocolError):
        run.join(2, **lie).result(PATIENCE_S)  # and so is who comes after the first party
    run.join(2)
    assert [one.result(PATIENCE_S)["child"] for one in (a, b)] == [0, 1]


def test_below_another_rule_terms_are_those_of_who_comes_first() -> None:
    run = Joining("mean")
    run.join(2, seed=8)
    with pytest.raises(ProtocolError, match=r"`seed`\. Site `c` has 8\. Received: seed=7"):
        run.join(0).result(PATIENCE_S)
    with run.session.changed:
        run.session._waiting.end("the test is over")


@pytest.mark.parametrize(
    ("told", "wishes", "found"),
    [
        (None, {2: "onebit", 0: "fp16", 1: None}, "fp16"),  # whoever joined first
        (None, {2: "onebit", 1: "fp16", 0: None, 3: "fp16"}, "fp16"),
        (None, {2: "onebit", 1: "fp16", 0: None}, "fp16"),
        (None, {1: None, 0: None}, "int8"),
        ("bf16", {2: "onebit", 0: "fp16"}, "bf16"),
    ],
    ids=["the first", "most", "no majority", "nobody", "told"],
)
def test_what_goes_up_is_no_matter_of_who_joined_first(
    told: str | None, wishes: dict[int, str | None], found: str
) -> None:
    """Below a robust rule children may wish for different things, if the first has no wish."""
    children = {
        child: types.SimpleNamespace(above=wish, compression="int8")
        for child, wish in wishes.items()
    }
    members = types.SimpleNamespace(
        children=children, terms=types.SimpleNamespace(way_up=told and compressors.parse(told).text)
    )
    session: Any = types.SimpleNamespace(state=types.SimpleNamespace(members=members))
    expected = compressors.parse(found)
    assert compressors.parse(uplink._way_up(session)) in (expected, expected.for_sums)


def test_nobody_brings_a_leaf_of_the_name_of_another_party() -> None:
    run = Joining("mean")
    caller = Caller(2, "p", PATIENCE_S)
    with pytest.raises(ProtocolError, match="Received: `b` twice, as b and as c/b"):
        run.session.join(caller, 1, "fp32", "same", 7, leaves=(("b", 1),))
