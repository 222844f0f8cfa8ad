# SPDX-License-Identifier: Apache-2.0
"""Gathers: every child's bytes for all children, once each, and children that do not come."""

import concurrent.futures
import itertools
import time
from collections.abc import Iterator

import pytest

from tests.ps.parties import DEADLINE_S
from tests.support.eventually import eventually
from tf_hips.errors import PeerError, ProtocolError, TfHipsError
from tf_hips.ps.rounds.gather import LABEL_BYTES, Gathers, Upload, to_packet
from tf_hips.ps.session import waiting
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import HEADER

pytestmark = pytest.mark.heavy  # children that are waited for

# --- what is kept -----------------------------------------------------------------------------


def upload(upload: Upload, label: str, payload: bytes) -> None:
    """Feeds a whole packet."""
    for message in wire.bundle([(0, to_packet(label, payload))]):
        upload.feed(message)


def deliver(gathers: Gathers, child: int, number: int, payload: bytes) -> None:
    """One call of a child, up to where it waits."""
    begun = gathers.begin(child, number)
    upload(begun, "x", payload)
    came = begun.finish()
    assert came is not None
    gathers.deliver(child, number, *came)
    gathers.end(child, begun)


def answer(gathers: Gathers, number: int) -> list[tuple[int, bytes]]:
    return [(child, bytes(payload)) for child, payload in gathers.answer(number)]


def kept(gathers: Gathers) -> int:
    """Bytes that are held, coming in or delivered."""
    return sum(
        len(payload) for one in gathers._gathers.values() for payload in one.payloads.values()
    ) + sum(
        len(one._packet or one._assembler._packet if one._assembler else b"")
        for one in gathers._uploads.values()
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_payloads_come_in_child_order_whoever_is_first(order: tuple[int, ...]) -> None:
    gathers = Gathers(3, 100, 10_000)
    for number in range(3):
        for child in order:
            assert gathers.missing(number) >= {child} or number not in gathers._gathers
            deliver(gathers, child, number, bytes([number, child]))
        assert gathers.missing(number) == set()
        assert answer(gathers, number) == [(child, bytes([number, child])) for child in range(3)]
    assert gathers.oldest == 0
    gathers.need(2)
    assert set(gathers._gathers) == {1, 2}


def test_a_payload_counts_once_and_is_kept_until_nobody_needs_it() -> None:
    gathers = Gathers(2, 100, 1000)
    deliver(gathers, 0, 0, b"first")
    deliver(gathers, 0, 0, b"first")  # sent again
    deliver(gathers, 1, 0, b"")
    expected = [(0, b"first")]  # what is empty is not sent
    assert answer(gathers, 0) == expected
    assert gathers.answer(0, have=[0]) == []
    deliver(gathers, 0, 1, b"next")
    assert answer(gathers, 0) == expected  # child 1 may have lost it
    deliver(gathers, 1, 0, b"")  # it has lost the answer
    assert answer(gathers, 0) == expected
    deliver(gathers, 1, 1, b"next")
    assert answer(gathers, 0) == expected  # one may come back to it
    gathers.need(1)
    assert answer(gathers, 0) == expected
    assert gathers.are_whole
    deliver(gathers, 0, 2, b"more")
    assert not gathers.are_whole
    with pytest.raises(ProtocolError, match="Gather 0 is over"):
        gathers.answer(0)
    assert gathers.missing(0) == set()


@pytest.mark.parametrize(("label", "payload"), [("x", b"other"), ("x", b""), ("y", b"first")])
def test_what_is_sent_again_must_be_the_same(make_run, label: str, payload: bytes) -> None:
    run = make_run()
    first = run.gather(0, 0, payload=b"first")
    again = run.gather(0, 0, label, payload)
    error = error_of(again)
    assert isinstance(error, ProtocolError)
    assert "Gather 0 of a site must stay what it was" in str(error)
    assert f"Received: `{label}`, {len(payload)} other bytes" in str(error)
    assert not first.done()  # what came first counts
    assert run.gather(1, 0, payload=b"second").result(DEADLINE_S) == [b"first", b"second"]
    assert first.result(DEADLINE_S) == [b"first", b"second"]


def test_a_number_must_be_the_next() -> None:
    gathers = Gathers(2, 100, 1000)
    with pytest.raises(ProtocolError, match=r"must be 0, which is next"):
        gathers.begin(0, 1)
    deliver(gathers, 0, 0, b"")
    with pytest.raises(ProtocolError, match=r"one of 0 to 1, which is next.*Received: gather 1"):
        gathers.begin(0, 1)  # not before child 1 has come
    deliver(gathers, 1, 0, b"")
    for child in (0, 1):
        deliver(gathers, child, 1, b"")
    with pytest.raises(ProtocolError, match=r"one of 0 to 2, which is next.*Received: gather 3"):
        gathers.begin(1, 3)
    for child in (0, 1):
        deliver(gathers, child, 2, b"")
    gathers.need(2)
    with pytest.raises(ProtocolError, match=r"one of 1 to 3, which is next.*Received: gather 0"):
        gathers.begin(1, 0)


def test_gathers_of_a_few_bytes_are_bounded_too() -> None:
    """One of each step, as of loss scales: what is kept of it is Python's objects above all."""
    gathers = Gathers(2, 100, 100_000)
    for number in range(300):
        for child in range(2):
            deliver(gathers, child, number, b"1")
        assert gathers.newest == number
    assert 30 < len(gathers._gathers) < 100
    assert sorted(gathers._gathers) == list(range(gathers.oldest, 300))


def test_answers_that_are_restored_count() -> None:
    """Those of a server above are larger than what went up: the limit is of both."""
    gathers = Gathers(1, 100, 10_000)
    gathers.shape([None], is_passed_up=True)
    for number in range(8):
        gathers.restore(0, number, "x", memoryview(b"1"))
    for number in range(8):
        gathers.take_answer(number, [bytes(3000)])
    gathers.restore(0, 8, "x", memoryview(b"1"))
    assert sorted(gathers._gathers) == [5, 6, 7, 8]
    assert gathers._past_bytes == sum(gathers._gathers[number].num_bytes for number in (5, 6))


def test_memory_is_bounded_whatever_a_child_does() -> None:
    limit = 5000
    gathers = Gathers(2, limit, 3 * limit)
    for number in range(4):
        for child in (0, 1):
            deliver(gathers, child, number, bytes(limit))
    deliver(gathers, 0, 4, bytes(limit))
    older = [gathers.begin(child, 4) for child in (0, 1)]
    part = HEADER.pack(0, limit, 0, 10) + bytes(10)  # takes the memory of a whole payload
    for one in older:
        one.feed(part)
    assert gathers.oldest == 2  # of gather 0 and 1 there is no room for both
    assert kept(gathers) == (2 + 2 + 1 + 2) * limit
    newer = gathers.begin(1, 4)
    assert kept(gathers) == (2 + 2 + 1 + 1) * limit
    with pytest.raises(PeerError, match="over another connection"):
        older[1].feed(part)
    with pytest.raises(PeerError, match="over another connection"):
        older[1].finish()
    gathers.end(1, older[1])
    upload(newer, "x", b"good")
    assert newer.finish() == ("x", b"good")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (HEADER.pack(0, 0xFFFFFFFF, 0, 1) + b"x", "announces 4294967295"),
        (HEADER.pack(0, 1103, 0, 1) + b"x", "at most 1102 bytes"),
        (HEADER.pack(1, 9, 0, 9) + bytes(9), "Received: chunk 1"),
        (HEADER.pack(0, 9, 0, 4) + bytes(4), "ended after 4"),
        (2 * (HEADER.pack(0, 4, 0, 4) + b"\1\0ab"), "one packet of each site"),
        (HEADER.pack(0, 1, 0, 1) + b"\1", "A label must have 1 to 1000 bytes. Received: 0"),
        (HEADER.pack(0, 4, 0, 4) + b"\3\0ab", "A label must have 1 to 1000 bytes. Received: 3"),
        (HEADER.pack(0, 3, 0, 3) + b"\0\0a", "A label must have 1 to 1000 bytes. Received: 0"),
        (HEADER.pack(0, 4, 0, 4) + b"\2\0\xff\xff", "must be UTF-8"),
        (HEADER.pack(0, 104, 0, 104) + b"\1\0a" + bytes(101), "at most 100 bytes, the server's"),
    ],
)
def test_bytes_that_are_no_payload_are_refused(message: bytes, text: str) -> None:
    bad = Gathers(2, 100, 1000).begin(0, 0)
    with pytest.raises(ProtocolError, match=text):
        bad.feed(message)
        bad.finish()


def test_a_label_must_fit() -> None:
    for label in ("", "x" * (LABEL_BYTES + 1)):
        with pytest.raises(ValueError, match="`label` must have 1 to 1000 bytes"):
            to_packet(label, b"")


# --- who waits for whom -----------------------------------------------------------------------


class Run:
    """A session of sites `a`, `b` ..., all joined, and threads that call it."""

    def __init__(self, num_children: int) -> None:
        self.session = Session(
            Terms(tuple("abc"[:num_children]), None, None, 1 << 30, max_gather_bytes=100)
        )
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        for future in [
            self.pool.submit(self.session.join, self.caller(child), 1, "fp32", "same", 7)
            for child in range(num_children)
        ]:
            future.result(DEADLINE_S)

    def caller(self, child: int, patience_s: float = DEADLINE_S) -> Caller:
        return Caller(child, f"p{child}", patience_s)

    def gather(
        self, child: int, number: int, label: str = "x", payload: bytes | None = None
    ) -> concurrent.futures.Future:
        """Begins to gather; returns when the call waits or is over."""

        def call() -> list[bytes]:
            caller = self.caller(child)
            begun = self.session.begin_gather(caller, number)
            upload(begun, label, b"%d" % child if payload is None else payload)
            return [bytes(one) for _, one in self.session.wait_gather(caller, number, begun)]

        return self._begin(child, call)

    def round(self, child: int, number: int = 0) -> concurrent.futures.Future:
        """Begins to wait for the results of a round, in which all owe their packets."""

        def call() -> None:
            caller = self.caller(child)
            store = self.session.begin_round(caller, number)
            self.session.wait_results(caller, store, number, 0, lambda: False, 0)

        return self._begin(child, call)

    def _begin(self, child: int, call) -> concurrent.futures.Future:
        before = self.session._waiting._newest.get(child)
        future = self.pool.submit(call)
        eventually(
            lambda: future.done() or self.session._waiting._newest.get(child) not in (None, before),
            DEADLINE_S,
            changed=self.session.changed,
        )
        return future

    def agree(self) -> None:
        for child in range(len(self.session._terms.parties)):
            self.session.agree_model(self.caller(child), [[3]])


@pytest.fixture
def make_run() -> Iterator:
    made: list[Run] = []

    def make(num_children: int = 2) -> Run:
        made.append(Run(num_children))
        return made[-1]

    yield make
    for run in made:
        run.session.end("The test is over.")
        run.pool.shutdown()


def error_of(future: concurrent.futures.Future) -> TfHipsError:
    error = future.exception(DEADLINE_S)
    assert isinstance(error, TfHipsError)
    return error


def test_different_labels_end_the_run_for_all(make_run) -> None:
    run = make_run(3)
    first = run.gather(0, 0, "loss")
    second = run.gather(1, 0, "accuracy")
    for future in (first, second):
        error = error_of(future)
        assert type(error) is ProtocolError
        assert "site `a` waits in exact value 0 (`loss`)" in str(error)
        assert "site `b` waits in exact value 0 (`accuracy`)" in str(error)
        assert "`tf_hips.shard`" in str(error)
    # Whoever computes hears of it as the same error.
    with pytest.raises(ProtocolError, match=r"The run has ended\. The parties wait for each other"):
        run.session.agree_model(run.caller(2), [[3]])
    [(text, kind)] = run.session.watch(run.caller(2))
    assert "waits in" in text
    assert kind is ProtocolError


def test_a_gather_and_a_round_that_wait_for_each_other_end_the_run(make_run) -> None:
    run = make_run(3)
    run.agree()
    began = time.monotonic()
    first = run.round(0)
    second = run.gather(2, 0, "metrics")
    for future in (first, second):
        error = error_of(future)
        assert type(error) is ProtocolError
        assert "site `a` waits in round 0 of the gradients" in str(error)
        assert "site `c` waits in exact value 0 (`metrics`)" in str(error)
        assert "site `b`" not in str(error)
    assert time.monotonic() - began < 5.0


def test_first_weights_and_a_gather_that_wait_for_each_other_end_the_run(make_run) -> None:
    run = make_run()
    first = run.gather(0, 0)
    second = run.pool.submit(run.session.begin_sync, run.caller(1), ["<f4[1]"], 4)
    for future in (first, second):
        error = error_of(future)
        assert type(error) is ProtocolError
        assert "site `b` waits in the first weights" in str(error)


def test_a_round_that_waits_for_a_model_and_a_gather_end_the_run(make_run) -> None:
    run = make_run()
    run.session.agree_model(run.caller(0), [[3]])
    first, second = run.round(0), run.gather(1, 0)
    assert "site `a` waits in round 0 of the gradients" in str(error_of(first))
    assert type(error_of(second)) is ProtocolError


def test_waits_that_do_not_cross_are_left_alone(make_run) -> None:
    run = make_run(3)
    run.agree()
    # All in one thing, one after the other; a re-sent call over a newer connection besides.
    futures = [run.gather(child, 0) for child in (2, 0, 0)]
    assert run.session.ended is None
    futures.append(run.gather(1, 0))
    assert [future.result(DEADLINE_S) for future in futures] == 4 * [[b"0", b"1", b"2"]]
    # An old call of a lost connection waits for a round, while its child is in a gather already:
    # the newer call is what the child does.
    older = run.caller(0)
    old = run.round(1)
    for child in (1, 0):
        futures.append(run.gather(child, 1))
    assert run.session.ended is None
    # Nor may one come back to waiting that began before.
    store = run.session.begin_round(older, 0)
    stale = run.pool.submit(run.session.wait_results, older, store, 0, 0, lambda: False, 0)
    eventually(lambda: run.session._waiting._num_calls >= 4, DEADLINE_S)
    assert run.session._waiting._newest[0][1].what == "exact value 1 (`x`)"
    assert run.session.ended is None
    futures.append(run.gather(2, 1))
    assert futures[-1].result(DEADLINE_S) == [b"0", b"1", b"2"]
    # And what is there already keeps nobody, even before it has noticed.
    assert not old.done()
    assert not stale.done()


def test_a_call_that_is_ready_but_asleep_waits_for_nobody(make_run) -> None:
    run = make_run()
    future = run._begin(1, lambda: run.session.begin_sync(run.caller(1), ["<f4[1]"], 4))
    with run.session.changed:  # what child 1 waits for is there before its call wakes
        run.session.begin_sync(run.caller(0), ["<f4[1]"], 4)
        caller = run.caller(0, patience_s=0.1)
        begun = run.session.begin_gather(caller, 0)
        upload(begun, "x", b"0")
        with pytest.raises(PeerError, match="these have not sent their values of `x`: `b`"):
            run.session.wait_gather(caller, 0, begun)
    assert future.result(DEADLINE_S) == (0, True)
    assert run.session.ended is None


def test_a_party_that_has_left_is_not_waited_for(make_run) -> None:
    run = make_run()
    future = run.gather(0, 0, "loss")
    run.session.leave(run.caller(1), None)
    text = "Exact value 0 (`loss`) needs all parties; site `b` has left the run before it."
    assert str(error_of(future)) == text


def test_a_party_that_does_not_come_is_named(make_run) -> None:
    run = make_run()
    caller = run.caller(0, patience_s=0.2)
    begun = run.session.begin_gather(caller, 0)
    upload(begun, "loss", b"")
    with pytest.raises(PeerError, match="these have not sent their values of `loss`: `b`"):
        run.session.wait_gather(caller, 0, begun)
    # Its payload is there, and it may ask again.
    other = run.gather(1, 0, "loss")
    assert other.result(DEADLINE_S) == [b"1"]
    assert run.gather(0, 0, "loss", b"").result(DEADLINE_S) == [b"1"]


def test_who_goes_on_may_back_up_before_the_others_have_agreed_on_the_model(make_run) -> None:
    run = make_run()
    session = run.session
    session.agree_model(run.caller(0), [[3]], 4)
    with pytest.raises(ProtocolError, match=r"of round 5 at most. Received: round 6"):
        session.back_up(run.caller(0), session.token, 6, 1)
    session.back_up(run.caller(0), session.token, 4, 1)
    with pytest.raises(ProtocolError, match=r"of round 1 at most. Received: round 4"):
        session.back_up(run.caller(1), session.token, 4, 1)  # of no round that it has told
    session.agree_model(run.caller(1), [[3]], 4)
    session.back_up(run.caller(1), session.token, 4, 1)


def test_only_who_has_joined_may_gather_or_fail() -> None:
    session = Session(Terms(("a", "b"), None, None, 1 << 30))
    caller = Caller(0, "p", DEADLINE_S)
    with pytest.raises(ProtocolError, match="must join before"):
        session.begin_gather(caller, 0)
    with pytest.raises(ProtocolError, match="must join before"):
        session.fail(caller, "text")


def test_a_party_that_failed_and_does_not_come_ends_the_run(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FAILED_AFTER_S", 0.3)
    for place, begin in enumerate(("gather", "round")):
        run = make_run(3)
        run.agree()
        run.session.fail(run.caller(1), "earlier")
        run.session.agree_model(run.caller(1), [[3]])  # a call: it goes on
        future = getattr(run, begin)(0, 0)
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(0.6)
        began = time.monotonic()
        run.session.fail(run.caller(1), "ValueError: a bad batch")
        error = error_of(future)
        assert 0.25 < time.monotonic() - began < 5.0
        assert type(error) is PeerError
        what = ("exact value 0 (`x`)", "round 0 of the gradients")[place]
        assert str(error) == (
            f"The run has ended. Site `b` does not come to {what}: its last step ended with an "
            "error. ValueError: a bad batch"
        )
        assert next(iter(run.session.watch(run.caller(2))))[1] is PeerError


def test_who_says_again_and_again_that_it_failed_keeps_nobody_waiting(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FAILED_AFTER_S", 0.5)
    run = make_run()
    run.agree()
    future = run.gather(0, 0)
    began = time.monotonic()
    assert run.session.fail(run.caller(1), "the first") == (True, True)
    with pytest.raises(PeerError, match="The run has ended"):
        while time.monotonic() - began < 5.0:
            assert run.session.fail(run.caller(1), "one more") == (False, False)
    assert "its last step ended with an error. the first" in str(error_of(future))
    assert time.monotonic() - began < 5.0


def test_of_failures_in_one_round_some_are_written(make_run) -> None:
    run = make_run()
    run.agree()
    told = []
    for _ in range(10):
        told.append(run.session.fail(run.caller(1), "a bad batch"))
        run.session.goes_on(1)
    assert told == [(True, True)] * 8 + [(True, False)] * 2


def test_a_party_that_failed_and_goes_on_is_forgiven(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FAILED_AFTER_S", 0.5)
    run = make_run()
    run.session.fail(run.caller(1), "ValueError: a bad batch")
    text, failed = run.session._waiting._failures[1]
    run.session._waiting._failures[1] = text, failed - 60.0  # it counts once somebody waits
    first = run.gather(0, 0)
    assert not first.done()
    # That it still holds its connection open, or opens another, is no sign of going on.
    watching = run.pool.submit(list, run.session.watch(run.caller(1)))
    eventually(
        lambda: bool(run.session._presence._calls[1]), DEADLINE_S, changed=run.session.changed
    )
    assert run.session._waiting._failures
    assert run.gather(1, 0).result(DEADLINE_S) == first.result(DEADLINE_S) == [b"0", b"1"]
    assert not run.session._waiting._failures
    assert not watching.done()
