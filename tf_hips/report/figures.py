# SPDX-License-Identifier: Apache-2.0
"""Figures of runs beside each other: what ESync's `drawer.py` draws, from what was measured.

Legends and numbers have places of their own, above the axes or right of the bars, so none can cross
a line. A run has one colour in all figures. matplotlib is the extra `plots`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_hips.errors import ConfigError
from tf_hips.report import canvas, peer_figures
from tf_hips.report.runs import Run, Worker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of single devices; the others where colours repeat.
_DOTTED = ((0, (1, 1.6)), (0, (1, 4)), (0, (4, 1.6, 1, 1.6, 1, 1.6)))
_MINUTES_FROM_S = 600.0
_HEIGHT = 4.2
# Workers in one figure; of more, both ends are drawn. A screen shows so many rows, and there are no
# more lines that can be told apart.
_MOST_ROWS, _MOST_LINES = 60, 20
_Numbered = tuple[int, Run]


def draw(runs: Sequence[Run]) -> dict[str, "Figure"]:
    """All figures that the runs have data for, by name.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("Figures need matplotlib: pip install 'tf_hips[plots]'") from error
    found = {**_of_accuracy(runs), **_of_bars(runs)}
    if shares := [run for run in runs if run.communication_share is not None]:
        found["time-share"] = _shares(shares)
    if counted := [run for run in runs if any(one.local_steps for one in run.workers)]:
        found["local-steps"] = _local_steps(counted)
    found.update(peer_figures.draw(runs))
    return found


def subject_of(runs: Sequence[Run]) -> str:
    """Network and data set, where all runs have the same; else nothing."""
    subjects = {run.subject for run in runs}
    return subjects.pop() if len(subjects) == 1 else ""


def _of_accuracy(runs: Sequence[Run]) -> "dict[str, Figure]":
    found: dict[str, Figure] = {}
    tested = [(index, run) for index, run in enumerate(runs) if run.curve]
    tested.sort(key=lambda one: one[1].is_single)  # solid lines before dotted ones
    subject = subject_of(runs)
    of_what = f" of {subject}" if subject else ""
    for name, kind, is_iid in (
        ("accuracy-iid", "IID data", True),
        ("accuracy-non-iid", "non-IID data", False),
    ):
        if any(run.is_iid == is_iid and not _is_alone(run) for _, run in tested):
            chosen = [one for one in tested if one[1].is_iid == is_iid or _is_alone(one[1])]
            found[name] = _accuracy(chosen, f"Test accuracy{of_what}, {kind}")
    if tested and not found:
        found["accuracy-iid"] = _accuracy(tested, f"Test accuracy{of_what} on one device")
    return found


def _is_alone(run: Run) -> bool:
    """Whether it has all rows, so that runs of both kinds of data are compared with it."""
    return run.is_single and run.mode == "local"


def _of_bars(runs: Sequence[Run]) -> "dict[str, Figure]":
    found: dict[str, Figure] = {}
    numbered = list(enumerate(runs))
    rates = [(one, one[1].samples_per_s) for one in numbered if one[1].samples_per_s is not None]
    if rates:
        found["throughput"] = _bars(
            rates, "Throughput", "samples per second, all workers, tests included", _plain
        )
    traffic = [(one, one[1].bytes_per_s) for one in numbered if one[1].bytes_per_s is not None]
    if traffic:
        found["traffic"] = _bars(
            traffic,
            "Traffic of the slow tier",
            "bytes per second on the uplinks' sockets, all parties, both ways",
            _bytes,
        )
    return found


def _accuracy(tested: Sequence[_Numbered], title: str) -> "Figure":
    from matplotlib.ticker import PercentFormatter

    drawn, axes = canvas.figure(title, _HEIGHT)
    longest = max(run.curve[-1][0] for _, run in tested)
    unit, divisor = ("min", 60.0) if longest > _MINUTES_FROM_S else ("s", 1.0)
    for index, run in tested:
        times = [second / divisor for second, _ in run.curve]
        values = [accuracy for _, accuracy in run.curve]
        axes.plot(
            times,
            values,
            color=canvas.colour(index),
            linewidth=1.8,
            linestyle=canvas.line(index, _DOTTED) if run.is_single else canvas.line(index),
            marker="o" if len(values) <= 40 else None,
            markersize=3.5,
            label=f"{run.label} (one device)" if run.is_single else run.label,
        )
    lowest = min(accuracy for _, run in tested for _, accuracy in run.curve)
    axes.set_ylim(max(0.0, lowest - 0.05), 1.01)
    axes.set_xlim(left=0.0)
    axes.set_xlabel(f"time since training began [{unit}]")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    canvas.legend(axes)
    return drawn


def _bars(
    values: Sequence[tuple[_Numbered, float | None]],
    title: str,
    label: str,
    text: Any,
) -> "Figure":
    from matplotlib.ticker import FuncFormatter

    drawn, axes = canvas.figure(title, 1.5 + canvas.BAR_HEIGHT * len(values))
    numbers = [value or 0.0 for _, value in values]
    bars = axes.barh(
        range(len(values)),
        numbers,
        height=0.62,
        color=[canvas.colour(index) for (index, _), _ in values],
    )
    axes.bar_label(bars, [text(one) for one in numbers], padding=5, color=canvas.INK)
    canvas.name_rows(axes, [run.label for (_, run), _ in values])
    axes.set_xlim(0, (max(numbers) or 1.0) * 1.2)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.locator_params(axis="x", nbins=6)
    return drawn


def _shares(runs: Sequence[Run]) -> "Figure":
    from matplotlib.ticker import PercentFormatter

    rows = [
        (run, worker)
        for run in runs
        for worker in run.workers
        if worker.communication_s is not None and worker.seconds > 0
    ]
    rows, left_out = canvas.both_ends(rows, _MOST_ROWS, lambda row: _waited(row[1]))
    drawn, axes = canvas.figure(
        "Computing and communication time of each worker", 1.6 + canvas.BAR_HEIGHT * len(rows)
    )
    waited = [_waited(worker) for _, worker in rows]
    computed = [1.0 - share for share in waited]
    places = range(len(rows))
    first = axes.barh(places, computed, height=0.62, color=canvas.COLOURS[0], label="computing")
    second = axes.barh(
        places, waited, left=computed, height=0.62, color=canvas.COLOURS[1], label="communication"
    )
    for bars, shares in ((first, computed), (second, waited)):
        # A part that is too narrow for its number goes without.
        texts = [f"{share:.0%}" if share >= 0.08 else "" for share in shares]
        axes.bar_label(bars, texts, label_type="center", color="white")
    names = [f"{run.label}\n{worker.name}" for run, worker in rows]
    canvas.name_rows(axes, names if len(runs) > 1 else [worker.name for _, worker in rows])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    # A summary of ESync does not say how long its tests were.
    times = sorted({"elapsed" if worker.with_tests else "training" for _, worker in rows})
    note = f"\n{left_out} workers between them are not shown" if left_out else ""
    axes.set_xlabel(
        f"share of {' or '.join(times)} time; communication is waiting for other parties{note}"
    )
    canvas.legend(axes)
    return drawn


def _waited(worker: Worker) -> float:
    """Its share of time in which it waited for other parties."""
    return (worker.communication_s or 0.0) / worker.seconds


def _local_steps(runs: Sequence[Run]) -> "Figure":
    rows = [(run, worker) for run in runs for worker in run.workers if worker.local_steps]
    rows, left_out = canvas.both_ends(
        rows, _MOST_LINES, lambda row: sum(row[1].local_steps) / len(row[1].local_steps)
    )
    drawn, axes = canvas.figure("Local steps per round", _HEIGHT)
    for index, (run, worker) in enumerate(rows):
        name = f"{run.label}, {worker.name}" if len(runs) > 1 else worker.name
        axes.plot(
            range(1, len(worker.local_steps) + 1),
            worker.local_steps,
            color=canvas.colour(index),
            linewidth=1.6,
            linestyle=canvas.line(index),
            marker="o" if len(worker.local_steps) <= 40 else None,
            markersize=3.5,
            label=name,
        )
    axes.set_xlim(left=0.5)
    note = f"; {left_out} workers between those with fewer and with more steps are not shown"
    axes.set_xlabel(f"round{note if left_out else ''}")
    axes.set_ylabel("steps of a worker")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="both", integer=True)
    canvas.legend(axes)
    return drawn


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(value: float) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B/s"
