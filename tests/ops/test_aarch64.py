# SPDX-License-Identifier: Apache-2.0
"""What is compiled for AArch64 makes the same bytes: the tests of x86-64, run by an emulator.

Needed are a cross compiler and qemu (Debian: g++-aarch64-linux-gnu, qemu-user-static). Nothing here
says how fast anything is.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tf_hips
from tests.ops import test_machines as machines
from tests.support import foreign
from tf_hips.errors import LibraryError

pytestmark = [
    pytest.mark.heavy,  # compiles, and emulates
    pytest.mark.skipif(bool(foreign.missing()), reason=foreign.missing() or "all is there"),
]

HERE = f"a machine like this, {platform.machine()}, cannot load it"
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
# Suites that call the native library, and which of their tests do it in another way: codecs that
# are loaded while a process runs are this machine's, and so is the library of other processes.
SUITES = {
    "codecs": ("tests/ops/test_conformance.py", "not registry and not graph"),
    "state": ("tests/ops/test_state.py", "not loaded and not registry and not refused"),
    "momentum": ("tests/ops/test_momentum.py", "not operation and not refused"),
    "promises": ("tests/ops/test_promises.py tests/ops/test_by_hand.py", "not loaded"),
    "packets": (
        "tests/ops/test_native.py tests/ops/test_selection.py",
        "not machines and not fork",
    ),
    "streams": ("tests/ops/test_streaming.py tests/ops/test_sizes.py", "not loaded"),
    "updates": ("tests/ops/test_native_updates.py tests/ops/test_checksum.py", "not loaded"),
    "robust": ("tests/robust/test_kernels.py", "not registers"),
}
# The same of what the compiler makes, not optimised: rows of every operation, and transforms.
QUICK = ("tests/compll/test_rows.py", "comparisons")
PROGRAMS = (
    "tests/compll/test_rows.py tests/compll/test_hadamard.py",
    "not narrower and not kernels",
)
GENERATED = ("", "--integers", "--feedback", "--shipped")


def run_suite(suite: tuple[str, str], native: Path | None = None) -> str:
    """Runs tests with all that is compiled for AArch64; returns what pytest says."""
    files, chosen = suite
    environment = {name: text for name, text in os.environ.items() if "PYTEST_XDIST" not in name}
    environment[foreign.NATIVE] = "" if native is None else str(native)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.foreign", *files.split()]
    done = subprocess.run(
        [*command, "-k", chosen, "-n", "0", "-q", "-m", "not slow", "--timeout", str(DEADLINE_S)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of all codecs, without a warning."""
    folder = tmp_path_factory.mktemp("aarch64")
    return machines.build_native(folder, (str(shutil.which(foreign.compiler())),))


@pytest.mark.timeout(200)
def test_some_programs_are_the_same() -> None:
    assert "passed" in run_suite(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 100)
def test_programs_of_every_operation_are_the_same() -> None:
    assert "passed" in run_suite(PROGRAMS)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 100)
@pytest.mark.parametrize("grammar", GENERATED)
def test_generated_programs_are_the_same(grammar: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "programs", "--aarch64", "--count", "6"]
    done = subprocess.run(
        [*command, *grammar.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "6 programs" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 100)
@pytest.mark.parametrize("machine", ["", "base"])
@pytest.mark.parametrize("threads", ["1", "5"])
def test_every_codec_makes_the_same(native: Path, machine: str, threads: str) -> None:
    """With the registers that all have, and without them."""
    code = "from pathlib import Path\nfrom tests.support import foreign\n"
    code += f"foreign.use(Path({str(native)!r}))"
    settings = {"TF_HIPS_CPU": machine, "TF_HIPS_NUM_THREADS": threads}
    here = machines.digests()
    assert machines.digests_elsewhere(code, DEADLINE_S, **settings) == here


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 100)
@pytest.mark.parametrize("suite", SUITES)
def test_suites_of_the_native_library(native: Path, suite: str) -> None:
    assert "passed" in run_suite(SUITES[suite], native)


def test_a_library_is_made_for_there_and_refused_here(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": foreign.compiler()}
    spec = ROOT / "tests/compll/momentum.pse"
    command = [sys.executable, "-m", "compll", "gen", str(spec), "-o", str(tmp_path), "--build"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    built = Path(done.stdout.strip())
    assert done.stderr == f"compll: built for aarch64: {HERE}\n"
    with pytest.raises(LibraryError, match="it is for aarch64, and this processor is"):
        tf_hips.load(built)


def test_what_a_function_must_not_do_is_told(tmp_path: Path) -> None:
    """To write beside its memory, or to leave its caller with another mode of denormals."""
    source = tmp_path / "wrong.cc"
    source.write_text(
        '#include <cstdint>\nextern "C" {\n'
        "int32_t tf_hips_update_scale(const float* x, float factor, float* out, int64_t n) {\n"
        "  for (int64_t i = 0; i < n + (factor < 0); ++i) out[i] = factor * x[i];\n"
        '  if (factor > 1) asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));\n'
        "  return 0;\n}\n}\n"
    )
    built = tmp_path / "wrong.so"
    command = [foreign.compiler(), "-O1", "-shared", "-fPIC", str(source), "-o", str(built)]
    subprocess.run(command, check=True, timeout=60)
    scale = foreign.Library(foreign.the_host(), built)["tf_hips_update_scale"]
    scale.argtypes = (ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64)
    x, y = np.array([1, 1e-40], np.float32), np.empty(2, np.float32)
    assert scale(x.ctypes.data, 0.5, y.ctypes.data, 2) == 0
    assert y.tolist() == [0.5, 0.0]  # the caller flushes, and this function leaves it so
    for factor, told in ((-1, "wrote beside its memory"), (2, "changed the mode of its caller")):
        with pytest.raises(foreign.ForeignError, match=told):
            scale(x.ctypes.data, factor, y.ctypes.data, 2)
