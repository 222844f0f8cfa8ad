# SPDX-License-Identifier: Apache-2.0
"""The examples run, and keep what their first lines promise."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BY_CHANCE = 0.15
UNTRAINED = 0.25  # less than the GAN's distance of means before it is trained
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _output(name: str, index: int) -> str:
    """What a command of an example's first lines prints."""
    script = EXAMPLES / f"{name}.py"
    commands = re.findall(r"^    tf-hips (run .+)$", script.read_text("utf-8"), re.MULTILINE)
    shown = commands[index].replace("--log-dir log ", "").replace("examples/", f"{EXAMPLES}/")
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', shown)]
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.tf
@pytest.mark.parametrize("name", ["local_steps", "liar"])
def test_an_example_runs_as_one_worker(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--epochs", "1", "--batch-size", "128"])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    found = re.search(r"test accuracy (\d\.\d+)", capsys.readouterr().out)
    assert found
    assert float(found[1]) > BY_CHANCE


@pytest.mark.tf
def test_the_gan_runs_as_one_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gan", "--epochs", "1"])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / "gan.py"), run_name="__main__")
    found = re.search(r"worker 0: distance of means (\d\.\d+)", capsys.readouterr().out)
    assert found
    assert float(found[1]) < UNTRAINED


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("index", [0, 1])
def test_the_gan_comes_to_the_same_at_all_workers(index: int) -> None:
    distances = re.findall(r"worker \d: distance of means (\d\.\d+)", _output("gan", index))
    assert len(distances) == 2
    assert len(set(distances)) == 1
    assert float(distances[0]) < UNTRAINED / 2


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "index", "least", "most"),
    [("local_steps", 0, 0.97, 1.0), ("liar", 0, 0.0, 0.3), ("liar", 1, 0.88, 1.0)],
)
def test_the_commands_of_an_example_come_to_what_it_says(
    name: str, index: int, least: float, most: float
) -> None:
    done = _output(name, index)
    accuracies = {float(found) for found in re.findall(r"test accuracy (\d\.\d+)", done)}
    assert len(accuracies) == 1, done
    assert least <= accuracies.pop() <= most
