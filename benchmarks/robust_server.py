# SPDX-License-Identifier: Apache-2.0
"""What a rule in a server costs beside a mean there, on links of 1 Gbit/s.

Server and children are hosts of `benchmarks.network`, and the server's link is as fast as one of a
child: it is what a round waits for. Both servers keep their runs on disk and speak mutual TLS,
packets are float32, and rounds of both take turns. A round lasts from the first child's encoding to
the last one's decoding; there is no backward pass that would hide a part of it. Rules of
coordinates merge what has come of all children while more comes; rules of whole rows begin when all
has come, so what goes down no longer goes beside what comes up (decision 0037).
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator

from benchmarks import closing, harness, ps_processes
from benchmarks.collectives_jobs import Row, link_of, ratio_row, row

MBIT = 1000
ROUNDS = 9
WARM_UP = 1  # rounds
TENSORS = 8  # alike
PACKETS = "fp32"


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule and how many rows it gets.

    Attributes:
        children: how many.
        elements: of the model; what comes up is about as much in all cases.
        rule: beside `mean`.
        about: the target.
    """

    children: int
    elements: int
    rule: str
    about: str


COORDINATES, WHOLE = "robust-step-server", "robust-step-server-whole"
CASES = (
    Case(4, 12_000_000, "median", COORDINATES),
    Case(4, 12_000_000, "geometric_median", WHOLE),
    Case(15, 3_200_000, "median", COORDINATES),
    Case(15, 3_200_000, "trimmed_mean(f=7)", COORDINATES),
    Case(15, 3_200_000, "krum(f=6)", WHOLE),
)


def measured(rounds: int = ROUNDS) -> Iterator[Row]:
    """Rounds of rules over rounds of a mean, side by side.

    Args:
        rounds: of each.

    Raises:
        NotRunError: there can be no network here.
    """
    for case in CASES:
        mean_s, rule_s = _rounds(case, rounds)
        what = f"{case.children} children at a server, {4 * case.elements / 1e6:.3g} MB each"
        for name, seconds in (("mean", mean_s), (case.rule, rule_s)):
            yield row(
                "server", f"{what}: {name}", statistics.median(seconds), "s", link=link_of(MBIT),
                interval=harness.interval_text(seconds),
            )  # fmt: skip
        yield ratio_row(
            "server",
            f"{what}: {case.rule} over mean",
            [mine / mean for mean, mine in zip(mean_s, rule_s, strict=True)],
            link=link_of(MBIT),
            against=f"{rounds} rounds",
            about=case.about,
        )


def _rounds(case: Case, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of rounds with a mean, and with the rule."""
    shapes = [[case.elements // TENSORS]] * TENSORS
    found: tuple[list[float], list[float]] = [], []
    with contextlib.ExitStack() as stack:
        about = (COORDINATES, WHOLE)
        net = stack.enter_context(
            closing.network_of(case.children + 1, "rounds of a server", about)
        )
        runs = []
        for rule in ("mean", case.rule):
            options = ("--rule", rule)
            server = stack.enter_context(
                ps_processes.server(case.children, network=net, host=case.children, options=options)
            )
            children = stack.enter_context(ps_processes.children(case.children, network=net))
            children.join(server, shapes, PACKETS, PACKETS)
            runs.append(children)
        net.limit(MBIT)
        for number in range(WARM_UP + rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                [seconds] = runs[place].rounds(number)["seconds"]
                if number >= WARM_UP:
                    found[place].append(seconds)
        for children in runs:
            children.leave()
    return found
