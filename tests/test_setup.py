# SPDX-License-Identifier: Apache-2.0
"""What the set-up promises: one line for what is missing; Horovod built once, whole, as patched.

Horovod's build is tried with a stand-in for the interpreter in .venv that does what pip would do to
the files, since the real one takes minutes. Everything else of the scripts is real.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import horovod_patch

pytestmark = pytest.mark.heavy  # builds that are broken off

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "horovod-0.28.1"
FIRST = horovod_patch.CHANGES[0]

# `pip wheel` reports that it runs and waits for a word when there is a pipe, then packs the patched
# source as the wheel.
STAND_IN = r"""#!/usr/bin/env bash
set -euo pipefail
case "$*" in
  -) cat >/dev/null; echo tensorflow_cpu-2.21.0-cp311-linux_x86_64 ;;
  "-c import pip, sys"*) echo 3.11 ;;
  "-c "*tomllib*) echo pip==26 ;;
  "-m pip install "*) echo "$*" >>{installs} ;;
  "-m zipfile -t "* | */tools/horovod_patch.py\ *) exec {python} "$@" ;;
  "-m pip download "*) cp {sdist} "${{@: -1}}/" ;;
  "-m pip wheel "*)
    echo build >>{builds}
    if [ -p {started} ]; then echo started >{started}; read -r word <{resume}; fi
    out=${{@: -2:1}}
    mkdir -p "$out"
    {python} -m zipfile -c "$out/horovod-0.28.1-cp311-cp311-linux_x86_64.whl" ./*
    ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class Clone:
    """A tree with the real scripts and the stand-in interpreter."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.started, self.resume = folder / "started", folder / "resume"
        self._builds = folder / "builds"
        self._installs = folder / "installs"
        for name, text in files.items():
            source = folder / "source" / SOURCE / name
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text, encoding="utf-8")
        sdist = folder / "horovod-0.28.1.tar.gz"
        subprocess.run(["tar", "-czf", sdist, "-C", folder / "source", "."], check=True)
        shutil.copytree(ROOT / "tools", folder / "tools")
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(
            STAND_IN.format(
                python=sys.executable,
                sdist=sdist,
                builds=self._builds,
                installs=self._installs,
                started=self.started,
                resume=self.resume,
            ),
            encoding="utf-8",
        )
        python.chmod(0o755)

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.folder / "tools/horovod_wheel.sh"],
            env={**os.environ, "TF_HIPS_CACHE": str(self.cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self) -> tuple[int, str, str]:
        process = self.start()
        out, err = process.communicate(timeout=30)
        return process.returncode, out.strip(), err

    def pause_builds(self) -> None:
        os.mkfifo(self.started)
        os.mkfifo(self.resume)

    def set_up(self, **environment: str) -> tuple[list[str], str]:
        """Runs the whole set-up; what pip was told to install, and what was said."""
        done = run_setup(self.folder, TF_HIPS_CACHE=str(self.cache), **environment)
        assert done.returncode == 0, done.stderr
        return self._installs.read_text(encoding="utf-8").splitlines(), done.stderr

    @property
    def num_builds(self) -> int:
        return len(self._builds.read_text().splitlines()) if self._builds.exists() else 0


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    # A name that means something else in a regular expression.
    yield Clone(tmp_path / "c++", files("old"))


def files(which: str) -> dict[str, str]:
    """What the set-up reads of Horovod's source, before or after the patch."""
    found: dict[str, str] = {}
    for number, change in enumerate(horovod_patch.CHANGES):
        found[change.file] = f"{found.get(change.file, '')}line {number}\n{getattr(change, which)}"
    return found


def contents(wheel: str) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        return {name: archive.read(name).decode() for name in names}


def test_horovod_is_built_once_as_patched(clone: Clone) -> None:
    code, wheel, err = clone.run()
    assert code == 0, err
    assert contents(wheel) == files("new")
    # Says where to receive before it sends, wherever it did both.
    for name, text in files("new").items():
        assert ("send(" in text) == name.endswith("v.cc")
        calls = re.findall(r"(send|recv)\(", text)
        assert calls == ["recv", "send"] * (len(calls) // 2)
    assert Path(wheel).is_relative_to(clone.cache)
    assert clone.run()[:2] == (0, wheel)
    assert clone.num_builds == 1
    assert not list(clone.cache.rglob("*.tmp"))


def test_a_broken_wheel_is_built_again(clone: Clone) -> None:
    _, wheel, _ = clone.run()
    Path(wheel).write_bytes(Path(wheel).read_bytes()[:50])
    assert clone.run()[:2] == (0, wheel)
    assert contents(wheel) == files("new")
    assert clone.num_builds == 2


@pytest.mark.parametrize("text", ["", FIRST.old * 2, f"  {FIRST.old}"])
@pytest.mark.parametrize("change", horovod_patch.CHANGES[:3], ids=lambda change: change.file[-13:])
def test_a_source_that_differs_is_refused(
    change: horovod_patch.Change, text: str, tmp_path: Path
) -> None:
    text = text.replace(FIRST.old, change.old)
    clone = Clone(tmp_path, {**files("old"), change.file: text})
    code, wheel, err = clone.run()
    assert (code, wheel) == (1, "")
    assert f"{change.file} of Horovod must hold these lines exactly once" in err
    assert clone.num_builds == 0


def test_a_killed_build_leaves_nothing_that_counts(clone: Clone) -> None:
    clone.pause_builds()
    process = clone.start()
    try:
        assert clone.started.read_text() == "started\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    clone.started.unlink()
    code, wheel, err = clone.run()
    assert code == 0, err
    assert contents(wheel) == files("new")


def test_a_second_set_up_waits_for_the_first(clone: Clone) -> None:
    clone.pause_builds()
    first = clone.start()
    second = None
    try:
        assert clone.started.read_text() == "started\n"
        second = clone.start()
        assert second.stderr is not None
        assert "waiting for it" in second.stderr.readline()
        clone.resume.write_text("go on\n")
        wheels = {process.communicate(timeout=30)[0].strip() for process in (first, second)}
        assert len(wheels) == 1
        assert contents(wheels.pop()) == files("new")
    finally:
        for process in filter(None, (first, second)):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert clone.num_builds == 1


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.copytree(ROOT / "tools", folder / "tools", dirs_exist_ok=True)
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        [folder / "tools/setup.sh"],
        env={**os.environ, "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def stub(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_an_unsupported_python_is_refused(version: str, tmp_path: Path) -> None:
    python = stub(tmp_path / "python", f"echo {version} /opt/python")
    done = run_setup(tmp_path, PYTHON=str(python))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "must be Python 3.11, 3.12 or 3.13" in line
    assert f"Received: /opt/python, Python {version}" in line
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run_setup(tmp_path, PYTHON="python-of-the-future")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "PYTHON=python-of-the-future" in done.stderr


def on_machine(folder: Path, machine: str) -> dict[str, str]:
    """What makes the set-up believe that it runs on this machine, with an NVIDIA device."""
    tools = folder / "stand-ins"
    tools.mkdir()
    stub(tools / "uname", f"echo {machine}")
    stub(tools / "nvidia-smi", "exit 0")
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


def test_a_machine_without_wheels_of_tensorflow_is_refused(tmp_path: Path) -> None:
    done = run_setup(tmp_path, **on_machine(tmp_path, "riscv64"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "must be x86_64 or aarch64" in line
    assert line.endswith("Received: riscv64")


def test_aarch64_has_one_tensorflow(clone: Clone) -> None:
    venv = clone.folder / ".venv"
    (venv / "pyvenv.cfg").write_text(f"command = python3 -m venv {venv}\n", encoding="utf-8")
    (venv / "lib/python3.11/site-packages/tensorflow-2.21.0.dist-info").mkdir(parents=True)
    installs, said = clone.set_up(**on_machine(clone.folder, "aarch64"))
    assert any(line.endswith("--group dev --group tensorflow-cpu") for line in installs)
    assert "its wheel for aarch64 does not know the NVIDIA device" in said
    assert "making .venv" not in said


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_machine_gets_one_tensorflow(machine: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    wanted = {"x86_64": "tensorflow-cpu"}.get(machine, "tensorflow")
    for texts in (extras["cpu"], groups["tensorflow-cpu"]):
        needs = [Requirement(text) for text in texts]
        chosen = [
            need.name for need in needs if need.marker.evaluate({"platform_machine": machine})
        ]
        assert chosen == [wanted]


def test_without_root_missing_tools_are_named_with_their_command(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "env", "flock", "g++", "python3", "sha256sum", "uname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    stub(tools / "apt-get", "echo must not run; exit 9")
    stub(tools / "id", "echo 1000")
    stub(tools / "sudo", "exit 1")
    done = run_setup(tmp_path, PATH=str(tools))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("set-up: missing: cmake")
    assert "sudo apt-get install cmake" in line
