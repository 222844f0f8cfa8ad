# SPDX-License-Identifier: Apache-2.0
"""Builds the runtime and the generated codecs with bare g++, mostly with sanitizers; runs them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# With the two of the tests: reductions, packings, noise, blocks, selections, states, merges.
QUICK = ("dgc", "int8", "terngrad")
FLAGS = ["-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_full", [False, True])
def test_runtime_under_sanitizers(tmp_path: Path, is_full: bool) -> None:
    specs = sorted((ROOT / "tf_hips/ops/specs").glob("*.pse"))
    specs = [spec for spec in specs if is_full or spec.stem in QUICK]
    specs += [ROOT / "tests/cc/widths.pse", ROOT / "tests/compll/momentum.pse"]
    subprocess.run(
        [sys.executable, "-m", "compll", "gen", *specs, "-o", tmp_path], cwd=ROOT, check=True
    )
    codecs = sorted(tmp_path.glob("*.codec.cc"))
    assert len(codecs) == len(specs)
    # A compiler reads the headers for as long as it takes to compile a codec: two files hold all.
    together = [tmp_path / "even.cc", tmp_path / "odd.cc"]
    for first, source in enumerate(together):
        lines = [f'#include "{codec.name}"\n' for codec in codecs[first::2]]
        source.write_text("".join(lines), encoding="utf-8")
    sources = [
        *together,
        ROOT / "tests/cc/runtime_test.cc",
        *sorted((ROOT / "tf_hips/cc/runtime").glob("*.cc")),
    ]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

    def build(source: Path) -> Path:
        target = tmp_path / f"{source.name}.o"
        subprocess.run(
            ["g++", *FLAGS, *sanitize, "-I", ROOT, "-c", source, "-o", target], check=True
        )
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, sources))
    program = tmp_path / "runtime_test"
    subprocess.run(["g++", *sanitize, "-pthread", *objects, "-o", program], check=True)
    environment = {**os.environ, "TF_HIPS_NUM_THREADS": "4"}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


@pytest.mark.heavy  # compiles
@pytest.mark.timeout(120)
def test_a_child_makes_a_pool_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "pool_test"
    sources = [ROOT / "tests/cc/pool_test.cc", ROOT / "tf_hips/cc/runtime/parallel.cc"]
    subprocess.run(["g++", *FLAGS, "-I", ROOT, *sources, "-o", program], check=True)
    environment = {**os.environ, "TF_HIPS_NUM_THREADS": "3"}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stdout
