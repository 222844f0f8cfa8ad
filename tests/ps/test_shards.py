# SPDX-License-Identifier: Apache-2.0
"""Several global servers that share one model: who has what, the same bits, one run for all."""

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import (
    SHAPES,
    SITES,
    Party,
    expected_rounds,
    parties,
    raw_channel,
    raw_exchange,
    serving,
    together,
    train_all,
)
from tests.ps.relay import Relay
from tests.ps.test_restart import Later
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import cli, log
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, NonFiniteError, PeerError, ProtocolError, StateError
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.shards import ShardedClient, connect
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # servers start in most of these

LARGE = ((5, 3), (CHUNK + 3,), (), (300, 7), (11,), (CHUNK // 4,), (64,))
SMALLER = (*LARGE[:1], *LARGE[2:5], (CHUNK // 32,), (64,))  # none in two chunks
CODECS = (
    ("fp32", "same"),
    ("error_feedback(onebit)", "same"),
    ("error_feedback(onebit)", "fp16"),
    ("terngrad(bitwidth=2)", "same"),
    ("error_feedback(topk(ratio=0.01))", "same"),
    ("warmup(error_feedback(topk(ratio=0.1)), steps=2, stages=2)", "same"),
    ("fp16", "warmup(error_feedback(onebit), steps=1)"),
    ("mixed(warmup(error_feedback(onebit), steps=1), below=100)", "same"),
)


@contextlib.contextmanager
def shards(
    certificates: Certificates, count: int, **settings: Any
) -> Iterator[tuple[list[Server], str]]:
    """The servers of one run, and what parties are told of them."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(certificates, shard=(index, count), **settings))
            for index in range(count)
        ]
        yield servers, ",".join(server.address for server in servers)


@contextlib.contextmanager
def sharded(
    certificates: Certificates, count: int, told: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[list[Server], list[Party]]]:
    """Servers and their parties; `told` goes to the servers, the rest to the parties."""
    with (
        shards(certificates, count, **(told or {})) as (servers, address),
        parties(servers[0], certificates, address=address, **settings) as members,
    ):
        yield servers, members


def wait_until(server: Server, is_so: Any) -> None:
    session = server._session
    eventually(lambda: is_so(session), 20.0, changed=session.changed)


@pytest.mark.parametrize(
    ("up", "down", "counts", "shapes"),
    [
        ("fp32", "same", (1, 2, 3), LARGE),
        (*CODECS[1], (1, 3), LARGE),
        *((*one, (1, 3), SMALLER) for one in CODECS[2:]),
        *(pytest.param(*one, (1, 2, 5), LARGE, marks=pytest.mark.slow) for one in CODECS[1:]),
    ],
)
def test_the_result_is_the_same_for_any_number_of_shards(
    certificates: Certificates, up: str, down: str, counts: tuple[int, ...], shapes: Any
) -> None:
    results = []
    for count in counts:
        settings = {"shapes": shapes, "compression": up, "downlink": down}
        with sharded(certificates, count, **settings) as (servers, members):
            results.append(train_all(members, 0, 2))
            stores = [server._session.store for server in servers]
            # Each has done its own part, and no more.
            for index, store in enumerate(stores):
                assert store is not None
                merged = {chunk for chunk, _ in store.results(2, 0)[1]}
                assert merged == set(Shard(index, count).chunks(Model(shapes)))
    assert results == results[:1] * len(counts)


def test_as_many_servers_as_one_likes_give_what_the_store_gives(
    certificates: Certificates,
) -> None:
    """The fifth of them has no chunk at all."""
    for count in (2, 5):
        with sharded(certificates, count) as (servers, members):
            assert train_all(members, 0, 4) == expected_rounds(5)
            for member in members:
                member.client.leave()
            for server in servers:
                assert server._session.is_over
                assert server._session.ended is None


def test_a_run_goes_on_at_a_later_round(certificates: Certificates) -> None:
    text = "warmup(terngrad(bitwidth=2), steps=2)"
    with sharded(certificates, 3, compression=text, first_round=1) as (_, members):
        assert train_all(members, 1, 3) == expected_rounds(4, text)[1:]


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_connection_cut_to_one_server_counts_once(
    certificates: Certificates, direction: str
) -> None:
    """Its chunks are not in a row, and each end says which of them it holds."""
    shapes = ((CHUNK,), (CHUNK,), (CHUNK // 2,), (CHUNK // 2,), (CHUNK,), (10,))
    settings: dict[str, Any] = {"shapes": shapes, "compression": "fp32"}
    with sharded(certificates, 1, **settings) as (_, members):
        expected = train_all(members, 0, 1)
    with shards(certificates, 2) as (servers, address), Relay(servers[0].port) as relay:
        assert Shard(0, 2).chunks(Model(shapes)) == (0, 4, 5)
        a = Party(address, "a", certificates.party("a"), **settings)
        through = f"{relay.address},{servers[1].address}"
        b = Party(through, "b", certificates.party("b"), **settings)
        together(a.join, b.join)
        relay.cut_after(direction, 6 << 20)
        results = train_all((a, b), 0, 0)
        assert relay.num_cuts == 1
        results += train_all((a, b), 1, 1)
        assert results == expected
        for member in (a, b):
            member.client.close()


def test_small_packets_share_a_message(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = tuple((size,) for size in range(1, 101))
    with sharded(certificates, 3, shapes=shapes) as (servers, (a, b)):
        messages: list[Counter[str]] = [Counter() for _ in servers]
        for server, count in zip(servers, messages, strict=True):
            for way in ("received", "sent"):

                def note(child: int, size: int, count: Any = count, way: str = way) -> None:
                    count[f"{way} {child}"] += 1

                monkeypatch.setattr(server._traffic, way, note)
        early = Later(lambda: a.train(0, 0))
        for server in servers:
            wait_until(server, lambda one: len(one.store.delivered(0, 0)) == len(one.store.chunks))
        assert b.train(0, 0) == early.result()
        assert all(len(server._session.store.chunks) > 30 for server in servers)  # type: ignore[union-attr]
        for count in messages:
            assert (count["received 0"], count["received 1"]) == (1, 1)
            # Who comes last sees chunks as they are merged; who waits wakes when all of them are.
            assert count["sent 0"] <= 2


def test_packets_are_not_copied(certificates: Certificates) -> None:
    with sharded(certificates, 2) as (_, (a, _b)):
        packets = a.packets(0)
        whole = a.client._clients[0].open_round(0, packets)
        assert all(np.shares_memory(np.asarray(view), packets) for view in whole.views)
        assert all(np.shares_memory(np.asarray(one), whole.result) for one in whole.targets)


def test_first_weights_and_exact_values_go_through_shard_0(certificates: Certificates) -> None:
    weights = [np.arange(700_000, dtype=np.float32), np.ones((3, 2), np.int64)]
    with sharded(certificates, 3) as (servers, (a, b)):
        got, other = together(
            lambda: a.client.first_sync(weights),
            lambda: b.client.first_sync([0 * one for one in weights]),
        )
        for one, two, three in zip(weights, got, other, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)
        values = [b"from a", b"from b"]
        gathered = together(
            lambda: a.client.gather(0, "loss", values[0]),
            lambda: b.client.gather(0, "loss", values[1]),
        )
        assert gathered == [values, values]
        traffic = [server._traffic.read()[0] for server in servers]
        assert traffic[0][0].received_bytes > 2_800_000
        assert [one.received_bytes for held in traffic[1:] for one in held] == [0] * 4
        assert train_all((a, b), 0, 1) == expected_rounds(2)


def test_bytes_are_those_of_all_servers(certificates: Certificates) -> None:
    with sharded(certificates, 2) as (_, (a, b)):
        before = a.client.wire_bytes()
        train_all((a, b), 0, 9)
        after = a.client.wire_bytes()
        parts = [client.wire_bytes() for client in a.client._clients]
        payload = 10 * a.packets(10).size
        for way in ("sent", "received"):
            counted = getattr(after, way) - getattr(before, way)
            assert payload < counted < payload + 10 * 2 * 550
            assert sum(getattr(one, way) for one in parts) >= getattr(after, way)
        assert all(one.sent > 0 < one.received for one in parts)


WRONG_LISTS = {
    # Whichever answers first is named.
    "two are exchanged": ((1, 0, 2), r"which is shard (1 of 3, at place 0|0 of 3, at place 1)"),
    "too few": ((0, 1), r"all servers .* Received: 2 of them, and \S+ is shard \d of 3"),
    "only one": ((1,), r"Received: 1 of them, and \S+ is shard 1 of 3"),
    "too many": ((0, 1, 2, 0), r"Received: 4 of them, and \S+ is shard \d of 3"),
    "one twice": ((0, 1, 1), r"which is shard 1 of 3, at place 2"),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_a_wrong_list_of_servers_is_refused_in_one_line(
    certificates: Certificates, name: str
) -> None:
    places, text = WRONG_LISTS[name]
    with shards(certificates, 3) as (servers, right):
        wrong = ",".join(servers[place].address for place in places)
        late = Party(wrong, "a", certificates.party("a"))
        with pytest.raises(ProtocolError, match=text) as caught:
            late.join()
        assert "\n" not in str(caught.value)
        assert all(not server._session._members.children for server in servers)
        with parties(servers[0], certificates, address=right) as members:
            assert train_all(members, 0, 0) == expected_rounds(1)


def test_servers_of_several_runs_do_not_make_one(certificates: Certificates) -> None:
    with (
        serving(certificates, shard=(0, 2)) as first,
        serving(certificates, shard=(1, 3)) as other,
        serving(certificates, shard=(1, 2), parties=tuple(reversed(SITES))) as turned,
    ):
        mixed = Party(f"{first.address},{other.address}", "a", certificates.party("a"))
        with pytest.raises(ProtocolError, match=f"{other.address} is shard 1 of 3"):
            mixed.join()
        text = rf"agree on `child`. Received: \d from {first.address} and \d from {turned.address}"
        members = [
            Party(f"{first.address},{turned.address}", site, certificates.party(site))
            for site in SITES
        ]
        for later in [Later(member.join) for member in members]:
            with pytest.raises((ProtocolError, PeerError), match=f"{text}|has ended|has left"):
                later.result()
        for server in (first, turned):
            wait_until(server, lambda session: session.is_over)


def test_servers_that_close_rounds_differently_do_not_make_one(certificates: Certificates) -> None:
    """A late update would count in the rounds of one and not of the other."""
    with (
        serving(certificates, shard=(0, 2), close_at=1) as first,
        serving(certificates, shard=(1, 2), close_at=1, late="drop") as other,
    ):
        text = r"agree on `quorum`.*1 children after 0 s, late updates: next.*updates: drop from"
        members = [
            Party(f"{first.address},{other.address}", site, certificates.party(site))
            for site in SITES
        ]
        found = []
        for later in [Later(member.join) for member in members]:
            with pytest.raises((ProtocolError, PeerError)) as caught:
                later.result()
            found.append(str(caught.value))
        # Who comes second may hear first that the other has left.
        assert any(re.search(text, one) for one in found), found
        for server in (first, other):
            wait_until(server, lambda session: session.is_over)


@pytest.mark.parametrize(
    "server", ["127.0.0.1:1,", "127.0.0.1:1,nowhere", ",".join(["h:1"] * 1025)]
)
def test_a_list_that_is_none_is_refused(server: str) -> None:
    with pytest.raises(ConfigError, match=r"must be host:port|at most 1024 servers"):
        connect(Uplink(server, "a"), "local", 1)


def test_one_server_has_a_plain_client() -> None:
    assert isinstance(connect(Uplink("127.0.0.1:1", "a"), "local", 1), Client)
    two = connect(Uplink("127.0.0.1:1, 127.0.0.1:2", "a"), "local", 1)
    assert isinstance(two, ShardedClient)


def test_a_chunk_of_another_server_is_refused(certificates: Certificates) -> None:
    with sharded(certificates, 2) as (servers, (a, _)):
        foreign = Shard(1, 2).chunks(Model(SHAPES))[0]
        message = next(iter(wire.bundle([(foreign, b"x" * 20)])))
        call = wire.Call("local", "a", a.client._clients[0]._process, 0)
        with raw_channel(servers[0].address, certificates.party("a")) as channel:
            code, text = raw_exchange(channel, call, [message])
        assert code.name == "FAILED_PRECONDITION"
        assert text == f"Chunk {foreign} is another server's."


def test_a_run_that_ends_at_one_server_ends_at_all(certificates: Certificates) -> None:
    """At once, though no party calls: each hears it from its watch, and leaves the others."""
    with sharded(certificates, 3) as (servers, members):
        train_all(members, 0, 1)
        servers[1]._session.end("The disk is full.")
        for server in servers:
            wait_until(server, lambda session: session.ended is not None)
        text = f"Server {servers[1].address}, Exchange: The run has ended. The disk is full."
        for member in members:
            client = member.client
            with pytest.raises(PeerError) as caught:
                wait_until_heard(client)
                member.train(2, 2)
            assert str(caught.value) == text
            with pytest.raises(PeerError, match=r"Gather: The run has ended\. The disk is full"):
                client.gather(0, "loss", b"x")
        for server in (servers[0], servers[2]):
            assert f"left the run: Server {servers[1].address}" in str(server._session.ended)


def wait_until_heard(client: ShardedClient) -> None:
    why = "the party does not hear that the run has ended"
    eventually(lambda: client._ended_at is not None, 20.0, why)


def test_a_party_in_a_round_hears_of_the_end_at_any_server(certificates: Certificates) -> None:
    with sharded(certificates, 3) as (servers, (a, b)):
        waiting = Later(lambda: b.train(0, 0))
        for server in servers:
            wait_until(server, lambda one: len(one.store.delivered(0, 1)) == len(one.store.chunks))
        a.client.leave("worker 1 exited with 3")
        with pytest.raises(PeerError, match=r"The run has ended.*worker 1 exited with 3"):
            waiting.result()
        for server in servers:
            assert "worker 1 exited with 3" in str(server._session.ended)


def test_only_the_first_server_gives_up_a_run_that_nobody_calls(
    certificates: Certificates,
) -> None:
    """While parties make exact sums for long, the others hear nothing."""
    with sharded(certificates, 2, {"once": True, "idle_timeout_s": 0.01}) as (servers, members):
        train_all(members, 0, 0)
        second = Later(servers[1].wait)  # looks once a second
        first = Later(servers[0].wait)
        assert first.result() == "No party called for 0.01 s (`--idle-timeout`)."
        assert f"left the run: Server {servers[0].address}, Watch" in second.result()


def test_leaving_needs_no_threads(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the exit of an interpreter that starts none any more."""
    with sharded(certificates, 2) as (servers, members):
        train_all(members, 0, 0)
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("tf_hips-shard"):
                raise RuntimeError("can't create new thread at interpreter shutdown")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for member in members:
            member.client.leave()
        assert all(server._session.is_over for server in servers)
        assert not any(server._session.ended for server in servers)


def test_a_lost_party_is_lost_for_all_servers(certificates: Certificates) -> None:
    with sharded(certificates, 2, {"lost_after_s": 0.3}) as (servers, (a, b)):
        train_all((a, b), 0, 0)
        a.client.close()
        with pytest.raises(PeerError, match="Site `a` was lost"):
            b.train(1, 1)
        for server in servers:
            wait_until(server, lambda session: session.ended is not None)


def test_a_failed_step_is_told_to_all(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_hips.ps.session.waiting.FAILED_AFTER_S", 0.2)
    with sharded(certificates, 2) as (servers, (a, b)):
        train_all((a, b), 0, 0)
        a.client.failed("MemoryError: too large")
        assert [one._session._waiting.failures() for one in servers] == [
            {0: "MemoryError: too large"}
        ] * 2
        with pytest.raises(PeerError, match=r"last step ended with an error\. MemoryError"):
            b.train(1, 1)


def test_a_party_that_fails_at_one_server_need_not_wait_for_the_others(
    certificates: Certificates,
) -> None:
    """The other party does not come, and servers and clients would wait for an hour."""
    patient = {"round_timeout_s": 3600.0}
    with sharded(certificates, 3, patient, compression="fp32") as (servers, (a, b)):
        packets = a.packets(0)
        wrong = packets.copy()
        wrong[16 : 16 + 4 * 72] = np.full(72, np.nan, np.float32).view(np.uint8)
        failing = Later(lambda: a.client.exchange(0, wrong))
        address = servers[1].address  # it has the first tensor
        with pytest.raises(NonFiniteError, match=f"Server {address}, Exchange: Site `a`, round 0"):
            failing.result()
        # The round is as it was, and so are the connections.
        later = Later(lambda: a.client.exchange(0, packets).tobytes())
        [merged] = b.train(0, 0)
        assert later.result() == merged
        assert [merged, *train_all((a, b), 1, 1)] == expected_rounds(2, "fp32")


def test_a_failed_join_leaves_no_party_behind(certificates: Certificates) -> None:
    """Shard 1 takes another compression only; at shard 0 the run may have begun by then."""
    patient = {"join_timeout_s": 3600.0}
    with (
        serving(certificates, shard=(0, 2), **patient) as first,
        serving(certificates, shard=(1, 2), compression="fp16", **patient) as second,
    ):
        address = f"{first.address},{second.address}"
        alone = Later(Party(address, "a", certificates.party("a")).join)
        with pytest.raises(ProtocolError, match=f"{second.address}, Join: `compression` must be"):
            alone.result()  # and does not wait at shard 0 for the other party
        wait_until(first, lambda session: not session._members.children)
        for later in [Later(Party(address, site, certificates.party(site)).join) for site in SITES]:
            with pytest.raises((ProtocolError, PeerError)):
                later.result()
        with parties(first, certificates, address=address, compression="fp16") as members:
            assert train_all(members, 0, 0) == expected_rounds(1, "fp16")


def test_the_state_of_another_shard_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    settings = {"parties": SITES, "tls": certificates.server(), "state_dir": str(tmp_path)}
    with serving(certificates, shard=(1, 3), **settings):
        pass
    for shard in ((0, 3), (1, 2), (0, 1)):
        with pytest.raises(StateError, match=r"shard=\(\d, \d\), as .* shard=\(1, 3\)"):
            Server(ServerConfig(shard=shard, **settings)).start()  # type: ignore[arg-type]


def test_logs_and_metrics_say_which_shard(certificates: Certificates, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    import urllib.request

    told = {"log_dir": str(tmp_path), "metrics": "127.0.0.1:0"}
    with sharded(certificates, 2, told) as (servers, members):
        train_all(members, 0, 0)
        for index, server in enumerate(servers):
            with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as page:
                text = page.read().decode()
            assert f'tf_hips_round{{run="local",shard="{index}"}} 0.0' in text
            assert f'tf_hips_child_up{{run="local",shard="{index}",site="a"}} 1.0' in text
    events = log.read_events(tmp_path)
    listening = [one for one in events if one["event"] == "listen"]
    assert [(one["rank"], one["shard"]) for one in listening] == [(0, [0, 2]), (1, [1, 2])]
    assert Counter(one["rank"] for one in events if one["event"] == "round") == {0: 2, 1: 2}


def test_status_shows_all_servers(
    certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = certificates.identity("operator", "alice")
    options = [
        *("--authority", identity.authority, "--timeout", "0.2"),
        *("--certificate", identity.certificate, "--key", identity.key),
    ]

    def shown(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["status", *arguments, *options])
        return ended.value.code, capsys.readouterr().out

    with sharded(certificates, 2) as (servers, members):
        train_all(members, 0, 2)
        address = ",".join(server.address for server in servers)
        code, text = shown("--server", address)
        assert code == 0
        assert text.count("run local: training, round 2") == 1
        for index, server in enumerate(servers):
            assert f"server {server.address}, shard {index} of 2: up for" in text
            for site in SITES:
                assert f"{index}/2    {site}     there" in text
        code, text = shown("--server", address, "--json")
        assert [one["chunks"] for one in json.loads(text)] == [1, 3]
        code, text = shown("--server", f"{servers[0].address},127.0.0.1:1")
        assert code == 1
        assert "server 127.0.0.1:1: Status: Nothing listens at 127.0.0.1:1" in text
        assert "1/1" in text
