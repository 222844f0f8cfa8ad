# SPDX-License-Identifier: Apache-2.0
"""What `make bench-collectives` sums up, and what it concludes from its figures."""

import tomllib

import pytest

from benchmarks import (
    closing,
    collectives,
    collectives_jobs,
    collectives_parts,
    collectives_wire,
    harness,
    shapes,
)

TARGETS = tomllib.loads((harness.ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8"))


def of(identity: str, rows: list) -> dict:
    [row] = [row for row in closing.targets(rows, collectives.COMMAND) if row["id"] == identity]
    return row


def test_models_have_the_published_numbers_of_weights() -> None:
    vgg19, resnet50 = (shapes.MODELS[name]() for name in ("vgg19", "resnet50"))
    assert (len(vgg19), shapes.num_elements(vgg19)) == (38, 143_667_240)
    assert max(shapes.num_elements([shape]) for shape in vgg19) * 4 == 392 * 2**20
    assert (len(resnet50), shapes.num_elements(resnet50)) == (161, 25_557_032)


@pytest.mark.parametrize("model", shapes.MODELS)
def test_narrow_models_have_as_many_tensors(model: str) -> None:
    whole, narrow = shapes.MODELS[model](1), shapes.MODELS[model](8)
    assert len(whole) == len(narrow)
    assert shapes.num_elements(narrow) < shapes.num_elements(whole) / 20


def test_a_step_is_bound_by_the_link_or_by_the_cores() -> None:
    # 25 MB at 100 Mbit/s are 2 s.
    assert collectives_jobs.bound_s(25e6, 100, 0.5) == 2.0
    assert collectives_jobs.bound_s(25e6, 1000, 0.5) == 0.5


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    found = collectives_jobs.ratio_row("wire", "a", [1.0, 1.3, 1.2], about="b")
    assert (found["measured"], found["interval"], found["about"]) == (1.2, "1 - 1.3", "b")
    assert collectives_jobs.ratio_row("wire", "a", [1.5])["interval"] == ""


def test_a_target_counts_the_worst_and_what_is_missing_is_not_met() -> None:
    name = "collectives-bound-onebit-100"
    assert of(name, [])["met"] == closing.NOT_MEASURED
    rows = [collectives_jobs.ratio_row("wire", "a", [1.1, 1.1, 1.1], about=name)]
    assert of(name, rows)["met"] == "yes"
    rows.append(collectives_jobs.ratio_row("wire", "b", [1.3, 1.3, 1.3], about=name))
    worst = of(name, rows)
    assert (worst["what"], worst["met"], worst["target"]) == ("b", "no", "<= 1.25 x")
    faster = [collectives_jobs.row("wire", "c", 9.9, "x", about="collectives-faster-onebit")]
    assert of("collectives-faster-onebit", faster)["met"] == "no"


def test_horovods_faster_way_counts_and_rows_say_of_how_many_steps() -> None:
    def step(seconds: float) -> collectives_jobs.Steps:
        return collectives_jobs.Steps([seconds], 1e6)

    best = {
        (precision, mbit): f"{precision}-grouped" if mbit else f"{precision}-each"
        for precision in collectives_wire.PRECISIONS
        for mbit in collectives_wire.LINKS
    }
    long = {(best[one, 100], 100): [step(40.0)] for one in collectives_wire.PRECISIONS}
    found = {("onebit", mbit): [step(1.0), step(2.0), step(4.0)] for mbit in (None, 1000, 100)}
    for (_, mbit), way in best.items():
        if mbit != 100:
            found[way, mbit] = [step(4.0), step(6.0), step(8.0)]
    rows = list(collectives_wire._over_ours("onebit", found, best, long))
    told = {row["against"]: (row["measured"], row["interval"]) for row in rows}
    assert told["Horovod fp32-each: 3 steps"] == (3.0, "2 - 4")
    assert told["Horovod fp32-grouped: 1 step"] == (20.0, "10 - 40")
    assert [row["link"] for row in rows if row["about"]] == ["100 Mbit/s"]


def test_a_wide_interval_around_the_bound_is_no_answer() -> None:
    name = "collectives-bound-onebit-100"
    wide = collectives_jobs.ratio_row("wire", "a", [0.9, 1.2, 1.6], about=name)
    assert of(name, [wide])["met"] == "noisy"
    beyond = collectives_jobs.ratio_row("wire", "a", [0.7, 0.9, 1.2], about=name)
    assert of(name, [beyond])["met"] == "yes"


def test_every_target_is_about_something_that_is_measured() -> None:
    named = {
        f"collectives-bound-{name}-{mbit}" for name in ("onebit", "tbq") for mbit in (100, 1000)
    }
    named |= {f"collectives-faster-{name}" for name in ("onebit", "tbq")}
    named |= {f"collectives-loopback-{model}" for model in shapes.MODELS}
    named |= {f"collectives-auto-{model}-100" for model in shapes.MODELS}
    others = ("predicted", "auto-seconds", "train-images", "train-accuracy")
    named |= {f"collectives-{one}" for one in others}
    known = {one["id"] for one in TARGETS["target"] if one["command"] == collectives.COMMAND}
    assert known == named


def test_choices_are_told_in_short() -> None:
    choices = [[None, "allreduce", 1], ["onebit", "ps", 4], ["onebit", "ps", 1]]
    assert collectives_parts.in_short(choices) == "1 exact, 2 onebit ps"


def test_a_timeline_shows_when_packets_travelled() -> None:
    def ran(pid: int, name: str, began: int, ended: int) -> list[dict]:
        return [
            {"ph": "B", "name": name, "ts": began, "pid": pid},
            {"ph": "B", "name": f"GLOO_{name}", "ts": began, "pid": pid},
            {"ph": "E", "ts": ended, "pid": pid},
            {"ph": "E", "ts": ended, "pid": pid},
        ]

    title = {"ph": "M", "name": "process_name", "pid": 0, "args": {}}
    step_before = [*ran(2, "ALLREDUCE", 0, 10), *ran(1, "ALLTOALL", 200, 900)]
    barrier = ran(2, "ALLREDUCE", 500_000, 1_000_000)
    first = ran(1, "ALLTOALL", 2_000_000, 3_000_000)
    second = ran(3, "ALLTOALL", 4_000_000, 4_500_000)
    sums = ran(4, "ALLGATHER", 5_000_000, 5_500_000)
    found = collectives_parts.travels([title, *step_before, *barrier, *first, *second, *sums])
    assert found == (1.0, 3.0, 4.5, 2.0)
