# SPDX-License-Identifier: Apache-2.0
"""The committed results hold every target of `benchmarks/targets.toml`; a miss says why."""

import functools
import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import harness

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TARGETS = tomllib.loads((FOLDER / "targets.toml").read_text(encoding="utf-8"))["target"]


needs_results = pytest.mark.skipif(
    "TF_HIPS_MEASURING" in os.environ, reason="benchmarks.first_run is making the result"
)


def newest(results: list[dict], target: dict) -> dict | None:
    """The newest row about a target; of one time, that of the wider registers, then the worse."""

    def order(found: tuple[dict, dict]) -> tuple:
        facts, row = found
        is_wide = facts.get("vectors", "AVX-512") == "AVX-512"
        value = float("-inf") if row["measured"] is None else row["measured"]
        return *harness.when(facts), is_wide, -value if "at_least" in target else value

    rows = [
        (result["environment"], row)
        for result in results
        for row in result["rows"]
        if row.get("id") == target["id"]
    ]
    return max(rows, key=order)[1] if rows else None


def why_wrong(row: dict, target: dict) -> str:
    """What is wrong with the newest row about a target; empty: nothing."""
    met = row["met"]
    if met not in ("yes", "no", "noisy"):
        return f"`met` must be yes, no or noisy. Received: {met}"
    if row["measured"] is None:
        return "a figure must be there. Received: none"
    if met != (is_met := harness.verdict(row, target)):
        return f"`met` must be what the figure says: {is_met}. Received: {met}"
    if met == "yes":
        return "it is met now: take `missed` away" if "missed" in target else ""
    return "" if "missed" in target else f"it is not met ({met}): say why as `missed`"


@functools.cache
def committed() -> list[dict]:
    paths = sorted(FOLDER.glob("results/*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


@needs_results
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["id"])
def test_committed_result_meets_the_target(target: dict) -> None:
    row = newest(committed(), target)
    if not target.get("is_measured", True):
        assert row is None, "there is a result: take `is_measured` away"
        pytest.skip(f"no result of `{target['command']}` is committed yet")
    assert row is not None, f"run `{target['command']}` and commit its result"
    assert not (why := why_wrong(row, target)), why


AT_MOST = {"id": "a", "at_most": 1.05}
AT_LEAST = {"id": "a", "at_least": 2}


def result(day: str, value: float, **facts: str) -> dict:
    return {"environment": {"date": day, **facts}, "rows": [{"id": "a", "measured": value}]}


def test_the_newest_result_counts_and_of_one_time_the_worse() -> None:
    def value(target: dict, *results: dict) -> float:
        row = newest(list(results), target)
        assert row is not None
        assert row == newest(list(reversed(results)), target)
        return row["measured"]

    old, new = result("2026-11-23", 9.0), result("2026-11-24", 1.0)
    assert value(AT_LEAST, old, new) == value(AT_MOST, old, new) == 1.0
    early, late = (result("2026-11-24", at, time=f"0{at}:00:00") for at in (3, 1))
    assert value(AT_MOST, early, late, new) == value(AT_LEAST, early, late, new) == 3
    one, two = result("2026-11-24", 1.0), result("2026-11-24", 2.0)
    assert value(AT_LEAST, one, two) == 1.0
    assert value(AT_MOST, one, two) == 2.0
    narrow = result("2026-11-24", 1.0, vectors="AVX2")
    assert value(AT_LEAST, narrow, two) == 2.0
    assert newest([result("2026-11-24", 1.0)], {"id": "b", "at_least": 1}) is None


@pytest.mark.parametrize(
    ("measured", "met", "interval", "wrong"),
    [
        (1.0, "yes", "0.99 - 1.01", ""),
        (1.0, "no", "", "what the figure says: yes"),
        (1.1, "yes", "", "what the figure says: no"),
        (1.1, "no", "", "say why"),
        (1.04, "noisy", "1.03 - 1.06", "say why"),
        (1.04, "yes", "1.03 - 1.06", "what the figure says: noisy"),
        # What a part that did not run left behind.
        (0.0, "no", "", "what the figure says: yes"),
        (None, "not measured", "", "must be yes, no or noisy"),
        (None, "no", "", "must be there"),
        (0.0, "not run", "", "must be yes, no or noisy"),
    ],
)
def test_what_was_not_measured_is_no_answer(
    measured: float | None, met: str, interval: str, wrong: str
) -> None:
    row = {"id": "a", "measured": measured, "interval": interval, "met": met}
    assert wrong in (why := why_wrong(row, AT_MOST))
    assert bool(wrong) == bool(why)
    if wrong == "say why":
        assert not why_wrong(row, {**AT_MOST, "missed": "because"})
    if not wrong:
        assert "take `missed` away" in why_wrong(row, {**AT_MOST, "missed": "because"})


def test_targets_say_what_they_are() -> None:
    assert len({target["id"] for target in TARGETS}) == len(TARGETS)
    for target in TARGETS:
        assert ("at_least" in target) != ("at_most" in target), target["id"]
        assert target["command"].startswith("make "), target["id"]


def test_who_stores_a_result_is_a_verb_that_the_readme_lists() -> None:
    makefile = (FOLDER.parent / "Makefile").read_text(encoding="utf-8")
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = set()
    for path in FOLDER.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'(?i)\bcommand ?= ?"([^"]+)"', source))
    assert {"make bench-low-rank", "make bench-sparse"} <= found
    for command in found:
        assert re.search(rf"^{command.removeprefix('make ')}:.*##", makefile, re.M), command
        assert f"| `{command}` |" in readme, command


@needs_results
def test_every_result_names_its_command_and_machine() -> None:
    paths = list(FOLDER.glob("results/*.json"))
    assert paths
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["command"].startswith("make "), path.name
        assert {"cpu", "cores", "date", "commit", "gpu"} <= result["environment"].keys(), path.name
        assert path.with_suffix(".md").is_file(), path.name


@needs_results
def test_results_of_several_runs_say_of_each_part_when_and_on_what_it_was_measured() -> None:
    several = [result for result in committed() if "parts" in result]
    assert several
    for result in several:
        of_rows = {row["part"] for row in result["rows"] if not row.get("id")}
        assert result["parts"].keys() == of_rows, result["theme"]
        for facts in result["parts"].values():
            assert {*harness.PART_FACTS, "note"} == facts.keys(), result["theme"]
        days = max(facts["date"] for facts in result["parts"].values())
        assert days == result["environment"]["date"], result["theme"]
