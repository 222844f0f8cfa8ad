# SPDX-License-Identifier: Apache-2.0
"""What `make bench-robust` measures, and that each of its targets is about a figure."""

import json
import subprocess
import sys
import tomllib

import pytest

from benchmarks import collectives, harness, robust
from tf_hips import robust as rules

TARGETS = tomllib.loads((harness.ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8"))


def test_every_target_is_about_something_that_is_measured() -> None:
    measured = {
        robust.about("read", rule, n, d)
        for rule in robust.RULES
        for n in robust.COUNTS
        for d in robust.LENGTHS
        if n * d <= robust.MOST
    }
    for part in ("sort", "byzfl"):
        measured |= {
            robust.about(part, rule, n, d)
            for rule in ("median", "krum")
            for n in robust.PEER_COUNTS
            for d in robust.PEER_LENGTHS
            if n * d <= robust.PEER_MOST and (part == "sort") == (rule == "median")
        }
    known = {one["id"] for one in TARGETS["target"] if one["command"] == robust.COMMAND}
    assert known == measured - {""}


def test_the_worst_figure_counts() -> None:
    pairs = [(0.2, 0.1), (0.13, 0.1), (0.12, 0.1)]
    rows = [
        robust._row("read", "median", n, 10_000_000, [mine / once for mine, once in pairs],
                    pairs, "one read")
        for n in (5, 16)
    ]  # fmt: skip
    rows[1]["measured"] = 1.5
    [found] = [row for row in collectives.targets(rows, robust.COMMAND) if row["measured"] == 1.5]
    assert found["id"] == "robust-median"
    assert found["target"] == "<= 1.3 x"
    others = collectives.targets([], robust.COMMAND)
    assert {row["met"] for row in others} == {"no"}


@pytest.mark.parametrize("n", robust.COUNTS)
def test_rules_that_are_measured_are_rules(n: int) -> None:
    for rule in robust.RULES:
        rules.parse(robust.text_of(rule, n))


def test_a_small_run_prints_and_stores_nothing() -> None:
    before = set(harness.RESULTS.iterdir())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.robust", "--only", "read"),
            *("--rounds", "1", "--most", "1000000"),
        ],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing is stored" in done.stdout
    assert done.stdout.splitlines()[-1] == "bench-robust: 0 of 11 targets met"
    assert set(harness.RESULTS.iterdir()) == before


def test_byzfl_is_pinned() -> None:
    path = harness.ROOT / "benchmarks/byzfl/requirements.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split("==")[0] for line in lines[1:]] == ["byzfl", "torch"]
    assert json.dumps(lines).count("==") == 2
