# SPDX-License-Identifier: Apache-2.0
"""`tf-hips plan` and `tf-hips profile`: tables, files, and wrong command lines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.comm.profiles import DGC, ONEBIT, codec, profile
from tf_hips import cli, config
from tf_hips.cli import plan as plan_command
from tf_hips.cli import profile as profile_command
from tf_hips.comm import launchers
from tf_hips.comm.cost_model import Backward
from tf_hips.comm.plan import Plan
from tf_hips.comm.planner import make_plan
from tf_hips.comm.profile import Profile

SIZES = {"conv/kernel": 1728, "conv/bias": 64, "dense, wide [1]": 2**23, "dense/bias": 512}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in (*launchers.HOROVOD, *launchers.SIZES):
        monkeypatch.delenv(name, raising=False)
    profile(4, 1.25e7, codecs=(codec(ONEBIT, 1 / 8), codec(DGC, 0.065))).write("p.yaml")
    Path("m.csv").write_text("".join(f"{name},{size}\n" for name, size in SIZES.items()))
    return tmp_path


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    output = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, output.out, output.err


def plan(*more: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    return run("plan", "--profile", "p.yaml", "--model", "m.csv", *more, capsys=capsys)


def test_a_plan_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan("--compression", "error_feedback(onebit)", capsys=capsys)
    assert (code, err) == (0, "")
    written = Plan.read("plan.yaml")
    made = make_plan(Profile.read("p.yaml"), list(SIZES.items()), [ONEBIT])
    assert written.choices == made.choices
    assert {choice.compression for choice in written.choices} == {None, ONEBIT}
    lines = out.splitlines()
    assert lines[0].split() == [
        "gradient", "elements", "compression", "topology", "parts", "alone"
    ]  # fmt: skip
    shown = lines[1 : 1 + len(written.choices)]
    for line, choice in zip(shown, written.choices, strict=True):
        assert line.startswith(choice.name)
        assert f" {choice.num_elements} " in line
        assert f" {choice.compression or '-'} " in line
        assert f" {choice.topology} " in line
    assert lines[-2].endswith("x")
    assert lines[-2].startswith("4 ranks, 1 of 4 gradients compressed; predicted step: ")
    exact, planned = lines[-2].split("step: ")[1].split(", ")[:2]
    # 8.4 million floats, three halves of them over 12.5 MB/s: 4.03 s; a 32th of that as bits.
    assert exact == "4.03 s exact"
    assert 126 < float(planned.removesuffix(" ms planned")) < 150
    assert lines[-1] == "wrote plan.yaml"


def test_the_columns_of_hipress_go_out_and_in(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        "--compression", ONEBIT, "--topology", "ps", "--format", "secopa", capsys=capsys
    )
    assert code == 0
    assert out.splitlines()[-1] == "wrote SeCoPaPlan.txt"
    rows = [line.rsplit(",", 3) for line in Path("SeCoPaPlan.txt").read_text().splitlines()]
    assert [(name, int(size)) for name, size, _, _ in rows] == list(SIZES.items())
    assert [row[2] for row in rows] == ["n", "n", "y", "n"]
    more = ("--from-secopa", "SeCoPaPlan.txt", "--compression", ONEBIT)
    code, out, _ = plan(*more, "-o", "again.yaml", capsys=capsys)
    assert code == 0
    again = Plan.read("again.yaml")
    assert [choice.compression for choice in again.choices] == [None, None, ONEBIT, None]
    assert again.predicted_seconds is not None
    code, _, err = plan("--from-secopa", "SeCoPaPlan.txt", capsys=capsys)
    assert code == 2
    assert "--from-secopa must come with one --compression" in err


def test_ranks_and_a_backward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    for more, on_cores in (((), True), (("--gpu",), False)):
        code, _, _ = plan("--ranks", "3", "--backward-ms", "50", *more, capsys=capsys)
        assert code == 0
        made = make_plan(
            Profile.read("p.yaml").for_ranks(3),
            list(SIZES.items()),
            [ONEBIT, DGC],
            Backward.even(4, 0.05, on_cores),
        )
        written = Plan.read("plan.yaml")
        assert written.num_ranks == 3
        assert written.choices == made.choices
        assert written.predicted_seconds == made.predicted_seconds


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        (["--compression", "onebti"], 2, "did you mean 'onebit'"),
        (["--compression", "terngrad"], 2, "--compression must be one of the profile's: error_f"),
        (["--topology", "tree"], 2, "one of ps, ring, allgather, butterfly for 4 ranks. Received"),
        (["--ranks", "0"], 2, "whole number >= 1. Received: '0'"),
        (["--backward-ms", "-1"], 2, "must be a number of milliseconds >= 0. Received: '-1'"),
        (["--gpu"], 2, "needs --backward-ms"),
        (["--format", "json"], 2, "invalid choice: 'json'"),
        (["--profile", "nowhere"], 1, "nowhere cannot be read: No such file"),
        (["--model", "nowhere"], 1, "nowhere cannot be read: No such file"),
        (["--model", "p.yaml"], 1, "p.yaml:1: expected `name,num_elements`"),
        (["--profile", "m.csv"], 1, "m.csv: expected a mapping with `version: 3`"),
        (["-o", "no/folder.yaml"], 2, "--output must be a file in a folder that can be written"),
    ],
)
def test_what_is_wrong_is_one_line(
    more: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = plan(*more, capsys=capsys)
    assert found == code
    assert err.startswith("tf-hips plan: error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_a_keras_model_is_asked_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("m.keras").write_bytes(b"")
    commands: list[list[str]] = []
    answers = [
        subprocess.CompletedProcess([], 0, "notice\n" + json.dumps([["a", 0], ["b", 2**23]]), ""),
        subprocess.CompletedProcess([], 1, "", "W 1\ntf_hips.errors.ConfigError: no model"),
    ]

    def asked(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return answers.pop(0)

    monkeypatch.setattr(plan_command.subprocess, "run", asked)
    arguments = ["plan", "--profile", "p.yaml", "--model", "m.keras"]
    code, out, _ = run(*arguments, capsys=capsys)
    assert code == 0
    assert out.splitlines()[1].split()[:5] == ["a", "0", "-", "as", "rows"]
    assert [one.num_elements for one in Plan.read("plan.yaml").choices] == [0, 2**23]
    assert commands == [[sys.executable, "-m", "tf_hips.comm.keras_file", "m.keras"]]
    code, _, err = run(*arguments, capsys=capsys)
    assert (code, err) == (1, "tf-hips plan: error: no model\n")


class RecordingJob:
    """Takes note of what would be started, and writes what it would write."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __enter__(self) -> "RecordingJob":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start_group(self, name: str, start: Any, max_restarts: int, **more: Any) -> None:
        start(0)

    def start(
        self, role: str, command: list[str], environment: dict[str, str], **options: object
    ) -> None:
        assert config.load(environment[config.CONFIG_VARIABLE]) == config.Run()
        self.commands.append(command)
        profile(len(self.commands), 1e8).write(command[command.index("--output") + 1])

    def wait(self) -> None:
        pass


def test_ranks_on_this_machine_measure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = RecordingJob()
    monkeypatch.setattr(profile_command, "Job", lambda: job)
    more = ["--compression", "onebit", "--compression", "dgc", "--seconds", "3", "-o", "q.yaml"]
    code, out, err = run("profile", "-np", "3", *more, capsys=capsys)
    assert code == 0
    # Nothing is known for as long as TensorFlow needs to start.
    assert "3 ranks start here, which takes a while, and measure for about 3 s\n" in err
    expected = [sys.executable, "-m", "tf_hips.comm.profiling", "--output", str(folder / "q.yaml")]
    expected += ["--seconds", "3.0", "--compression", "onebit", "--compression", DGC]
    assert job.commands == [expected] * 3
    assert Profile.read("q.yaml") == profile(3, 1e8)
    lines = out.splitlines()
    assert lines[0] == "3 ranks, at most 1 on a host of 2 cores"
    assert lines[-1] == "wrote q.yaml"
    # 20 us and 0.84 ms; 24 and 2^17 bytes; 0.6 ms and 2 (N - 1) / N of a mebibyte at 100 MB/s.
    assert [ONEBIT, "0.86", "ms", "0.44", "ms", "1.17", "ms", "128", "KiB"] in [
        line.split() for line in lines
    ]
    assert ["allreduce", "0.60", "ms", "14.58", "ms"] in [line.split() for line in lines]


def test_under_a_launcher_each_process_is_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [0, 0, -9]

    def measured(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        profile(4, 1e8).write(command[command.index("--output") + 1])
        return subprocess.CompletedProcess(command, codes.pop(0))

    monkeypatch.setattr(profile_command.subprocess, "run", measured)
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    code, out, _ = run("profile", capsys=capsys)
    assert code == 0
    assert out.startswith("4 ranks, ")
    monkeypatch.setenv("HOROVOD_RANK", "2")
    assert run("profile", capsys=capsys)[:2] == (0, "")
    assert run("profile", capsys=capsys)[0] == 137
    code, _, err = run("profile", "-np", "2", capsys=capsys)
    assert code == 2
    assert "-np is for ranks on this machine" in err


def test_launchers_that_horovod_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A batch script of Slurm, for as many tasks as it may start; it is one process.
    assert profile_command.launched_rank({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    monkeypatch.setattr(profile_command, "_run_here", lambda command, number: 7)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert run("profile", "-np", "3", capsys=capsys)[0] == 7
    code, _, err = run("profile", capsys=capsys)
    assert code == 1
    assert "without MPI here. Start them with `horovodrun`" in err
    assert err.endswith("Received: SLURM_STEP_NUM_TASKS=4\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-np", "0"], "whole number >= 1. Received: '0'"),
        (["--compression", "onebti"], "did you mean 'onebit'"),
        (["--seconds", "0"], "seconds > 0. Received: '0'"),
        (["-o", "."], "--output must be a file in a folder that can be written. Received: ."),
        (["-o", "no/folder.yaml"], "--output must be a file in a folder that can be written"),
    ],
)
def test_a_wrong_profile_is_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run("profile", *arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("tf-hips profile: error: ")
    assert err.count("\n") == 1
    assert expected in err
