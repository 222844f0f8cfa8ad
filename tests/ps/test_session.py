# SPDX-License-Identifier: Apache-2.0
"""One run without sockets: who is in it, who comes twice, who is lost."""

import concurrent.futures
from collections.abc import Iterator

import pytest

from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.session import Caller, Session, Terms

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
        with self.session.changed:
            assert self.session.changed.wait_for(
                lambda: self.session.is_started or self._num_joining(child, process) > before,
                PATIENCE_S,
            )
        return caller, future

    def _num_joining(self, child: int, process: str) -> int:
        known = self.session._children.get(child)
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
    _, late = run.join(0, "old")
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
