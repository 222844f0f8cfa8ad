# SPDX-License-Identifier: Apache-2.0
"""A server: gRPC calls of the parties in, the session's answers out.

With an uplink it is the server of one party of another server (`upper`), else the global server.

    Terms, Join, AgreeModel, BeginSync, Leave   unary, JSON
    Upload, Download                            the first weights of child 0, raw bytes
    Exchange                                    both ways at once: packets up, merged packets down
                                                as soon as they are there
    Gather                                      one payload up, the payloads of all down
    BackedUp                                    where the caller could come back to, JSON
    Failed                                      a step of the caller ended with an error, JSON
    Status                                      what the run is doing, JSON; also for operators
    Watch                                       open for as long as a child takes part; brings the
                                                reason when the run ends for one

Every call names run, site and number in its metadata, and is refused unless the caller's
certificate is `party/<site>` and the site is one of the run's. Plain text has no certificates, so
it binds loopback only and must be asked for.

A server whose children have all left is ready for them to come again, unless it serves one run only
(`once`). One with a `state_dir` goes on with the run that it finds there (`durable`), and answers
when what it has accepted is durable. Imports no TensorFlow: a server starts in about a second.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import grpc

from tf_hips import log
from tf_hips.config import Tls
from tf_hips.errors import (
    ConfigError,
    NonFiniteError,
    PacketError,
    PeerError,
    ProtocolError,
    TfHipsError,
)
from tf_hips.ps import tls, wire
from tf_hips.ps.admission import Admission, RefusedError, TurnedAwayError
from tf_hips.ps.diagnosis import check_server
from tf_hips.ps.durable import Keeper
from tf_hips.ps.listening import SERVER_OPTIONS, check_free, keepalive
from tf_hips.ps.members import Caller
from tf_hips.ps.session import Session
from tf_hips.ps.settings import ServerConfig, terms_of
from tf_hips.ps.shards import connect
from tf_hips.ps.status import Metrics, snapshot
from tf_hips.ps.streams import Reader, tell_held, weight_of
from tf_hips.ps.traffic import Traffic
from tf_hips.ps.tree import read_leaves
from tf_hips.ps.upper import Upper
from tf_hips.ps.waits import Waits
from tf_hips.ps.wire import Call

_CODES: tuple[tuple[type[TfHipsError], grpc.StatusCode], ...] = (
    (PacketError, grpc.StatusCode.INVALID_ARGUMENT),
    (NonFiniteError, grpc.StatusCode.OUT_OF_RANGE),
    (ProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerError, grpc.StatusCode.ABORTED),
)
# For children to hear why a run has ended, before a server of one run stops.
_GRACE_S = 10.0


class Server:
    """A server, listening once started."""

    def __init__(self, config: ServerConfig) -> None:
        """A server that does not listen yet."""
        self._config = config
        self._terms = terms_of(config)
        self._lock = threading.Lock()
        self._session = Session(self._terms)
        self._keeper: Keeper | None = None
        self._stopped = threading.Event()
        self._role, site = tls.SERVER_ROLE, tls.SERVER_ROLE
        if config.uplink is not None:
            self._role, site = tls.PARTY_SERVER_ROLE, config.uplink.site
        self._events = log.EventLog(
            config.log_dir,
            run=config.run,
            role=self._role,
            site=site,
            rank=self._terms.shard.index,
        )
        self._waits = Waits(config)
        self._upper: Upper | None = None
        self._admission = Admission(config, self._tell)
        self._traffic = Traffic(len(config.parties))
        self._metrics: Metrics | None = None
        self._server: grpc.Server | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port the server listens at; 0 before `start`."""
        return self._port

    @property
    def metrics_address(self) -> str | None:
        """`host:port` of the metrics; None: there are none."""
        return self._metrics.address if self._metrics is not None else None

    @property
    def address(self) -> str:
        """`host:port` the server listens at."""
        return f"{self._config.bind.rpartition(':')[0]}:{self._port}"

    def start(self) -> None:
        """Starts to listen.

        Raises:
            ConfigError: the address is taken or not this machine's, or a certificate cannot be
                used, or another server holds the state.
            StateError: the state is damaged, or another run's.
            PeerError: the state cannot be written.
        """
        if self._config.tls is not None:
            self._check_identity(self._config.tls)
        if self._config.uplink is not None:
            connect(self._config.uplink, self._config.run, 1).close()  # whether it can be used
        check_free(self._config.bind)
        if self._config.state_dir is not None:
            self._keeper = Keeper(
                self._config.state_dir, self._config.run, self._terms, self._events
            )
        try:
            if self._keeper is not None:
                self._session = self._keeper.restore() or self._keeper.begin()
            if self._config.metrics is not None:
                self._metrics = Metrics(self._config.metrics, self._snapshot)
            self._listen()
            self._pass_up()
        except BaseException:
            self._stop_metrics()
            if self._keeper is not None:
                self._keeper.close()  # the run is as it was
                self._keeper = None
            raise
        shard = self._terms.shard
        self._events.write(
            "listen",
            address=self.address,
            parties=list(self._config.parties),
            shard=list(shard.numbers),
        )
        uplink = self._config.uplink
        log.info(
            "%s%s of run %s listens at %s for the parties %s",
            "Global server" if uplink is None else f"Server of party {uplink.site}",
            "" if shard.is_whole else f", {shard},",
            self._config.run,
            self.address,
            ", ".join(self._config.parties),
        )
        if self._metrics is not None:
            log.info("Metrics at http://%s/metrics", self._metrics.address)
            if self._metrics.is_public:
                log.warning("Metrics are plain HTTP for whoever reaches this address")

    def wait(self) -> str | None:
        """Waits until the run is over and `once` is set, or until `stop`.

        Returns:
            None after a run that all children left in peace or after `stop`, else why the run
            ended.
        """
        while not self._stopped.is_set():
            session = self._session
            with session.changed:
                # Once a second it looks whether another session has begun, or this one sleeps.
                if not session.changed.wait_for(functools.partial(self._is_done, session), 1.0):
                    # Of several servers the first hears all calls; by its end the others end.
                    is_first = self._terms.shard.index == 0
                    limit_s = self._config.idle_timeout_s
                    if is_first and session.is_started and session.idle_s() > limit_s:
                        session.end(f"No party called for {limit_s:g} s.")
                    continue
                session.changed.wait_for(session.is_known_to_all, _GRACE_S)
            return None if self._stopped.is_set() else session.ended
        return None

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends the run, if one is on, and stops to listen."""
        self._stopped.set()
        with self._session.changed:
            if not self._session.is_over:  # who hears later of a run that is over, hears why
                self._session.end("The server was stopped.")
        if self._server is not None:
            self._server.stop(grace_s).wait()
            self._server = None
        if self._upper is not None:
            self._upper.close()
            self._upper = None
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._stop_metrics()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        self._events.close()

    def _listen(self) -> None:
        children = len(self._config.parties)
        # Per child: a watch and an exchange, the same again whose connection is gone and which have
        # not noticed, control calls.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            6 * children + 4, thread_name_prefix="tf_hips-server"
        )
        server = grpc.server(
            self._pool,
            handlers=(grpc.method_handlers_generic_handler(wire.SERVICE, self._handlers()),),
            options=(*SERVER_OPTIONS, *keepalive(self._config.lost_after_s)),
            maximum_concurrent_rpcs=8 * children + 8,
        )
        try:
            if self._config.tls is None:
                self._port = server.add_insecure_port(self._config.bind)
            else:
                self._port = server.add_secure_port(
                    self._config.bind,
                    tls.server_credentials(self._config.tls, self._check_identity, self._tell),
                )
        except RuntimeError as error:
            raise ConfigError(
                f"`bind` must be a free address of this machine. Received: {self._config.bind}"
            ) from error
        server.start()
        self._server = server

    def _stop_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.stop()
            self._metrics = None

    def _tell(self, text: str) -> None:
        """Says what has become of a file that has changed."""
        self._events.write("changed", text=text)
        log.warning("%s", text)

    def _is_done(self, session: Session) -> bool:
        return self._stopped.is_set() or (self._config.once and session.is_over)

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Terms": grpc.unary_unary_rpc_method_handler(self._unary(self._tell_terms)),
            "Join": grpc.unary_unary_rpc_method_handler(self._unary(self._join)),
            "AgreeModel": grpc.unary_unary_rpc_method_handler(self._unary(self._agree_model)),
            "BeginSync": grpc.unary_unary_rpc_method_handler(self._unary(self._begin_sync)),
            "Leave": grpc.unary_unary_rpc_method_handler(self._unary(self._leave)),
            "Upload": grpc.stream_unary_rpc_method_handler(self._unary(self._upload)),
            "Download": grpc.unary_stream_rpc_method_handler(self._stream(self._download)),
            "Watch": grpc.unary_stream_rpc_method_handler(self._stream(self._watch)),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "BackedUp": grpc.unary_unary_rpc_method_handler(self._unary(self._back_up)),
            "Failed": grpc.unary_unary_rpc_method_handler(self._unary(self._fail)),
            "Gather": grpc.stream_stream_rpc_method_handler(self._stream(self._gather)),
            "Exchange": grpc.stream_stream_rpc_method_handler(self._stream(self._exchange)),
        }

    def _status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Not one of the session's calls: it waits for nothing, and shows nobody to be there."""
        del request
        with self._translated(context):
            metadata = dict(context.invocation_metadata() or ())
            call = Call.from_text(str(metadata.get(wire.METADATA_KEY, "")))
            self._admission.check(context, call, may_operate=True)
            return wire.to_json(**self._snapshot())
        raise AssertionError("abort returned")

    def _unary(
        self, handle: Callable[[Any, Call, Caller, Session], bytes]
    ) -> Callable[[Any, Any], bytes]:
        def run(request: Any, context: grpc.ServicerContext) -> bytes:
            with self._translated(context):
                call, caller, session = self._identify(context, is_join=handle == self._join)
                with _settling(session):
                    answer = handle(request, call, caller, session)
                if handle != self._tell_terms:  # who may begin another run must hear them
                    session.settle()
                return answer
            raise AssertionError("abort returned")

        return run

    def _stream(
        self, handle: Callable[[Any, Call, Caller, Session, grpc.ServicerContext], Iterator[bytes]]
    ) -> Callable[[Any, Any], Iterator[bytes]]:
        def run(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._translated(context):
                call, caller, session = self._identify(context)
                with _settling(session):
                    yield from handle(request, call, caller, session, context)

        return run

    @contextlib.contextmanager
    def _translated(self, context: grpc.ServicerContext) -> Iterator[None]:
        try:
            self._admission.admit(context)
            yield
        except TurnedAwayError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except RefusedError as error:
            self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, str(error))
        except TfHipsError as error:
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            self._refuse(context, code, str(error))

    def _refuse(self, context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
        text = text[:2000]  # gRPC bounds a call's metadata to 8 KiB
        self._traffic.refused()
        self._events.write("refused", code=code.name, reason=text, peer=context.peer())
        log.warning("Refused a call of %s: %s", context.peer(), text)
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
        with self._lock:
            if is_join:
                self._renew()
            session = self._session
        self._traffic.called(caller.child, call.attempt)
        if not context.add_callback(lambda: session.hang_up(caller)):
            caller.is_gone = True
        return call, caller, session

    def _renew(self) -> None:
        """Begins a new session where a process that joins finds one that is over."""
        if not self._session.is_over or self._config.once or self._stopped.is_set():
            return
        self._session = self._keeper.begin() if self._keeper else Session(self._terms)
        self._pass_up()

    def _pass_up(self) -> None:
        """Takes the session to the server above, if there is one."""
        if self._waits.uplink is not None:
            uplink, waits = self._waits.uplink, self._waits
            self._upper = Upper(
                uplink,
                self._config.run,
                self._session,
                self._events,
                lambda: waits.ask(uplink.deadline_s),
            )
            self._upper.start()

    def _snapshot(self) -> dict[str, Any]:
        above = self._upper.describe() if self._upper is not None else None
        return snapshot(self._config, self._session, self._traffic) | {"uplink": above}

    def _check_identity(self, identity: Tls) -> None:
        check_server(identity, self._role)

    def _tell_terms(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        return wire.to_json(
            **dataclasses.asdict(self._waits.ask(caller.patience_s)),
            is_durable=self._keeper is not None,
            shard=self._terms.shard.numbers,
            is_over=session.is_over,
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
            above=(str, type(None)),
        )
        fields["leaves"] = read_leaves(fields["leaves"], call.site, fields["workers"])
        answer = session.join(caller, **fields)
        self._events.write(
            "join",
            child=caller.child,
            child_site=call.site,
            attempt=call.attempt,
            is_back=answer["is_back"],
            **fields,
        )
        if not answer["is_back"]:
            log.info("Site %s has joined with %d workers", call.site, fields["workers"])
        return wire.to_json(**answer)

    def _agree_model(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        fields = wire.from_json(request, shapes=list, round=int)
        session.agree_model(caller, fields["shapes"], fields["round"])
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
            for message in messages:
                self._traffic.received(caller.child, len(message))
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
        for message in session.download(caller, call.number):
            self._traffic.sent(caller.child, len(message))
            yield message

    def _watch(
        self,
        request: bytes,
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        context.send_initial_metadata(())  # the child knows that it has been heard
        for reason, error in session.watch(caller):
            yield wire.to_json(reason=reason, error=error.__name__)

    def _leave(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        reason = wire.from_json(request, reason=(str, type(None)))["reason"]
        session.leave(caller, reason)
        self._events.write("leave", child=caller.child, child_site=call.site, reason=reason)
        log.info("Site %s has left%s", call.site, f": {reason}" if reason else "")
        return b""

    def _back_up(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        fields = wire.from_json(request, session=str, round=int, number=int)
        session.back_up(caller, fields["session"], fields["round"], fields["number"])
        return b""

    def _fail(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        text = wire.from_json(request, text=str)["text"]
        session.fail(caller, text)
        if self._upper is not None and session.have_all_failed:
            self._upper.failed(call.site, text)
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
        began = time.monotonic()
        upload = session.begin_gather(caller, call.number)
        have: set[int] = set()
        if call.attempt > 0:
            held = {0} if session.has_payload(caller, call.number) else set()
            have = tell_held(context, held, session.num_leaves)
        received_bytes, sent_bytes = 0, 0
        try:
            for message in messages:
                received_bytes += len(message)
                self._traffic.received(caller.child, len(message))
                upload.feed(message)
        except grpc.RpcError as error:
            raise PeerError(f"Site `{call.site}` was cut off in a gather.") from error
        while (payloads := session.wait_gather(caller, call.number, upload, have)) is None:
            yield b""  # others go on: the child waits on
        session.settle()
        for message in wire.bundle(payloads):
            sent_bytes += len(message)
            self._traffic.sent(caller.child, len(message))
            yield message
        self._events.write(
            "gather",
            number=call.number,
            child=caller.child,
            child_site=call.site,
            attempt=call.attempt,
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
            duration_us=int(1e6 * (time.monotonic() - began)),
        )

    def _exchange(
        self,
        messages: Iterable[bytes],
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        began = time.monotonic()
        store = session.begin_round(caller, call.number, weight_of(context))
        reader = Reader(messages, store, session, caller, call, self._traffic)
        refused = len(store.refusals(call.number))
        have: set[int] = set()
        if call.attempt > 0:
            have = tell_held(
                context, store.delivered(call.number, caller.child), len(store.model.chunks)
            )
        reader.start()
        after, sent_bytes = 0, 0
        while after < len(store.chunks):
            after, news = session.wait_results(
                caller, store, call.number, after, reader.has_failed, refused
            )
            reader.check()
            if not news:
                yield b""  # others are sending: the child waits on
            for message in wire.bundle(
                (chunk, memoryview(packet)) for chunk, packet in news if chunk not in have
            ):
                sent_bytes += len(message)
                self._traffic.sent(caller.child, len(message))
                yield message
        self._traffic.finished_round(caller.child, time.monotonic() - began)
        self._events.write(
            "round",
            round=call.number,
            child=caller.child,
            child_site=call.site,
            attempt=call.attempt,
            received_bytes=reader.received_bytes,
            sent_bytes=sent_bytes,
            duration_us=int(1e6 * (time.monotonic() - began)),
        )


@contextlib.contextmanager
def _settling(session: Session) -> Iterator[None]:
    """An error is told when what the session had accepted before it is durable."""
    try:
        yield
    except TfHipsError:
        session.settle()
        raise
