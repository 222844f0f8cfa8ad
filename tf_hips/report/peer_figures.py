# SPDX-License-Identifier: Apache-2.0
"""Figures of peers: refused or outvoted, how often and in which rounds; chosen, in which share.

Rows are peers, those with the most marks first, or, server by server, with the largest share. A
kind of mark has one colour in both figures; where two have the same, one is hatched and has
crosses.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_hips.report import canvas, peers
from tf_hips.report.choices import Share
from tf_hips.report.peers import Mark
from tf_hips.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_ROWS = 30
# By which kinds of one colour are told apart.
_HATCHES, _MARKERS, _MARKER_SIZES = ("", "///"), ("|", "x"), (11, 6)
# Rounds that have a mark of their own on the axis; of more, neighbours share one. A mark is wider
# than that, and a page with one for each of a million rounds opens in no browser.
_MOST_COLUMNS = 2000
_Rows = list[tuple[Run, str, list[Mark]]]


def draw(runs: Sequence[Run]) -> "dict[str, Figure]":
    """`peers`, counts; `peers-rounds`, where marks have rounds; `chosen`, where rules choose."""
    return {**_marked(runs), **_chosen(runs)}


def _marked(runs: Sequence[Run]) -> "dict[str, Figure]":
    """None where nobody was marked."""
    told = [run for run in runs if run.marks]
    if not told:
        return {}
    rows: _Rows = []
    for run in told:
        of_peers: dict[str, list[Mark]] = {}
        for mark in run.marks:
            of_peers.setdefault(mark.peer, []).append(mark)
        rows += [(run, peer, of_peers[peer]) for peer in peers.names(run.marks)]
    left_out = max(0, len(rows) - _MAX_ROWS)
    if left_out:
        kept = sorted(rows, key=lambda row: -len(row[2]))[:_MAX_ROWS]
        rows = [row for row in rows if row in kept]
    known = peers.kinds([mark for run in told for mark in run.marks])
    note = f"; {left_out} more are not shown" if left_out else ""
    found = {"peers": _counts(rows, known, note)}
    if any(mark.round is not None for *_, marks in rows for mark in marks):
        found["peers-rounds"] = _rounds(rows, known, note)
    return found


def _chosen(runs: Sequence[Run]) -> "dict[str, Figure]":
    """None where no rule has chosen rows."""
    rows = [(run, one) for run in runs for one in run.shares]
    if not rows:
        return {}
    # Who is chosen least may be an honest peer that is never heard, and who is chosen most a liar.
    rows, left_out = canvas.both_ends(rows, _MAX_ROWS, lambda row: row[1].share)
    drawn, axes = canvas.figure(
        "Rounds in which a rule has chosen a peer's row", 1.4 + canvas.BAR_HEIGHT * len(rows)
    )
    places = range(len(rows))
    axes.barh(places, [one.share for _, one in rows], height=0.62, color=canvas.COLOURS[0])
    for place, (_, one) in enumerate(rows):
        axes.annotate(
            f"{one.chosen} of {one.of}",
            (one.share, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=canvas.INK,
        )
    axes.set_xlim(0, 1.2)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    note = f"; {left_out} between them are not shown" if left_out else ""
    axes.set_xlabel(f"share of the rounds in which it had a row{note}")
    _name_rows(axes, [(run, _shown(run, one)) for run, one in rows])
    return {"chosen": drawn}


def _shown(run: Run, one: Share) -> str:
    """The peer, and who has chosen where several have: servers of a tree."""
    return one.peer if len({other.by for other in run.shares}) == 1 else f"{one.peer}, at {one.by}"


def _counts(rows: _Rows, known: Sequence[str], note: str) -> "Figure":
    drawn, axes = canvas.figure("Peers refused or outvoted", 1.7 + canvas.BAR_HEIGHT * len(rows))
    places = list(range(len(rows)))
    ends = [0] * len(rows)
    for kind in known:
        counts = [sum(mark.kind == kind for mark in marks) for *_, marks in rows]
        axes.barh(
            places,
            counts,
            left=ends,
            height=0.62,
            color=canvas.colour(_place(kind)),
            hatch=canvas.line(_place(kind), _HATCHES),
            edgecolor="white",
            linewidth=0,
            label=kind,
        )
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
    for place, end in zip(places, ends, strict=True):
        axes.annotate(
            str(end),
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=canvas.INK,
        )
    axes.set_xlim(0, max(ends) * 1.15)
    axes.set_xlabel(f"times{note}")
    axes.locator_params(axis="x", integer=True)
    _finish(axes, rows)
    return drawn


def _rounds(rows: _Rows, known: Sequence[str], note: str) -> "Figure":
    drawn, axes = canvas.figure(
        "Rounds in which peers were refused or outvoted", 1.7 + canvas.BAR_HEIGHT * len(rows)
    )
    last = max(mark.round or 0 for run, *_ in rows for mark in run.marks)
    width = 1 + last // _MOST_COLUMNS
    for kind in known:
        points = sorted(
            {
                (mark.round // width * width, place)
                for place, (*_, marks) in enumerate(rows)
                for mark in marks
                if mark.kind == kind and mark.round is not None
            }
        )
        axes.plot(
            [one for one, _ in points],
            [place for _, place in points],
            linestyle="none",
            marker=canvas.line(_place(kind), _MARKERS),
            markersize=canvas.line(_place(kind), _MARKER_SIZES),
            markeredgewidth=1.6,
            color=canvas.colour(_place(kind)),
            label=kind,
        )
    axes.set_xlim(-0.02 * max(last, 10), 1.02 * max(last, 10))
    axes.set_xlabel(f"round{note}")
    axes.locator_params(axis="x", integer=True)
    _finish(axes, rows)
    return drawn


def _finish(axes: Any, rows: _Rows) -> None:
    _name_rows(axes, [(run, peer) for run, peer, _ in rows])
    canvas.legend(axes)


def _name_rows(axes: Any, rows: Sequence[tuple[Run, str]]) -> None:
    is_one = len({run.label for run, _ in rows}) == 1
    texts = [peer if is_one else f"{run.label}\n{peer}" for run, peer in rows]
    canvas.name_rows(axes, texts)


def _place(kind: str) -> int:
    """The number of a kind, of which follows how it is drawn, the same in every report."""
    return peers.NAMES.index(kind)
