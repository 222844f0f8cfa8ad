# SPDX-License-Identifier: Apache-2.0
"""One connection of one process: what becomes of it where something else fails."""

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import PacketError, PeerError
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.link import Link
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.transport.sockets import Meter

DEADLINE_S = 20.0


@contextlib.contextmanager
def linked() -> Iterator[Link]:
    """A link to an address at which nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()[:2]
        link = Link(Uplink(f"{host}:{port}", "a"), (host, port), None, "run", "process")
        with contextlib.closing(link):
            yield link


def is_closed(channel: grpc.Channel) -> bool:
    try:
        channel.unary_unary("/any/call").future(b"").cancel()
    except ValueError:
        return True
    return False


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[grpc.Channel]]:
    """Those that links have made."""
    made: list[grpc.Channel] = []
    real = grpc.insecure_channel

    def keep(*arguments: Any) -> grpc.Channel:
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(grpc, "insecure_channel", keep)
    yield made
    for channel in made:
        channel.close()  # one that was left open would keep the process of the tests


def test_who_is_interrupted_while_it_connects_leaves_no_channel(
    channels: list[grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Meter) -> None:
        raise KeyboardInterrupt

    with linked() as link:
        with monkeypatch.context() as patch:
            patch.setattr(Meter, "_scan", interrupt)
            with pytest.raises(KeyboardInterrupt):
                link.once("Terms", b"", 0, 0.01)
        assert [is_closed(channel) for channel in channels] == [True]


def test_a_connection_is_closed_where_its_bytes_cannot_be_counted(
    channels: list[grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Meter) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with linked() as link:
        link.stub("unary_unary", "Terms", 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(Meter, "scan", fail)
            with pytest.raises(OSError, match="Too many open files"):
                link.close()
        assert [is_closed(channel) for channel in channels] == [True]


def test_a_server_that_keeps_no_run_is_not_looked_for_where_nobody_listens() -> None:
    with linked() as link:
        host, port = link._address
    link = Link(Uplink(f"{host}:{port}", "a"), (host, port), None, "run", "process")
    with contextlib.closing(link), pytest.raises(PeerError, match="Nothing listens") as caught:
        link.expect()
        link.control("Leave", b"", 10 * DEADLINE_S, comes_back=False)
    assert "Tried for" not in str(caught.value)


def test_a_call_that_has_met_nobody_has_found_no_server() -> None:
    class Error(grpc.RpcError):
        def __init__(self, code: grpc.StatusCode) -> None:
            self.code, self.details = lambda: code, lambda: "Deadline Exceeded"

    with linked() as link:
        for code, is_there in (
            (grpc.StatusCode.DEADLINE_EXCEEDED, False),
            (grpc.StatusCode.CANCELLED, False),
            (grpc.StatusCode.ABORTED, True),
            (grpc.StatusCode.DEADLINE_EXCEEDED, True),  # it was there before
        ):

            def fail(*_: Any, code: grpc.StatusCode = code) -> None:
                raise Error(code)

            with pytest.raises(PeerError):
                link.persist("Terms", 0.0, fail)
            assert link._has_connected == is_there


def test_connecting_and_answer_have_one_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []

    def call(_: bytes, *, timeout: float, metadata: object) -> bytes:
        del metadata
        left.append(timeout)
        return b"answer"

    def stub(*_: object) -> Any:
        threading.Event().wait(0.2)  # for a connection
        return call

    with linked() as link:
        monkeypatch.setattr(link, "stub", stub)
        assert link.once("Terms", b"", 0, 1.0) == b"answer"
        assert link.once("Terms", b"", 0, 0.1) == b"answer"
    assert 0.0 < left[0] <= 0.8
    assert 0.0 < left[1] < 0.01  # 0 would be no limit


def test_a_watch_that_fails_is_begun_again(
    channels: list[grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = threading.Semaphore(0)

    def fail(*_: Any) -> Any:
        tries.release()
        raise OSError(errno.EMFILE, "Too many open files")

    with linked() as link:
        link.stub("unary_unary", "Terms", 0.01)
        monkeypatch.setattr(link, "metadata", fail)
        link.watch()
        for _ in range(3):
            assert tries.acquire(timeout=DEADLINE_S)
        assert link.ended is None
        link.close()
        watcher = link._watcher
        assert watcher is not None
        eventually(lambda: not watcher.is_alive())


@pytest.mark.heavy
def test_who_leaves_at_the_end_of_its_process_connects_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, real = threading.current_thread(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if threading.current_thread() is main:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        real(thread)  # of gRPC and of the server

    server = Server(ServerConfig(("a",), "run", insecure=True))
    server.start()
    try:
        client = Client(Uplink(server.address, "a", None, DEADLINE_S), "run", 1)
        client.join("fp32()", "fp32()", 0)
        client.link._disconnect()  # the connection was lost
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            client.leave()
        assert server._session.is_over
        assert server._session.ended is None
    finally:
        server.stop(0.0)


@pytest.mark.heavy
def test_a_call_whose_channel_another_one_has_closed_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(ServerConfig(("a",), "run", insecure=True))
    server.start()
    try:
        client = Client(Uplink(server.address, "a", None, DEADLINE_S), "run", 1)
        client.join("fp32()", "fp32()", 0)
        link, real = client.link, client.link.metadata
        main, closes = threading.current_thread(), [link._disconnect]

        def metadata(*numbers: int) -> Any:
            if closes and threading.current_thread() is main:
                closes.pop()()  # between the making of a call and its beginning
            return real(*numbers)

        monkeypatch.setattr(link, "metadata", metadata)
        client.backed_up(0, 0)
        assert not closes

        def fail(*_: int) -> Any:
            raise ValueError("of something else")

        monkeypatch.setattr(link, "metadata", fail)
        with pytest.raises(ValueError, match="of something else"):
            client.backed_up(1, 0)

        def refuse(*_: int) -> Any:
            link._disconnect()
            raise PacketError("our own word")

        monkeypatch.setattr(link, "metadata", refuse)
        with pytest.raises(PacketError, match="our own word"):
            client.backed_up(1, 0)
        monkeypatch.undo()
        client.leave()
    finally:
        server.stop(0.0)
