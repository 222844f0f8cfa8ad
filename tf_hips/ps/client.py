# SPDX-License-Identifier: Apache-2.0
"""The child's end of the protocol: join, agree on the model, first synchronisation, rounds, leave.

Every call has a deadline. A connection that breaks is made again within that deadline, and only
what the other side lacks is sent again: the server drops what it has had, so a round counts once
however often its bytes travel. A connection that cannot come about is diagnosed, and the error says
what is wrong.

A client is used by one thread at a time; `leave` and `close` may come from another one and end the
call in progress.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from tf_hips import log
from tf_hips.config import Uplink
from tf_hips.errors import (
    ConfigError,
    NonFiniteError,
    PacketError,
    PeerError,
    ProtocolError,
    TfHipsError,
)
from tf_hips.ops import compressor as compressors
from tf_hips.ps import tls, wire
from tf_hips.ps.model import Model
from tf_hips.ps.sockets import Meter, WireBytes, diagnose, is_loopback, split_address
from tf_hips.ps.weights import cut_weights, kind_of, restore_weights
from tf_hips.ps.wire import Call

# Pings cost 100 bytes a minute on an idle uplink; they keep routers from forgetting it and find a
# dead peer.
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # the uplink goes where the configuration says
    ("grpc.use_local_subchannel_pool", 1),
    # The window is fixed and wide enough for 100 Mbit/s at 300 ms, so the prober that would widen
    # it can be off.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)
_FIRST_CONTACT_S = (
    30.0  # a server that never answered may still be starting, but not for a whole round's deadline
)
_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)
_ERRORS: dict[grpc.StatusCode, type[TfHipsError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: PacketError,
    grpc.StatusCode.OUT_OF_RANGE: NonFiniteError,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ProtocolError,
}

_Result = TypeVar("_Result")
_Packets = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Welcome:
    """What a child learns when all have joined.

    Attributes:
        child: its position among the parties.
        parties: names of all parties, in child order.
        workers: number of workers of each party.
        compression: canonical text of the compressor of the way up.
        downlink: canonical text of the compressor of the way down.
        seed: seed of the run.
        round: the next round.
    """

    child: int
    parties: tuple[str, ...]
    workers: tuple[int, ...]
    compression: str
    downlink: str
    seed: int
    round: int


class Client:
    """A party's connection to the server above it."""

    def __init__(self, uplink: Uplink, run: str, workers: int) -> None:
        """A client that has not connected yet.

        Args:
            uplink: where the server is, and who this party is.
            run: identity of the run.
            workers: number of workers of this party.

        Raises:
            ConfigError: the address or a name is no such thing, a certificate cannot be read or is
                another's, or plain text is asked for beyond loopback.
        """
        try:
            self._host, self._port = split_address(uplink.server)
            wire.check_name("site", uplink.site)
            wire.check_name("run", run)
        except ValueError as error:
            raise ConfigError(f"The uplink is wrong. {error}") from error
        if uplink.tls is None and not is_loopback(self._host):
            raise ConfigError(
                f"Plain text is for loopback only: `uplink.tls` must be set. Received: "
                f"server={uplink.server!r}"
            )
        if not uplink.deadline_s > 0:
            raise ConfigError(f"`deadline_s` must be > 0. Received: deadline_s={uplink.deadline_s}")
        self._credentials = tls.channel_credentials(uplink.tls) if uplink.tls is not None else None
        self._uplink = uplink
        self._run = run
        self._workers = workers
        # Goes with every call, so it is short: it only tells this process from one that was, or is
        # by mistake, the same site's.
        self._process = uuid.uuid4().hex[:8]
        self._meter = Meter(self._host, self._port)
        self._channel: grpc.Channel | None = None
        self._has_connected = False
        self._is_closed = False
        self._is_synced = False
        self._welcome: Welcome | None = None
        self._up: tuple[int, ...] | None = None
        self._down: tuple[int, ...] = ()

    def join(self, compression: str, downlink: str, seed: int) -> Welcome:
        """Joins the run and waits for all other parties.

        Args:
            compression: text of the compressor of the way up, such as `error_feedback(onebit)`.
            downlink: text of the compressor of the way down, or `same`.
            seed: seed of the run, equal at all parties.

        Raises:
            ProtocolError: the server or another party wants something else.
            PeerError: the server cannot be reached or refuses this party, or another party did not
                come.
        """
        request = wire.to_json(
            workers=self._workers,
            compression=compression,
            downlink=downlink,
            seed=seed,
        )
        fields = wire.from_json(
            self._control("Join", request),
            child=int,
            parties=list,
            workers=list,
            compression=str,
            downlink=str,
            seed=int,
            round=int,
        )
        fields["parties"] = tuple(map(str, fields["parties"]))
        fields["workers"] = tuple(map(int, fields["workers"]))
        self._welcome = Welcome(**fields)
        return self._welcome

    def agree_model(self, shapes: Sequence[Sequence[int]]) -> None:
        """Tells the server the shapes of all gradients, in order of position.

        Raises:
            ProtocolError: the model is too large for the server, or another party's differs; names
                the first mismatch.
        """
        welcome = self._joined()
        model = Model(tuple(tuple(int(size) for size in shape) for shape in shapes))
        self._control("AgreeModel", wire.to_json(shapes=model.shapes))
        self._up = model.packet_bytes(compressors.parse(welcome.compression))
        self._down = model.packet_bytes(compressors.parse(welcome.downlink))

    def first_sync(self, weights: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Makes the weights of all parties those of child 0.

        Args:
            weights: all weights, of any types and shapes, equal at all parties but for the values.

        Returns:
            The weights of child 0, same types and shapes.

        Raises:
            ValueError: a weight holds Python objects.
            ProtocolError: types or shapes differ, or are too large for the server; names the first
                mismatch.
        """
        welcome = self._joined()
        if self._is_synced:
            raise ProtocolError("`first_sync` must be called once in a run.")
        arrays = [np.ascontiguousarray(value) for value in weights]
        total = sum(value.nbytes for value in arrays)
        # NumPy makes at least one dimension of none, so shapes are those of `weights`.
        shapes = [np.shape(value) for value in weights]
        kinds = [kind_of(value.dtype, shape) for value, shape in zip(arrays, shapes, strict=True)]
        request = wire.to_json(kinds=kinds, bytes=total)

        def upload(attempt: int, timeout_s: float) -> None:
            answer = self._once("BeginSync", request, attempt, timeout_s)
            held = wire.from_json(answer, held=int)["held"]
            call = self._stub("stream_unary", "Upload", timeout_s)
            messages = self._metered(cut_weights(arrays, held))
            call(messages, timeout=timeout_s, metadata=self._metadata(held, attempt))

        content = bytearray()

        def download(attempt: int, timeout_s: float) -> None:
            self._once("BeginSync", request, attempt, timeout_s)
            call = self._stub("unary_stream", "Download", timeout_s)
            metadata = self._metadata(len(content), attempt)
            for message in call(b"", timeout=timeout_s, metadata=metadata):
                if len(content) + len(message) > total:
                    raise ProtocolError(f"The weights have {total} bytes. Received: more")
                content.extend(message)

        if welcome.child == 0:
            self._persist("Upload", upload)
            self._is_synced = True
            return [np.array(value) for value in weights]
        self._persist("Download", download)
        if len(content) != total:
            raise ProtocolError(f"The weights have {total} bytes. Received: {len(content)}")
        self._is_synced = True
        return restore_weights(content, [value.dtype for value in arrays], shapes)

    def exchange(self, round: int, packets: _Packets) -> _Packets:
        """Sends this party's packets of one round, returns the merged ones.

        Args:
            round: the round; the first is `Welcome.round`, each next one is one more.
            packets: uint8 [bytes], all chunk packets of the model, tensors in order.

        Returns:
            uint8 [bytes], all chunk packets of the merged gradients, encoded with the downlink's
            compressor.

        Raises:
            PacketError: the server refuses a packet; it names the tensor.
            NonFiniteError: a packet, or the sum of all, holds NaN or an infinity.
            PeerError: the server cannot be reached, or another party did not deliver or has left.
        """
        up = self._up
        if up is None:
            raise ProtocolError("`agree_model` must come before `exchange`.")
        packets = np.ascontiguousarray(packets)
        if packets.dtype != np.uint8 or packets.shape != (sum(up),):
            raise ValueError(
                f"`packets` must be uint8 of shape ({sum(up)},), the packets of the model agreed "
                f"on. Received: {packets.dtype} of shape {packets.shape}"
            )
        views = _cut(packets, up)
        result = np.empty(sum(self._down), np.uint8)
        targets = _cut(result, self._down)
        have: set[int] = set()

        def attempt(number: int, timeout_s: float) -> None:
            call = _Exchange(views, resumes=number > 0)
            stream = self._stub("stream_stream", "Exchange", timeout_s)(
                self._metered(call.messages()),
                timeout=timeout_s,
                metadata=(*self._metadata(round, number), *_held(have)),
            )
            try:
                if number > 0:
                    call.resume(_read_held(stream.initial_metadata(), len(up)))
                assembler = wire.Assembler(self._down)
                for message in stream:
                    for chunk, packet in assembler.feed(message):
                        if len(packet) != self._down[chunk]:
                            raise ProtocolError(
                                f"The packet of chunk {chunk} must have {self._down[chunk]} bytes. "
                                f"Received: {len(packet)}"
                            )
                        targets[chunk][:] = packet
                        have.add(chunk)
                assembler.finish()
            finally:
                call.resume(())
                stream.cancel()
            if len(have) != len(self._down):
                raise ProtocolError(
                    f"Round {round} has {len(self._down)} chunks. The server ended it after "
                    f"{len(have)}."
                )

        self._persist("Exchange", attempt)
        return result

    def leave(self, reason: str | None = None) -> None:
        """Leaves the run and closes the connection; with a reason, the run ends for all.

        A server that is gone by then is no error: the run is over either way. A second call does
        nothing.
        """
        try:
            if self._welcome is not None and not self._is_closed:
                self._once(
                    "Leave", wire.to_json(reason=reason), 0, min(self._uplink.deadline_s, 10.0)
                )
        except (grpc.RpcError, TfHipsError) as error:
            log.warning(
                "Leaving the run was not heard by %s: %s", self._uplink.server, _detail(error)
            )
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connection without leaving the run."""
        self._is_closed = True
        self._disconnect()

    def wire_bytes(self) -> WireBytes:
        """Bytes that crossed this client's sockets so far, closed connections included."""
        return self._meter.read()

    def _joined(self) -> Welcome:
        if self._welcome is None:
            raise ProtocolError("`join` must come before anything else.")
        return self._welcome

    def _metadata(self, number: int = 0, attempt: int = 0) -> tuple[tuple[str, str], ...]:
        call = Call(self._run, self._uplink.site, self._process, number, attempt)
        return ((wire.METADATA_KEY, call.to_text()),)

    def _stub(self, kind: str, method: str, timeout_s: float) -> Callable[..., Any]:
        if self._is_closed:
            raise PeerError(f"{method}: this party has left the run.")
        if self._channel is None:
            self._channel = self._connect(timeout_s)
        stub: Callable[..., Any] = getattr(self._channel, kind)(f"/{wire.SERVICE}/{method}")
        return stub

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

        with self._meter.connecting():
            if self._credentials is None:
                channel = grpc.insecure_channel(self._uplink.server, CHANNEL_OPTIONS)
            else:
                name = ("grpc.ssl_target_name_override", tls.server_name(tls.SERVER_ROLE))
                channel = grpc.secure_channel(
                    self._uplink.server, self._credentials, (*CHANNEL_OPTIONS, name)
                )
            channel.subscribe(note, try_to_connect=True)
            settled.wait(timeout_s)
        channel.unsubscribe(note)
        return channel

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._meter.scan()  # the last moment at which gRPC's descriptors can be seen
            self._channel.close()
            self._channel = None
            self._meter.settle()

    def _metered(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        yield from messages
        self._meter.scan()  # a channel that was idle has connected anew by now, if it can

    def _once(self, method: str, request: bytes, attempt: int, timeout_s: float) -> bytes:
        answer: bytes = self._stub("unary_unary", method, timeout_s)(
            request, timeout=timeout_s, metadata=self._metadata(0, attempt)
        )
        self._meter.scan()
        return answer

    def _control(self, method: str, request: bytes) -> bytes:
        return self._persist(
            method, lambda attempt, timeout_s: self._once(method, request, attempt, timeout_s)
        )

    def _persist(self, method: str, call: Callable[[int, float], _Result]) -> _Result:
        """Runs `call(attempt, seconds left)` until it ends, over a new connection if need be."""
        began = time.monotonic()
        deadline = began + self._uplink.deadline_s
        attempt = 0
        while True:
            try:
                result = call(attempt, max(0.001, deadline - time.monotonic()))
                self._has_connected = True
                return result
            except grpc.RpcError as error:
                code = error.code()
                if code != grpc.StatusCode.UNAVAILABLE:
                    self._has_connected = True
                    raise self._translate(method, code, error, began) from None
                self._pause(method, attempt, began, deadline)
            attempt += 1

    def _pause(self, method: str, attempt: int, began: float, deadline: float) -> None:
        """After a broken connection: finds out why, and waits a moment or raises."""
        self._disconnect()
        name = tls.server_name(tls.SERVER_ROLE)
        found = diagnose(self._host, self._port, self._uplink.tls, name, meter=self._meter)
        if not self._has_connected:
            deadline = min(deadline, began + _FIRST_CONTACT_S)
        pause_s = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
        if not found.may_pass or time.monotonic() + pause_s > deadline:
            waited = f" Tried for {time.monotonic() - began:.0f} s." if found.may_pass else ""
            raise PeerError(f"{method}: {found.text}{waited}") from None
        if attempt == 0:
            log.warning(
                "%s: the connection to %s failed (%s). Trying again.",
                method,
                self._uplink.server,
                found.text,
            )
        threading.Event().wait(pause_s)

    def _translate(
        self, method: str, code: grpc.StatusCode, error: grpc.RpcError, began: float
    ) -> TfHipsError:
        text = _detail(error)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in text:
            waited = time.monotonic() - began
            text = f"no answer within {waited:.0f} s."
        return _ERRORS.get(code, PeerError)(f"Server {self._uplink.server}, {method}: {text}")


class _Exchange:
    """The way up of one attempt; a repeated one waits to hear what the server has."""

    def __init__(self, packets: Sequence[memoryview], *, resumes: bool) -> None:
        self._packets = packets
        self._held: frozenset[int] = frozenset()
        self._may_send = threading.Event()
        if not resumes:
            self._may_send.set()

    def resume(self, held: Iterable[int]) -> None:
        if not self._may_send.is_set():
            self._held = frozenset(held)
            self._may_send.set()

    def messages(self) -> Iterator[bytes]:
        self._may_send.wait()
        yield from wire.bundle(
            (chunk, packet) for chunk, packet in enumerate(self._packets) if chunk not in self._held
        )


def _cut(packets: _Packets, lengths: Sequence[int]) -> list[memoryview]:
    view = memoryview(packets)
    cuts = itertools.accumulate(lengths, initial=0)
    return [view[start:end] for start, end in itertools.pairwise(cuts)]


def _held(chunks: set[int]) -> tuple[tuple[str, str], ...]:
    return ((wire.HELD_KEY, wire.ranges_to_text(chunks)),) if chunks else ()


def _read_held(metadata: Iterable[tuple[str, str | bytes]] | None, limit: int) -> set[int]:
    for key, value in metadata or ():
        if key == wire.HELD_KEY:
            return wire.ranges_from_text(str(value), limit)
    return set()


def _detail(error: Exception) -> str:
    with contextlib.suppress(AttributeError):
        return str(error.details())  # type: ignore[attr-defined]
    return str(error)
