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
    Away                                        the caller's process ends, another may come, JSON
    Status                                      what the run is doing, JSON; also for operators
    Pace                                        how many local steps to take (`pacing`), JSON
    Seat, Replica                               of children that vote (`seat`), JSON
    Measure, Moving                             of another shard of the run (`joint`), raw bytes
    Watch                                       open for as long as a child takes part; brings the
                                                reason when the run ends for one

What all of them go through, before and behind that, is in `entrance`.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import grpc

from tf_hips import log
from tf_hips.errors import PeerError
from tf_hips.ps.calls import seat
from tf_hips.ps.calls.admission import Admission
from tf_hips.ps.calls.entrance import Entrance, Host, only, shortened
from tf_hips.ps.calls.joint import MEASURE, MOVING
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
from tf_hips.ps.terms.tree import check_workers, read_groups, read_guards, read_leaves
from tf_hips.ps.transport import keepalive, wire
from tf_hips.ps.transport.news import news_to_message
from tf_hips.ps.transport.parcel import Held
from tf_hips.ps.transport.wire import Call


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
        self._traffic = traffic
        self._events = events
        self._host = host
        self._entrance = Entrance(config, waits, admission, traffic, events, host)
        self._pacing = PaceServer(len(config.parties))
        self._written = Written()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of all methods, by name.

        All take streams: of a method with one request gRPC would wait for that in a thread of the
        server, before anybody has looked who calls.
        """
        one, many = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        unary, stream = self._entrance.unary, self._entrance.stream
        return {
            # Who may begin another run hears them, whatever becomes of this one.
            "Terms": one(unary(self._tell_terms, settles=False)),
            "Join": one(unary(self._join, is_join=True)),
            "AgreeModel": one(unary(self._agree_model)),
            "BeginSync": one(unary(self._begin_sync)),
            "Leave": one(unary(self._leave)),
            "Upload": one(unary(self._upload, has_stream=True)),
            "Download": many(stream(self._download)),
            "Watch": many(stream(self._watch, has_stream=True)),
            "Status": one(self._status),
            "BackedUp": one(unary(self._back_up)),
            "WantBackup": many(stream(self._want_backup)),
            "GiveBackup": one(unary(self._give_backup, has_stream=True)),
            "Failed": one(unary(self._fail)),
            "Away": one(unary(self._note_away)),
            SEAT: one(unary(seat.seat)),
            REPLICA: one(unary(seat.replica)),
            METHOD: many(stream(self._pacing.serve)),
            "Gather": many(stream(self._gather, has_stream=True)),
            "Exchange": many(stream(self._exchange, has_stream=True)),
            MEASURE: many(self._measure),
            MOVING: one(self._moving),
        }

    def _status(self, requests: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
        del requests
        with self._entrance.asking(context):
            return wire.to_json(**self._host.snapshot())
        raise AssertionError("abort returned")

    def _measure(self, messages: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Another shard has measured a round."""
        with self._entrance.shard(context) as (call, lead):
            yield from lead.answer(call.number, messages, context)

    def _moving(self, requests: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
        """Bytes of a round come in at another shard."""
        del requests
        with self._entrance.shard(context) as (_, lead):
            lead.note_moved()
            return b""
        raise AssertionError("abort returned")

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
        only(requests)
        context.send_initial_metadata(())  # the child knows that it has been heard
        tick_s = keepalive.tick_s(self._config.lost_after_s)
        read_ticks(requests, context, tick_s)
        for news in session.watch(caller, tick_s):
            yield news_to_message(news)

    def _leave(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        reason = wire.from_json(request, reason=(str, type(None)))["reason"]
        reason = None if reason is None else shortened(reason)
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
        text = shortened(wire.from_json(request, text=str)["text"])
        is_news, is_written = session.fail(caller, text)
        if is_news:
            self._host.has_failed(session, call.site, text)
        if is_written:
            self._events.write("failed", child=caller.child, child_site=call.site, text=text[:1000])
        return b""

    def _note_away(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        reason = shortened(wire.from_json(request, reason=str)["reason"])
        if session.away(caller, reason):
            self._events.write("away", child=caller.child, child_site=call.site, reason=reason)
            log.warning("The process of site %s has ended with %s", call.site, reason)
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
