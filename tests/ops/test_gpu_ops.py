# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's kernels for GPUs, as far as it can be shown without one.

A plugin (tests/support/gpu_double.cc) gives TensorFlow a device of type GPU whose memory is the
host's, and the emulation of tests/compll stands for libtf_hips_cuda.so. So placement, copies,
memory on the host, streams, reports of wrong packets and errors are TensorFlow's own; what is not
seen is CUDA: not run on a GPU.
"""

import os
from pathlib import Path

import pytest

from compll.backends import cuda
from compll.passes import optimise
from tests.compll import emulation
from tests.compll.support import spec
from tests.support import gpu_double, hurried
from tests.support.ranks import run_parties

pytestmark = [pytest.mark.tf, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
EMULATED = ("onebit", "terngrad", "graddrop", "dgc")


def fake_nvcc(folder: Path) -> Path:
    """A compiler that stands in for nvcc: g++ with the emulation's header."""
    script = folder / "nvcc"
    headers = ROOT / "tests/compll/emulation"
    script.write_text(
        "#!/bin/bash\n"
        'if [ "$1" = --version ]; then echo emulation; exit; fi\n'
        f"args=({' '.join(emulation.flags(cuda.emit(optimise(spec('onebit')))))} -I{headers})\n"
        'for one in "$@"; do\n'
        '  case "$one" in -O3|-gencode*|-fmad*|-ftz*|-prec*|-cudart*|--expt*|-Xcompiler*) ;;\n'
        "  -shared|-std*) ;;\n"
        '  *.cu) args+=(-x c++ "$one") ;;\n'
        '  *) args+=("$one") ;; esac\n'
        "done\n"
        'exec g++ "${args[@]}"\n'
    )
    script.chmod(0o755)
    return script


def on_a_double(plugin: Path, kernels: Path, folder: Path) -> None:
    """In a process of its own: TensorFlow looks for its devices once."""
    from tests.ops import gpu_child

    with (folder / "said").open("wb") as said:
        os.dup2(said.fileno(), 2)
    gpu_child.check(plugin, kernels, folder)
    (folder / "end").touch()


def test_kernels_for_gpus(tmp_path: Path) -> None:
    told = {
        "plugin": gpu_double.build(tmp_path),
        "kernels": emulation.build(*(spec(name) for name in EMULATED)),
        "folder": tmp_path,
    }
    env = {
        "NVCC": str(fake_nvcc(tmp_path)),
        "TF_HIPS_CACHE": str(tmp_path / "cache"),
        "CXX": str(hurried.compiler(tmp_path)),
        hurried.HURRY: "1",
    }
    try:
        run_parties(on_a_double, told, [1], [env], deadline_s=200)
    except AssertionError:
        print((tmp_path / "said").read_text()[-4000:])
        raise
    said = (tmp_path / "said").read_text()
    assert (tmp_path / "end").exists()
    word = "encodes on the CPU, and gradients are copied there"
    assert f"onebit {word}: no libtf_hips_cuda.so" in said
    assert said.count(f"{word}: an emulated error (CUDA of the driver: 12.4") == 1
