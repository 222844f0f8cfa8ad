# SPDX-License-Identifier: Apache-2.0
"""Parts `flower` and `slow` of `make bench-ps`: rounds beside Flower's."""

import contextlib
import statistics
from collections.abc import Iterator

from benchmarks import harness, ps_flower, ps_processes
from benchmarks.collectives_jobs import Row, ratio_row, row
from benchmarks.network import network
from benchmarks.ps_options import ONEBIT, Options

CHILDREN = 4
MBIT = 100


def flower(options: Options) -> Iterator[Row]:
    """A dense model over loopback, both with TLS, ours durable."""
    yield from _beside(options, "flower", "fp32", None, "ps-faster-flower")


def slow(options: Options) -> Iterator[Row]:
    """The same over links of 100 Mbit/s, ours compressed both ways."""
    yield from _beside(options, "slow", ONEBIT, MBIT, "ps-faster-flower-100")


def _beside(options: Options, part: str, text: str, mbit: int | None, about: str) -> Iterator[Row]:
    # Over loopback both take what the cores give, which others use, too: more rounds tell more.
    rounds = options.rounds * (3 if mbit is None else 1)
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(CHILDREN)) if mbit else None
        shapes = options.shapes
        peer = stack.enter_context(ps_flower.flower(CHILDREN, shapes, rounds + 1, net))
        server = stack.enter_context(ps_processes.server(CHILDREN, network=net))
        ours = stack.enter_context(ps_processes.children(CHILDREN, network=net))
        ours.join(server, shapes, text, text)
        if net is not None:
            net.limit(mbit)
        theirs_s, ours_s = [], []
        for number in range(rounds + 1):
            theirs_s.append(peer.round())
            ours_s += ours.rounds(number)["seconds"]
        ours.leave()
    link = "loopback" if mbit is None else f"{mbit} Mbit/s"
    name = "fp32" if text == "fp32" else "onebit both ways"
    # The first round of each is a warm-up.
    for what, seconds in ((ps_flower.version(), theirs_s[1:]), (f"ours, {name}", ours_s[1:])):
        interval = harness.interval_text(seconds)
        yield row(part, what, statistics.median(seconds), "s", link=link, interval=interval)
    ratios = [a / b for a, b in zip(theirs_s[1:], ours_s[1:], strict=True)]
    yield ratio_row(
        part,
        f"a round of Flower over ours, {name}",
        ratios,
        link=link,
        against=f"{ps_flower.version()}, start_server, TLS",
        about=about,
    )
