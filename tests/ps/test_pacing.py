# SPDX-License-Identifier: Apache-2.0
"""ESync's state service under a real server: assignments, stops, and what is refused."""

import contextlib
import math
import threading
import types
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import ProtocolError
from tf_hips.esync.pacer import Report
from tf_hips.esync.rule import Pace
from tf_hips.ps.calls import pacing, service
from tf_hips.ps.calls.pacing import PaceClient
from tf_hips.ps.client.client import Client
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.settings import ServerConfig

SITES = ("slow", "fast", "third", "fourth")
PACE = Pace(slowest_steps=2, most_slowest_steps=2, margin=0.0, link_share=1.0)
PATIENCE_S = 20.0
PACES: dict[int, pacing.PaceServer] = {}  # of the servers of the tests, by port


class Clock:
    """Seconds of the server, set by the test; its children come long before the first round."""

    def __init__(self) -> None:
        self.now = -1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def running(
    clock: Clock,
    pace: Pace = PACE,
    count: int = 2,
    connections: list[Client] | None = None,
    rule: str | None = None,
) -> Iterator[tuple[Server, list[PaceClient]]]:
    """A server with children that have joined."""
    with contextlib.ExitStack() as stack:
        server = Server(ServerConfig(parties=SITES[:count], insecure=True, rule=rule))
        pacer = pacing.PaceServer(count, clock)
        stack.enter_context(mock.patch.object(service, "PaceServer", lambda _: pacer))
        server.start()
        stack.callback(server.stop, 0.0)
        PACES[server.port] = pacer
        clients = []
        for site in SITES[:count]:
            client = Client(Uplink(server.address, site, deadline_s=PATIENCE_S), "local", 1)
            stack.callback(client.close)
            clients.append(client)
        joins = [
            threading.Thread(target=client.join, args=("onebit", "same", 0)) for client in clients
        ]
        for join in joins:
            join.start()
        for join in joins:
            join.join(PATIENCE_S)
        clock.now = 0.0
        if connections is not None:
            connections.extend(clients)
        yield server, [PaceClient(client, pace) for client in clients]


def heard(server: Server, client: PaceClient, number: int, report: Report) -> None:
    """Sends a report, and returns when the server has taken it."""
    session = server._session
    with session.changed:
        client.report(number, report)
        child = SITES.index(client._link._uplink.site)
        eventually(
            lambda: _has(server, child, number),
            PATIENCE_S,
            "the report has not come",
            changed=session.changed,
        )


def _has(server: Server, child: int, number: int) -> bool:
    run = PACES[server.port]._run
    return run is not None and run.latest.get(child) == number


def is_stopped(client: PaceClient) -> bool:
    """Whether a stop comes before the call ends."""
    call = client._call
    assert call is not None
    for thread in threading.enumerate():
        if thread.name == "tf_hips-pace" and getattr(thread, "_target", None) == call._hear:
            thread.join(PATIENCE_S)
    return client.is_stopped()


def in_round(server: Server, number: int) -> None:
    """The server has come to a round; its rounds themselves are of no interest here."""
    rounds = types.SimpleNamespace(round=number)
    store = types.SimpleNamespace(of=lambda child: rounds)
    server._session._state.store = store  # type: ignore[assignment]


def test_children_hear_their_steps_when_all_have_arrived() -> None:
    clock = Clock()
    with running(clock) as (server, (slow, fast)):
        clock.now = 3.0
        heard(server, fast, 0, Report(4, 0.25, 1.0))
        assert fast.assignment(0.05) is None  # the other one has not arrived
        clock.now = 10.0
        heard(server, slow, 0, Report(4, 1.0, 4.0))
        found = [one.assignment(PATIENCE_S) for one in (slow, fast)]
        assert [one and one.steps for one in found] == [2, 8]
        assert [one and one.local_s for one in found] == [2.0, 2.0]
        # The next rounds begin at 10 s and 12.5 s: half a second of each is the slow one's way.
        for number, began in enumerate((10.0, 12.5), 1):
            clock.now = began + 2.0
            heard(server, fast, number, Report(8, 0.25, 2.0))
            clock.now = began + 2.5
            heard(server, slow, number, Report(2, 1.0, 2.0))
            found = [one.assignment(PATIENCE_S) for one in (slow, fast)]
            # The first way holds what is made once, and does not count.
            is_known = number == 2
            assert [one and one.steps for one in found] == [2, 10 if is_known else 8]
            assert [one and one.round_s for one in found] == [2.5 if is_known else 2.0] * 2
            assert [one and one.local_s for one in found] == [2.0, 2.5 if is_known else 2.0]


def test_the_last_one_is_told_to_stop() -> None:
    clock = Clock()
    with running(clock, Pace(deadline=0.0)) as (server, (slow, fast)):
        for client in (slow, fast):
            heard(server, client, 0, Report(4, 1.0, 4.0))
        assert slow.assignment(PATIENCE_S) is not None
        assert fast.assignment(PATIENCE_S) is not None
        assert not slow.is_stopped()
        clock.now = 4.0
        heard(server, fast, 1, Report(4, 1.0, 4.0))
        assert is_stopped(slow)
        assert not fast.is_stopped()


def test_whoever_is_late_is_told_to_stop() -> None:
    clock = Clock()
    pace = Pace(slowest_steps=1, most_slowest_steps=1, deadline=1.0)
    with running(clock, pace, 4) as (server, clients):
        for client in clients:
            heard(server, client, 0, Report(4, 1.0, 4.0))
        for client in clients:
            assert client.assignment(PATIENCE_S) is not None
        for client in clients[:2]:
            heard(server, client, 1, Report(1, 0.5, 0.5))
        assert not any(client.is_stopped() for client in clients)
        clock.now = 1.5
        with server._session.changed:
            server._session.changed.notify_all()
        assert [is_stopped(client) for client in clients[2:]] == [True, True]


def test_reports_that_are_refused() -> None:
    clock = Clock()
    connections: list[Client] = []
    with running(clock, connections=connections) as (server, (slow, fast)):
        heard(server, fast, 0, Report(4, 0.25, 1.0))
        other = PaceClient(connections[0], Pace())
        other.report(0, Report(4, 1.0, 4.0))
        with pytest.raises(ProtocolError, match="All children must keep one pace"):
            other.assignment(PATIENCE_S)
        heard(server, slow, 0, Report(4, 0.5, 2.0))
        for wrong in ({"steps": -1}, {"step_s": 1e999}, {"number": -1}, {"pace": "margn=1"}):
            fields = {"number": 0, "pace": PACE.text, "steps": 1, "step_s": 1.0, "busy_s": 1.0}
            with pytest.raises(ProtocolError):
                pacing._read(str(fields | wrong).replace("'", '"').encode())


def test_who_has_missed_a_round_is_not_waited_for() -> None:
    clock = Clock()
    with running(clock) as (server, (slow, fast)):
        for client in (slow, fast):
            heard(server, client, 0, Report(4, 1.0, 4.0))
        in_round(server, 2)  # which have closed without it
        heard(server, fast, 1, Report(4, 1.0, 4.0))
        assert fast.assignment(0.05) is None  # it may still come
        heard(server, fast, 2, Report(4, 1.0, 4.0))
        assert fast.assignment(PATIENCE_S) is not None


def test_one_that_is_behind_may_call_first_after_a_restart() -> None:
    clock = Clock()
    with running(clock, count=3) as (server, (slow, fast, third)):
        in_round(server, 10)
        heard(server, slow, 5, Report(4, 1.0, 4.0))  # what was known before is gone
        clock.now = 1.0
        heard(server, fast, 10, Report(4, 1.0, 4.0))
        heard(server, third, 10, Report(4, 0.5, 4.0))
        for client in (fast, third):
            assert client.assignment(PATIENCE_S) is not None


def test_a_first_call_from_a_far_round_leaves_those_of_the_others_alone() -> None:
    with running(Clock()) as (server, (slow, fast)):
        in_round(server, 3)
        slow.report(1 << 31, Report(4, 1.0, 4.0))
        assert slow.assignment(PATIENCE_S) is None
        assert slow.is_answered(0.0)
        for client in (slow, fast):
            heard(server, client, 4, Report(4, 1.0, 4.0))
        assert fast.assignment(PATIENCE_S) is not None


def test_rounds_that_one_runs_ahead_to_leave_those_of_the_others_alone() -> None:
    with running(Clock()) as (server, (slow, fast)):
        in_round(server, 3)
        for client in (slow, fast):
            heard(server, client, 3, Report(4, 1.0, 4.0))
        heard(server, slow, 4, Report(4, 1.0, 4.0))
        for number in range(5, 9):
            slow.report(number, Report(4, 1.0, 4.0))
            assert slow.is_answered(PATIENCE_S)
            assert slow.assignment(0.0) is None
        heard(server, fast, 4, Report(4, 1.0, 4.0))
        assert fast.assignment(PATIENCE_S) is not None


def test_what_most_say_is_a_round_that_has_come() -> None:
    """Loops count meetings in which nothing is exchanged, and a new server knows of none."""
    clock = Clock()
    with running(clock, count=3) as (server, (slow, fast, third)):
        in_round(server, 3)
        slow.report(7, Report(4, 1.0, 4.0))
        assert slow.is_answered(PATIENCE_S)
        for number in (7, 8):
            clock.now += 5.0
            heard(server, fast, number, Report(4, 1.0, 4.0))
            heard(server, third, number, Report(4, 1.0, 4.0))
            if number == 8:
                heard(server, slow, number, Report(4, 1.0, 4.0))
                assert slow.assignment(PATIENCE_S) is not None
            # The slow one did not count in the first of these rounds, and is waited for.
            found = fast.assignment(PATIENCE_S if number == 8 else 0.0)
            assert (found is None) == (number == 7)


def test_a_server_that_does_not_know_when_a_round_began_learns_nothing_of_it() -> None:
    clock = Clock()
    with running(clock) as (server, (slow, fast)):
        in_round(server, 5)
        PACES[server.port]._began = "", math.inf  # as after its restart
        for now, number in ((1.0, 5), (9.0, 6)):
            clock.now = now
            for client, report in ((slow, Report(4, 2.0, 8.0)), (fast, Report(4, 0.5, 2.0))):
                heard(server, client, number, report)
            found = [one.assignment(PATIENCE_S) for one in (slow, fast)]
            assert [one is None for one in found] == [number == 5] * 2
        assert [one and one.steps for one in found] == [2, 8]


def test_smoothing_is_that_of_the_children() -> None:
    with running(Clock(), Pace(smoothing=1.0)) as (server, (slow, _)):
        heard(server, slow, 0, Report(4, 1.0, 4.0))
        run = PACES[server.port]._run
        assert run is not None
        assert {one.smoothing for one in run.pacer._averages} == {1.0}


def test_the_pace_of_the_first_one_holds() -> None:
    with running(Clock()) as (server, (slow, fast)):
        heard(server, slow, 0, Report(4, 1.0, 4.0))
        slow._pace = Pace(slowest_steps=5)  # its script has been edited
        slow.report(1, Report(4, 1.0, 4.0))
        with pytest.raises(ProtocolError, match="one pace"):
            slow.assignment(PATIENCE_S)
        heard(server, fast, 0, Report(4, 1.0, 4.0))
        assert fast.assignment(PATIENCE_S) is not None


def test_all_may_come_back_with_another_pace() -> None:
    with running(Clock()) as (server, clients):
        for client in clients:
            heard(server, client, 0, Report(4, 1.0, 4.0))
        session = server._session
        with session.changed:
            for child in session.state.members.children.values():
                child.process += "-again"
        other = Pace(slowest_steps=5)
        for client in clients:
            client._pace = other
            client._link._process += "-again"
            heard(server, client, 1, Report(4, 1.0, 4.0))
        run = PACES[server.port]._run
        assert run is not None
        assert run.pacer.pace == other


def test_no_step_is_longer_than_the_children_have_been_there() -> None:
    clock = Clock()
    with running(clock) as (server, (slow, fast)):
        # They have joined at -1000 s.
        heard(server, slow, 0, Report(2, 1e308, 1e308))
        heard(server, fast, 0, Report(4, 0.5, 4.0))
        found = fast.assignment(PATIENCE_S)
        assert found is not None
        assert found.round_s <= 2 * 500.0
        assert found.steps <= 2 * 500.0 / 0.5


def test_below_a_robust_rule_the_pace_is_that_of_most() -> None:
    odd = Pace(slowest_steps=5)
    with running(Clock(), count=3, rule="median") as (server, (slow, fast, third)):
        slow._pace = odd
        for client in (slow, fast, third):  # the odd one is the first to call
            heard(server, client, 0, Report(4, 1.0, 4.0))
        for client in (fast, third):
            found = client.assignment(PATIENCE_S)
            assert found is not None
            assert found.steps == PACE.slowest_steps
        with pytest.raises(ProtocolError, match="one pace"):
            slow.assignment(PATIENCE_S)


def test_who_is_lost_is_not_waited_for_and_a_call_ends_with_the_next_one() -> None:
    clock = Clock()
    with running(clock, count=3) as (server, (slow, fast, third)):
        for client in (slow, fast, third):
            heard(server, client, 0, Report(4, 1.0, 4.0))
        heard(server, fast, 1, Report(4, 1.0, 4.0))
        before = fast._call
        assert before is not None
        assert fast.assignment(0.05) is None  # slow and third may still come
        heard(server, third, 1, Report(4, 1.0, 4.0))
        heard(server, third, 2, Report(4, 1.0, 4.0))
        heard(server, fast, 2, Report(4, 1.0, 4.0))
        assert before.is_heard.wait(PATIENCE_S)  # though slow has not come to it
        assert fast.assignment(PATIENCE_S) is not None
        heard(server, slow, 2, Report(4, 1.0, 4.0))
        heard(server, third, 3, Report(4, 1.0, 4.0))
        with server._session.changed:
            server._session.state.members.children[0].is_lost = True
        heard(server, fast, 3, Report(4, 1.0, 4.0))
        assert fast.assignment(PATIENCE_S) is not None


def test_in_a_tree_no_server_gives_advice() -> None:
    clock = Clock()
    with running(clock) as (server, (slow, _)):
        with server._session.changed:
            child = server._session.state.members.children[1]
            child.leaves = (("leaf", 1), ("other", 1))
        slow.report(0, Report(4, 1.0, 4.0))  # at once, though the other one never calls
        assert slow.assignment(PATIENCE_S) is None
        call = slow._call
        assert call is not None
        assert call.is_heard.is_set()
        assert call.error is None


def test_a_server_that_is_gone_gives_no_advice() -> None:
    clock = Clock()
    with running(clock) as (server, (slow, _)):
        server.stop(0.0)
        slow.report(0, Report(4, 1.0, 4.0))
        assert slow.assignment(PATIENCE_S) is None
        assert not slow.is_stopped()
        slow.close()
