# SPDX-License-Identifier: Apache-2.0
"""Parties that are killed and come back as other processes, here and as real processes."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import (
    DEADLINE_S,
    FEEDBACK,
    SHAPES,
    SITES,
    Party,
    expected_rounds,
    parties,
    serving,
    together,
    train_all,
)
from tests.ps.served import TERMS, Served, accepted, rounds
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.waiting import Wait
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.past import Past
from tf_hips.ps.terms.recorder import Kind

pytestmark = pytest.mark.heavy  # servers start in most of these


@dataclasses.dataclass
class Backup:
    """What a party needs to come back: its residuals before a round, and how many gathers were."""

    number: int
    gather: int
    residuals: list[npt.NDArray[np.float32]]

    @classmethod
    def of(cls, party: Party, number: int, gather: int = 0) -> "Backup":
        party.client.backed_up(number, gather)
        return cls(number, gather, [one.copy() for one in party.residuals])


def killed(party: Party) -> None:
    """Its connection ends without a word."""
    party.client.close()


def come_back(
    server: Server,
    certificates: Certificates,
    site: str,
    backup: Backup | None = None,
    *,
    compression: str = FEEDBACK,
    must_be_back: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Party:
    """Another process of a site, which goes on from its backup."""
    party = Party(
        server.address,
        site,
        certificates.party(site),
        compression=compression,
        deadline_s=deadline_s,
        first_round=backup.number if backup is not None else 0,
    )
    party.client._must_be_back = must_be_back
    if backup is not None:
        party.residuals = [one.copy() for one in backup.residuals]
    party.join()
    return party


def wait_gone(server: Server, child: int) -> None:
    session = server._session
    eventually(lambda: not session._presence.is_there(child), DEADLINE_S, changed=session.changed)


@pytest.mark.parametrize("durable", [False, True])
def test_a_party_comes_back_from_its_backup(
    certificates: Certificates, tmp_path: Path, durable: bool
) -> None:
    expected = expected_rounds(9)
    settings = {"state_dir": str(tmp_path)} if durable else {}
    with serving(certificates, **settings) as server, parties(server, certificates) as members:
        a, b = members
        assert train_all(members, 0, 2) == expected[:3]
        backup = Backup.of(b, 3)
        assert train_all(members, 3, 5) == expected[3:6]
        killed(b)
        back = come_back(server, certificates, "b", backup, must_be_back=True)
        # It does rounds 3 to 5 again, with what came down then, and sends nothing of them.
        assert back.train(3, 5) == expected[3:6]
        counts, _ = server._traffic.read()
        before = counts[1].received_bytes
        assert train_all((a, back), 6, 7) == expected[6:8]
        assert back.client._welcome is not None
        assert back.client._welcome.is_back
        # Once more, in the middle of a round: its packets of round 8 are there, or are not.
        newer = Backup.of(back, 8)
        killed(back)
        wait_gone(server, 1)
        third = come_back(server, certificates, "b", newer)
        assert train_all((a, third), 8, 8) == expected[8:]
        sent = server._traffic.read()[0][1].received_bytes - before
        assert sent < 4 * len(expected[0])  # three rounds, and no fourth
        third.client.leave()
        a.client.leave()


def test_a_party_without_a_backup_begins_again(certificates: Certificates) -> None:
    """It gets the weights that all began with, and does all rounds again."""
    weights = [np.arange(50_000, dtype=np.float32), np.ones((3, 2))]
    others = [np.zeros_like(one) for one in weights]
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        first, second = together(
            lambda: a.client.first_sync(weights), lambda: b.client.first_sync(others)
        )
        assert all(np.array_equal(one, two) for one, two in zip(first, second, strict=True))
        expected = train_all((a, b), 0, 4)
        for member in (a, b):
            killed(member)
        back = [come_back(server, certificates, site) for site in SITES]
        # Also the one that sent them, whatever its new process begins with.
        for one in back:
            synced = one.client.first_sync(others)
            assert all(np.array_equal(x, y) for x, y in zip(synced, weights, strict=True))
        assert [back[0].train(0, 2), back[1].train(0, 1)] == [expected[:3], expected[:2]]
        assert back[1].train(2, 4) == expected[2:]
        assert back[0].train(3, 4) == expected[3:]
        assert train_all(back, 5, 5) == expected_rounds(6)[5:]


def test_gathers_are_done_again_with_what_came_then(certificates: Certificates) -> None:
    def payloads(number: int) -> list[bytes]:
        return [b"%d of %s" % (number, site.encode()) for site in SITES]

    def gather_all(members: Sequence[Party], number: int) -> list[list[bytes]]:
        own = zip(members, payloads(number), strict=True)
        return together(*(lambda m=m, p=p: m.client.gather(number, "loss", p) for m, p in own))

    with serving(certificates) as server, parties(server, certificates) as (a, b):
        # These two parties have agreed on the model: what comes now is no prologue.
        server._session._state.gathers.prologue = 1
        for number in range(5):
            gather_all((a, b), number)
        train_all((a, b), 0, 0)
        backup = Backup.of(b, 1, gather=3)
        Backup.of(a, 1, gather=4)
        killed(b)
        back = come_back(server, certificates, "b", backup)
        assert back.client.gather(0, "loss", payloads(0)[1]) == payloads(0)
        # What it computes again need not be equal bit for bit; what it sent then stands.
        assert back.client.gather(3, "loss", b"another") == payloads(3)
        with pytest.raises(ProtocolError, match=r"value 4 was `loss`. Received: `accuracy`"):
            back.client.gather(4, "accuracy", b"")
        with pytest.raises(ProtocolError, match=r"The gather must be one of 0 to 5, which is next"):
            back.client.gather(2, "loss", b"")
        assert back.client.gather(4, "loss", payloads(4)[1]) == payloads(4)
        results = gather_all((a, back), 5)
        assert results == [payloads(5), payloads(5)]


def test_what_is_older_than_all_backups_is_forgotten(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        train_all((a, b), 0, 5)
        store = server._session.store
        assert store is not None
        assert store.oldest == 0
        b.client.backed_up(5, 0)
        assert store.oldest == 0  # a may begin again
        a.client.backed_up(3, 0)
        a.client.backed_up(2, 0)  # an older one that was kept
        assert store.oldest == 3
        killed(b)
        with pytest.raises(ProtocolError, match="to rounds 3 to 5, whose results are kept"):
            come_back(server, certificates, "b")


def test_a_server_keeps_no_more_than_it_may(certificates: Certificates) -> None:
    packets = np.array_split(
        np.frombuffer(expected_rounds(1)[0], np.uint8), len(Model(SHAPES).chunks)
    )
    one_round = Past(0)._cost(list(enumerate(packets)))
    with (
        serving(certificates, past_bytes=2 * one_round) as server,
        parties(server, certificates) as (a, b),
    ):
        together(*(lambda m=m: m.client.first_sync([np.zeros(3)]) for m in (a, b)))
        train_all((a, b), 0, 7)
        store = server._session.store
        assert store is not None
        assert store.oldest == 4  # two in the past, two that all rounds have
        assert store.past.num_bytes == 2 * one_round
        killed(b)
        late = Party(server.address, "b", certificates.party("b"))
        late.client.join(late.compressor.text, "same", 7)
        with pytest.raises(ProtocolError, match="only from a backup that was made in it"):
            late.client.first_sync([np.zeros(3)])
        late.client.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compression": "onebit"}, "compression=onebit"),
        ({"shapes": ((3,), (8,), (72, 10), (10,))}, "tensor 0 is"),
    ],
)
def test_who_comes_back_must_be_as_before(
    certificates: Certificates, changes: dict[str, object], text: str
) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        train_all((a, b), 0, 0)
        killed(b)
        other = Party(server.address, "b", certificates.party("b"), **changes)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match=text):
            other.join()
        other.client.close()
        back = come_back(server, certificates, "b")
        expected = expected_rounds(2)
        assert back.train(0, 0) == expected[:1]
        assert train_all((a, back), 1, 1) == expected[1:]


def test_nobody_comes_back_to_a_run_that_is_over(certificates: Certificates) -> None:
    with serving(certificates) as server:
        with parties(server, certificates) as (a, b):
            train_all((a, b), 0, 0)
            b.client.leave()
            again = Party(server.address, "b", certificates.party("b"))
            with pytest.raises(ProtocolError, match="Site `b` has left this run"):
                again.join()
            again.client.close()
            a.client.leave()
        late = Party(server.address, "b", certificates.party("b"))
        late.client._must_be_back = True
        with pytest.raises(PeerError, match=r"The run has ended\. No process can come back to it"):
            late.join()


def test_who_is_started_again_before_the_run_has_begun_joins_it(certificates: Certificates) -> None:
    with serving(certificates) as server:
        a, b = (Party(server.address, site, certificates.party(site)) for site in SITES)
        b.client._must_be_back = True
        together(a.join, b.join)
        assert train_all((a, b), 0, 0) == expected_rounds(1)
        for one in (a, b):
            one.client.leave()


def test_others_wait_while_a_party_does_its_rounds_again(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them takes less than a round may stand still, all of them together more."""
    monkeypatch.setattr("tf_hips.ps.client.client._MARGIN_S", 0.2)
    monkeypatch.setattr("tf_hips.ps.session.moves.TELLS_AFTER_S", 0.1)
    settings = {"deadline_s": 1.0}
    with (
        serving(certificates, round_timeout_s=1.0) as server,
        parties(server, certificates, **settings) as (a, b),
    ):
        expected = train_all((a, b), 0, 5)
        killed(b)
        back = come_back(server, certificates, "b", **settings)
        began = time.monotonic()

        def slowly() -> list[bytes]:
            found = []
            for number in range(6):
                threading.Event().wait(0.4)  # it computes
                found += back.train(number, number)
            return found + back.train(6, 6)

        results = together(lambda: a.train(6, 6), slowly)
        assert time.monotonic() - began > 2.0
        assert results[1][:6] == expected
        assert results[1][6:] == results[0]


def test_a_backup_must_be_of_this_run(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        train_all((a, b), 0, 0)
        with pytest.raises(ProtocolError, match=r"of round 1 at most. Received: round 2"):
            a.client.backed_up(2, 0)
        with pytest.raises(ProtocolError, match=r"of exact value 1 and of .*, exact value 2$"):
            a.client.backed_up(1, 2)
        assert a.client._welcome is not None
        a.client._welcome = dataclasses.replace(a.client._welcome, session="another")
        with pytest.raises(ProtocolError, match="must be of this run"):
            a.client.backed_up(1, 0)


def test_backups_only_go_on(tmp_path: Path) -> None:
    """Each one is a record: one that goes to and fro would fill the disk."""
    with Served(tmp_path) as one:
        one.join()
        one.agree()
        one.deliver(rounds(0, 4))
        for number in range(2):
            one.gather(number, 0, b"", wait=False)
            one.gather(number, 1, b"", wait=True)

        def back_up(number: int, gather: int) -> None:
            one.session.back_up(one.caller(0), one.session.token, number, gather)

        back_up(4, 1)
        for told in ((2, 1), (4, 1), (5, 0), (1, 2), (3, 1)):
            back_up(*told)
        assert one.session._state.members.children[0].backup == (4, 1)
        back_up(4, 2)
        for told in ((-1, 0), (4, -1)):
            with pytest.raises(ProtocolError, match="A backup must be of this run"):
                back_up(*told)
        assert one.session._recorder.settle() is None
        kept = [fields for kind, fields in accepted(tmp_path) if kind == Kind.BACKED_UP]
        assert [(one["round"], one["number"]) for one in kept] == [(4, 1), (4, 2)]


def test_of_two_that_come_back_at_once_one_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tmp_path) as one:
        one.join()
        one.agree()
        session, call = one.session, one.caller(0)
        waits = []

        def until(caller: Caller, wait: Wait) -> None:
            """The one before goes, and the other one that waits for that wakes first."""
            assert not wait.is_ready()
            waits.append(caller.patience_s)
            session._presence.depart(0, call)
            session._state.take_back(0, "first")
            assert wait.is_ready()

        monkeypatch.setattr(session._waiting, "until", until)
        with session.changed:
            session._presence.arrive(0, call)
        second = dataclasses.replace(one.caller(0, "second"), patience_s=600.0)
        with pytest.raises(ProtocolError, match="another process"):
            session.join(second, 2, *one.texts, 7, None)
        assert waits == [TERMS.lost_after_s / 2]  # a broken connection is noticed by then
        assert session._state.members.children[0].process == "first"


def test_a_party_comes_back_to_all_of_several_servers(certificates: Certificates) -> None:
    expected = expected_rounds(6)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(certificates, shard=(index, 2))) for index in range(2)
        ]
        address = ",".join(server.address for server in servers)
        a, b = (Party(address, site, certificates.party(site)) for site in SITES)
        together(a.join, b.join)
        assert train_all((a, b), 0, 1) == expected[:2]
        backup = Backup.of(b, 2, gather=0)
        Backup.of(a, 1, gather=0)
        assert train_all((a, b), 2, 3) == expected[2:4]
        for server in servers:
            store = server._session.store
            assert store is not None
            assert store.of(0).oldest == 1
        killed(b)
        back = Party(address, "b", certificates.party("b"), first_round=backup.number)
        back.residuals = [one.copy() for one in backup.residuals]
        back.join()
        assert all(one._welcome.is_back for one in back.client._clients)
        assert back.train(2, 3) == expected[2:4]
        assert train_all((a, back), 4, 5) == expected[4:]
        back.client.leave()
        a.client.leave()
