# SPDX-License-Identifier: Apache-2.0
"""What all figures of reports have in common: colours, size, axes and legend."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, _GRID = "#222222", "#e6e6e6"
# Apart from each other for the colour-blind, too (Okabe and Ito, 2008), without the yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#666666")
_WIDTH, BAR_HEIGHT = 8.0, 0.42
_MAX_LEGEND_COLUMN = 3
SHORT_LABEL = 24


def figure(title: str, height: float) -> "tuple[Figure, Any]":
    """An empty figure with a title, `height` inches high, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(drawn)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = drawn.subplots()
    axes.grid(visible=True, which="major", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, which="both")
    return drawn, axes


def legend(axes: Any, labels: Sequence[str]) -> None:
    """Above the axes; long labels one below the other."""
    is_short = max(map(len, labels)) <= SHORT_LABEL
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=_MAX_LEGEND_COLUMN if is_short else 1,
        frameon=False,
        borderaxespad=0.2,
        handlelength=2.6,
    )
