# SPDX-License-Identifier: Apache-2.0
"""The committed results hold every target of `benchmarks/targets.toml`; a miss says why."""

import functools
import json
import os
import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TARGETS = tomllib.loads((FOLDER / "targets.toml").read_text(encoding="utf-8"))["target"]


needs_results = pytest.mark.skipif(
    "TF_HIPS_MEASURING" in os.environ, reason="benchmarks.first_run is making the result"
)


@functools.cache
def measured() -> dict[str, float]:
    """The newest committed value of each target id; of one day, that of the wider registers."""
    values: dict[str, tuple[str, bool, float]] = {}
    for path in FOLDER.glob("results/*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        for row in result["rows"]:
            if "id" in row:
                facts = result["environment"]
                is_wide = facts.get("vectors", "AVX-512") == "AVX-512"
                newest = values.get(row["id"], ("", False, 0.0))
                values[row["id"]] = max(newest, (facts["date"], is_wide, row["measured"]))
    return {name: value for name, (*_, value) in values.items()}


@needs_results
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["id"])
def test_committed_result_meets_the_target(target: dict) -> None:
    values = measured()
    if not target.get("is_measured", True):
        assert target["id"] not in values, "there is a result: take `is_measured` away"
        pytest.skip(f"no result of `{target['command']}` is committed yet")
    assert target["id"] in values, f"run `{target['command']}` and commit its result"
    low, high = target.get("at_least", float("-inf")), target.get("at_most", float("inf"))
    if "missed" in target:
        assert not low <= values[target["id"]] <= high, "it is met now: take `missed` away"
    else:
        assert low <= values[target["id"]] <= high


def test_targets_say_what_they_are() -> None:
    assert len({target["id"] for target in TARGETS}) == len(TARGETS)
    for target in TARGETS:
        assert ("at_least" in target) != ("at_most" in target), target["id"]
        assert target["command"].startswith("make "), target["id"]


@needs_results
def test_every_result_names_its_command_and_machine() -> None:
    paths = list(FOLDER.glob("results/*.json"))
    assert paths
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["command"].startswith("make "), path.name
        assert {"cpu", "cores", "date", "commit", "gpu"} <= result["environment"].keys(), path.name
        assert path.with_suffix(".md").is_file(), path.name
