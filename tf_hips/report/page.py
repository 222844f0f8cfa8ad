# SPDX-License-Identifier: Apache-2.0
"""A report as files: each figure as PNG and SVG, the numbers as JSON, and all of it as one page.

The page holds its figures and styles itself; it opens without a network.
"""

import html
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tf_hips.errors import ConfigError
from tf_hips.log import printable
from tf_hips.report import ends, figures, peers, runs
from tf_hips.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, NUMBERS = "report.html", "summary.json"
_DPI = 150
_STATE_CHARACTERS = 60  # in a table; the numbers have all of it
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #e6e6e6; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


def write(found: Sequence[Run], folder: Path, title: str) -> list[Path]:
    """Writes a report; returns the files.

    Args:
        found: the runs, in the order of their colours.
        folder: where to; it is made.
        title: of the page.

    Raises:
        ConfigError: matplotlib is missing, or the folder cannot be written.
    """
    drawn = figures.draw(found)
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        svgs = {name: svg(figure, name) for name, figure in drawn.items()}
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.png", dpi=_DPI)
            (folder / f"{name}.svg").write_text(svgs[name], encoding="utf-8")
            files += [folder / f"{name}.png", folder / f"{name}.svg"]
        numbers = json.dumps([runs.facts(run) for run in found], indent=1)
        (folder / NUMBERS).write_text(numbers + "\n", encoding="utf-8")
        (folder / PAGE).write_text(page(found, svgs, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return [*files, folder / NUMBERS, folder / PAGE]


def svg(figure: "Figure", name: str) -> str:
    """A figure as SVG text; the same figure is the same text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # Ids follow from the name, so figures of one page do not take each other's clips.
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def page(found: Sequence[Run], svgs: Mapping[str, str], title: str) -> str:
    """The page."""
    tables = "\n".join(
        _html(f"<h2>{_text(name)}</h2>" if name else "", one)
        for name, one in (
            ("", table(found)),
            ("Peers", peer_table(found)),
            ("Chosen rows", choice_table(found)),
        )
        if len(one) > 1
    )
    subject = figures.subject_of(found)
    of_what = f"<p>{_text(subject)}</p>\n" if subject else ""
    drawn = "\n".join(
        f'<figure id="{name}">{text[text.index("<svg") :]}</figure>' for name, text in svgs.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style></head><body>\n"
        f"<h1>{_text(title)}</h1>\n{of_what}{tables}\n{drawn}\n</body></html>\n"
    )


def _text(text: str) -> str:
    """The text for a page, whatever a folder or a peer is called."""
    return html.escape(printable(text))


def _html(head: str, rows: Sequence[Sequence[str]]) -> str:
    names, *cells = rows
    heads = "".join(f"<th>{_text(one)}</th>" for one in names)
    lines = "".join(
        "<tr>" + "".join(f"<td>{_text(one)}</td>" for one in row) + "</tr>\n" for row in cells
    )
    return f"{head}<table><thead><tr>{heads}</tr></thead>\n<tbody>{lines}</tbody></table>"


def peer_table(found: Sequence[Run]) -> list[list[str]]:
    """Rows of text about peers that were refused or outvoted, the head first; else only that."""
    head = ["run", "peer", "what", "times", "rounds", "found out by", "reason"]
    return [
        head,
        *(
            [
                run.label,
                line.peer,
                line.kind,
                str(line.times),
                peers.rounds_text(line.rounds),
                line.by,
                line.reason or "-",
            ]
            for run in found
            for line in peers.lines(run.marks)
        ),
    ]


def choice_table(found: Sequence[Run]) -> list[list[str]]:
    """Rows of text about peers whose rows a rule could choose, the head first; else only that."""
    head = ["run", "peer", "chosen", "of rounds", "share", "by"]
    return [
        head,
        *(
            [run.label, one.peer, str(one.chosen), str(one.of), f"{one.share:.0%}", one.by]
            for run in found
            for one in run.shares
        ),
    ]


def table(found: Sequence[Run]) -> list[list[str]]:
    """Rows of text, the head first; with how each has ended where not all are whole."""
    head = ["run", "workers", "accuracy", "best", "time", "samples/s", "slow tier", "communication"]
    rows = [head, *(_row(run) for run in found)]
    if all(run.state in (None, ends.ENDED) for run in found):
        return rows
    states = ["state", *(textwrap.shorten(run.state or "-", _STATE_CHARACTERS) for run in found)]
    return [[*row, state] for row, state in zip(rows, states, strict=True)]


def _row(run: Run) -> list[str]:
    best = run.best_accuracy
    share = run.communication_share
    slow = "-"
    if run.slow_bytes is not None:
        slow = _size(run.slow_bytes)
        if run.dense_bytes:
            slow += f" ({_against(run.slow_bytes, run.dense_bytes)} dense)"
    return [
        run.label,
        str(run.num_workers),
        "-" if run.accuracy is None else f"{run.accuracy:.2%}",
        "-" if best is None else f"{best:.2%}",
        f"{run.seconds:.1f} s",
        "-" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}",
        slow,
        "-" if share is None else f"{share:.0%}",
    ]


def _against(value: float, other: float) -> str:
    """How many times less than `other` a value is, or more: frames of a small model outweigh it."""
    times, word = (other / value, "less") if value <= other else (value / other, "more")
    factor = f"{times:.1f}x"
    return "as much as" if factor == "1.0x" else f"{factor} {word} than"


def _size(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g} B"
