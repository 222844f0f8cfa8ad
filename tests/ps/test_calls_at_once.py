# SPDX-License-Identifier: Apache-2.0
"""A child that opens calls without end takes no threads but its own."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.ps.parties import (
    DEADLINE_S,
    SITES,
    Certificates,
    parties,
    raw_channel,
    serving,
    train_all,
)
from tf_hips.ps.server.server import Server
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.calls_at_once import MAX_CALLS, MAX_STATUS, CallsAtOnce, CrowdedError

pytestmark = pytest.mark.heavy  # servers and many calls


def test_the_call_too_many_is_refused_and_told_once() -> None:
    calls = CallsAtOnce(("a", "b"))
    with contextlib.ExitStack() as open_calls:
        for _ in range(MAX_CALLS):
            open_calls.enter_context(calls.taking(0))
        for is_news in (True, False, False):
            with (
                pytest.raises(CrowdedError, match=r"may have 16 calls at once.*site `a`") as caught,
                calls.taking(0),
            ):
                pass
            assert caught.value.is_news == is_news
        with calls.taking(1):
            pass
    with contextlib.ExitStack() as open_calls:
        for _ in range(MAX_CALLS):
            open_calls.enter_context(calls.taking(0))
        with pytest.raises(CrowdedError) as caught, calls.taking(0):
            pass
        assert caught.value.is_news  # there was room in between


def test_a_child_that_opens_calls_without_end_hinders_itself_alone(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        train_all((a, b), 0, 0)
        identity = ((wire.METADATA_KEY, b.call(0).to_text()),)
        with (
            caplog.at_level("WARNING"),
            raw_channel(server.address, certificates.party("b")) as channel,
        ):
            watch = channel.unary_stream(f"/{wire.SERVICE}/Watch")
            watches = [watch(b"", metadata=identity) for _ in range(MAX_CALLS)]
            for one in watches:
                one.initial_metadata()  # it was heard, or refused: `b` watches already
            for _ in range(3):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(f"/{wire.SERVICE}/Terms")(
                        b"", timeout=DEADLINE_S, metadata=identity
                    )
                assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "A site may have 16 calls at once" in caught.value.details()
            lines = [one for one in caplog.records if "calls at once" in one.getMessage()]
            assert len(lines) == 1
            with raw_channel(server.address, certificates.party("a")) as other:
                other.unary_unary(f"/{wire.SERVICE}/Terms")(
                    b"",
                    timeout=DEADLINE_S,
                    metadata=((wire.METADATA_KEY, a.call(0).to_text()),),
                )
        train_all((a, b), 1, 1)  # it tries again until its calls have ended


@pytest.mark.parametrize("site", ["b", "operator/night"])
def test_who_asks_for_the_status_without_end_hinders_nobody_else(
    certificates: Certificates, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the residuals of a whole model, so it may take as long as it likes."""
    end, snapshot = threading.Event(), Server.snapshot

    def slow(server: Server) -> dict[str, Any]:
        end.wait()
        return snapshot(server)

    monkeypatch.setattr(Server, "snapshot", slow)
    role, _, name = site.rpartition("/")
    identity = certificates.identity(role or "party", name)
    with (
        serving(certificates) as server,
        raw_channel(server.address, identity) as channel,
        raw_channel(server.address, certificates.party("a")) as other,
    ):
        status = channel.unary_unary(f"/{wire.SERVICE}/Status")
        calls = [
            status.future(b"", metadata=((wire.METADATA_KEY, f"local/{name}/p/0/0"),))
            for _ in range(2 * MAX_CALLS * len(SITES))
        ]
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for call in calls:
            call.add_done_callback(ended.put)
        try:
            for _ in range(len(calls) - MAX_STATUS):
                assert ended.get(timeout=DEADLINE_S).code() == (grpc.StatusCode.RESOURCE_EXHAUSTED)
            other.unary_unary(f"/{wire.SERVICE}/Terms")(
                b"", timeout=DEADLINE_S, metadata=((wire.METADATA_KEY, "local/a/p/0/0"),)
            )
        finally:
            end.set()
        for _ in range(MAX_STATUS):
            assert ended.get(timeout=DEADLINE_S).code() == grpc.StatusCode.OK


@pytest.mark.parametrize("site", ["b", "stranger"])
def test_calls_whose_request_never_comes_hinder_nobody_else(
    certificates: Certificates, site: str
) -> None:
    """A party of the run, and one that has a certificate and is none of this run."""
    end = threading.Event()

    def silence() -> Iterator[bytes]:
        end.wait()
        yield from ()

    def call_of(caller: str) -> tuple[tuple[str, str], ...]:
        return ((wire.METADATA_KEY, wire.Call("local", caller, "p").to_text()),)

    with (
        serving(certificates) as server,
        raw_channel(server.address, certificates.party(site)) as channel,
        raw_channel(server.address, certificates.party("a")) as other,
    ):
        methods = ("Terms", "Leave", "Status", "Watch", "Moving")
        calls = [
            channel.stream_unary(f"/{wire.SERVICE}/{method}").future(
                silence(), metadata=call_of(site)
            )
            for method in methods * (MAX_CALLS * len(SITES))
        ]
        try:
            # More than a server takes at once: those that are not held open are answered.
            for call in calls[-len(methods) :]:
                call.exception(DEADLINE_S)
            other.unary_unary(f"/{wire.SERVICE}/Terms")(
                b"", timeout=DEADLINE_S, metadata=call_of("a")
            )
        finally:
            for call in calls:
                call.cancel()
            end.set()
