# SPDX-License-Identifier: Apache-2.0
"""A short set of `make test-faults`, and that it finds what it is there to find."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import __main__ as program
from tests.faults import job as jobs
from tests.faults import refusals
from tests.faults.job import Failed, Job
from tests.faults.keras_runs import KINDS, STEPS, KerasRun
from tests.faults.schedule import DELAYS_S, ROLES, Schedule, cases
from tests.faults.training import SETTINGS, TREES, Trainer
from tf_hips.ps.terms.recorder import Kind

ONEBIT, TREE = SETTINGS["onebit"], TREES[0]
BY_NAME = {one.name: one for one in cases()}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        "party/backed-up/0s/onebit",
        # Others kill these, too: test_restart.py and test_durable.py (after any record),
        # test_snapshot.py, test_shards_restart.py, test_tree_restart.py.
        pytest.param("global-server/mid-upload/0s/onebit", marks=pytest.mark.slow),
        pytest.param("global-server/snapshot/0s/noise", marks=pytest.mark.slow),
        pytest.param("shard/recorded/0s/two", marks=pytest.mark.slow),
        pytest.param("party-server/going-up/0s/tree", marks=pytest.mark.slow),
    ],
)
def test_a_role_is_killed_in_a_phase(name: str, tmp_path: Path) -> None:
    assert BY_NAME[name].run(tmp_path) == "1 kill"


@pytest.mark.heavy
def test_a_schedule(tmp_path: Path) -> None:
    assert Schedule.of(12).run(tmp_path) == "a tree below two servers, 1 kills, 1 cuts"


@pytest.mark.heavy
def test_a_refusal(tmp_path: Path) -> None:
    said = refusals.REFUSALS["refusal/damaged-snapshot"](tmp_path)
    assert "a snapshot must be whole" in said


@pytest.mark.heavy
def test_weights_that_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the children are compared with is another run's.
    monkeypatch.setattr(jobs, "undisturbed", lambda setting: "0" * 64)
    with pytest.raises(Failed, match="weights must be 000"):
        jobs.run(tmp_path, ONEBIT, lambda job: None)


def recorded(tmp_path: Path, change: Callable[[list[dict]], None]) -> None:
    """Checks the log of a whole run of which `change` has made something else."""
    job = Job(tmp_path, ONEBIT)
    shapes = [list(shape) for shape in ONEBIT.shapes]
    packets = [
        {"round": number, "child": child, "chunk": chunk}
        for number in range(ONEBIT.rounds)
        for child in range(2)
        for chunk in range(len(shapes))
    ]
    change(packets)
    kept = {Kind.PACKET: packets, Kind.MODEL: [{"shapes": shapes}]}
    job.top.recorded = kept.__getitem__  # type: ignore[method-assign]
    with contextlib.closing(job.relay.listener):
        job.check_log()


def test_an_answer_from_above_that_is_lost_is_found(tmp_path: Path) -> None:
    west = Job(tmp_path, TREE).servers["west"]
    shapes = [list(shape) for shape in TREE.shapes]
    packets = [
        {"round": number, "child": child, "chunk": chunk}
        for number in range(TREE.rounds)
        for child in range(2)
        for chunk in range(len(shapes))
    ]
    answers = [one for one in packets if one["child"] == 0]
    kept = {Kind.PACKET: packets, Kind.MODEL: [{"shapes": shapes}], Kind.PASSED_DOWN: answers}
    west.recorded = kept.__getitem__  # type: ignore[method-assign]
    west.check_log(TREE.rounds)
    answers.append(answers.pop(3) | {"round": 1})
    with pytest.raises(Failed, match=r"west: lost: \[\(0, 3\)\]; twice: \[\(1, 3\)\] from above"):
        west.check_log(TREE.rounds)


def test_an_update_that_is_lost_or_counts_twice_is_found(tmp_path: Path) -> None:
    for place, change in enumerate(
        (lambda found: None, lambda found: found.pop(), lambda found: found.append(found[3]))
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        if place == 0:
            recorded(folder, change)
            continue
        with pytest.raises(Failed, match=r"lost: \[\(7, 1, 4\)\]|twice: \[\(0, 0, 3\)\]"):
            recorded(folder, change)


def test_one_packet_that_is_lost_changes_the_final_weights() -> None:
    one, other = Trainer(ONEBIT, 0), Trainer(ONEBIT, 0)
    for number in range(3):
        packets = one.packets(number)
        assert (packets == other.packets(number)).all() == (number < 2)
        one.apply(packets)
        if number != 1:
            other.apply(packets)
    assert one.digest() != other.digest()


def test_the_table_has_every_phase() -> None:
    assert len(BY_NAME) == len(cases()) >= 50
    phases = {"idle", "mid-upload", "recorded", "mid-download", "snapshot"}
    for name in ("global-server", "shard", "party-server", "above-a-party-server"):
        assert phases <= {one.name for one in ROLES[name].phases}
        assert {(one.phase.name, one.delay_s) for one in cases() if one.role == name} >= {
            (phase, delay_s) for phase in phases for delay_s in DELAYS_S
        }
    assert {case.delay_s for case in cases()} == set(DELAYS_S) == {0.0, 5.0}


def test_a_seed_says_everything() -> None:
    schedules = [Schedule.of(seed) for seed in range(200)]
    assert schedules == [Schedule.of(seed) for seed in range(200)]
    assert {one.resends for one in schedules} == {True, False}
    kinds = {fault.kind for one in schedules for fault in one.faults}
    assert kinds == {"trap", "party", "moment", "idle", "cut"}
    shapes = {(one.setting.shards, bool(one.setting.parties)) for one in schedules}
    assert shapes == {(1, False), (2, False), (1, True), (2, True)}
    assert {fault.server for one in schedules for fault in one.faults} == {"top", "top-1", "west"}
    for one in schedules:
        rounds = [fault.round for fault in one.faults]
        assert all(0 < first < one.setting.rounds - 1 for first in rounds)


def test_a_soak_kills_every_role() -> None:
    runs = [KerasRun.of(seed) for seed in range(1000, 1000 + program.KERAS_RUNS)]
    assert runs == [KerasRun.of(seed) for seed in range(1000, 1000 + program.KERAS_RUNS)]
    kinds = [kill.kind for run in runs for kill in run.kills]
    assert all(kinds.count(kind) >= 2 for kind in KINDS)
    for run in runs:
        rounds = [kill.round for kill in run.kills]
        assert rounds == sorted(set(rounds))
        assert 0 < rounds[0] <= rounds[-1] < STEPS - 6


def test_what_fails_says_how_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(base: Path) -> str:
        assert os.listdir(base) == []  # noqa: PTH208 - an empty folder of its own
        raise Failed("the weights differ")

    jobs_ = [("good", "--case good", lambda base: "1 kill"), ("seed 7", "--seed 7", fails)]
    assert program.run(jobs_, 2) == 1
    said = capsys.readouterr().out
    assert "Failed: the weights differ" in said
    assert "again: make test-faults ARGS='--seed 7'" in said
    assert said.endswith("s\n")
    assert "test-faults: 1 of 2 passed" in said
