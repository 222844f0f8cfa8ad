# SPDX-License-Identifier: Apache-2.0
"""`tf-hips summary` and `tf-hips report`: what runs came to, as a table, as figures, as a page."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_hips import tables
from tf_hips.cli import arguments

if TYPE_CHECKING:
    from tf_hips.report import trees

_TEXTS = ("state", "peer", "what", "rounds", "found out by", "reason", "by")  # columns of words
_RUN = (
    "a folder of events (--log-dir), a folder of trees (--tree-dir, HiPS, ESync), a summary of "
    "ESync, or a folder of these"
)


def add(commands: Any) -> None:
    """Declares both sub-commands."""
    summary = commands.add_parser(
        "summary", help="what runs came to, as a table", description="A line for each run."
    )
    summary.add_argument("runs", nargs="+", metavar="RUN", help=_RUN)
    summary.add_argument("--json", metavar="FILE", help="write the numbers, too; `-`: only them")
    summary.add_argument(
        "--esync",
        metavar="FILE",
        help="merge the trees of all RUNs, one for each host, into a summary as ESync writes it; "
        "there is no table then",
    )
    summary.set_defaults(run=_summary)
    report = commands.add_parser(
        "report",
        help="figures of runs, and one page with all of it",
        description="Draws accuracy over time (single-device runs dotted), throughput, measured "
        "traffic, time shares, local steps and peers that were refused or chosen as PNG and SVG, "
        "and report.html with all of it.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help=_RUN)
    report.add_argument(
        *("-o", "--output"),
        metavar="DIR",
        default="report",
        help="folder to write (default report)",
    )
    report.add_argument("--title", metavar="TEXT", default="Training runs", help="of the page")
    report.set_defaults(run=_report)


def _summary(options: argparse.Namespace) -> int:
    from tf_hips.report import page, runs, trees

    if options.esync is not None:
        trees.write_summary(_merged(options.runs), Path(options.esync))
        if options.json is None:
            sys.stdout.write(f"wrote {options.esync}\n")
            return 0
    found = runs.read_all(options.runs)
    text = json.dumps([runs.facts(run) for run in found], indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
        return 0
    if options.json is not None:
        Path(options.json).write_text(text, encoding="utf-8")
    if options.esync is not None:
        sys.stdout.write(f"wrote {options.esync}\nwrote {options.json}\n")
        return 0
    for head, *rows in (page.table(found), page.peer_table(found), page.choice_table(found)):
        words = {head[0], *_TEXTS}
        columns = [tables.Column(name, name not in words, name in words) for name in head]
        tables.show(columns, rows)
    return 0


def _merged(paths: list[str]) -> "trees.Summary":
    """The trees of all hosts as one summary.

    Raises:
        UsageError: a worker is in two of them.
    """
    from tf_hips.report import trees

    merged: trees.Summary = {}
    for path in paths:
        for host, devices in trees.summarise_tree(Path(path)).items():
            twice = merged.get(host, {}).keys() & devices.keys()
            if twice:
                raise arguments.UsageError(
                    f"--esync must have each worker once. Received: {host}/{min(twice)} twice"
                )
            merged.setdefault(host, {}).update(devices)
    return merged


def _report(options: argparse.Namespace) -> int:
    from tf_hips.report import page, runs

    for path in page.write(runs.read_all(options.runs), Path(options.output), options.title):
        sys.stdout.write(f"wrote {path}\n")
    return 0
