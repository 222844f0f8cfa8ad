# SPDX-License-Identifier: Apache-2.0
"""The figure of `make demo`: accuracy and bytes of the slow tier over time, from events alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tf_hips import report
from tf_hips.errors import ConfigError
from tf_hips.log import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(events: Sequence[Event], path: str | Path, title: str) -> None:
    """Draws accuracy and slow-tier bytes over time into a PNG or SVG file.

    Args:
        events: in order of time; the newest run is drawn, which must have finished.
        path: the file to write.
        title: what was run, in a few words.

    Raises:
        ConfigError: matplotlib is missing, or events are.
    """
    figure(events, title).savefig(path, dpi=150)


def figure(events: Sequence[Event], title: str) -> "Figure":
    """The figure that `draw` writes.

    Every label has a place of its own, above the axes or right of the last point, so none can cross
    a line whatever the numbers are.

    Raises:
        ConfigError: matplotlib is missing, or events are.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, PercentFormatter
    except ImportError as error:
        raise ConfigError("Figures need matplotlib: pip install 'tf_hips[plots]'") from error

    events = report.newest_run(events)
    summary = report.summarise(events)
    seen = summary.traffic
    # The clock starts with the first synchronisation: how long TensorFlow takes to load is another
    # story.
    begin = events[0]["time_us"] + seen.seconds[0] * 1e6
    points = [((time_us - begin) / 1e6, accuracy) for time_us, accuracy in report.epochs(events)]
    seconds = [second - seen.seconds[0] for second in seen.seconds]

    ink, quiet, blue, orange = "#222222", "#8a8a8a", "#1f6fb4", "#d9822b"
    drawn = Figure(figsize=(8, 6.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(drawn)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=ink)
    top, bottom = drawn.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))

    top.plot(*zip(*points, strict=True), color=blue, marker="o", markersize=4, linewidth=1.8)
    top.annotate(
        f"{summary.accuracy:.1%}",
        points[-1],
        xytext=(10, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        color=blue,
        fontweight="bold",
    )
    top.set_ylabel("test accuracy")
    top.set_ylim(max(0.0, min(accuracy for _, accuracy in points) - 0.1), 1.02)
    top.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    end = seconds[-1]
    bottom.plot(
        seconds,
        seen.dense,
        color=quiet,
        linewidth=1.8,
        linestyle=(0, (5, 2)),
        label="dense fp32: rounds x 2 x 4N",
    )
    bottom.plot(
        seconds,
        seen.measured,
        color=orange,
        linewidth=2.2,
        label="measured: TCP, with TLS and first synchronisation",
    )
    bottom.set_yscale("log")
    bottom.margins(y=0.1)
    bottom.set_xlim(right=end)
    bottom.set_ylabel("bytes on the slow tier,\nall parties, both ways")
    bottom.set_xlabel("time since the first synchronisation [s]")
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    bottom.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=2,
        frameon=False,
        labelcolor="linecolor",
        borderaxespad=0.2,
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
        f"{seen.ratio:.1f}x\nless",
        (end, (seen.measured[-1] * seen.dense[-1]) ** 0.5),
        xytext=(10, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        color=ink,
        fontweight="bold",
    )
    for axes in (top, bottom):
        axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink, which="both")
    return drawn


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"
