# SPDX-License-Identifier: Apache-2.0
"""Servers that share a model and rule on rounds together, over sockets: bits, kills, one error."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.ps.parties import (
    DEADLINE_S,
    SHAPES,
    Party,
    raw_channel,
    serving,
    together,
    train_all,
)
from tests.ps.test_comeback import Backup
from tests.ps.test_restart import Later, ServerProcess
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.errors import PeerError, ProtocolError, ToleranceError
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.calls import joint
from tf_hips.ps.robust.joint import JointStore
from tf_hips.ps.server.server import Server
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # servers start in all of these

SITES = ("a", "b", "c", "d", "e")
LARGE = ((5, 3), (CHUNK // 8 + 3,), (), (300, 7), (11,), (64,))
RULES = (
    "krum(f=1)",
    "nnm(f=1) >> trimmed_mean(f=1)",
    "geometric_median(f=1)",
    "centred_clipping(f=1, tau=2.0)",
    "bucketing(s=2) >> median",
    "clip >> mean >> fedavgm(0.5)",
)


@contextlib.contextmanager
def servers_of(
    certificates: Certificates, count: int, rule: str | None, **settings: Any
) -> Iterator[tuple[list[Server], str]]:
    """The servers of one run, each but the first told where that is, and what parties are told."""
    settings = {"parties": SITES, "rule": rule} | settings
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for index in range(count):
            lead = {"lead": servers[0].address} if index > 0 else {}
            more = settings | lead
            servers.append(stack.enter_context(serving(certificates, shard=(index, count), **more)))
        yield servers, ",".join(server.address for server in servers)


@contextlib.contextmanager
def joined(
    certificates: Certificates | None, address: str, **settings: Any
) -> Iterator[list[Party]]:
    """The parties of a run, joined and agreed on the model; in plain text without certificates."""
    members = [
        Party(address, site, certificates and certificates.party(site), **settings)
        for site in SITES
    ]
    try:
        together(*(one.join for one in members))
        yield members
    finally:
        for one in members:
            one.client.close()


def trained(
    certificates: Certificates, count: int, rule: str | None, last: int, **settings: Any
) -> list[bytes]:
    with (
        servers_of(certificates, count, rule) as (_, address),
        joined(certificates, address, **settings) as members,
    ):
        return train_all(members, 0, last)


@pytest.mark.parametrize(
    "rule",
    [
        RULES[3],
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES if rule != RULES[3]),
    ],
)
def test_the_bits_are_those_of_one_server(certificates: Certificates, rule: str) -> None:
    settings: dict[str, Any] = {"shapes": LARGE, "compression": "error_feedback(onebit)"}
    alone = trained(certificates, 1, rule, 2, **settings)
    assert trained(certificates, 3, rule, 2, **settings) == alone
    assert len(set(alone)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("text", ["fp32", "mixed(error_feedback(onebit), below=100)"])
def test_the_bits_are_those_of_one_server_for_any_codec(
    certificates: Certificates, count: int, text: str
) -> None:
    alone = trained(certificates, 1, RULES[0], 3, compression=text)
    assert trained(certificates, count, RULES[0], 3, compression=text) == alone


def test_who_shows_other_weights_to_other_shards_is_who_shard_0_has_heard(
    certificates: Certificates,
) -> None:
    """A rule that the children bring; the liar sits out at the other shards, not at the first."""
    rule = "geometric_median(f=1)"

    def answers(count: int, *, lies: bool) -> list[bytes]:
        with (
            servers_of(certificates, count, None) as (_, address),
            contextlib.ExitStack() as stack,
        ):
            members = [Party(address, site, certificates.party(site)) for site in SITES]
            for one in members:
                stack.callback(one.client.close)

            def join(one: Party) -> None:
                welcome = one.client.join(one.said, "same", 7, rule)
                one.child = welcome.child
                one.client.agree_model(SHAPES)

            def train(one: Party) -> bytes:
                first = 1.0
                if lies and one is members[3]:
                    for client in one.client._clients[1:]:
                        _say_weight(client, 0.0)
                found: bytes = one.client.exchange(0, one.packets(0), first).tobytes()
                return found

            together(*(lambda one=one: join(one) for one in members))
            return together(*(lambda one=one: train(one) for one in members))

    honest = answers(1, lies=False)
    assert answers(2, lies=True) == honest
    assert len(set(honest)) == 1


def _say_weight(client: Any, weight: float) -> None:
    """From now on a client tells its server another weight than it is told."""
    transfer = client.transfer

    def lie(passage: Any, _: float | None = None, halt: Any = None) -> None:
        transfer(passage, weight, halt)

    client.transfer = lie


def test_more_liars_than_the_rule_bears_end_the_run_at_all_shards(
    certificates: Certificates,
) -> None:
    with (
        servers_of(certificates, 3, RULES[0]) as (servers, address),
        joined(certificates, address, compression="fp32") as members,
    ):

        def train(one: Party) -> None:
            packets = one.packets(0)
            if one.child in (1, 4):
                packets.view(np.float32)[4:20] = 1e20  # behind the first packet's prefix
            with pytest.raises((ToleranceError, PeerError, ProtocolError), match="bears f=1 bad"):
                one.client.exchange(0, packets)

        together(*(lambda one=one: train(one) for one in members))
        for server in servers:
            session = server._session
            eventually(lambda session=session: session.is_over, DEADLINE_S, changed=session.changed)
            assert "2 that were refused" in str(session.ended)


def test_a_lead_that_is_not_there_is_named_by_all(certificates: Certificates) -> None:
    with serving(certificates, parties=SITES) as other:
        nobody = other.address  # nothing listens there any more
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"parties": SITES, "rule": RULES[0], "round_timeout_s": 1.5}
        servers = [
            stack.enter_context(serving(certificates, shard=(0, 2), **settings)),
            stack.enter_context(serving(certificates, shard=(1, 2), lead=nobody, **settings)),
        ]
        address = ",".join(server.address for server in servers)
        members = [Party(address, site, certificates.party(site)) for site in SITES]
        errors = together(*(lambda one=one: _error_of(one, join=True) for one in members))
        for one in members:
            one.client.close()
        told = "Shard 1 of 2: shard 0, the lead, cannot be asked. Moving: "
        told += f"Nothing listens at {nobody}"
        assert str(servers[1]._session.ended).startswith(told)
        assert all(told in error for error in errors)


def _error_of(one: Party, number: int = 0, *, join: bool = False) -> str:
    with pytest.raises((PeerError, ProtocolError)) as raised:
        if join:
            one.join()
        one.train(number, number)
    return str(raised.value)


def test_what_is_no_lead_is_refused(certificates: Certificates) -> None:
    """One that has all of a model, another shard, and one of another run."""
    with (
        serving(certificates, parties=SITES) as alone,
        serving(certificates, parties=SITES, shard=(1, 2), lead="127.0.0.1:1") as other,
        serving(certificates, parties=SITES, shard=(0, 2), run="another") as stranger,
    ):
        for server, said in (
            (alone, "address of shard 0 of several. Received: that of shard 0 of 1"),
            (other, "address of shard 0 of several. Received: that of shard 1 of 2"),
            (stranger, "The run must be `another`. Received: `local`"),
        ):
            code, text = _measure(server, certificates.server(), [b""])
            assert code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED)
            assert said in text


def test_only_servers_of_the_run_may_measure(certificates: Certificates) -> None:
    with servers_of(certificates, 2, RULES[0]) as (servers, address):
        lead = servers[0]
        for method in (joint.MEASURE, joint.MOVING):
            code, text = _measure(lead, certificates.party("a"), [b""], method)
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert "must be of role `global-server`. Received: `party/a`" in text
        code, text = _measure(lead, certificates.server(), [b""])
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "of a run that has not begun here" in text
        with joined(certificates, address) as members:
            train_all(members, 0, 0)
            for messages, said in (
                ([b""], "must bring a report. Received: nothing"),
                ([b"x" * 17], "announces|must lie inside|must begin|model has"),
                ([*wire.bundle([(0, b"\0" * 40)])], "must hold the measures of a shard"),
            ):
                code, text = _measure(lead, certificates.server(), messages)
                assert code == grpc.StatusCode.FAILED_PRECONDITION
                assert any(part in text for part in said.split("|")), text
            train_all(members, 1, 1)  # the run goes on


def _measure(
    server: Server, identity: Any, messages: Sequence[bytes], method: str = joint.MEASURE
) -> tuple[grpc.StatusCode, str]:
    call = wire.Call("local", "shard-1", "p1", 0)
    metadata = ((wire.METADATA_KEY, call.to_text()),)
    with raw_channel(server.address, identity) as channel:
        try:
            if method == joint.MOVING:
                channel.unary_unary(f"/{wire.SERVICE}/{method}")(
                    b"", timeout=DEADLINE_S, metadata=metadata
                )
            else:
                stub = channel.stream_stream(f"/{wire.SERVICE}/{method}")
                for _ in stub(iter(messages), timeout=DEADLINE_S, metadata=metadata):
                    pass
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_who_waits_hears_that_bytes_come_in_at_another_shard(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last child has sent nothing, then all to shard 1, and shard 0 is what all wait for."""
    heard: list[str] = []
    told = joint.Lead.note_moved
    monkeypatch.setattr(joint, "TELLS_AFTER_S", 0.02)
    monkeypatch.setattr(joint.Lead, "note_moved", lambda one: (heard.append("lead"), told(one)))
    with (
        servers_of(certificates, 2, RULES[0]) as (servers, address),
        joined(certificates, address, compression="fp32") as members,
    ):
        eventually(lambda: bool(heard))  # shard 1 has found it
        heard.clear()
        lead, other = (server._session for server in servers)
        early = [Later(lambda one=one: one.train(0, 0)) for one in members[:4]]
        store: Any = other.store
        eventually(lambda: all(store.progress(child)[1] == len(store.chunks) for child in range(4)))

        def has_heard() -> bool:
            other.note_moved(1)  # as when bytes come in
            return bool(heard)

        eventually(has_heard)
        moved = lead.moves.count

        def note(num_bytes: int = 0) -> None:
            if not num_bytes:
                heard.append("other")
            other.moves.note(num_bytes or 1)

        other.note_moved = note
        last: Any = members[4]
        clients = last.client._clients
        passage = clients[0].open_round(0, last.packets(0))
        sending = Later(lambda: clients[1].transfer(passage))
        eventually(lambda: store.unruled == 0)
        assert store.awaited() == "shard 0 has not ruled on it"

        def goes_on() -> bool:
            lead.note_moved(1)
            return "other" in heard

        eventually(goes_on)
        assert lead.moves.count > moved
        clients[0].transfer(passage)
        sending.result()
        assert all(one.result() == [passage.result.tobytes()] for one in early)


def test_a_report_leaves_when_what_was_measured_is_durable(
    certificates: Certificates, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"parties": SITES, "rule": RULES[0]}
        servers: list[Server] = []
        for index in range(2):
            more = {"lead": servers[0].address} if servers else {}
            more["state_dir"] = str(tmp_path / str(index))
            servers.append(
                stack.enter_context(serving(certificates, shard=(index, 2), **settings, **more))
            )
        address = ",".join(server.address for server in servers)
        members = stack.enter_context(joined(certificates, address, compression="fp32"))
        lead, other = (server._session.store for server in servers)
        assert isinstance(lead, JointStore) and isinstance(other, JointStore)
        recorder: Any = other._recorder
        is_late, goes_on, settle = threading.Event(), threading.Event(), recorder.settle

        def late() -> Any:  # a disk that takes its time
            is_late.set()
            assert goes_on.wait(DEADLINE_S)
            return settle()

        recorder.settle = late
        training = [Later(lambda one=one: one.train(0, 0)) for one in members]
        assert is_late.wait(DEADLINE_S)
        assert other.unruled == 0
        eventually(lambda: lead.lacks(0) == [1])
        assert lead.unruled == 0 and lead.verdict(0) is None
        goes_on.set()
        found = training[0].result()
        assert all(one.result() == found for one in training)


def test_a_party_that_was_killed_between_two_shards_comes_back(certificates: Certificates) -> None:
    """It has sent all of round 3 to shard 1, and nothing to shard 0; its backup is of round 2."""
    rule = RULES[0]
    expected = trained(certificates, 1, rule, 4)
    with (
        servers_of(certificates, 2, rule) as (servers, address),
        joined(certificates, address) as members,
    ):
        assert train_all(members, 0, 1) == expected[:2]
        backup = Backup.of(members[4], 2)
        for one in members[:4]:
            Backup.of(one, 1)
        assert train_all(members, 2, 2) == expected[2:3]
        early = [Later(lambda one=one: one.train(3, 3)) for one in members[:4]]
        store: Any = servers[1]._session.store
        clients = members[4].client._clients
        passage = clients[0].open_round(3, members[4].packets(3))
        cut = Later(lambda: clients[1].transfer(passage))
        eventually(lambda: store.unruled == 3)
        members[4].client.close()
        with pytest.raises(PeerError):
            cut.result()
        back = Party(address, "e", certificates.party("e"), first_round=backup.number)
        back.residuals = [one.copy() for one in backup.residuals]
        members[4] = back  # closed at the end
        back.join()
        assert back.train(2, 3) == expected[2:4]
        assert all(one.result() == expected[3:4] for one in early)
        assert train_all(members, 4, 4) == expected[4:]


class JointProcess(ServerProcess):
    """`tf-hips server --shard --lead --state`, which can be killed and started again."""

    def __init__(
        self, base: Path, index: int, count: int, lead: str | None, more: Sequence[str] = ()
    ) -> None:
        super().__init__(base)
        self._more = list(more)
        self._more += ["--shard", f"{index}/{count}", "--rule", RULES[3]]
        self._more += ["--lead", lead] if lead is not None else []

    def command(self, *more: str) -> list[str]:
        found = super().command(*self._more, *more)
        place = found.index("--parties") if "--parties" in found else -1
        if place >= 0:
            found[place + 1] = ",".join(SITES)
            return found
        found[-1] = found[-1].replace("'a,b'", repr(",".join(SITES)))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("is_eager", [False, True])
def test_shards_killed_while_rounds_go_on(
    certificates: Certificates, tmp_path: Path, is_eager: bool
) -> None:
    last = 59
    expected = trained(certificates, 1, RULES[3], last)
    processes = _processes(tmp_path)
    try:
        for one in processes:
            one.is_eager = is_eager
            one.start()
        address = ",".join(one.address for one in processes)
        with joined(None, address) as members:
            training = [Later(lambda one=one: one.train(0, last)) for one in members]
            for number, victim in ((3, 0), (10, 1), (17, 0), (24, 2)):
                _reach(processes[victim], number)
                processes[victim].restart()
            assert all(one.result() == expected for one in training)
            together(*(one.client.leave for one in members))
        for one in processes:
            assert one.process is not None
            assert one.process.wait(DEADLINE_S) == 0
            events = log.read_events(one.logs)
            restored = [event["round"] for event in events if event["event"] == "restored"]
            assert len(restored) == (2 if one is processes[0] else 1)
            assert all(0 < number < last for number in restored)
    finally:
        for one in processes:
            one.end()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_shard_that_is_gone_for_good_is_named_by_all(tmp_path: Path, victim: int) -> None:
    """All parties have sent all of the round to the two that are left, which wait for the third."""
    processes = _processes(tmp_path, "--round-timeout", "3")
    try:
        for one in processes:
            one.start()
        address = ",".join(one.address for one in processes)
        with joined(None, address) as members:
            train_all(members, 0, 0)
            processes[victim].kill()
            began = time.monotonic()
            errors = together(*(lambda one=one: _error_of(one, 1) for one in members))
            assert time.monotonic() - began < DEADLINE_S
        said = "shard 0, the lead, has not ruled. "
        if victim == 0:
            said += f"Measure: Nothing listens at {processes[0].address}"
        else:
            said += f"Server {processes[0].address}, Measure: Waited"
            assert all("the measures of shard 2 of 3 have not come" in one for one in errors)
        assert all(said in one for one in errors), errors
    finally:
        for one in processes:
            one.end()


def _processes(folder: Path, *more: str) -> list[JointProcess]:
    """Three servers of one run; each but the first is told where that is."""
    found: list[JointProcess] = []
    for index in range(3):
        lead = found[0].address if found else None
        found.append(JointProcess(folder / str(index), index, 3, lead, more))
    return found


def _reach(server: JointProcess, number: int) -> None:
    """Waits until a server has closed a round."""
    eventually(
        lambda: any(
            event["event"] == "round" and event["round"] >= number
            for event in log.read_events(server.logs)
        )
    )
