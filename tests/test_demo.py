# SPDX-License-Identifier: Apache-2.0
"""The demo: that its checks can fail, and a small run of the whole of it."""

import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from tf_hips import report

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.py"
LAST_LINE = re.compile(
    r"demo: accuracy=(\d\.\d\d) slow_tier_bytes=(\d+) dense_bytes=(\d+) replicas=(\w+)"
)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO.parent)
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    if spec is None or spec.loader is None:
        pytest.fail(f"{DEMO} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(
    *, accuracy: float = 0.97, measured: int = 100, fingerprints: tuple[str, ...] = ("f",) * 4
) -> report.Summary:
    traffic = report.Traffic((0.0, 1.0), (0, 7), (10, measured), (0, 2500))
    replicas = {f"party/worker{rank}": text for rank, text in enumerate(fingerprints)}
    return report.Summary(accuracy, traffic, replicas, 9.0)


CASES = {
    "all well": (summary(), 0, "", "replicas=identical"),
    "too few right": (summary(accuracy=0.9499), 1, "test accuracy is 0.9499", "accuracy=0.94"),
    "too many bytes": (summary(measured=126), 1, "times less is 19.8x", "slow_tier_bytes=126"),
    "one differs": (summary(fingerprints=("f", "f", "f", "g")), 1, "different", "different"),
    "one missing": (summary(fingerprints=("f",) * 3), 1, "different", "replicas=different"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_claim_is_checked(
    demo: ModuleType, case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given, code, reason, in_last_line = CASES[case]
    console = Console(file=io.StringIO(), width=100)
    assert demo.conclude(given, 4, 12.0, tmp_path / "figure.png", console) == code
    output = capsys.readouterr()
    last = output.out.splitlines()[-1]
    assert LAST_LINE.fullmatch(last)
    assert in_last_line in last
    assert ("demo: failed" in output.err) == bool(code)
    assert reason in output.err


@pytest.mark.tf
@pytest.mark.timeout(240)
def test_a_small_demo_keeps_its_promises(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--workers", "1", "--epochs", "5"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    match = LAST_LINE.fullmatch(lines[-1])
    assert match, done.stdout
    assert float(match[1]) >= 0.95
    assert int(match[3]) >= 20 * int(match[2])
    assert match[4] == "identical"
    assert sum(line.startswith("epoch ") for line in lines) == 5
    assert (tmp_path / "accuracy_and_bytes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--parties", "--workers", "--epochs"])
def test_a_demo_of_nothing_is_refused_at_once(
    option: str,
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["demo", option, "0", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert "must be a whole number >= 1. Received: '0'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_demo_removes_the_events_of_the_last_one_only(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    for name in ("worker-party0-0.jsonl", "thesis.txt"):
        (folder / name).write_text("{}\n")
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path)])
    monkeypatch.setattr(demo, "train", lambda *_: 7)
    assert demo.main() == 7
    assert [one.name for one in folder.iterdir()] == ["thesis.txt"]
