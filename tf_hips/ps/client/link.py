# SPDX-License-Identifier: Apache-2.0
"""A child's connection to its server: made, lost, made again, watched and measured.

Every call has a deadline. A connection that breaks is made again within that deadline; one that
cannot come about is diagnosed, and the error says what is wrong.

From the moment a child has joined, a thread holds a `Watch` call open, over the same connection.
By it the server knows that the child is there, and the child hears why the run has ended while it
computes: its next call says so at once, even when the server is gone by then.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import grpc

from tf_hips import log
from tf_hips.config import Uplink
from tf_hips.errors import ENDED, ConfigError, PeerError, ProtocolError, TfHipsError
from tf_hips.ps.client.failures import code_of, detail, is_broken, is_busy, kind_of
from tf_hips.ps.client.patience import Patience
from tf_hips.ps.security import expiry, tls
from tf_hips.ps.security.diagnosis import diagnose
from tf_hips.ps.transport import keepalive, wire
from tf_hips.ps.transport.news import TICK, Notice, Request, Tick, news_from_message
from tf_hips.ps.transport.sockets import Meter
from tf_hips.ps.transport.wire import Call

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.enable_http_proxy", 0),  # the uplink goes where the configuration says
    ("grpc.use_local_subchannel_pool", 1),
    # The window is fixed and wide enough for 100 Mbit/s at 300 ms, so the prober that would widen
    # it can be off.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)
# A server that never answered may still be starting, but not for a whole round's deadline.
_FIRST_CONTACT_S = 30.0
# For which the thread that watches waits for a channel that it makes, as may the one that calls.
_RENEW_S = 5.0
# Codes of calls that this side has ended, perhaps before anybody has heard of them.
_OF_THIS_SIDE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)

_Result = TypeVar("_Result")


class Link:
    """The connection of one process of one site."""

    def __init__(
        self,
        uplink: Uplink,
        address: tuple[str, int],
        credentials: grpc.ChannelCredentials | None,
        run: str,
        process: str,
    ) -> None:
        """A link that has not connected yet.

        Args:
            uplink: where the server is, and who this party is.
            address: host and port of the server.
            credentials: of TLS, or None for plain text.
            run: identity of the run.
            process: which process of the site this is.
        """
        self.ended: str | None = None
        self.on_end: Callable[[], None] | None = None  # called once `ended` is set, by any thread
        self.on_request: Callable[[Request], None] | None = None  # may not wait
        self.on_notice: Callable[[str], None] | None = None  # gets what is said of others, too
        self._error: type[TfHipsError] = PeerError  # what `ended` is raised as
        self.meter = Meter(*address)
        self._uplink = uplink
        self._address = address
        self._credentials = credentials
        self._run = run
        self._process = process
        self._lock = threading.Lock()  # one channel at a time
        self._channel: grpc.Channel | None = None
        self._stamps: tls.Stamps | None = None  # of the files that it was made with; None: unread
        self._said = ""  # why these are not used
        self._disconnects = 0
        self._has_connected = False
        self._lost_after_s = keepalive.LOST_AFTER_S
        self._own = expiry.own(uplink.tls)
        self._closed = threading.Event()
        self._wake = threading.Event()  # the run has ended, or the link was closed
        self._watcher: threading.Thread | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the link was closed for good."""
        return self._closed.is_set()

    def watch(self) -> None:
        """Begins to show the server that this child is there; once is enough."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="tf_hips-watch", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """Closes the connection for good, and ends the call in progress."""
        self._closed.set()
        self._wake.set()
        self._disconnect()

    def expect(self) -> None:
        """The server was there before: it is looked for as long as one that was lost."""
        self._has_connected = True

    def follow(self, lost_after_s: float) -> None:
        """From now on finds a dead connection within half of `lost_after_s`.

        The server takes a child for lost that was away for so many seconds. A connection that was
        made with other pings is made anew by the next call.
        """
        changes = keepalive.options(lost_after_s) != keepalive.options(self._lost_after_s)
        self._lost_after_s = lost_after_s
        if changes:
            self._disconnect()

    def stub(self, kind: str, method: str, timeout_s: float) -> Callable[..., Any]:
        """The callable of one method, over a connection that is made if there is none.

        Raises:
            PeerError: the link was closed.
        """
        with self._lock:
            if self._closed.is_set():
                self._refuse_closed(method)
            if self._channel is None:
                self._channel = self._connect(timeout_s)
            return self._method(self._channel, kind, method)

    def metadata(self, number: int = 0, attempt: int = 0) -> tuple[tuple[str, str], ...]:
        """The identity of one call."""
        call = Call(self._run, self._uplink.site, self._process, number, attempt)
        return ((wire.METADATA_KEY, call.to_text()),)

    def metered(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        """`messages`; the meter looks for new sockets at their end."""
        yield from messages
        self.meter.scan()  # a channel that was idle has connected anew by now, if it can

    def once(self, method: str, request: bytes, attempt: int, timeout_s: float) -> bytes:
        """Makes one unary call, once; connecting and answer have `timeout_s` together."""
        patience = Patience(timeout_s)
        stub = self.stub("unary_unary", method, timeout_s)
        answer: bytes = stub(request, timeout=patience.left_s, metadata=self.metadata(0, attempt))
        self.meter.scan()
        return answer

    def control(
        self, method: str, request: bytes, patience_s: float, *, comes_back: bool = True
    ) -> bytes:
        """Makes one unary call, over a new connection if need be; arguments as of `persist`."""
        return self.persist(
            method,
            patience_s,
            lambda attempt, patience: self.once(method, request, attempt, patience.left_s),
            comes_back=comes_back,
        )

    def persist(
        self,
        method: str,
        patience_s: float,
        call: Callable[[int, Patience], _Result],
        *,
        comes_back: bool = True,
    ) -> _Result:
        """Runs `call(attempt, patience)` until it ends, over a new connection if need be.

        Args:
            method: its name.
            patience_s: seconds in which nothing may move.
            call: makes it.
            comes_back: whether a server that is gone may come back with its run. Else nobody looks
                for it once nobody listens there.

        Raises:
            TfHipsError: the run has ended, the server refuses, or it cannot be reached.
        """
        patience = Patience(patience_s)
        attempt = 0
        reason = ""  # why the connection before this one was lost, or never made
        while True:
            self._check(method)
            began, disconnects = time.monotonic(), self._disconnects
            try:
                result = call(attempt, patience)
                self._has_connected = True
                return result
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                # A server that stops cancels calls that have just come.
                is_stopped = (
                    isinstance(error, grpc.RpcError)
                    and error.code() == grpc.StatusCode.CANCELLED
                    and not (self._closed.is_set() or patience.is_over)
                )
                if is_broken(error) or is_stopped:
                    reason = self._pause(method, attempt, patience, reason, comes_back)
                elif is_busy(error):
                    self._rest(method, attempt, patience)
                else:
                    self._has_connected |= code_of(error) not in _OF_THIS_SIDE
                    raise self._translate(method, error, patience, began, reason) from None
            except ValueError as error:
                # gRPC's word for a channel that is closed: another call has lost it meanwhile.
                is_ours = isinstance(error, TfHipsError)
                if is_ours or self._disconnects == disconnects or patience.is_over:
                    raise
            attempt += 1

    def end_error(self, method: str) -> TfHipsError:
        """What a call raises after the run has ended."""
        return self._error(f"Server {self._uplink.server}, {method}: {self.ended}")

    def _check(self, method: str) -> None:
        if self._closed.is_set():
            self._refuse_closed(method)
        if self.ended is not None:
            raise self.end_error(method)

    def _refuse_closed(self, method: str) -> NoReturn:
        raise PeerError(f"{method}: this party has left the run.")

    def _method(self, channel: grpc.Channel, kind: str, method: str) -> Callable[..., Any]:
        stub: Callable[..., Any] = getattr(channel, kind)(f"/{wire.SERVICE}/{method}")
        return stub

    def _read_credentials(self) -> None:
        """Takes the certificate that the files hold now; they may have been replaced."""
        self._own.look()
        identity = self._uplink.tls
        if identity is None:
            return
        said, self._said = self._said, ""
        self._stamps = tls.stamps_of(identity)  # before: what changes meanwhile is read again
        try:
            tls.check_pair(identity)
            self._credentials = tls.channel_credentials(identity)
        except ConfigError as error:
            self._said = str(error)
            if tls.could_not_read(error):
                self._stamps = None
            if self._said != said:  # they may be looked at every other second
                log.warning("The certificate as it was before is used on: %s", error)

    def _connect(self, timeout_s: float) -> grpc.Channel:
        """A channel that has tried to connect; where that failed, the next call says so at once."""
        settled = threading.Event()

        def note(state: grpc.ChannelConnectivity) -> None:
            if state in (
                grpc.ChannelConnectivity.READY,
                grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                grpc.ChannelConnectivity.SHUTDOWN,
            ):
                settled.set()

        with contextlib.ExitStack() as unfinished:
            with self.meter.connecting():
                self._read_credentials()
                options: tuple[tuple[str, Any], ...] = (
                    *CHANNEL_OPTIONS,
                    *keepalive.options(self._lost_after_s),
                )
                if self._credentials is None:
                    channel = grpc.insecure_channel(self._uplink.server, options)
                else:
                    name = tls.server_name(self._uplink.server_role)
                    options = (*options, ("grpc.ssl_target_name_override", name))
                    channel = grpc.secure_channel(self._uplink.server, self._credentials, options)
                # A traceback would keep it alive, and gRPC lets no process end that has one which
                # connects.
                unfinished.callback(channel.close)
                try:
                    channel.subscribe(note, try_to_connect=True)
                except RuntimeError:
                    # An interpreter that ends starts no more threads, and this takes one. Then the
                    # call connects by itself.
                    settled.set()
                deadline = time.monotonic() + timeout_s
                while not settled.wait(0.1) and time.monotonic() < deadline:
                    if self._closed.is_set():
                        break
            channel.unsubscribe(note)
            unfinished.pop_all()
        return channel

    def _disconnect(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        """Closes the channel, if there is one, with the lock held."""
        if self._channel is not None:
            self._disconnects += 1  # before others can find the channel closed
            try:
                self.meter.scan()  # the last moment at which gRPC's descriptors can be seen
            finally:
                self._channel.close()
                self._channel = None
            self.meter.settle()

    def _renewed(self, channel: grpc.Channel | None) -> grpc.Channel | None:
        """The channel; another one where the files of this side's certificate have changed.

        gRPC connects a broken channel again by itself, with the certificate that it was made with.
        That one may have ended, and while this child computes no call makes another channel.

        Args:
            channel: over which nobody could be reached.
        """
        identity = self._uplink.tls
        with self._lock:
            is_current = self._channel is channel is not None and not self._closed.is_set()
            if identity is not None and is_current and tls.stamps_of(identity) != self._stamps:
                self._drop()
                self._channel = self._connect(_RENEW_S)
            return self._channel

    def _pause(
        self, method: str, attempt: int, patience: Patience, reason: str, comes_back: bool
    ) -> str:
        """After a broken connection: says why, having waited a moment, or raises.

        What differs from `reason`, as it was before, is logged.
        """
        self._disconnect()
        self._check(method)
        name = tls.server_name(self._uplink.server_role)
        found = diagnose(
            *self._address,
            self._uplink.tls,
            name,
            meter=self.meter,
            was_there=self._has_connected,
        )
        self._check(method)
        # Whoever was connected has had all that it needs, so what is wrong now may be put right: a
        # certificate renewed, the other half of it copied, what answers for the server gone.
        may_pass = found.may_pass or self._has_connected
        if found.is_refused and not comes_back:
            may_pass = False
        waited_s = patience.seconds - patience.left_s
        is_late = not self._has_connected and waited_s > _FIRST_CONTACT_S
        if not may_pass or is_late or patience.left_s < _pause_s(attempt):
            waited = f" Tried for {waited_s:.0f} s." if may_pass else ""
            raise PeerError(f"{method}: {found.text}{waited}") from None
        if found.text != reason:
            log.warning(
                "%s: no connection to %s. %s Trying again.",
                method,
                self._uplink.server,
                found.text,
            )
        self._wake.wait(_pause_s(attempt))
        return found.text

    def _rest(self, method: str, attempt: int, patience: Patience) -> None:
        """After a server had no thread to spare: waits a moment or raises."""
        if patience.left_s < _pause_s(attempt):
            raise PeerError(
                f"Server {self._uplink.server}, {method}: it has more calls than it can serve. "
                f"Tried for {patience.seconds:.0f} s."
            ) from None
        self._wake.wait(_pause_s(attempt))

    def _translate(
        self, method: str, error: Exception, patience: Patience, began: float, reason: str
    ) -> TfHipsError:
        code, text = code_of(error), detail(error)
        waited_s = time.monotonic() - began
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in text:
            text = f"no answer within {waited_s:.0f} s."
            if reason:
                text += f" Before that: {reason}"
        elif code == grpc.StatusCode.CANCELLED and self._closed.is_set():
            text = "this party has left the run."
        elif code == grpc.StatusCode.CANCELLED and patience.is_over:
            text = f"no byte has moved for {patience.seconds:.0f} s."
        return kind_of(code)(f"Server {self._uplink.server}, {method}: {text}")

    def _ticks(self, is_over: threading.Event) -> Iterator[bytes]:
        """The request of a `Watch`, and signs of life until `is_over`."""
        yield TICK
        while not is_over.wait(keepalive.tick_s(self._lost_after_s)):
            self._own.look()
            yield TICK

    def _watch(self) -> None:
        """Keeps a `Watch` call open until the run ends or the link is closed."""
        attempt, is_lost = 0, False
        while not self._closed.is_set():
            channel, is_over = self._channel, threading.Event()
            try:
                if is_lost:
                    channel, is_lost = self._renewed(channel), False
                # Without a channel: the thread that calls has lost it and makes another.
                if channel is not None:
                    call = self._method(channel, "stream_stream", "Watch")
                    stream = call(self._ticks(is_over), metadata=self.metadata())
                    stream.initial_metadata()  # the server has heard
                    self.meter.scan()
                    for message in stream:
                        news = news_from_message(message)
                        if isinstance(news, Tick):
                            continue
                        if isinstance(news, Notice):
                            log.warning("%s", news.text)
                            if self.on_notice is not None:
                                self.on_notice(news.text)
                            continue
                        if isinstance(news, Request):
                            if self.on_request is not None:
                                self.on_request(news)
                            continue
                        reason, error = news
                        self._end(f"{ENDED}{reason}", error)
                        return
                    if stream.code() == grpc.StatusCode.OK:
                        return  # this child has left
            except ValueError:
                pass  # the channel was closed in between
            except ProtocolError as error:
                self._end(str(error))
                return
            except grpc.RpcError as error:
                is_stopped = error.code() == grpc.StatusCode.CANCELLED
                if not (is_broken(error) or is_stopped or is_busy(error)):
                    self._end(detail(error))
                    return
                is_lost = is_broken(error)
            except Exception as error:  # the server would take this child for lost
                if self.ended is not None:
                    raise
                (log.debug if attempt else log.warning)(
                    "The watch of this party has failed and begins again. %r", error
                )
            finally:
                is_over.set()
            self._closed.wait(_pause_s(attempt))
            attempt = 0 if self._channel is not channel else attempt + 1

    def _end(self, text: str, error: type[TfHipsError] = PeerError) -> None:
        if not self._closed.is_set():
            log.warning("%s", text)
        self._error, self.ended = error, text
        self._wake.set()
        if self.on_end is not None:
            self.on_end()


def _pause_s(attempt: int) -> float:
    return _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
