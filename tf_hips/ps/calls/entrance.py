# SPDX-License-Identifier: Apache-2.0
"""What every call of a server goes through: who calls, which session, and what an error becomes.

Every call names run, site and number in its metadata, and is refused unless the caller's
certificate is `party/<site>` and the site is one of the run's. Plain text has no certificates, so
it binds loopback only and must be asked for. Which session a call belongs to is `server`'s to say.

A refusal is a status code and a text; it is counted, and written down unless its peer has had many.
What a session has accepted is durable before its answer goes, or an error that came of it.
"""

import contextlib
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol

import grpc

from tf_hips import log
from tf_hips.errors import (
    ENDED,
    NonFiniteError,
    PacketError,
    PeerError,
    ProtocolError,
    TfHipsError,
    ToleranceError,
)
from tf_hips.ps.calls.admission import Admission, RefusedError, TurnedAwayError
from tf_hips.ps.calls.joint import Lead
from tf_hips.ps.calls.traffic import Traffic
from tf_hips.ps.calls.wait_limits import Waits
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.session import Session
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.session.waiting import STOPPED, HungUpError
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.calls_at_once import CallsAtOnce, CrowdedError
from tf_hips.ps.transport.wire import Call

_CODES: tuple[tuple[type[TfHipsError], grpc.StatusCode], ...] = (
    (PacketError, grpc.StatusCode.INVALID_ARGUMENT),
    (ToleranceError, grpc.StatusCode.NOT_FOUND),  # before those of sums: some are both
    (NonFiniteError, grpc.StatusCode.OUT_OF_RANGE),
    (ProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerError, grpc.StatusCode.ABORTED),
)

# Of a text, and as it travels: gRPC bounds a call's metadata to 8 KiB, or the caller hears of that
# instead, and sends each byte that is not of ASCII as three.
_MOST_CHARACTERS, _MOST_SENT = 2000, 6000


class Host(Protocol):
    """What calls ask of the server that hears them."""

    def session_of(self, *, is_join: bool) -> Session:
        """The session that a call belongs to; a new one where a process joins after the end."""

    def lead_of(self) -> tuple[Lead, Session]:
        """Who rules on rounds for all shards, and the session that it does it for.

        Raises:
            ProtocolError: this server has all of the model, or is not the first shard of it.
        """

    def snapshot(self) -> dict[str, Any]:
        """What there is to tell of the run (`status.snapshot`)."""

    def has_failed(self, session: Session, site: str, text: str) -> None:
        """A step of a child ended with an error."""


class Entrance:
    """The way into one server, and out of it."""

    def __init__(
        self,
        config: ServerConfig,
        waits: Waits,
        admission: Admission,
        traffic: Traffic,
        events: log.EventLog,
        host: Host,
    ) -> None:
        """No call has come.

        Args:
            config: what the server is told.
            waits: how long calls wait.
            admission: who may call.
            traffic: counts calls and refusals.
            events: where refusals are written.
            host: the server.
        """
        self._config = config
        self._waits = waits
        self._admission = admission
        self._traffic = traffic
        self._events = events
        self._host = host
        self._at_once = CallsAtOnce(config.parties)

    def unary(
        self,
        handle: Callable[[Any, Call, Caller, Session], bytes],
        *,
        has_stream: bool = False,
        is_join: bool = False,
        settles: bool = True,
    ) -> Callable[[Any, Any], bytes]:
        """What gRPC calls for a method of children with one answer.

        Args:
            handle: gets the request, or all of them, the call, who calls, and its session.
            has_stream: whether it gets all requests.
            is_join: whether a session that is over gives way to a new one.
            settles: whether the answer waits for what was accepted before it to be durable.
        """

        def run(requests: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
            with self._translated(context):
                call, caller, session = self._identify(context, is_join=is_join)
                with self._at_once.taking(caller.child):
                    request = requests if has_stream else only(requests)
                    with _settling(session):
                        answer = handle(request, call, caller, session)
                    if settles:
                        session.settle()
                return answer
            raise AssertionError("abort returned")

        return run

    def stream(
        self,
        handle: Callable[[Any, Call, Caller, Session, grpc.ServicerContext], Iterator[bytes]],
        *,
        has_stream: bool = False,
    ) -> Callable[[Any, Any], Iterator[bytes]]:
        """What gRPC calls for a method of children whose answer is a stream.

        Args:
            handle: as for `unary`; gets gRPC's context as well.
            has_stream: as for `unary`.
        """

        def run(requests: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._translated(context):
                call, caller, session = self._identify(context)
                with self._at_once.taking(caller.child), _settling(session):
                    request = requests if has_stream else only(requests)
                    yield from handle(request, call, caller, session, context)

        return run

    @contextlib.contextmanager
    def asking(self, context: grpc.ServicerContext) -> Iterator[None]:
        """A call that waits for nothing and shows nobody to be there; operators may make it."""
        with self._translated(context):
            self._admission.check(context, _call_of(context), may_operate=True)
            with self._at_once.asking():
                yield

    @contextlib.contextmanager
    def shard(self, context: grpc.ServicerContext) -> Iterator[tuple[Call, Lead]]:
        """A call of another shard of the run, which is none of its children."""
        with self._translated(context):
            call = _call_of(context)
            self._admission.check_shard(context, call)
            lead, session = self._host.lead_of()
            with _settling(session):
                yield call, lead

    @contextlib.contextmanager
    def _translated(self, context: grpc.ServicerContext) -> Iterator[None]:
        try:
            self._admission.admit(context)
            yield
        except TurnedAwayError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except CrowdedError as error:
            if error.is_news:
                self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            self._traffic.refused()
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except HungUpError as error:  # no refusal
            log.debug("%s", error)
            context.abort(grpc.StatusCode.ABORTED, str(error))
        except RefusedError as error:
            self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, str(error))
        except TfHipsError as error:
            codes = (code for kind, code in _CODES if isinstance(error, kind))
            code = next(codes, grpc.StatusCode.INTERNAL)  # a library that lacks a function
            self._refuse(context, code, str(error))

    def _refuse(self, context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
        text = shortened(text)
        if text in (STOPPED, f"{ENDED}{STOPPED}"):  # whoever has stopped it knows
            context.abort(code, text)
        peer = urllib.parse.unquote(context.peer())  # gRPC quotes the brackets of IPv6
        self._traffic.refused()
        if not self._admission.is_told(context, code):
            context.abort(code, text)
        self._events.write("call_refused", code=code.name, reason=text, peer=peer)
        log.warning("Refused a call of %s: %s", peer, text)
        who = self._admission.note(context, code)
        if who is not None:
            self._events.write("turned_away", who=who)
            log.warning("Calls of `%s` are turned away for the rest of this minute", who)
        context.abort(code, text)
        raise AssertionError("abort returned")

    def _identify(
        self, context: grpc.ServicerContext, *, is_join: bool = False
    ) -> tuple[Call, Caller, Session]:
        call = _call_of(context)
        self._admission.check(context, call)
        waits = self._waits.here
        limit = waits.join_timeout_s if is_join else waits.round_timeout_s
        left = context.time_remaining()
        if left is not None:
            # A little before the caller gives up, so that it hears what it has waited for.
            limit = min(limit, left - min(1.0, 0.1 * left))
        caller = Caller(self._config.parties.index(call.site), call.process, limit)
        session = self._host.session_of(is_join=is_join)
        self._traffic.called(caller.child, call.attempt)
        if not context.add_callback(lambda: session.hang_up(caller)):
            caller.is_gone = True
        return call, caller, session


@contextlib.contextmanager
def _settling(session: Session) -> Iterator[None]:
    """An error is told when what the session had accepted before it is durable."""
    try:
        yield
    except TfHipsError:
        session.settle()
        raise


def only(requests: Iterable[bytes]) -> bytes:
    """The request of a call that has one.

    Raises:
        ProtocolError: it has none.
        HungUpError: its caller has gone before it came.
    """
    try:
        for request in requests:
            return request
    except grpc.RpcError as error:
        raise HungUpError("The caller of a method has hung up before its request came.") from error
    raise ProtocolError("A call must have a request. Received: none")


def shortened(text: str) -> str:
    """A text that may be of another site, as it may stand in an answer, a log or an event."""
    text = log.printable(text[:_MOST_CHARACTERS])
    left = _MOST_SENT
    for place, one in enumerate(text):
        left -= 1 if one.isascii() and one != "%" else 3 * len(one.encode())
        if left < 0:
            return text[:place]
    return text


def _call_of(context: grpc.ServicerContext) -> Call:
    metadata = dict(context.invocation_metadata() or ())
    return Call.from_text(str(metadata.get(wire.METADATA_KEY, "")))
