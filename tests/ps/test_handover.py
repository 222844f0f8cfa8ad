# SPDX-License-Identifier: Apache-2.0
"""Backups that go from one party to another that has lost its own."""

import contextlib
import dataclasses
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.ps.parties import DEADLINE_S, SITES, Party, parties, serving, together, train_all
from tests.ps.relay import Relay
from tests.ps.test_comeback import killed, wait_gone
from tests.ps.trees import Node, addresses_of, leaves_of, serving_tree
from tests.support.certs import Certificates
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.handover import _ANSWER_S, Handover, _Wish
from tf_hips.ps.session.members import Caller, Members, Terms
from tf_hips.ps.terms.tree import Place
from tf_hips.ps.transport import parcel, wire
from tf_hips.ps.transport.news import Request
from tf_hips.ps.transport.parcel import Intake

pytestmark = pytest.mark.heavy  # servers start in most of these

NUM_BYTES = (5 << 20) + 17


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    folder = tmp_path / "00000002-epoch-0-step-4"
    folder.mkdir()
    (folder / "shared.data").write_bytes(np.random.default_rng(0).bytes(NUM_BYTES))
    (folder / "meta.json").write_text("{}")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def offer(party: Party, folder: Path, number: int) -> None:
    """What a party does that has made a backup before round `number`."""
    party.client.offer(lambda request: parcel.send(folder, request.held))
    party.client.backed_up(number, 0)


def joined_again(server: Server, certificates: Certificates, site: str, address: str) -> Party:
    """Another process of a site, which has joined and not agreed on the model."""
    wait_gone(server, SITES.index(site))
    party = Party(address, site, certificates.party(site))
    party.client.join(party.said, party.downlink, 7)
    return party


@contextlib.contextmanager
def lost_b(
    certificates: Certificates, relay: bool = False, rule: str | None = None
) -> Iterator[tuple[Server, Party, Party, Relay | None]]:
    """Two parties have done rounds 0 to 5 when b is killed, and is there again without anything."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(certificates, rule=rule))
        a, b = stack.enter_context(parties(server, certificates))
        train_all((a, b), 0, 5)
        b.client.backed_up(2, 0)  # what is older is kept no more
        a.client.backed_up(2, 0)
        killed(b)
        through = stack.enter_context(Relay(server.port)) if relay else None
        address = through.address if through is not None else server.address
        back = joined_again(server, certificates, "b", address)
        stack.callback(back.client.close)
        yield server, a, back, through


def test_a_party_takes_anothers_backup_and_goes_on(
    certificates: Certificates, backup: Path, tmp_path: Path
) -> None:
    with lost_b(certificates) as (server, a, back, _):
        welcome = back.client._welcome
        assert (welcome.is_back, welcome.oldest, welcome.keeps_all) == (True, 2, False)
        offer(a, backup, 4)
        intake = Intake(tmp_path / "taken")
        # Others may be in the middle of a round, and wait there for the one that fetches.
        ahead = threading.Thread(target=a.train, args=(6, 6), daemon=True)
        ahead.start()
        back.client.fetch_backup(intake)
        assert intake.name == backup.name
        assert content(tmp_path / "taken") == content(backup)
        back.child = 1
        back.client.agree_model(back.shapes, 4)
        back.client.backed_up(4, 0)
        assert len(back.train(4, 6)) == 3
        ahead.join(DEADLINE_S)
        assert not ahead.is_alive()
        train_all((a, back), 7, 8)
        # Both have told the same round, so what is older is forgotten.
        assert server._session.store.oldest == 4


def test_a_party_whose_gathers_are_forgotten_cannot_begin_anew(certificates: Certificates) -> None:
    """A loop has few rounds: the two newest ones, which are always kept, may be all."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(certificates))
        a, b = stack.enter_context(parties(server, certificates))
        train_all((a, b), 0, 0)
        for number in range(4):
            together(*(lambda one=one, n=number: one.client.gather(n, "x", b"") for one in (a, b)))
        together(*(lambda one=one: one.client.backed_up(1, 3) for one in (a, b)))
        killed(b)
        back = joined_again(server, certificates, "b", server.address)
        stack.callback(back.client.close)
        assert (back.client._welcome.oldest, back.client._welcome.keeps_all) == (0, False)


ROBUST = "median(f=0)"


def test_below_a_robust_rule_only_the_first_party_gives(
    certificates: Certificates, backup: Path, tmp_path: Path
) -> None:
    with lost_b(certificates, rule=ROBUST) as (server, a, back, _):
        offer(a, backup, 4)
        back.client.fetch_backup(Intake(tmp_path / "taken"))
        assert content(tmp_path / "taken") == content(backup)
        # The first party itself takes nobody's, whatever that one says it has.
        handover, members = server._session.handover, server._session.state.members
        members.children[1].backup = (6, 0)
        asked = handover._candidates(Caller(0, members.children[0].process, 1.0), 2)
        assert asked == []
        intake = Intake(tmp_path / "none")
        with pytest.raises(PeerError, match=r"median\(f=0\) only the first party, `a`, may give"):
            next(handover.fetch(Caller(0, members.children[0].process, 1.0), intake.held, 2))
        # Where all are believed it takes that one's.
        members.terms = dataclasses.replace(members.terms, rule="sum")
        for child in members.children.values():
            child.rule = "sum"
        assert handover._candidates(None, 2) == [1, 0]


@pytest.mark.parametrize(
    ("robust", "rule", "first", "expected"),
    [
        (None, "mean", 2, [0, 1]),
        (None, ROBUST, 2, [0, 1]),  # of whole parties: this one believes itself
        (None, "sketched(k=64) >> krum(f=1)", 2, []),
        (None, "sketched(k=64) >> krum(f=1)", 0, [0]),
        (ROBUST, "mean", 2, []),
        (ROBUST, "mean", 0, [0]),
    ],
)
def test_who_may_give_below_the_server_of_a_party(
    robust: str | None, rule: str, first: int, expected: list[int]
) -> None:
    members = Members(Terms(SITES, None, None, 1 << 20, site="west", robust=robust))
    members.place = Place(first, (("x", 1),), "fp32", "fp32", rule, "s", 0, 1)
    for child, site in enumerate(SITES):
        members.children[child] = types.SimpleNamespace(  # type: ignore[assignment]
            rule=rule, has_left=False, backup=(3, 0), workers=1, leaves=((site, 1),)
        )
    presence: Any = types.SimpleNamespace(is_there=lambda child: True)
    handover = Handover(threading.Condition(), members, presence, lambda: False, lambda *_: None)
    assert sorted(handover._candidates(None, 1)) == expected


@pytest.mark.parametrize("num_bytes", [200_000, 3_000_000])
def test_what_was_fetched_before_a_cut_is_not_fetched_again(
    certificates: Certificates, backup: Path, tmp_path: Path, num_bytes: int
) -> None:
    with lost_b(certificates, relay=True) as (_, a, back, relay):
        assert relay is not None
        offer(a, backup, 4)
        before = relay.moved["down"]
        relay.cut_after("down", num_bytes)
        back.client.fetch_backup(Intake(tmp_path / "taken"))
        assert relay.num_cuts == 1
        assert content(tmp_path / "taken") == content(backup)
        # A message that was cut comes once more, and so does what was on its way.
        assert relay.moved["down"] - before < NUM_BYTES + (3 << 20)


def test_nobody_has_a_backup(certificates: Certificates, tmp_path: Path) -> None:
    with lost_b(certificates) as (_, a, back, _):
        intake = Intake(tmp_path / "taken")
        with pytest.raises(PeerError, match="`a`: it makes no backups now"):
            back.client.fetch_backup(intake)
        a.client.offer(lambda request: parcel.send(tmp_path / "gone", request.held))
        with pytest.raises(PeerError, match=r"`a`: .*No such file"):
            back.client.fetch_backup(intake)
        back.client._workers = 5
        with pytest.raises(PeerError, match="no other site of this size is there"):
            back.client.fetch_backup(intake)
        assert not (tmp_path / "taken").exists()


def test_a_backup_that_is_deleted_just_then_gives_way_to_a_newer_one(
    certificates: Certificates, backup: Path, tmp_path: Path
) -> None:
    with lost_b(certificates) as (_, a, back, _):
        folders = iter([tmp_path / "deleted", backup])
        offer(a, backup, 4)
        a.client.offer(lambda request: parcel.send(next(folders), request.held))
        back.client.fetch_backup(Intake(tmp_path / "taken"))
        assert content(tmp_path / "taken") == content(backup)


def test_one_that_gives_and_is_killed_ends_the_fetching_in_words(
    certificates: Certificates, backup: Path, tmp_path: Path
) -> None:
    with lost_b(certificates) as (_, a, back, _):
        offer(a, backup, 4)

        def send_and_die(request: Request) -> Iterator[bytes]:
            messages = parcel.send(backup, request.held)
            yield next(messages)
            yield next(messages)
            killed(a)
            yield next(messages)

        a.client.offer(send_and_die)
        with pytest.raises(PeerError, match="No other site has given a backup"):
            back.client.fetch_backup(Intake(tmp_path / "taken"))


def test_one_that_goes_before_it_sends_is_not_waited_for(
    certificates: Certificates, backup: Path, tmp_path: Path
) -> None:
    with lost_b(certificates) as (_, a, back, _):
        offer(a, backup, 4)
        a.client.link.on_request = lambda _: killed(a)  # as it is asked
        with pytest.raises(PeerError, match="No other site has given a backup"):
            back.client.fetch_backup(Intake(tmp_path / "taken"))


def test_a_party_server_of_one_child_is_asked_whatever_it_has_said(
    certificates: Certificates, backup: Path, tmp_path: Path
) -> None:
    tree = Node("", (Node("west", ("a",)), Node("east", ("c",))))
    with (
        serving_tree(certificates, tree) as servers,
        leaves_of(certificates, tree, addresses_of(servers)) as members,
    ):
        train_all(members, 0, 1)
        offer(members[0], backup, 1)
        handover = servers[""]._session.handover
        assert servers[""]._session.state.members.children[0].backup is None
        messages = handover.fetch(None, Intake(tmp_path / "taken").held, members[0].client._workers)
        assert next(messages)
        messages.close()


def test_only_what_was_asked_for_is_taken(certificates: Certificates, backup: Path) -> None:
    with lost_b(certificates) as (_, a, _, _):
        offer(a, backup, 4)
        with pytest.raises(grpc.RpcError, match="must be asked for before it is sent"):
            message = wire.to_json(ticket="another's", error=None)
            a.client.link.stub("stream_unary", "GiveBackup", 1.0)(
                iter([message]), metadata=a.client.link.metadata()
            )


@pytest.mark.parametrize(
    "wrong",
    [{"parcel": "A" * 1_048_000}, {"parcel": "\x1b"}, {"bytes": -1}, {"workers": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_wish_is_refused_to_who_has_it_and_nobody_hears_of_it(
    certificates: Certificates, backup: Path, wrong: dict[str, Any]
) -> None:
    with lost_b(certificates) as (_, a, back, _):
        offer(a, backup, 4)
        wish = {"parcel": "", "bytes": 0, "workers": a.client._workers} | wrong
        call = back.client.link.stub("unary_stream", "WantBackup", 10.0)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(wire.to_json(**wish), metadata=back.client.link.metadata()))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert a.client.link.ended is None


def test_who_asks_and_hangs_up_has_one_backup_read_at_a_time(
    certificates: Certificates, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lost_b(certificates) as (server, a, back, _):
        reads, goes_on = threading.Semaphore(0), threading.Event()
        reading: list[Request] = []

        def read_for_long(request: Request) -> Iterator[bytes]:
            reading.append(request)
            reads.release()
            assert goes_on.wait(DEADLINE_S)
            yield from parcel.send(backup, request.held)

        a.client.offer(read_for_long)
        a.client.backed_up(4, 0)
        handover = server._session.handover
        begun, ended = threading.Semaphore(0), threading.Semaphore(0)

        def ask(*arguments: Any) -> Any:
            begun.release()
            try:
                return Handover._ask(handover, *arguments)
            finally:
                ended.release()

        monkeypatch.setattr(handover, "_ask", ask)
        wish = wire.to_json(parcel="", bytes=0, workers=a.client._workers)
        want = back.client.link.stub("unary_stream", "WantBackup", DEADLINE_S)

        def wanted() -> grpc.Call:
            call = want(wish, metadata=back.client.link.metadata())
            assert begun.acquire(timeout=DEADLINE_S)
            return call

        first = wanted()
        assert reads.acquire(timeout=DEADLINE_S)
        assert ended.acquire(timeout=DEADLINE_S)
        first.cancel()
        for _ in range(3):  # one after the other, each of which would be read beside the first
            wanted().cancel()
            assert ended.acquire(timeout=DEADLINE_S)
        at_once = [wanted() for _ in range(4)]
        with server._session.changed:
            assert not handover._asked[0]
            assert len(handover._unanswered) == len(reading) == 1
        goes_on.set()

        def take_head(call: Any) -> None:
            assert parcel.Header.from_message(next(iter(call))).name == backup.name
            call.cancel()

        together(*(lambda call=call: take_head(call) for call in at_once))
        for thread in threading.enumerate():
            if thread.name == "tf_hips-backup":
                thread.join(DEADLINE_S)
        # Who was asked and came too late is not to blame for it.
        assert not server._admission._refusals._peers


def test_who_never_answers_is_asked_again(certificates: Certificates, backup: Path) -> None:
    """Its answer may have been lost, and it may have been started again."""
    with lost_b(certificates) as (server, a, _, _):
        offer(a, backup, 4)
        handover = server._session.handover
        caller = Caller(1, "", 0.05)  # of little patience
        held = parcel.Held("0" * 32, 5)
        with server._session.changed:
            handover._asked.clear()
            lost = Request("its ticket", held, a.client._workers)
            handover._unanswered[1, 0] = _Wish(lost)
        with pytest.raises(PeerError, match="has not answered yet what it was asked before"):
            next(handover.fetch(caller, parcel.Held(), a.client._workers))
        assert not handover._expired
        with server._session.changed:
            handover._unanswered[1, 0] = _Wish(lost, time.monotonic() - _ANSWER_S)
        messages = handover.fetch(caller, parcel.Held(), a.client._workers)
        assert parcel.Header.from_message(next(messages)).name == backup.name
        messages.close()
        assert list(handover._expired[0]) == ["its ticket"]
        # What comes late is nobody's fault, and what was never asked for is.
        late = Caller(0, "", DEADLINE_S)
        head = [wire.to_json(ticket="its ticket", error=None)]
        with pytest.raises(PeerError, match="takes no more of it"):
            handover.give(late, head)
        with pytest.raises(ProtocolError, match="must be asked for"):
            handover.give(late, head)


def test_a_backup_finds_its_way_through_a_tree(
    certificates: Certificates, backup: Path, tmp_path: Path
) -> None:
    tree = Node("", (Node("west", ("a", "b")), Node("east", ("c", "d"))))
    with (
        serving_tree(certificates, tree) as servers,
        leaves_of(certificates, tree, addresses_of(servers)) as members,
    ):
        train_all(members, 0, 1)
        a, _, _, d = members
        offer(a, backup, 1)
        d.client.backed_up(1, 0)
        killed(d)
        wait_gone(servers["east"], 1)
        with contextlib.closing(
            Party(servers["east"].address, "d", None, workers=4).client
        ) as back:
            back.join(d.said, tree.up, 7, above="error_feedback(onebit)")
            back._workers = 1  # as those of a have, which is the only one to have a backup
            back.fetch_backup(Intake(tmp_path / "taken"))
        assert content(tmp_path / "taken") == content(backup)
        # And from its own server's other children, without a way up.
        servers["west"]._session.handover.fetch_above = None
        b = members[1]
        killed(b)
        wait_gone(servers["west"], 1)
        with contextlib.closing(
            Party(servers["west"].address, "b", None, workers=2).client
        ) as back:
            back.join(b.said, tree.up, 7, above="error_feedback(onebit)")
            back._workers = 1
            intake = Intake(tmp_path / "again")
            together(lambda: back.fetch_backup(intake))
        assert content(tmp_path / "again") == content(backup)
