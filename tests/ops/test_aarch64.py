# SPDX-License-Identifier: Apache-2.0
"""What is compiled for AArch64 makes the same bytes: the tests of x86-64, run by an emulator.

Needed are a cross compiler and qemu (Debian: g++-aarch64-linux-gnu, qemu-user-static). Nothing here
says how fast anything is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops import test_machines as machines
from tests.support import foreign

pytestmark = [
    pytest.mark.heavy,  # compiles, and emulates
    pytest.mark.skipif(bool(foreign.missing()), reason=foreign.missing() or "all is there"),
]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
# Suites that call the native library, and which of their tests do it in another way: codecs that
# are loaded while a process runs are this machine's, and so is the library of other processes.
SUITES = {
    "codecs": ("tests/ops/test_conformance.py", "not registry and not graph"),
    "state": ("tests/ops/test_state.py", "not loaded and not registry"),
    "momentum": ("tests/ops/test_momentum.py", "not loaded"),
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
QUICK = ("tests/compll/test_rows.py", "comparisons or thresholds")
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


def test_a_wrong_bit_is_seen(tmp_path: Path) -> None:
    """What writes beside its memory, or flushes its caller's denormals no longer, is told."""
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
    code = (
        "import sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from tests.support import foreign\nfrom tf_hips.ops import native_updates\n"
        f"foreign.use(Path({str(built)!r}))\n"
        "x = np.array([1, 1e-40], np.float32)\n"
        "print(native_updates.scale(x, 0.5).tolist())\n"
        "for factor in (-1, 2):\n"
        "    try:\n        native_updates.scale(x, factor)\n"
        "    except foreign.ForeignError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "[0.5, 0.0]",
        "a function of the library wrote beside its memory",
        "a function of the library changed the mode of its caller's denormals",
    ]
