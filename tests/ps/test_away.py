# SPDX-License-Identifier: Apache-2.0
"""Children whose processes end and say why, in whose place others may come."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.ps.parties import DEADLINE_S, parties, serving, train_all
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps import rules
from tf_hips.ps.client.client import Client
from tf_hips.ps.session import away
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.quorum import Quorum
from tf_hips.ps.transport.news import Notice, Tick, news_from_message, news_to_message

PATIENCE_S = 10.0
GONE = "The process of site `b` has ended with ValueError: a rate. Another one has 60 s to take its"
BACK = "Site `b` is there again, as another process."


def caller(child: int, process: str = "first") -> Caller:
    return Caller(child, process, PATIENCE_S)


def begun(**settings: Any) -> Session:
    """The session of three parties that have joined."""
    session = Session(Terms(("a", "b", "c"), None, None, 1 << 30, 60.0, **settings))
    joining = [
        threading.Thread(
            target=session.join, args=(caller(child), 2, "onebit", "same", 7), daemon=True
        )
        for child in range(3)
    ]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(PATIENCE_S)
    assert session.is_started
    return session


@pytest.fixture
def session() -> Iterator[Session]:
    made = begun()
    yield made
    made.end("The test is over.")


def told(session: Session, child: int, count: int) -> list[str]:
    """The first things that a child hears that watches now, which are notices."""
    watch = session.watch(caller(child))
    heard = [next(watch) for _ in range(count)]
    watch.close()  # type: ignore[attr-defined]
    assert all(isinstance(one, Notice) for one in heard)
    return [one.text for one in heard if isinstance(one, Notice)]


def test_the_others_hear_why_a_process_has_ended_and_that_another_has_come(
    session: Session,
) -> None:
    assert session.away(caller(1), "ValueError: a rate.")
    assert not session.away(caller(1), "ValueError: said again.")
    session.join(caller(1, "second"), 2, "onebit", "same", 7)
    for other in (0, 2):
        gone, back = told(session, other, 2)
        assert gone == f"{GONE} place (`--lost-after`)."
        assert back == BACK
    assert not session._away.has_notice(1)
    assert session.ended is None
    # Each process says it for itself, and one that was is heard no more.
    with pytest.raises(ProtocolError, match="is in this run already"):
        session.away(caller(1), "ValueError: of a process that was.")
    assert session.away(caller(1, "second"), "ValueError: another rate.")


def test_who_is_lost_was_lost_for_a_reason(session: Session) -> None:
    session.away(caller(1), "ProtocolError: another order.\n")
    with session.changed:
        session._lose(1)
    assert session.ended == (
        "Site `b` was lost: its connection closed and it did not come back within 60 s. Its "
        "process had ended with ProtocolError: another order."
    )
    with pytest.raises(PeerError, match="another order"):
        session.away(caller(1), "ValueError: behind the end.")


def test_a_reason_is_that_of_the_process_that_has_said_it(session: Session) -> None:
    session.away(caller(1), "ValueError: a rate.")
    session.join(caller(1, "second"), 2, "onebit", "same", 7)
    with session.changed:
        session._lose(1)
    assert session.ended is not None
    assert session.ended.endswith("did not come back within 60 s.")


def test_one_that_ends_without_end_fills_no_logs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "_MOST_TOLD", 5)
    news = []
    for number in range(4):
        news.append(session.away(caller(1, f"{number}" if number else "first"), f"{number}"))
        session.join(caller(1, f"{number + 1}"), 2, "onebit", "same", 7)
    assert news == [True, True, True, False]
    gone = [f"The process of site `b` has ended with {number}." for number in range(3)]
    heard = told(session, 0, 5)
    assert [text[: len(gone[0])] for text in heard[::2]] == gone
    assert heard[1::2] == [BACK, BACK]
    assert not session._away.has_notice(0)


def test_one_of_several_shards_tells_it() -> None:
    second = begun(shard=Shard(1, 2))
    assert second.away(caller(1), "ValueError: a rate.")
    assert not second._away.has_notice(0)
    with second.changed:
        second._lose(1)
    assert second.ended is not None
    assert second.ended.endswith("Its process had ended with ValueError: a rate.")


def test_a_connection_that_may_be_dead_takes_no_notice(session: Session) -> None:
    first = session.watch(caller(0), 0.01)
    assert next(first) == Tick()
    second = session.watch(caller(0), 0.01)
    assert next(second) == Tick()
    session.away(caller(1), "ValueError: a rate.")
    session.away(caller(2), "ValueError: a rate.")
    assert next(first) == Tick()
    assert isinstance(next(second), Notice)
    second.close()  # type: ignore[attr-defined]
    assert isinstance(next(first), Notice)
    first.close()  # type: ignore[attr-defined]


def test_who_has_left_is_waited_for_no_more(session: Session) -> None:
    session.leave(caller(1), None)
    assert not session.away(caller(1), "ValueError: a rate.")
    assert not session._away.has_notice(0)


def test_a_process_whose_site_went_on_alone_is_waited_for_no_more() -> None:
    session = begun(rule=rules.parse("fedasync").text)
    for child in range(3):
        threading.Thread(
            target=session.agree_model, args=(caller(child), [[3]], 0), daemon=True
        ).start()
    eventually(lambda: session.store is not None, PATIENCE_S, changed=session.changed)
    with session.changed:
        session._lose(1)
    assert session.ended is None
    assert not session.away(caller(1), "ProtocolError: has left this run.")
    assert not session._away.has_notice(0)
    session.end("The test is over.")


def test_with_a_quorum_nobody_says_for_how_long_others_wait() -> None:
    session = begun(quorum=Quorum(2))
    session.away(caller(1), "ValueError: a rate.")
    [gone] = told(session, 0, 1)
    assert gone == (
        "The process of site `b` has ended with ValueError: a rate. Another one may take its place."
    )
    session.end("The test is over.")


@pytest.mark.parametrize(
    "error", [ValueError("Cannot invoke RPC on closed channel!"), grpc.FutureCancelledError()]
)
@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("away", "Why this process ends was not heard"),
        ("failed", "That a step failed was not heard"),
        ("leave", "Leaving the run was not heard"),
    ],
)
def test_a_channel_that_another_call_has_closed_is_no_error(
    error: Exception,
    word: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client(Uplink(server="127.0.0.1:1", site="a"), "run", 1)
    monkeypatch.setattr(client, "_welcome", object())

    def closed(*args: object, **more: object) -> bytes:
        raise error

    monkeypatch.setattr(client.link, "once", closed)
    getattr(client, word)("ValueError: a rate")
    assert f"{text} by 127.0.0.1:1: {error}" in caplog.text
    assert client.link.is_closed == (word != "failed")
    client.close()


@pytest.mark.parametrize("word", ["away", "failed", "leave"])
def test_of_a_long_reason_the_beginning_is_said(
    word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error may quote a graph of more than a message may have, and its site waits for nobody."""
    client = Client(Uplink(server="127.0.0.1:1", site="a"), "run", 1)
    monkeypatch.setattr(client, "_welcome", object())
    said: list[bytes] = []

    def hear(method: str, request: bytes, *args: object) -> bytes:
        said.append(request)
        return b""

    monkeypatch.setattr(client.link, "once", hear)
    getattr(client, word)("a step of the graph " * (1 << 16))
    client.close()
    [request] = said
    assert b"a step of the graph a step" in request
    assert not caplog.text


def test_what_is_told_above_goes_to_all_below(session: Session) -> None:
    session.leave(caller(2), None)
    session.pass_on(BACK)
    assert [told(session, child, 1) for child in (0, 1)] == [[BACK], [BACK]]
    assert not session._away.has_notice(2)


def test_a_notice_travels() -> None:
    notice = Notice('Site `b` says "no"; reason, ticket.')
    assert news_from_message(news_to_message(notice)) == notice


@pytest.mark.heavy
def test_a_party_that_computes_hears_of_it_at_once(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        train_all((a, b), 0, 0)
        passed = threading.Event()
        a.client.link.on_notice = lambda text: passed.set()
        b.client.away("ProtocolError: another order.")
        assert passed.wait(DEADLINE_S)
        reason = "The process of site `b` has ended with ProtocolError: another order. Another"
        assert reason in caplog.text
        assert "The process of site b has ended with ProtocolError" in caplog.text  # the server's
        session = server._session
        eventually(lambda: not session._presence.is_there(1), DEADLINE_S, changed=session.changed)
        assert session.ended is None
        a.client.leave()
