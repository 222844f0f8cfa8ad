# SPDX-License-Identifier: Apache-2.0
"""Trees at their edges: names, servers that end while others join, and what a restart asks for."""

import contextlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ps.parties import DEADLINE_S, FEEDBACK, Party, serving
from tests.ps.test_restart import Later
from tests.ps.trees import SHAPES, Node, addresses_of, leaves_of, serving_tree
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import PeerError, ProtocolError, TfHipsError, is_final
from tf_hips.ps.client.client import Client
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.joining import Joining, described
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms import tree

pytestmark = pytest.mark.heavy  # servers start in most of these

MIXED = Node("", (Node("west", ("a", "b")), "c"), sends=FEEDBACK)


def until(server: Server, is_there: Any) -> None:
    """Waits for something of a server's session."""
    session = server._session
    eventually(lambda: is_there(session), DEADLINE_S, changed=session.changed)


def test_servers_of_one_name_in_different_parts_are_refused_with_both_paths(
    certificates: Certificates,
) -> None:
    with contextlib.ExitStack() as stack:

        def start(above: Server | None, site: str, *parties: str) -> Server:
            uplink = Uplink(above.address, site, None, DEADLINE_S) if above is not None else None
            return stack.enter_context(
                serving(certificates, parties=parties, insecure=True, uplink=uplink)
            )

        top = start(None, "", "north", "south")
        members = []
        for region, leaf in (("north", "a"), ("south", "b")):
            west = start(start(top, region, "west"), "west", leaf)
            members.append(Party(west.address, leaf, None, server_role="server"))
            stack.callback(members[-1].client.close)
        Later(members[0].join)
        until(top, lambda session: bool(session.state.members.children))
        with pytest.raises(TfHipsError, match="`west` twice, as north/west and as south/west"):
            members[1].join()


def test_names_of_paths() -> None:
    tree.check_names(["west/a", "west/b", "c", "north/east/d", "north/east/e"], "top")
    for paths, name, one, two in (
        (["west/a", "a"], "a", "west/a", "a"),
        (["west/a", "a/b"], "a", "west/a", "a"),
        (["north/west/a", "south/west/b"], "west", "north/west", "south/west"),
        (["west/a", "west/a"], "a", "west/a", "west/a"),
        (["top/a"], "top", "top, which is this server", "top"),
    ):
        with pytest.raises(ProtocolError, match=f"`{name}` twice, as {one} and as {two}$"):
            tree.check_names(paths, "top")
    assert tree.read_leaves([["west/a", 2], ["b", 1]], "x", 3) == (("west/a", 2), ("b", 1))
    for wrong in ("west//a", "/a", "a/", "west/a b", "x/" * 80 + "a"):
        with pytest.raises(ProtocolError, match="`leaves`"):
            tree.read_leaves([[wrong, 1]], "x", 1)


def test_guards_are_those_of_servers_above_leaves() -> None:
    assert tree.read_guards(None, is_leaf=True) == ()
    right = [["", "median", None], ["west", None, 2]]
    assert tree.read_guards(right, is_leaf=False) == (("", "median", None), ("west", None, 2))
    with pytest.raises(ProtocolError, match="of the server of a party"):
        tree.read_guards(right, is_leaf=True)
    for wrong in (
        1,
        ["west", None],
        [1, None, 2],
        ["west", 1, 2],
        ["west", None, 0],
        ["w st", None, 1],
        ["west", None, True],
        ["west//a", None, 1],
        ["x/" * 80 + "a", None, 1],
    ):
        with pytest.raises(ProtocolError, match="A guard must be the path of a server"):
            tree.read_guards([wrong], is_leaf=False)
    terms = Terms(("region",), None, None, 1 << 30)
    leaves = (("west/a", 1), ("b", 1))

    def describe(*guards: tree.Guard) -> None:
        described(terms, None, "p", 2, "fp32", "fp32", 7, leaves=leaves, guards=guards)

    describe(("", None, 1), ("west", "median", None))
    for guard, told in (
        (("east", "median", None), "must be of servers above leaves, once each. Received: 'east'"),
        (("west/a", "median", None), "above leaves"),
        (("west", "medium", None), "`guards` has an unknown rule"),
        (("west", "mean", None), "`guards` must have robust rules"),
    ):
        with pytest.raises(ProtocolError, match=told):
            describe(guard)
    with pytest.raises(ProtocolError, match="once each"):
        describe(("", None, 1), ("", None, 2))


def test_who_leaves_before_all_have_joined_is_not_waited_for() -> None:
    session = Session(Terms(("a", "b"), None, None, 1 << 30))
    first = Later(lambda: session.join(Caller(0, "p", DEADLINE_S), 1, "fp32", "fp32", 7))
    members = session.state.members
    eventually(lambda: 0 in members.children, DEADLINE_S, changed=session.changed)
    with pytest.raises(ProtocolError, match="has not joined this run"):
        session.leave(Caller(0, "another", 1.0), None)
    session.leave(Caller(0, "p", 1.0), "it was stopped")
    with pytest.raises(ProtocolError, match="left the run before it began: it was stopped"):
        first.result()
    assert (members.children, session.ended) == ({}, None)
    again = [
        Later(lambda c=c: session.join(Caller(c, "q", DEADLINE_S), 1, "fp32", "fp32", 7))
        for c in range(2)
    ]
    assert [one.result()["child"] for one in again] == [0, 1]
    session.end("The test is over.")


def test_a_party_server_that_ends_while_it_joins_is_not_lost_above(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server above has taken it in, and its answer is on the way, when it is stopped."""
    held, released = threading.Event(), threading.Event()
    join = Joining.join

    def slow(self: Joining, caller: Caller, *values: Any, **named: Any) -> Any:
        answer = join(self, caller, *values, **named)
        if "west" in self._members.terms.parties and caller.child == 0:
            held.set()
            assert released.wait(DEADLINE_S)
        return answer

    monkeypatch.setattr(Joining, "join", slow)
    try:
        with (
            serving_tree(certificates, MIXED, lost_after_s=600.0) as servers,
            leaves_of(certificates, MIXED, addresses_of(servers), joins=False) as (a, b, c),
        ):
            for one in (a, b):
                Later(one.join)  # until they are closed: a server may come back
            c.join()
            assert held.wait(DEADLINE_S)
            servers["west"].stop(0.0)
            until(servers[""], lambda session: session.ended is not None)
            assert servers[""]._session.ended == (
                "Site `west` left the run: The server was stopped."
            )
    finally:
        released.set()


def test_a_join_while_a_server_stops_is_refused_in_words(certificates: Certificates) -> None:
    """Whether a run is on or is over: no new one begins, and the caller hears why."""
    for is_over in (False, True):
        with serving(certificates, parties=("a",), insecure=True) as server:
            member = Party(server.address, "a", None)
            member.join()
            if is_over:
                member.client.leave()
                until(server, lambda session: session.is_over)
            before = server._session
            server._stopped.set()  # the first that `stop` does
            if not is_over:
                with server._session.changed:
                    server._session.end("The server was stopped.")
            late = Party(server.address, "a", None)
            began = time.monotonic()
            with pytest.raises(PeerError, match=r"The run has ended\. The server was stopped\."):
                late.join()
            assert time.monotonic() - began < DEADLINE_S
            assert server._session is before
            member.client.close()


def test_a_server_that_stops_before_the_run_has_begun_may_be_started_again(
    certificates: Certificates,
) -> None:
    with serving(certificates, parties=("a", "b"), insecure=True) as server:
        first = Party(server.address, "a", None)
        joining = Later(first.join)
        until(server, lambda session: session._waiting._num_calls > 0)
        server.stop()
        with pytest.raises(PeerError, match=r"Join: The server was stopped\.$") as caught:
            joining.result()
        first.client.close()
    assert not is_final(caught.value)


def test_a_restarted_party_server_waits_as_the_one_above_it_says(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Its children are in the run already and do not ask it, so it asks by itself."""
    with serving(
        certificates, parties=("west",), insecure=True, round_timeout_s=77.0, join_timeout_s=66.0
    ) as top:
        settings = {
            **{"parties": ("a",), "insecure": True, "round_timeout_s": 5.0},
            "join_timeout_s": 5.0,
        }
        uplink = Uplink(top.address, "west", None, DEADLINE_S)
        with serving(
            certificates, **settings, uplink=uplink, state_dir=str(tmp_path / "one")
        ) as west:
            member = Party(west.address, "a", None, server_role="server")
            member.join()
            until(west, lambda session: session.store is not None)
            west._session.settle()
            shutil.copytree(tmp_path / "one", tmp_path / "two")  # as after a kill
            member.client.close()
            upper = west._upper
            assert upper is not None
            assert upper._client is not None
            upper._client.close()
            with serving(
                certificates, **settings, uplink=uplink, state_dir=str(tmp_path / "two")
            ) as again:
                eventually(lambda: again._waits.here.round_timeout_s != 5.0, DEADLINE_S)
                assert (again._waits.here.round_timeout_s, again._waits.here.join_timeout_s) == (
                    87.0,
                    76.0,
                )
                assert again._waits.told.round_timeout_s == 2 * 87.0


def test_a_restarted_party_server_joins_above_as_it_was(
    certificates: Certificates, tmp_path: Path
) -> None:
    """What came down, which the rule above has decided, is what it asks for once more."""
    text = "error_feedback(hips2bit(threshold=0.01))"
    with serving(certificates, parties=("west",), insecure=True, rule="asgd(0.001)") as top:
        settings = {"parties": ("a",), "insecure": True}
        uplink = Uplink(top.address, "west", None, DEADLINE_S)
        with serving(
            certificates, **settings, uplink=uplink, state_dir=str(tmp_path / "one")
        ) as west:
            member = Party(west.address, "a", None, server_role="server", compression=text)
            member.client.join(text, "same", 7)
            member.client.agree_model([(4,)])
            until(west, lambda session: session.store is not None)
            west._session.settle()
            shutil.copytree(tmp_path / "one", tmp_path / "two")  # as after a kill
            member.client.close()
            upper = west._upper
            assert upper is not None
            assert upper._client is not None
            upper._client.close()
            with serving(
                certificates, **settings, uplink=uplink, state_dir=str(tmp_path / "two")
            ) as again:
                eventually(
                    lambda: (
                        again._session.ended
                        or (again._upper and again._upper._client and again._upper._client._welcome)
                    ),
                    DEADLINE_S,
                )
                assert again._session.ended is None
                child = top._session.state.members.children[0]
                assert (child.downlink, child.num_returns) == ("fp32", 1)


@pytest.mark.parametrize("has_called", [False, True], ids=["before its call", "after its call"])
def test_a_run_that_is_over_while_its_server_comes_back_is_over_above(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_called: bool
) -> None:
    """Its last child leaves while the restarted server is about to join above once more."""
    with serving(certificates, parties=("west",), insecure=True) as top:
        settings = {"parties": ("a",), "insecure": True}
        uplink = Uplink(top.address, "west", None, DEADLINE_S)
        with serving(
            certificates, **settings, uplink=uplink, state_dir=str(tmp_path / "one")
        ) as west:
            member = Party(west.address, "a", None, server_role="server")
            member.join()
            until(west, lambda session: session.store is not None)
            west._session.settle()
            shutil.copytree(tmp_path / "one", tmp_path / "two")  # as after a kill
            member.client.close()
            assert west._upper is not None
            assert west._upper._client is not None
            west._upper._client.close()
            joining, released = threading.Event(), threading.Event()
            join, is_first = Client.join, [True]

            def slow(self: Client, *terms: Any, **options: Any) -> Any:
                if not is_first or self._uplink.site != "west":
                    return join(self, *terms, **options)
                is_first.clear()
                answer = join(self, *terms, **options) if has_called else None
                joining.set()
                assert released.wait(DEADLINE_S)
                return answer if has_called else join(self, *terms, **options)

            monkeypatch.setattr(Client, "join", slow)
            with serving(
                certificates, **settings, uplink=uplink, state_dir=str(tmp_path / "two")
            ) as again:
                assert joining.wait(DEADLINE_S)
                process = member.client._process
                caller = Caller(0, process, DEADLINE_S)
                again._session.leave(caller, None)
                assert not top._session.is_over
                released.set()
                until(top, lambda session: session.is_over)
                until(again, lambda session: not session.owes_leave)


def test_a_run_after_another_joins_above_when_the_first_has_left(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A party's leaves come again while its server is still leaving."""
    leaving, released = threading.Event(), threading.Event()
    leave = Session.leave

    def slow(self: Session, caller: Caller, reason: str | None) -> None:
        if "west" in self.state.members.terms.parties:
            leaving.set()
            assert released.wait(DEADLINE_S)
        leave(self, caller, reason)

    monkeypatch.setattr(Session, "leave", slow)
    node = Node("", (Node("west", ("a",)),), sends=FEEDBACK)
    try:
        with serving_tree(certificates, node) as servers:
            with leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as (a,):
                a.client.leave()
            assert leaving.wait(DEADLINE_S)
            with leaves_of(certificates, node, addresses_of(servers), joins=False) as (a,):
                again = Later(a.join)
                until(servers["west"], lambda session: bool(session.state.members.children))
                released.set()
                again.result()
                a.client.leave()
    finally:
        released.set()
