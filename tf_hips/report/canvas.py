# SPDX-License-Identifier: Apache-2.0
"""What all figures of reports have in common: colours, size, axes and legend."""

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tf_hips.log import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Row = TypeVar("_Row")

INK, _GRID = "#222222", "#e6e6e6"
# Apart from each other for the colour-blind, too (Okabe and Ito, 2008), without the yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#666666")
# By which lines of one colour are told apart.
_LINES = ("-", "--", "-.")
_WIDTH, BAR_HEIGHT = 8.0, 0.42
_LINE_HEIGHT = 0.2  # of text, inches; two lines have room beside a bar
_MAX_LEGEND_COLUMN = 3
_LEGEND_LETTERS, _ROW_LETTERS, _MAX_LINES = 60, 30, 4


def figure(title: str, height: float) -> "tuple[Figure, Any]":
    """An empty figure with a title, `height` inches high, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(drawn)
    drawn.suptitle(_as_it_is(title), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = drawn.subplots()
    axes.grid(visible=True, which="major", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, which="both")
    return drawn, axes


def colour(index: int) -> str:
    """Of the run or line with this number; they repeat."""
    return COLOURS[index % len(COLOURS)]


def line(index: int, kinds: Sequence[Any] = _LINES) -> Any:
    """The kind of line, or of what else, with that number: another one where colours repeat."""
    return kinds[index // len(COLOURS) % len(kinds)]


def legend(axes: Any) -> None:
    """Above the axes, of all that was drawn; in as many columns as there is room for.

    To be called last: the names of rows take of that room. A high legend makes the figure higher.
    """
    drawn = axes.figure
    handles = [*axes.get_lines(), *axes.containers]
    texts = [_as_it_is(wrapped(one.get_label(), _LEGEND_LETTERS)) for one in handles]
    # matplotlib leaves out what begins so; a folder may be called so.
    texts = [f" {one}" if one.startswith("_") else one for one in texts]
    renderer = drawn.canvas.get_renderer()
    room = drawn.bbox.width - (axes.bbox.x0 - axes.get_tightbbox(renderer).x0)
    for columns in range(_MAX_LEGEND_COLUMN, 0, -1):
        made = axes.legend(
            handles,
            texts,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=columns,
            frameon=False,
            borderaxespad=0.2,
            handlelength=2.6,
        )
        taken = made.get_window_extent(renderer)
        if taken.width <= room:
            break
    drawn.set_figheight(drawn.get_figheight() + max(0.0, taken.height / drawn.dpi - 0.3))


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Writes a name left of each row, the first on top; long ones make the figure higher."""
    texts = [wrapped(one, _ROW_LETTERS) for one in names]
    axes.set_yticks(range(len(texts)), [_as_it_is(one) for one in texts])
    # As much room beyond the outer rows, however many there are.
    axes.set_ylim(len(texts) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    more = max(one.count("\n") for one in texts) - 1
    if more > 0:
        drawn = axes.figure
        drawn.set_figheight(drawn.get_figheight() + more * _LINE_HEIGHT * len(texts))


def _as_it_is(text: str) -> str:
    """The text for matplotlib, to which what stands between two `$` is a formula.

    What is no text of Unicode, as names of folders may be, or no character is a space.
    """
    return "\n".join(printable(line) for line in text.split("\n")).replace("$", r"\$")


def both_ends(
    rows: Sequence[_Row], most: int, key: Callable[[_Row], float]
) -> tuple[list[_Row], int]:
    """Of too many rows those with the largest and with the smallest `key`; how many are left out.

    They keep their order. Who is in the middle is as most are.
    """
    if len(rows) <= most:
        return list(rows), 0
    ranked = sorted(range(len(rows)), key=lambda place: key(rows[place]))
    kept = sorted([*ranked[: most // 2], *ranked[-(most // 2) :]])
    return [rows[place] for place in kept], len(rows) - len(kept)


def wrapped(text: str, letters: int) -> str:
    """A text in lines of at most so many letters; what is longer than a few lines lacks its middle.

    The ends stay: a path tells by its first folders, or by its last, which run it is.
    """
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, letters) or [""]]
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        lines = [*lines[: half - 1], f"{lines[half - 1][: letters - 3]}...", *lines[-half:]]
    return "\n".join(lines)
