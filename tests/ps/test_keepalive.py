# SPDX-License-Identifier: Apache-2.0
"""A link that is silently dead is found in time by both sides, and a slow one is kept."""

import itertools
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import Party, serving, together, train_all
from tests.ps.relay import Relay
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import ProtocolError
from tf_hips.ps.calls.service import Calls
from tf_hips.ps.client.client import Client
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.session import Session
from tf_hips.ps.session.settings import Terms
from tf_hips.ps.transport import keepalive
from tf_hips.ps.transport.news import TICK, Tick, news_from_message, news_to_message
from tf_hips.ps.transport.wire import Call


@pytest.mark.parametrize("lost_after_s", [0.5, 4.0, 20.0, 120.0, 3600.0])
def test_pings_take_half_of_the_time_and_ticks_come_before_them(lost_after_s: float) -> None:
    told = dict(keepalive.options(lost_after_s))
    pings_s = (told["grpc.keepalive_time_ms"] + told["grpc.http2.ping_timeout_ms"]) / 1000
    assert pings_s <= max(4.0, lost_after_s) / 2
    assert 4 * keepalive.tick_s(lost_after_s) <= told["grpc.keepalive_time_ms"] / 1000
    # The kernel must not give up first, over a tunnel that does not read for a while, nor keep what
    # dead connections have not sent for long.
    assert 600_000 < told["grpc.keepalive_timeout_ms"] <= 3_600_000


def test_both_sides_tick() -> None:
    session = Session(Terms(("a",), None, None, 1 << 30, 60.0))
    session.join(Caller(0, "a", 1.0), 1, "fp32()", "fp32()", 7, None)
    watch = session.watch(Caller(0, "a", 1.0), tick_s=0.001)
    assert [next(watch), next(watch)] == [Tick(), Tick()]
    watch.close()
    assert news_from_message(news_to_message(Tick())) == Tick()
    session.end("over")

    client = Client(Uplink("127.0.0.1:1", "a"), "run", 1)
    client.link.follow(0.001)
    is_over = threading.Event()
    ticks = client.link._ticks(is_over)
    assert [next(ticks), next(ticks)] == [TICK, TICK]
    is_over.set()
    assert list(ticks) == []


def test_a_server_reads_the_ticks_of_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC does not by itself: a child's would stop once the window of the stream is full."""
    monkeypatch.setattr(keepalive, "tick_s", lambda _: 0.002)
    session = Session(Terms(("a",), None, None, 1 << 30, 60.0))
    session.join(Caller(0, "a", 1.0), 1, "fp32()", "fp32()", 7, None)
    is_read = threading.Event()

    def ticks() -> Iterator[bytes]:
        yield from [TICK] * 10
        is_read.set()
        yield from itertools.repeat(TICK)

    ends: list[Callable[[], None]] = []

    def add_callback(end: Callable[[], None]) -> bool:
        ends.append(end)
        return True

    context: Any = types.SimpleNamespace(
        send_initial_metadata=lambda _: None, add_callback=add_callback
    )
    calls: Any = types.SimpleNamespace(_config=types.SimpleNamespace(lost_after_s=4.0))

    def watch(requests: Iterator[bytes]) -> Iterator[bytes]:
        call = Call("run", "a", "process")
        return Calls._watch(calls, requests, call, Caller(0, "a", 1.0), session, context)

    watched = watch(ticks())
    assert next(watched) == TICK
    assert is_read.wait(20.0)
    [end] = ends
    end()  # as gRPC does
    eventually(lambda: "tf_hips-ticks" not in {one.name for one in threading.enumerate()})
    with pytest.raises(ProtocolError, match="must have a request"):
        next(watch(iter(())))


@pytest.mark.heavy  # a server starts
def test_a_party_whose_connection_is_forgotten_comes_back_in_time(
    certificates: Certificates,
) -> None:
    with serving(certificates, lost_after_s=4.0) as server, Relay(server.port) as relay:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(relay.address, "b", certificates.party("b"))
        together(a.join, b.join)
        train_all((a, b), 0, 0)
        began = time.monotonic()
        relay.forget()
        train_all((a, b), 1, 1)
        assert time.monotonic() - began < 10.0  # 60 s, if pings were not the server's
        a.client.close()
        b.client.close()


@pytest.mark.slow  # 4 MiB take as long as their link does, 9 s
def test_a_connection_that_is_slow_one_way_is_kept(certificates: Certificates) -> None:
    """What stands in buffers takes longer than a ping may, and a busy machine is late by less."""
    weights = [np.arange(1 << 20, dtype=np.float32)]
    with serving(certificates, lost_after_s=8.0) as server, Relay(server.port) as relay:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(relay.address, "b", certificates.party("b"))
        together(a.join, b.join)
        before, relay.bytes_per_s = relay.num_connections, 5e5
        _, [fetched] = together(
            lambda: a.client.first_sync(weights), lambda: b.client.first_sync(weights)
        )
        assert relay.num_connections == before
        np.testing.assert_array_equal(fetched, weights[0])
        a.client.close()
        b.client.close()
