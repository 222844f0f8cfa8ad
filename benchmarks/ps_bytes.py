# SPDX-License-Identifier: Apache-2.0
"""Part `bytes` of `make bench-ps`: what the interface of a server counts, beside what is computed.

Server and children are hosts of `benchmarks.network`, segmentation offload off, links unlimited;
what counts are the frames of the server's own link, both ways, over some rounds after a warm-up.
Computed are, each way, from the bytes of the packets on:

    16      of our header for each part of a packet (wire.py), messages of at most 1 MiB
    5       of gRPC for each message
    9       of HTTP/2 for each 16 KiB
    22      of TLS 1.3 for each 16 KiB
    66      of Ethernet, IPv4 and TCP with time stamps for each segment of 1448 bytes (MTU 1500)

Bare acknowledgements are measured and not computed: with receive offload on there is one for dozens
of segments.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

from benchmarks import ps_processes
from benchmarks.collectives_jobs import Row, row
from benchmarks.network import network
from benchmarks.ps_options import ONEBIT, Options
from tf_hips.ops import compressor as compressors
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport import wire

SHAPES = [(1000, 1000), (1000, 500), (300, 300), (300,)]
ROUNDS = 5
SITES, WORKERS = 3, 6
_RECORD = 16384
_SEGMENT, _HEADERS = 1448, 14 + 20 + 32


def measured(options: Options) -> Iterator[Row]:
    """Bytes of dense and compressed rounds, of a flat and of a two-level tree."""
    del options
    found = {
        (name, count): _bytes(text, count)
        for name, text, count in (
            ("dense", "fp32", SITES),
            ("onebit", ONEBIT, SITES),
            ("onebit", ONEBIT, WORKERS),
        )
    }
    for (name, count), (sent, received) in found.items():
        text = "fp32" if name == "dense" else ONEBIT
        expected = computed(text, SHAPES, count)
        for way, value in (("received", received), ("sent", sent)):
            yield row(
                "bytes",
                f"{name}, {count} children: {way} by the server in a round",
                value / 1e6,
                "MB",
                against=f"computed {expected / 1e6:.4g}",
            )
            if count == SITES:
                yield row(
                    "bytes",
                    f"{name}: {way}, measured beside computed",
                    100 * abs(value / expected - 1),
                    "%",
                    against=f"{100 * (value / expected - 1):+.2f} %",
                    about="ps-bytes-computed",
                )
    total = {key: sum(ways) for key, ways in found.items()}
    yield row(
        "bytes",
        "dense over onebit both ways",
        total["dense", SITES] / total["onebit", SITES],
        "x",
        about="ps-bytes-onebit",
    )
    yield row(
        "bytes",
        f"{WORKERS} workers in {SITES} sites: flat over two levels, slow tier",
        total["onebit", WORKERS] / total["onebit", SITES],
        "x",
        against=f"{WORKERS} children over {SITES}; sums in a site cross no slow link",
        about="ps-bytes-two-level",
    )


def computed(text: str, shapes: Sequence[tuple[int, ...]], num_children: int) -> float:
    """Bytes that a server's link carries each way in one round."""
    lengths = Model(tuple(shapes)).packet_bytes(compressors.parse(text))
    messages = [
        len(one) for one in wire.bundle((k, bytes(length)) for k, length in enumerate(lengths))
    ]
    stream = sum(messages) + 5 * len(messages)
    stream += (9 + 22) * sum(math.ceil(one / _RECORD) for one in messages)
    return num_children * (stream + stream / _SEGMENT * _HEADERS)


def _bytes(text: str, num_children: int) -> tuple[float, float]:
    """Bytes of a round that the server's host has sent, and received."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(num_children + 1))
        server = stack.enter_context(
            ps_processes.server(num_children, network=net, host=num_children)
        )
        children = stack.enter_context(ps_processes.children(num_children, network=net))
        children.join(server, SHAPES, text, text)
        children.rounds(0)
        before = net.hosts[num_children].counters()
        children.rounds(1, ROUNDS)
        after = net.hosts[num_children].counters()
        children.leave()
    sent, received = ((late - early) / ROUNDS for early, late in zip(before, after, strict=True))
    return sent, received
