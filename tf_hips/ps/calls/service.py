# SPDX-License-Identifier: Apache-2.0
"""The calls of a server's children: gRPC in, what the session makes of it out.

    Terms, Join, AgreeModel, BeginSync, Leave   unary, JSON
    Upload, Download                            the first weights of child 0, raw bytes
    Exchange                                    both ways at once: packets up, merged packets down
                                                as soon as they are there
    Gather                                      one payload up, the payloads of all down
    BackedUp                                    where the caller could come back to, JSON
    WantBackup, GiveBackup                      a backup of another child down, one's own up
    Failed                                      a step of the caller ended with an error, JSON
    Status                                      what the run is doing, JSON; also for operators
    Pace                                        how many local steps to take (`pacing`), JSON
    Seat, Replica                               of children that vote (`seat`), JSON
    Measure, Moving                             of another shard of the run (`joint`), raw bytes
    Watch                                       open for as long as a child takes part; brings the
                                                reason when the run ends for one

Every call names run, site and number in its metadata, and is refused unless the caller's
certificate is `party/<site>` and the site is one of the run's. Plain text has no certificates, so
it binds loopback only and must be asked for. Which session a call belongs to is `server`'s to say.
"""

import contextlib
import dataclasses
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
from tf_hips.ps.calls import seat
from tf_hips.ps.calls.admission import Admission, RefusedError, TurnedAwayError
from tf_hips.ps.calls.joint import MEASURE, MOVING, Lead
from tf_hips.ps.calls.pacing import METHOD, PaceServer
from tf_hips.ps.calls.sketch import poll_of
from tf_hips.ps.calls.streams import Reader, read_ticks, tell_held, weight_of
from tf_hips.ps.calls.traffic import Flow, Traffic
from tf_hips.ps.calls.wait_limits import Waits
from tf_hips.ps.calls.written import Written
from tf_hips.ps.client.vote import REPLICA, SEAT
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.moves import LEAST_BYTES_PER_S
from tf_hips.ps.session.session import Session
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.session.waiting import STOPPED, HungUpError
from tf_hips.ps.terms.tree import check_workers, read_groups, read_guards, read_leaves
from tf_hips.ps.transport import keepalive, wire
from tf_hips.ps.transport.calls_at_once import CallsAtOnce, CrowdedError
from tf_hips.ps.transport.news import news_to_message
from tf_hips.ps.transport.parcel import Held
from tf_hips.ps.transport.wire import Call

_CODES: tuple[tuple[type[TfHipsError], grpc.StatusCode], ...] = (
    (PacketError, grpc.StatusCode.INVALID_ARGUMENT),
    (ToleranceError, grpc.StatusCode.NOT_FOUND),  # before those of sums: some are both
    (NonFiniteError, grpc.StatusCode.OUT_OF_RANGE),
    (ProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerError, grpc.StatusCode.ABORTED),
)

_MOST_CHARACTERS = 2000  # of a text of another site


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


class Calls:
    """The calls of one server."""

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
            traffic: counts what moves.
            events: where calls are written.
            host: the server.
        """
        self._config = config
        self._waits = waits
        self._admission = admission
        self._traffic = traffic
        self._events = events
        self._host = host
        self._pacing = PaceServer(len(config.parties))
        self._at_once = CallsAtOnce(config.parties)
        self._written = Written()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of all methods, by name.

        All take streams: of a method with one request gRPC would wait for that in a thread of the
        server, before anybody has looked who calls.
        """
        unary, stream = (
            grpc.stream_unary_rpc_method_handler,
            grpc.stream_stream_rpc_method_handler,
        )
        return {
            "Terms": unary(self._unary(self._tell_terms)),
            "Join": unary(self._unary(self._join)),
            "AgreeModel": unary(self._unary(self._agree_model)),
            "BeginSync": unary(self._unary(self._begin_sync)),
            "Leave": unary(self._unary(self._leave)),
            "Upload": unary(self._unary(self._upload, has_stream=True)),
            "Download": stream(self._stream(self._download)),
            "Watch": stream(self._stream(self._watch, has_stream=True)),
            "Status": unary(self._status),
            "BackedUp": unary(self._unary(self._back_up)),
            "WantBackup": stream(self._stream(self._want_backup)),
            "GiveBackup": unary(self._unary(self._give_backup, has_stream=True)),
            "Failed": unary(self._unary(self._fail)),
            SEAT: unary(self._unary(seat.seat)),
            REPLICA: unary(self._unary(seat.replica)),
            METHOD: stream(self._stream(self._pacing.serve)),
            "Gather": stream(self._stream(self._gather, has_stream=True)),
            "Exchange": stream(self._stream(self._exchange, has_stream=True)),
            MEASURE: stream(self._measure),
            MOVING: unary(self._moving),
        }

    def _status(self, requests: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
        """Not one of the session's calls: it waits for nothing, and shows nobody to be there."""
        del requests
        with self._translated(context):
            metadata = dict(context.invocation_metadata() or ())
            call = Call.from_text(str(metadata.get(wire.METADATA_KEY, "")))
            self._admission.check(context, call, may_operate=True)
            with self._at_once.asking():
                return wire.to_json(**self._host.snapshot())
        raise AssertionError("abort returned")

    def _measure(self, messages: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Not one of a child's calls: another shard has measured a round."""
        with self._translated(context):
            call, lead, session = self._identify_shard(context)
            with _settling(session):
                yield from lead.answer(call.number, messages, context)

    def _moving(self, requests: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
        """Not one of a child's calls: bytes of a round come in at another shard."""
        del requests
        with self._translated(context):
            self._identify_shard(context)[1].note_moved()
            return b""
        raise AssertionError("abort returned")

    def _identify_shard(self, context: grpc.ServicerContext) -> tuple[Call, Lead, Session]:
        metadata = dict(context.invocation_metadata() or ())
        call = Call.from_text(str(metadata.get(wire.METADATA_KEY, "")))
        self._admission.check_shard(context, call)
        return call, *self._host.lead_of()

    def _unary(
        self, handle: Callable[[Any, Call, Caller, Session], bytes], *, has_stream: bool = False
    ) -> Callable[[Any, Any], bytes]:
        def run(requests: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
            with self._translated(context):
                call, caller, session = self._identify(context, is_join=handle == self._join)
                with self._at_once.taking(caller.child):
                    request = requests if has_stream else _only(requests)
                    with _settling(session):
                        answer = handle(request, call, caller, session)
                    if handle != self._tell_terms:  # who may begin another run must hear them
                        session.settle()
                return answer
            raise AssertionError("abort returned")

        return run

    def _stream(
        self,
        handle: Callable[[Any, Call, Caller, Session, grpc.ServicerContext], Iterator[bytes]],
        *,
        has_stream: bool = False,
    ) -> Callable[[Any, Any], Iterator[bytes]]:
        def run(requests: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._translated(context):
                call, caller, session = self._identify(context)
                with self._at_once.taking(caller.child), _settling(session):
                    request = requests if has_stream else _only(requests)
                    yield from handle(request, call, caller, session, context)

        return run

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
        text = log.printable(text[:_MOST_CHARACTERS])  # gRPC bounds a call's metadata to 8 KiB
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
        metadata = dict(context.invocation_metadata() or ())
        call = Call.from_text(str(metadata.get(wire.METADATA_KEY, "")))
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

    def _tell_terms(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        return wire.to_json(
            **dataclasses.asdict(self._waits.ask(caller.patience_s)),
            is_durable=self._config.state_dir is not None,
            shard=self._config.shard,
            is_over=session.is_over,
            absent=session.absent(),
            lost_after_s=float(self._config.lost_after_s),
        )

    def _join(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        fields = wire.from_json(
            request,
            workers=int,
            compression=str,
            downlink=str,
            seed=int,
            rule=(str, type(None)),
            leaves=(list, type(None)),
            groups=(int, type(None)),
            above=(str, type(None)),
            guards=(list, type(None)),
        )
        is_leaf = fields["leaves"] is None
        fields["leaves"] = read_leaves(fields["leaves"], call.site, fields["workers"])
        fields["groups"] = read_groups(fields["groups"], fields["workers"], is_leaf=is_leaf)
        fields["guards"] = read_guards(fields["guards"], is_leaf=is_leaf)
        answer = session.join(caller, **fields)
        self._pacing.begins(session)
        if self._written.is_of_another(session.token, caller.child, "join", call.process):
            if answer["is_back"]:  # as it was
                del fields["leaves"], fields["guards"]
            self._events.write(
                "join",
                child=caller.child,
                child_site=call.site,
                attempt=call.attempt,
                is_back=answer["is_back"],
                **fields,
            )
            if not answer["is_back"]:
                ending = "" if fields["workers"] == 1 else "s"
                log.info(
                    "Site %s has joined with %d worker%s", call.site, fields["workers"], ending
                )
        return wire.to_json(**answer)

    def _agree_model(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        fields = wire.from_json(request, shapes=list, round=int)
        session.agree_model(caller, fields["shapes"], fields["round"])
        if self._written.is_of_another(session.token, caller.child, "model", call.process):
            self._events.write(
                "model",
                child=caller.child,
                child_site=call.site,
                tensors=len(fields["shapes"]),
                round=fields["round"],
            )
        return b""

    def _begin_sync(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        fields = wire.from_json(request, kinds=list, bytes=int)
        held, fetches = session.begin_sync(caller, fields["kinds"], fields["bytes"])
        return wire.to_json(held=held, fetches=fetches)

    def _upload(
        self, messages: Iterable[bytes], call: Call, caller: Caller, session: Session
    ) -> bytes:
        position = call.number
        try:
            for message in Flow(self._traffic, caller.child).coming(messages):
                position = session.upload(caller, position, message)
        except grpc.RpcError as error:
            raise PeerError(
                f"Site `{call.site}` was cut off in the first synchronisation."
            ) from error
        return b""

    def _download(
        self,
        request: bytes,
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        flow = Flow(self._traffic, caller.child)
        yield from flow.going(session.download(caller, call.number))

    def _watch(
        self,
        requests: Iterable[bytes],
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        _only(requests)
        context.send_initial_metadata(())  # the child knows that it has been heard
        tick_s = keepalive.tick_s(self._config.lost_after_s)
        read_ticks(requests, context, tick_s)
        for news in session.watch(caller, tick_s):
            yield news_to_message(news)

    def _leave(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        reason = wire.from_json(request, reason=(str, type(None)))["reason"]
        reason = None if reason is None else log.printable(reason[:_MOST_CHARACTERS])
        session.leave(caller, reason)
        if self._written.is_of_another(session.token, caller.child, "leave", call.process):
            self._events.write("leave", child=caller.child, child_site=call.site, reason=reason)
            log.info("Site %s has left%s", call.site, f": {reason}" if reason else "")
        return b""

    def _back_up(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        fields = wire.from_json(request, session=str, round=int, number=int)
        session.back_up(caller, fields["session"], fields["round"], fields["number"])
        return b""

    def _want_backup(
        self,
        request: bytes,
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        fields = wire.from_json(request, parcel=str, bytes=int, workers=int)
        held = Held.told(fields["parcel"], fields["bytes"])
        check_workers([(call.site, fields["workers"])])
        flow = Flow(self._traffic, caller.child)
        yield from flow.going(session.want_backup(caller, held, fields["workers"]))
        if self._written.is_of_another(session.token, caller.child, "handed_over", call.process):
            told = flow.told()
            self._events.write("handed_over", child=caller.child, child_site=call.site, **told)

    def _give_backup(
        self, messages: Iterable[bytes], call: Call, caller: Caller, session: Session
    ) -> bytes:
        flow = Flow(self._traffic, caller.child)
        try:
            session.handover.give(caller, flow.coming(messages))
        except grpc.RpcError as error:
            raise PeerError(f"Site `{call.site}` was cut off while it sent a backup.") from error
        return b""

    def _fail(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        text = log.printable(wire.from_json(request, text=str)["text"][:_MOST_CHARACTERS])
        is_news, is_written = session.fail(caller, text)
        if is_news:
            self._host.has_failed(session, call.site, text)
        if is_written:
            self._events.write("failed", child=caller.child, child_site=call.site, text=text[:1000])
        return b""

    def _gather(
        self,
        messages: Iterable[bytes],
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        flow = Flow(self._traffic, caller.child)
        upload = session.begin_gather(caller, call.number)
        have: set[int] = set()
        if call.attempt > 0:
            held = {0} if session.has_payload(caller, call.number) else set()
            have = tell_held(context, held, session.num_leaves + 1)
        try:
            for message in flow.coming(messages):
                upload.feed(message)
        except grpc.RpcError as error:
            raise PeerError(f"Site `{call.site}` was cut off in a gather.") from error
        while (payloads := session.wait_gather(caller, call.number, upload, have)) is None:
            yield b""  # others go on: the child waits on
        session.settle()
        yield from flow.going(wire.bundle(payloads))
        if self._written.is_new(session.token, caller.child, "gather", call.number):
            self._events.write(
                "gather",
                number=call.number,
                child=caller.child,
                child_site=call.site,
                attempt=call.attempt,
                **flow.told(),
            )

    def _exchange(
        self,
        messages: Iterable[bytes],
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        flow = Flow(self._traffic, caller.child)
        store = session.begin_round(caller, call.number, weight_of(context))
        poll = poll_of(store, call.number, caller.child, context)
        # Servers that share a model share what a child sends at once.
        step_bytes = LEAST_BYTES_PER_S * self._waits.here.round_timeout_s / self._config.shard[1]
        reader = Reader(flow.coming(messages), store, session, caller, call.number, step_bytes)
        refused = len(store.refusals(call.number))
        have: set[int] = set()
        if poll.vote():
            session.note_moved()
            session.goes_on(caller.child)
        if call.attempt > 0:
            have = tell_held(
                context, store.delivered(call.number, caller.child), len(store.model.chunks)
            )
        reader.start()
        after = 0
        with poll.counting(lambda: flow.received_bytes):
            while after < len(store.chunks):
                after, news = session.wait_results(
                    caller,
                    store,
                    call.number,
                    after,
                    lambda: reader.has_failed() or poll.is_due,
                    refused,
                )
                reader.check()
                yield from flow.going(poll.messages())
                if not news:
                    yield b""  # others are sending: the child waits on
                packets = (
                    (chunk, memoryview(packet)) for chunk, packet in news if chunk not in have
                )
                yield from flow.going(wire.bundle(packets))
        if self._written.is_new(session.token, caller.child, "round", call.number):
            self._traffic.finished_round(caller.child, flow.seconds)
            self._events.write(
                "round",
                round=call.number,
                child=caller.child,
                child_site=call.site,
                attempt=call.attempt,
                **flow.told(),
            )


@contextlib.contextmanager
def _settling(session: Session) -> Iterator[None]:
    """An error is told when what the session had accepted before it is durable."""
    try:
        yield
    except TfHipsError:
        session.settle()
        raise


def _only(requests: Iterable[bytes]) -> bytes:
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
