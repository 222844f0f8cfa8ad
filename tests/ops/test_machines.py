# SPDX-License-Identifier: Apache-2.0
"""Processors with narrower vectors make the same bytes: every codec, in processes of their own."""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from compll.backends import toolchain
from tests.ops import codecs
from tf_hips.ops import REGISTRY, Compressor, Key, error_feedback, native

pytestmark = pytest.mark.heavy  # every codec with narrower registers

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1, 77, 5001)
BUILD_DEADLINE_S = 600


def digests() -> dict[str, str]:
    """What each codec makes of the same gradients: packets, residuals, values, sums."""
    made = {}
    fed_back = set(codecs.variants_with_feedback())
    for compressor in codecs.variants():
        found = hashlib.sha256()
        for n in SIZES:
            x = codecs.in_reach(compressor, codecs.gradient(n, seed=n))
            x[n // 2] = np.nan
            # Thirteen are one by itself, four and eight that are added in one loop.
            packets = [
                native.encode(compressor, x, Key(seed=row, step=2, tensor_id=3))
                for row in range(13)
            ]
            values = native.decode(compressor, packets[0], n)
            found.update(packets[0].tobytes() + values.tobytes())
            found.update(native.merge(compressor, packets, n).tobytes())
            if compressor in fed_back:
                residual = codecs.gradient(n, seed=n + 1)
                key = Key(seed=9, step=2, tensor_id=3)
                packet = native.encode(error_feedback(compressor), x, key, residual)
                found.update(packet.tobytes() + residual.tobytes())
        made[compressor.text] = found.hexdigest()
    return made | large_sums()


def large_sums() -> dict[str, str]:
    """Sums and values that may go past the caches, where lines of memory begin and elsewhere."""
    n, made = (1 << 21) + 77, {}
    x = codecs.gradient(n, seed=7)
    room = np.empty(n + 32, np.float32)
    start = -(room.ctypes.data // 4) % 16
    for name in ("onebit", "tbq", "hips2bit", "terngrad", "int8", "qsgd", "topk"):
        compressor = Compressor(name)
        # All in one loop that writes past the caches, and others before it.
        num_rows = 12 if name == "onebit" else 5
        packets = [native.encode(compressor, x, Key(row, 2, 3)) for row in range(num_rows)]
        found = hashlib.blake2b()  # of hundreds of megabytes: the fastest there is
        for skew in (0, 3, 8):
            room[:] = -1
            out = room[start + skew :][:n]
            native.merge(compressor, packets, n, out=out)
            # What lies around them is the same, too.
            found.update(room[start : start + n + 16].tobytes())
            native.decode(compressor, packets[0], n, out=out)
            found.update(room[start : start + n + 16].tobytes())
        made[f"large {name}"] = found.hexdigest()
    return made


def digests_elsewhere(code: str, deadline_s: int = 100, /, **environment: str) -> dict[str, str]:
    """The same in another process, which runs `code` first."""
    command = f"{code}\nimport json\nfrom tests.ops import test_machines as here\n"
    result = subprocess.run(
        [sys.executable, "-c", command + "print(json.dumps(here.digests()))"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, str] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    """What this process makes."""
    return digests()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("machine", ["avx2", "base"])
def test_capped_vectors_make_the_same(machine: str, here: dict[str, str]) -> None:
    """TF_HIPS_CPU takes the wide registers away from packing, noise and sums."""
    level, stores = {"avx2": ("l1", "past"), "base": ("l2", "through")}[machine]
    settings = {"TF_HIPS_PREFETCH": level, "TF_HIPS_STORES": stores}
    assert digests_elsewhere("", TF_HIPS_CPU=machine, **settings) == here


def test_how_large_tensors_are_written(tmp_path: Path) -> None:
    """By the kind of the processor, or as the environment says (decision 0088)."""
    source, program = tmp_path / "stores.cc", tmp_path / "stores"
    source.write_text(
        '#include "tf_hips/cc/runtime/stores.h"\n'
        "int main() { return tf_hips::kPastCaches ? 10 : 20; }\n"
    )
    flags = ["-std=c++17", f"-I{ROOT}", str(source), "-o", str(program)]
    subprocess.run(["g++", *flags], check=True, timeout=60)

    def asked(**environment: str) -> int:
        return subprocess.run([program], env=environment, check=False, timeout=10).returncode

    assert (asked(TF_HIPS_STORES="past"), asked(TF_HIPS_STORES="through")) == (10, 20)
    assert asked() == asked(TF_HIPS_STORES="else") == (20 if _is_small_skylake() else 10)


def _is_small_skylake() -> bool:
    """As Linux describes it: up to 4 processors, Skylake-SP, Cascade Lake or Cooper Lake."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    first = dict(re.findall(r"^(\S.*?)\s*: (.*)$", text.partition("\n\n")[0], re.MULTILINE))
    kind = (first.get("vendor_id"), first.get("cpu family"), first.get("model"))
    is_wide = "avx512f" in first.get("flags", "").split()
    return kind == ("GenuineIntel", "6", "85") and is_wide and text.count("\nprocessor") < 4


@pytest.mark.slow
@pytest.mark.timeout(BUILD_DEADLINE_S + 120)
@pytest.mark.parametrize(
    ("compiler", "flag"), [("g++", "-march=x86-64"), ("g++", "-mavx2"), ("clang++", "-mavx2")]
)
def test_compiled_for_older_processors(
    compiler: str, flag: str, here: dict[str, str], tmp_path: Path
) -> None:
    """The loops that compilers turn into vector code, without the clones for newer processors."""
    if platform.machine() != "x86_64":
        pytest.skip("the flags are those of x86-64")
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} is here")
    built = build_native(tmp_path, (compiler, flag, "-DTF_HIPS_NO_CLONES"))
    path = (
        f"from pathlib import Path\nfrom tf_hips.ops import library\nbuilt = Path({str(built)!r})"
    )
    assert digests_elsewhere(f"{path}\nlibrary.NATIVE_PATH = built") == here


def build_native(folder: Path, compiler: Sequence[str]) -> Path:
    """The native library of all codecs, as `make build` compiles it but for the compiler's flags.

    Raises:
        CalledProcessError: a warning, among others.
    """
    specs = [codecs.SPECS / f"{name}.pse" for name in REGISTRY]
    subprocess.run(
        [sys.executable, "-m", "compll", "gen", *specs, "--target", "cpp", "-o", folder],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    flags = [flag for flag in toolchain.flags(tuple(compiler)) if flag != "-shared"]
    flags += ["-Wall", "-Wextra", "-Werror", "-I", str(ROOT), "-c"]
    sources = [*folder.glob("*.codec.cc"), *ROOT.glob("tf_hips/cc/runtime/*.cc")]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.name}.o"
        command = [*compiler, *flags, str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=BUILD_DEADLINE_S)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    library_path = folder / "libtf_hips_native.so"
    exports = f"-Wl,--version-script={ROOT / 'tf_hips/cc/native_exports.lds'}"
    link = ["-shared", "-pthread", exports, "-Wl,--no-undefined"]
    subprocess.run(
        [*compiler, *link, *map(str, objects), "-o", str(library_path)], check=True, timeout=60
    )
    return library_path
