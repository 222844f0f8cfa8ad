# SPDX-License-Identifier: Apache-2.0
"""docs/events.md names every event and every metric that there is, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/events.md").read_text(encoding="utf-8")
# What a file of JSON lines is written with.
WRITERS = re.compile(r"(^|\.)(_?write_event|_?tell|_say|_?events\.write)$")


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_cells(heading: str) -> set[str]:
    cells = [line.split("|")[1] for line in section(heading).splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def written() -> Iterator[str]:
    """First arguments of the calls that write events."""
    for path in sorted((ROOT / "tf_hips").rglob("*.py")):
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(one, ast.Call) or not one.args:
                continue
            first = one.args[0]
            if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
                continue
            if WRITERS.search(ast.unparse(one.func)) and re.fullmatch(r"[a-z_]+", first.value):
                yield first.value


def test_every_event_is_listed() -> None:
    # Of votes: `tally` tells them by the name of what was seen.
    votes = {"outvoted", "absent", "proven", "passed_over"}
    assert first_cells("Workers") | first_cells("Servers") == {*written()} | votes


def test_every_metric_is_listed() -> None:
    source = (ROOT / "tf_hips/ps/server/status.py").read_text(encoding="utf-8")
    of_children = {
        f"tf_hips_child_{name}{'_total' * (kind == 'Counter')}"
        for name, kind in re.findall(r'\("(\w+)", "(Counter|Gauge)", "', source)
    }
    assert len(of_children) > 10
    others = {f"tf_hips_{name}" for name in re.findall(r'self\._one\(\s*"(\w+)"', source)}
    assert first_cells("Metrics") == of_children | others | {
        "tf_hips_refused_calls_total",
        "tf_hips_round_seconds",
        "tf_hips_child_up",
    }
