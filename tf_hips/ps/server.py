# SPDX-License-Identifier: Apache-2.0
"""The global server: gRPC calls of the parties in, the session's answers out.

    Terms, Join, AgreeModel, BeginSync, Leave   unary, JSON
    Upload, Download                            the first weights of child 0, raw bytes
    Exchange                                    both ways at once: packets up, merged packets down
                                                as soon as they are there
    Gather                                      one payload up, the payloads of all down
    Failed                                      a step of the caller ended with an error, JSON
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
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc

from tf_hips import log
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
from tf_hips.ps.members import Caller
from tf_hips.ps.session import Session
from tf_hips.ps.settings import ServerConfig, terms_of
from tf_hips.ps.sockets import split_address
from tf_hips.ps.store import Store
from tf_hips.ps.wire import Call

# An idle child pings once a minute; a server that counts such pings as abuse would cut the
# connection.
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)
_CODES: tuple[tuple[type[TfHipsError], grpc.StatusCode], ...] = (
    (PacketError, grpc.StatusCode.INVALID_ARGUMENT),
    (NonFiniteError, grpc.StatusCode.OUT_OF_RANGE),
    (ProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerError, grpc.StatusCode.ABORTED),
)
# For children to hear why a run has ended, before a server of one run stops.
_GRACE_S = 10.0


class Server:
    """A global server, listening once started."""

    def __init__(self, config: ServerConfig) -> None:
        """A server that does not listen yet."""
        self._config = config
        self._terms = terms_of(config)
        self._lock = threading.Lock()
        self._session = Session(self._terms)
        self._keeper: Keeper | None = None
        self._stopped = threading.Event()
        self._events = log.EventLog(
            config.log_dir, run=config.run, role=tls.SERVER_ROLE, site=tls.SERVER_ROLE, rank=0
        )
        self._admission = Admission(config, self._tell)
        self._server: grpc.Server | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port the server listens at; 0 before `start`."""
        return self._port

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
            check_server(self._config.tls)
        _check_free(self._config.bind)
        if self._config.state_dir is not None:
            self._keeper = Keeper(
                self._config.state_dir, self._config.run, self._terms, self._events
            )
        try:
            if self._keeper is not None:
                self._session = self._keeper.restore() or self._keeper.begin()
            self._listen()
        except BaseException:
            if self._keeper is not None:
                self._keeper.close()  # the run is as it was
                self._keeper = None
            raise
        self._events.write("listen", address=self.address, parties=list(self._config.parties))
        log.info(
            "Global server of run %s listens at %s for the parties %s",
            self._config.run,
            self.address,
            ", ".join(self._config.parties),
        )

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
                    if session.is_started and session.idle_s() > self._config.idle_timeout_s:
                        session.end(f"No party called for {self._config.idle_timeout_s:g} s.")
                    continue
                session.changed.wait_for(session.is_known_to_all, _GRACE_S)
            return None if self._stopped.is_set() else session.ended
        return None

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends the run, if one is on, and stops to listen."""
        self._stopped.set()
        self._session.end("The server was stopped.")
        if self._server is not None:
            self._server.stop(grace_s).wait()
            self._server = None
        if self._pool is not None:
            self._pool.shutdown(wait=False)
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
            options=(*SERVER_OPTIONS, *_keepalive(self._config.lost_after_s)),
            maximum_concurrent_rpcs=8 * children + 8,
        )
        try:
            if self._config.tls is None:
                self._port = server.add_insecure_port(self._config.bind)
            else:
                self._port = server.add_secure_port(
                    self._config.bind, tls.server_credentials(self._config.tls, self._tell)
                )
        except RuntimeError as error:
            raise ConfigError(
                f"`bind` must be a free address of this machine. Received: {self._config.bind}"
            ) from error
        server.start()
        self._server = server

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
            "Failed": grpc.unary_unary_rpc_method_handler(self._unary(self._fail)),
            "Gather": grpc.stream_stream_rpc_method_handler(self._stream(self._gather)),
            "Exchange": grpc.stream_stream_rpc_method_handler(self._stream(self._exchange)),
        }

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
        limit = self._config.join_timeout_s if is_join else self._config.round_timeout_s
        left = context.time_remaining()
        if left is not None:
            # A little before the caller gives up, so that it hears what it has waited for.
            limit = min(limit, left - min(1.0, 0.1 * left))
        caller = Caller(self._config.parties.index(call.site), call.process, limit)
        with self._lock:
            if is_join:
                self._renew(call, caller)
            session = self._session
        session.meet(caller)
        if not context.add_callback(lambda: session.hang_up(caller)):
            caller.is_gone = True
        return call, caller, session

    def _renew(self, call: Call, caller: Caller) -> None:
        """Begins a new session where a process that joins finds none that it could join."""
        if self._session.gives_way(caller):
            reason = (
                f"Site `{call.site}` has come as a new process, and no process of the run that was "
                "restored has come back. That run is given up."
            )
            log.warning("%s", reason)
            self._events.write("given_up", child=caller.child, child_site=call.site)
            self._session.end(reason)
        elif not self._session.is_over or self._config.once:
            return
        self._session = self._keeper.begin() if self._keeper else Session(self._terms)

    def _tell_terms(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        return wire.to_json(
            join_timeout_s=float(self._config.join_timeout_s),
            round_timeout_s=float(self._config.round_timeout_s),
            max_gather_bytes=self._config.max_gather_bytes,
            is_durable=self._keeper is not None,
        )

    def _join(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        fields = wire.from_json(request, workers=int, compression=str, downlink=str, seed=int)
        answer = session.join(caller, **fields)
        self._events.write(
            "join", child=caller.child, child_site=call.site, attempt=call.attempt, **fields
        )
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
        return wire.to_json(held=session.begin_sync(caller, fields["kinds"], fields["bytes"]))

    def _upload(
        self, messages: Iterable[bytes], call: Call, caller: Caller, session: Session
    ) -> bytes:
        position = call.number
        try:
            for message in messages:
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
        return session.download(caller, call.number)

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

    def _fail(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        text = wire.from_json(request, text=str)["text"]
        session.fail(caller, text)
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
            have = _tell_held(context, held, len(self._config.parties))
        received_bytes, sent_bytes = 0, 0
        try:
            for message in messages:
                received_bytes += len(message)
                upload.feed(message)
        except grpc.RpcError as error:
            raise PeerError(f"Site `{call.site}` was cut off in a gather.") from error
        payloads = session.wait_gather(caller, call.number, upload, have)
        session.settle()
        for message in wire.bundle(payloads):
            sent_bytes += len(message)
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
        store = session.begin_round(caller, call.number)
        reader = _Reader(messages, store, session, caller, call)
        refused = len(store.refusals(call.number))
        have: set[int] = set()
        if call.attempt > 0:
            have = _tell_held(
                context, store.delivered(call.number, caller.child), len(store.model.chunks)
            )
        reader.start()
        after, sent_bytes = 0, 0
        while after < len(store.model.chunks):
            after, news = session.wait_results(
                caller, store, call.number, after, reader.has_failed, refused
            )
            reader.check()
            for message in wire.bundle(
                (chunk, memoryview(packet)) for chunk, packet in news if chunk not in have
            ):
                sent_bytes += len(message)
                yield message
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


class _Reader(threading.Thread):
    """Takes in the packets of one exchange, while the call's own thread sends results."""

    def __init__(
        self, messages: Iterable[bytes], store: Store, session: Session, caller: Caller, call: Call
    ) -> None:
        super().__init__(name="tf_hips-reader", daemon=True)
        self.received_bytes = 0
        self._messages = messages
        self._store = store
        self._session = session
        self._caller = caller
        self._number = call.number
        self._site = call.site
        self._error: Exception | None = None

    def has_failed(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Raises what has gone wrong."""
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            assembler = wire.Assembler(self._store.packet_limits(self._number))
            for message in self._messages:
                self.received_bytes += len(message)
                self._store.add(self._number, self._caller.child, assembler.feed(message))
            assembler.finish()
            self._check_complete()
        except grpc.RpcError:
            return  # the connection is gone, and the call's own thread knows
        except Exception as error:  # noqa: BLE001 - handed to the call's own thread, which raises it
            with self._session.changed:
                self._error = error
                self._session.changed.notify_all()

    def _check_complete(self) -> None:
        owed = self._store.missing(self._number).get(self._site)
        if owed is not None and not self._store.has_refused(self._number):
            total = len(self._store.model.chunks)
            raise ProtocolError(
                f"A round has {total} chunks. The stream ended with {owed} delivered."
            )


@contextlib.contextmanager
def _settling(session: Session) -> Iterator[None]:
    """An error is told when what the session had accepted before it is durable."""
    try:
        yield
    except TfHipsError:
        session.settle()
        raise


def _tell_held(context: grpc.ServicerContext, held: Iterable[int], limit: int) -> set[int]:
    """Tells a caller that tries again what the server holds; what the caller holds."""
    metadata = dict(context.invocation_metadata() or ())
    have = wire.ranges_from_text(str(metadata.get(wire.HELD_KEY, "")), limit)
    context.send_initial_metadata(((wire.HELD_KEY, wire.ranges_to_text(held)),))
    return have


def _keepalive(lost_after_s: float) -> tuple[tuple[str, int], ...]:
    """Options by which a link that is silently dead is noticed within half of `lost_after_s`.

    A ping goes out only where nothing has come in for a while, so traffic pays nothing for it.
    """
    quarter_ms = int(250 * min(120.0, max(4.0, lost_after_s)))
    return (
        ("grpc.keepalive_time_ms", quarter_ms),
        ("grpc.keepalive_timeout_ms", quarter_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", quarter_ms),
    )


def _check_free(bind: str) -> None:
    """Raises ConfigError where the port is taken: gRPC would not say so in one sentence."""
    host, port = split_address(bind)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"`bind` must be a free address of this machine. Received: {bind} ({error.strerror})"
        ) from error


def serve(config: ServerConfig, announce: str | Path | None = None) -> None:
    """Runs a server until its run is over (`once`) or the process is told to end.

    Args:
        config: what the server is told.
        announce: file that gets the address, `host:port` and a line feed, as soon as the server
            listens.

    Raises:
        PeerError: with `once`, when the run ended for a reason.
    """
    server = Server(config)
    server.start()
    try:
        if announce is not None:
            path = Path(announce)
            whole = path.with_name(f".{path.name}.{os.getpid()}")
            whole.write_text(f"{server.address}\n", encoding="ascii")
            whole.replace(path)
        reason = server.wait()
    finally:
        server.stop()
    if reason is not None:
        raise PeerError(reason)
