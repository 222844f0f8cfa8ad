# SPDX-License-Identifier: Apache-2.0
"""Servers and parties in one process, over real sockets and real TLS."""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from tests.support.certs import Certificates
from tf_hips.config import Tls, Uplink
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.client.link import CHANNEL_OPTIONS
from tf_hips.ps.client.shards import connect
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.security import tls
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport import wire

FEEDBACK = "error_feedback(onebit)"
SHAPES = ((3, 3, 1, 8), (8,), (72, 10), (10,))
SITES = ("a", "b")
DEADLINE_S = 20.0


@contextlib.contextmanager
def serving(certificates: Certificates, **settings: Any) -> Iterator[Server]:
    """A server on a free port of loopback; mutual TLS unless `insecure`."""
    if not settings.get("insecure") and "tls" not in settings:
        settings["tls"] = certificates.server()
    settings.setdefault("parties", SITES)
    settings.setdefault("round_timeout_s", DEADLINE_S)
    settings.setdefault("join_timeout_s", DEADLINE_S)
    server = Server(ServerConfig(**settings))
    server.start()
    try:
        yield server
    finally:
        server.stop(0.0)


def where(thread: threading.Thread) -> str:
    """What a thread does at the moment."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}\n{''.join(traceback.format_stack(frame)) if frame else 'ends'}"


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions at the same time; their results, or the first one's error."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException | None] = [None] * len(functions)

    def run(position: int) -> None:
        try:
            results[position] = functions[position]()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors[position] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(functions))]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + 2 * DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    # First, as the errors of the others are mostly that it does not come.
    hanging = [where(thread) for thread in threads if thread.is_alive()]
    assert not hanging, "a party hangs:\n" + "\n".join(hanging)
    for error in errors:
        if error is not None:
            raise error
    return results


def noise(child: int, number: int, sizes: Iterable[int]) -> list[npt.NDArray[np.float32]]:
    """What a child gives in a round, by tensor: of both signs, between 1/128 and 2.

    Sums of them are rounded. Normal ones would take a quarter of the time of tests of large models.
    """
    generator = np.random.default_rng((child, number))
    drawn = [np.frombuffer(generator.bytes(4 * size), np.uint32) for size in sizes]
    # Any sign and fraction; of the exponent the three lowest bits.
    return [((bits & 0x83FFFFFF) | 0x3C000000).view(np.float32) for bits in drawn]


class Party:
    """A party that trains on noise: a client, and the residuals of its encoder."""

    def __init__(
        self,
        address: str,
        site: str,
        identity: Tls | None,
        *,
        shapes: Sequence[Sequence[int]] = SHAPES,
        compression: str = FEEDBACK,
        downlink: str = "same",
        deadline_s: float = DEADLINE_S,
        first_round: int = 0,
        above: str | None = None,
        server_role: str = "global-server",
        workers: int = 2,
    ) -> None:
        uplink = Uplink(address, site, identity, deadline_s, server_role)
        self.client: Any = connect(uplink, "local", workers)
        self.above = above
        self.shapes = shapes
        self.sizes = [int(np.prod(shape)) for shape in shapes]
        self.compressor = compressors.parse(compression)
        self.downlink = downlink
        self.first_round = first_round
        self.residuals = [np.zeros(size, np.float32) for size in self.sizes]
        self.child = -1
        self.said = self.compressor.text  # a budget may stand for the compressor

    def join(self) -> None:
        welcome = self.client.join(self.said, self.downlink, 7, above=self.above)
        self.child = welcome.child
        self.client.agree_model(self.shapes, self.first_round)

    def call(self, number: int) -> wire.Call:
        """The identity of one of this party's calls."""
        return wire.Call("local", self.client._uplink.site, self.client._process, number)

    def packets(self, number: int) -> npt.NDArray[np.uint8]:
        values = noise(self.child, number, self.sizes)
        ways = [self.compressor.of_size(size) for size in self.sizes]
        return np.concatenate(
            [
                native.encode(
                    way,
                    values[tensor],
                    native.Key(self.child, number, tensor),
                    kept=self.residuals[tensor] if way.has_residual else None,
                )
                for tensor, (size, way) in enumerate(zip(self.sizes, ways, strict=True))
            ]
        )

    def train(self, first: int, last: int) -> list[bytes]:
        """Exchanges rounds `first` to `last`; the packets that came down."""
        return [
            self.client.exchange(number, self.packets(number)).tobytes()
            for number in range(first, last + 1)
        ]


@contextlib.contextmanager
def parties(server: Server, certificates: Certificates, **settings: Any) -> Iterator[list[Party]]:
    """The parties of a server, joined and agreed on the model."""
    secure = not settings.pop("insecure", False)
    address = settings.pop("address", server.address)
    sites = settings.pop("sites", SITES)
    members = [
        Party(address, site, certificates.party(site) if secure else None, **settings)
        for site in sites
    ]
    try:
        together(*(member.join for member in members))
        yield members
    finally:
        for member in members:
            member.client.close()


def train_all(members: Sequence[Party], first: int, last: int) -> list[bytes]:
    """Trains all parties; what came down, which is the same bytes for all."""
    results = together(*(lambda m=member: m.train(first, last) for member in members))
    assert all(result == results[0] for result in results)
    return results[0]


def expected_rounds(num_rounds: int, text: str = FEEDBACK) -> list[bytes]:
    """What the rounds of two parties must give, from the store alone."""
    model = Model(SHAPES)
    compressor = compressors.parse(text)
    store = Store(model, SITES, compressor, compressor.for_sums, 7)
    members = [Party("127.0.0.1:1", site, None, compression=text) for site in SITES]
    results = []
    for number in range(num_rounds):
        store.begin(number)
        for child, member in enumerate(members):
            member.child = child
            packets = member.packets(number)
            at = 0
            for chunk, size in enumerate(store.packet_limits(number)):
                store.add(number, child, [(chunk, packets[at : at + size])])
                at += size
        merged = sorted(store.results(number, 0)[1], key=lambda pair: pair[0])
        results.append(b"".join(packet.tobytes() for _, packet in merged))
    return results


@contextlib.contextmanager
def raw_channel(address: str, identity: Tls | None) -> Iterator[grpc.Channel]:
    """A gRPC channel that sends what a test likes."""
    if identity is None:
        channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    else:
        name = ("grpc.ssl_target_name_override", tls.server_name("global-server"))
        credentials = tls.channel_credentials(identity)
        channel = grpc.secure_channel(address, credentials, (*CHANNEL_OPTIONS, name))
    try:
        yield channel
    finally:
        channel.close()


def raw_exchange(
    channel: grpc.Channel, call: wire.Call, messages: Iterable[bytes]
) -> tuple[grpc.StatusCode, str]:
    """Sends `messages` as an exchange; how the server ends it."""
    stream = channel.stream_stream(f"/{wire.SERVICE}/Exchange")(
        iter(messages),
        timeout=DEADLINE_S,
        metadata=((wire.METADATA_KEY, call.to_text()),),
    )
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""
