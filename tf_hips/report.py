# SPDX-License-Identifier: Apache-2.0
"""From events to numbers and figures, and from nothing else: a figure can always be drawn again.

Read here are the events of workers. Rank 0 of every party writes `model` (`num_elements` of its
gradients), `first_sync` and `round` (bytes `sent` and `received` on its uplink's sockets since the
event before; the first counts from the handshake), and `left` (the same from beginning to end).
Every worker writes `epoch` (`test_accuracy`) and `result` (`test_accuracy`, `fingerprint`).
Imports no TensorFlow; matplotlib (extra `plots`) only to draw.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_hips.errors import ConfigError

Event = Mapping[str, Any]

_BYTES_PER_FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The slow tier over time, all parties together.

    Attributes:
        seconds: time of each point since the first event.
        rounds: number of rounds that all parties have finished by then.
        measured: bytes on all uplink sockets, both ways, so far.
        dense: bytes that gradients in fp32 would have taken by then: rounds x 2 x 4N per party.
    """

    seconds: tuple[float, ...]
    rounds: tuple[int, ...]
    measured: tuple[int, ...]
    dense: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense fp32."""
        return self.dense[-1] / self.measured[-1]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run came to.

    Attributes:
        accuracy: the lowest test accuracy that a worker reported, in [0, 1].
        traffic: bytes of the slow tier over time.
        fingerprints: of the weights of every worker, by `site/worker<rank>`.
        seconds: from the first to the last event.
    """

    accuracy: float
    traffic: Traffic
    fingerprints: Mapping[str, str]
    seconds: float

    @property
    def are_replicas_identical(self) -> bool:
        """Whether all workers ended with the same weights, bit for bit."""
        return len(set(self.fingerprints.values())) == 1


def summarise(events: Sequence[Event]) -> Summary:
    """The summary of one finished run.

    Raises:
        ConfigError: an event that every finished run has is missing.
    """
    results = [event for event in events if _is(event, "result")]
    if not results:
        raise ConfigError("The events must hold a `result` of every worker. Received: none")
    return Summary(
        accuracy=min(event["test_accuracy"] for event in results),
        traffic=traffic(events),
        fingerprints={f"{e['site']}/worker{e['rank']}": e["fingerprint"] for e in results},
        seconds=(events[-1]["time_us"] - events[0]["time_us"]) / 1e6,
    )


def traffic(events: Sequence[Event]) -> Traffic:
    """Bytes of the slow tier over time.

    Raises:
        ConfigError: there is no `model` or no `round` event.
    """
    model = next((event for event in events if _is(event, "model")), None)
    if model is None:
        raise ConfigError("The events must hold the `model` of the run. Received: none")
    begin = events[0]["time_us"]
    so_far: dict[str, int] = {}
    rounds: dict[str, int] = {}
    points = []
    for event in events:
        if not _is(event, "first_sync", "round", "left"):
            continue
        site, moved = event["site"], event["sent"] + event["received"]
        so_far[site] = moved if event["event"] == "left" else so_far.get(site, 0) + moved
        rounds[site] = rounds.get(site, 0) + (event["event"] == "round")
        dense = sum(rounds.values()) * 2 * _BYTES_PER_FLOAT * model["num_elements"]
        points.append(
            ((event["time_us"] - begin) / 1e6, min(rounds.values()), sum(so_far.values()), dense)
        )
    if not points:
        raise ConfigError("The events must hold the `round`s of the parties. Received: none")
    return Traffic(*zip(*points, strict=True))


def epochs(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The end of every epoch of the first worker that logs them: (`time_us`, test accuracy)."""
    found = [event for event in events if _is(event, "epoch")]
    if not found:
        return []
    first = min((event["site"], event["rank"]) for event in found)
    return [
        (event["time_us"], event["test_accuracy"])
        for event in found
        if (event["site"], event["rank"]) == first
    ]


def draw(events: Sequence[Event], path: str | Path, title: str) -> None:
    """Draws accuracy and slow-tier bytes over time into a PNG or SVG file.

    Args:
        events: of one finished run, in order of time.
        path: the file to write.
        title: what was run, in a few words.

    Raises:
        ConfigError: matplotlib is missing, or events are.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, PercentFormatter
    except ImportError as error:
        raise ConfigError("Figures need matplotlib: pip install 'tf_hips[plots]'") from error

    summary = summarise(events)
    seen = summary.traffic
    # The clock starts with the first synchronisation: how long TensorFlow takes to load is another
    # story.
    begin = events[0]["time_us"] + seen.seconds[0] * 1e6
    points = [((time_us - begin) / 1e6, accuracy) for time_us, accuracy in epochs(events)]
    seconds = [second - seen.seconds[0] for second in seen.seconds]

    ink, quiet, blue, orange = "#222222", "#8a8a8a", "#1f6fb4", "#d9822b"
    figure = Figure(figsize=(8, 6.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=ink)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))

    top.plot(*zip(*points, strict=True), color=blue, marker="o", markersize=4, linewidth=1.8)
    top.annotate(
        f"{summary.accuracy:.1%}",
        points[-1],
        xytext=(0, -8),
        textcoords="offset points",
        ha="center",
        va="top",
        color=blue,
        fontweight="bold",
    )
    top.set_ylabel("test accuracy")
    top.set_ylim(max(0.0, min(accuracy for _, accuracy in points) - 0.1), 1.02)
    top.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    bottom.plot(seconds, seen.dense, color=quiet, linewidth=1.8, linestyle=(0, (5, 2)))
    bottom.plot(seconds, seen.measured, color=orange, linewidth=2.2)
    bottom.set_yscale("log")
    bottom.margins(y=0.1)
    bottom.set_ylabel("bytes on the slow tier")
    bottom.set_xlabel("time since the first synchronisation [s]")
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    end = seconds[-1]
    for values, text, colour, side in (
        (seen.dense, "dense fp32: rounds x 2 x 4N, all parties", quiet, 8),
        (
            seen.measured,
            "measured: TCP, both ways, with TLS and first synchronisation",
            orange,
            -48,
        ),
    ):
        bottom.annotate(
            text,
            (end, values[-1]),
            xytext=(0, side),
            textcoords="offset points",
            ha="right",
            va="bottom" if side > 0 else "top",
            color=colour,
        )
    bottom.annotate(
        "",
        (end, seen.measured[-1]),
        xytext=(end, seen.dense[-1]),
        arrowprops={
            "arrowstyle": "<->",
            "color": ink,
            "linewidth": 1.0,
            "shrinkA": 2,
            "shrinkB": 2,
        },
    )
    bottom.annotate(
        f"{seen.ratio:.1f}x less ",
        (end, (seen.measured[-1] * seen.dense[-1]) ** 0.5),
        ha="right",
        va="center",
        color=ink,
        fontweight="bold",
    )
    for axes in (top, bottom):
        axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink, which="both")
    figure.savefig(path, dpi=150)


def _is(event: Event, *names: str) -> bool:
    return event["role"] == "worker" and event["event"] in names


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"
