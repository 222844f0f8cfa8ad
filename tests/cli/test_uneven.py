# SPDX-License-Identifier: Apache-2.0
"""`tf-hips run --slowdown --clock-skew`: each worker's environment, and wrong texts."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tf_hips import cli, config
from tf_hips.cli import run as run_command
from tf_hips.esync import clock

SCRIPT = """
import os, pathlib, sys, time
from tf_hips.esync.clock import wall_clock
ahead = round(wall_clock() - time.time())
text = f"{os.environ.get('TF_HIPS_SLOWDOWN')} {ahead}"
pathlib.Path(sys.argv[1], os.environ["HOROVOD_RANK"]).write_text(text)
"""


def test_workers_get_it_by_their_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tf_hips.cli", "run", "--parties", "1", "--workers", "3"]
    command += ["--slowdown", "worker=1:50ms", "--clock-skew", "worker=2:-5s"]
    command += [str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert found == ["None 0", "50ms 0", "None -5"]


@pytest.mark.parametrize(
    ("intra", "sizes"), [(None, [("party0", 2), ("party1", 2)]), ("ps", [
        ("party0-0", 1), ("party0-1", 1), ("party1-0", 1), ("party1-1", 1)
    ])],
)  # fmt: skip
def test_workers_are_counted_over_all_parties(
    intra: str | None, sizes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[str, int, list[dict[str, str]]]] = []
    writers, firsts = [], []

    def start(job: Any, stack: Any, told: Any, *, site: str, number: int, **more: Any) -> None:
        started.append((site, number, more["more"]))
        writers.append(told.saves)
        firsts.append(more["first"])
        assert (told.uplink.site, more["processes"], more["max_restarts"]) == (site, 4, 3)

    monkeypatch.setattr(run_command.party, "start_local_workers", start)
    uplinks = [config.Uplink("127.0.0.1:1", site) for site, _ in sizes]
    monkeypatch.setattr(run_command, "_start_servers", lambda *_: uplinks)
    parser = argparse.ArgumentParser()
    run_command.add(parser.add_subparsers())
    line = ["run", "--slowdown", "worker=1:50ms", "--slowdown", "worker=2:20x"]
    line += ["--clock-skew", "worker=3:-5", "--max-restarts", "3", "train.py"]
    options = parser.parse_args([*line[:1], *(["--intra", intra] if intra else []), *line[1:]])
    assert run_command._start(None, None, options, ["true"], tmp_path) is None
    assert [(site, number) for site, number, _ in started] == sizes
    assert writers == [True, *[False] * (len(sizes) - 1)]  # files of the run are one's alone
    assert firsts == [place * number for place, (_, number) in enumerate(sizes)]
    assert [one for *_, more in started for one in more] == [
        {},
        {"TF_HIPS_SLOWDOWN": "50ms"},
        {"TF_HIPS_SLOWDOWN": "20x"},
        {"TF_HIPS_CLOCK_SKEW": "-5.0"},
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slowdown", "3:20x"], "must be worker=N:20x"),
        (["--slowdown", "3x"], "worker=N:50ms or worker=N:cpu=20%. Received: '3x'"),
        (["--slowdown", "worker=x:20x"], "must be worker=N:20x"),
        (["--slowdown", "worker=1:20"], "must be a factor >= 1"),
        (["--slowdown", "worker=1:0.5x"], "must be a factor >= 1"),
        (["--slowdown", "worker=1:-1s"], "must be a factor >= 1"),
        (["--slowdown", "worker=1:cpu=20"], "must be a share of a core"),
        (["--slowdown", "worker=1:cpu=0%"], "must be a share of a core"),
        (["--slowdown", "worker=1:cpu=x%"], "must be a share of a core"),
        (["--slowdown", "worker=4:cpu=20%"], "--slowdown must be of a worker from 0 to 3"),
        (["--slowdown", "worker=4:2x"], "--slowdown must be of a worker from 0 to 3"),
        (["--slowdown", "worker=1:2x", "--slowdown", "worker=1:3x"], "once for a worker"),
        (["--clock-skew", "worker=1:soon"], "must be a number of seconds"),
        (["--clock-skew", "worker=1:nan"], "must be a number of seconds"),
        (["--clock-skew", "worker=9:1"], "--clock-skew must be of a worker from 0 to 3"),
    ],
)
def test_wrong_texts(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *options, str(script)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_skew_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(clock.SKEW_VARIABLE, "soon")
    with pytest.raises(ValueError, match="TF_HIPS_CLOCK_SKEW must be a number"):
        clock.wall_clock()
