# SPDX-License-Identifier: Apache-2.0
"""What `make bench-robust` measures, and that each of its targets is about a figure."""

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    closing,
    harness,
    robust,
    robust_accuracy,
    robust_server,
    robust_step,
    robust_votes,
)
from tf_hips import robust as rules
from tf_hips.comm import robust_rows
from tf_hips.robust import attacks

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
    of_digits = {"robust-detox-points"} | {
        f"robust-table-{what}" for what in ("run", "minutes", "processes")
    }
    others = {robust_step.TARGET, robust_votes.ABOUT}
    others |= {case.about for case in robust_server.CASES}
    assert known == measured - {""} | of_digits | others


def test_a_figure_says_how_long_its_rows_are() -> None:
    parts = {
        robust.about(part, rule, n, 10**8): part
        for part in robust.LEAST_LENGTH
        for rule in robust.RULES
        for n in robust.COUNTS
    }
    told = {one["id"]: one["figure"] for one in TARGETS["target"] if one["id"] in parts}
    assert told.keys() == parts.keys() - {""}
    for name, figure in told.items():
        least = f"{robust.LEAST_LENGTH[parts[name]]:.0e}".replace("e+0", "e")
        assert f"d >= {least}" in figure, name


def test_rules_of_steps_bear_the_ranks_that_there_are() -> None:
    for rule in (*robust_step.RULES, *robust_step.ONEBIT_RULES):
        robust_rows.check(rules.parse(rule), robust_step.RANKS)


def test_the_note_tells_the_rounds_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert robust.rounds_told(9) == "9 rounds (byzfl: 5; accuracy and table: 3 seeds)"
    assert robust.rounds_told(3) == "3 rounds (byzfl: 3; accuracy and table: 3 seeds)"
    asked: list[int] = []
    monkeypatch.setattr(robust, "_interpreter", lambda: Path(sys.executable))
    monkeypatch.setattr(robust, "_byzfl", lambda _: contextlib.nullcontext(lambda o: o["least_s"]))
    monkeypatch.setattr(robust, "_ours", lambda *_: lambda: None)
    monkeypatch.setattr(robust, "_of_block", lambda _: asked.append(1) or 1.0)
    shown = list(robust.byzfl(9, 15 * 100_000))
    assert len(asked) == 5 * len(shown) > 0


def test_the_worst_figure_counts() -> None:
    pairs = [(0.2, 0.1), (0.13, 0.1), (0.12, 0.1)]
    rows = [
        robust._row("read", "median", n, 10_000_000, [mine / once for mine, once in pairs],
                    pairs, "one read")
        for n in (5, 16)
    ]  # fmt: skip
    rows[1]["measured"] = 1.5
    [found] = [row for row in closing.targets(rows, robust.COMMAND) if row["measured"] == 1.5]
    assert found["id"] == "robust-median"
    assert found["target"] == "<= 1.3 x"
    others = closing.targets([], robust.COMMAND)
    assert {row["met"] for row in others} == {closing.NOT_MEASURED}


@pytest.mark.parametrize("n", robust.COUNTS)
def test_rules_that_are_measured_are_rules(n: int) -> None:
    for rule in robust.RULES:
        rules.parse(robust.text_of(rule, n))


@pytest.mark.heavy
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
    targets = sum(one["command"] == robust.COMMAND for one in TARGETS["target"])
    last = f"bench-robust: 0 of {targets} targets met, {targets} not measured"
    assert done.stdout.splitlines()[-1] == last
    assert set(harness.RESULTS.iterdir()) == before


@pytest.mark.heavy
def test_gradients_of_digits_are_those_of_differences() -> None:
    data = robust_accuracy.digits()
    generator = np.random.default_rng(0)
    weights = generator.standard_normal(sum(robust_accuracy.SIZES)).astype(np.float64) / 8
    rows, labels = data.rows[:12].reshape(2, 6, 64).astype(np.float64), data.labels[:12]
    found = robust_accuracy.gradients(weights, rows, labels.reshape(2, 6))

    def loss(values: np.ndarray, worker: int) -> float:
        first, first_bias, second, second_bias = robust_accuracy._parts(values)
        scores = np.maximum(rows[worker] @ first + first_bias, 0) @ second + second_bias
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return -scores[np.arange(6), labels.reshape(2, 6)[worker]].mean()

    for place in generator.integers(0, weights.size, 30):
        step = np.zeros_like(weights)
        step[place] = 1e-6
        for worker in (0, 1):
            slope = (loss(weights + step, worker) - loss(weights - step, worker)) / 2e-6
            assert found[worker, place] == pytest.approx(slope, abs=1e-6)


def test_training_learns_and_an_attack_that_nobody_rejects_stops_it() -> None:
    clean = robust_accuracy.trained(rules.median(), None, 0, workers=7, liars=0, steps=60)
    lying = attacks.inner_product(20)
    mean = robust_accuracy.trained(rules.mean(), lying, 0, workers=7, liars=2, steps=60)
    median = robust_accuracy.trained(rules.median(), lying, 0, workers=7, liars=2, steps=60)
    assert mean < 50 < 80 < median <= 100
    assert clean > 85


def test_no_attack_on_rows_is_missing_in_the_table() -> None:
    shown = {one.name for one in robust_accuracy.attacks_on(rules.median()).values() if one}
    # A row that is not finite is refused by every rule.
    assert {*attacks.NAMES} - shown == {"nan"}


@pytest.mark.parametrize("name", ["free riding", "small inner"])
def test_a_row_near_zero_stops_krum_and_no_rule_that_returns_a_mean(name: str) -> None:
    attack = robust_accuracy.ATTACKS[name]
    krum, multi_krum = (
        robust_accuracy.trained(rules.parse(text), attack, 0, steps=80)
        for text in ("krum(f=3)", "multi_krum(f=3)")
    )
    assert krum < 30 < 80 < multi_krum


@pytest.mark.heavy
def test_unlike_data_are_all_dealt_out_and_who_copies_one_worker_does_harm() -> None:
    data = robust_accuracy.digits()
    dealt = robust_accuracy._dealt(robust_accuracy.SPLIT, 12, 0)
    assert sorted(row for mine in dealt for row in mine) == [*range(len(data.rows))]
    assert max(len({*data.labels[mine]}) for mine in dealt) <= 3
    rule = rules.geometric_median()
    clean, lying = (
        robust_accuracy.trained(rule, attack, 0, steps=150, split=robust_accuracy.SPLIT)
        for attack in (None, attacks.mimic())
    )
    assert lying < clean - 5


def test_byzfl_that_cannot_be_installed_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> Path:
        raise OSError("`pip install` must succeed.\nReceived: no network")

    monkeypatch.setattr(robust, "_interpreter", refused)
    monkeypatch.setattr(sys, "argv", ["robust", "--only", "byzfl", "--dry-run"])
    of_tensorflow = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_CPP_MIN_LOG_LEVEL")
    for name in ("TF_HIPS_NUM_THREADS", *of_tensorflow):
        monkeypatch.setenv(name, "7")
    assert robust.main() == 0
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == os.environ["TF_NUM_INTEROP_THREADS"] == "2"
    said = capsys.readouterr().out
    assert "ByzFL: not run (`pip install` must succeed. Received: no network)" in said
    last = said.splitlines()[-1]
    assert last.startswith("bench-robust: 0 of ")
    assert " targets met, 2 not run, " in last
    ids = {row["id"] for row in TARGETS["target"]}
    assert {*robust.BYZFL_TARGETS} < ids


def test_byzfl_is_pinned() -> None:
    path = harness.ROOT / "benchmarks/byzfl/requirements.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split("==")[0] for line in lines[1:]] == ["byzfl", "torch"]
    assert json.dumps(lines).count("==") == 2


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_small_step_over_ranks_is_measured() -> None:
    rows = list(robust_step.measured(rounds=1, ranks=3, scale=16))
    ratios = [row for row in rows if row["unit"] == "x"]
    assert len(ratios) == 2 * len(robust_step.RULES) + len(robust_step.ONEBIT_RULES)
    assert all(row["measured"] > 0 and row["about"] == "" for row in ratios)
    # As many bytes as a mean has, but for a byte for each gradient and n x n numbers.
    sizes = {row["what"]: row["measured"] for row in rows if row["unit"] == "MB"}
    mean = sizes["resnet50, fp32, 3 ranks, the mean"]
    assert all(0.8 * mean < size < 1.3 * mean for what, size in sizes.items() if ", fp32, " in what)
