# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what an installed tf_hips needs, and works from where it is unpacked."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.tf, pytest.mark.timeout(150)]


def build(folder: Path, root: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_wheel_works_where_it_is_unpacked(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    files = {path.name for path in unpacked.rglob("*")}
    assert not files & {"BUILD", "bazel_stubs"}
    assert not any(name.endswith((".bzl", ".lds")) for name in files)
    assert all((unpacked / package / "py.typed").is_file() for package in ("compll", "tf_hips"))
    entry_points = next(unpacked.glob("*.dist-info/entry_points.txt")).read_text()
    assert "compll = compll.cli:main" in entry_points
    assert "tf-hips = tf_hips.cli:main" in entry_points
    metadata = next(unpacked.glob("*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: horovod==0.28.1" in metadata
    is_cpu = "(platform_machine == 'x86_64') and extra == 'cpu'"
    assert f"Requires-Dist: tensorflow-cpu<2.22,>=2.21; {is_cpu}" in metadata
    assert f"Requires-Dist: tensorflow<2.22,>=2.21; {is_cpu.replace('==', '!=', 1)}" in metadata

    program = (
        "import pathlib, subprocess, sys, numpy as np, tf_hips\n"
        "from tf_hips import ops\n"
        "from tf_hips.ops import native\n"
        "assert pathlib.Path(tf_hips.__file__).is_relative_to(sys.argv[1]), tf_hips.__file__\n"
        "codec = ops.parse('onebit')\n"
        "packet = native.encode(codec, np.ones(9, np.float32), native.Key(1, 0, 0))\n"
        "assert native.decode(codec, packet, 9).tolist() == [1.0] * 9\n"
        "import tensorflow as tf\n"
        "from tf_hips.ops import graph\n"
        "packet, _ = graph.encode(codec, tf.ones(9), seed=1, step=0, tensor_id=0)\n"
        "assert graph.decode(codec, packet, 9).numpy().tolist() == [1.0] * 9\n"
        "from tf_hips.cluster import ssh\n"
        "assert 'setsid' in ssh.command('host', [], 'look', [])[-1]\n"
        "command = [sys.executable, '-m', 'compll', 'includes']\n"
        "folder = subprocess.check_output(command, text=True)\n"
        "assert pathlib.Path(folder.strip(), 'tf_hips/cc/runtime/codec.h').is_file(), folder\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, unpacked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_wheel_without_the_libraries_is_refused(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "tf_hips").mkdir(parents=True)
    (tree / "compll").mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "tf_hips/__init__.py"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    done = build(tmp_path / "dist", tree)
    assert done.returncode != 0
    assert "Missing: tf_hips/_build_info.py" in done.stderr
    assert "Run `make build` first." in done.stderr
