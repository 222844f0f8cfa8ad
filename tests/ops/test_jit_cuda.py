# SPDX-License-Identifier: Apache-2.0
"""Kernels of loaded codecs in the cache: machines with other GPUs may share its folder."""

import os
import shutil
from pathlib import Path

import pytest

from compll.backends import cache, toolchain
from tf_hips.ops import jit, specifications

pytestmark = pytest.mark.heavy  # runs of gcc

MINE = Path(__file__).with_name("mine.pse")
NAME = toolchain.codec_id("mine", MINE.read_bytes())
# Stands in for nvcc: notes what it is asked for, and makes a library with what is looked for in it.
NVCC = """#!/bin/bash
if [ "$1" = --version ]; then echo a double; exit; fi
while [ $# -gt 0 ]; do
  case "$1" in -o) made=$2; shift ;; -gencode*) echo "$1" >>"$0.log" ;; esac
  shift
done
gcc -shared -fPIC -o "$made" -x c - <<END
void *tf_hips_cuda_codec_mine(void) { static int table; return &table; }
const char *tf_hips_cuda_refusal(void) { return "$REFUSAL"; }
END
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the double of nvcc was asked for; the file is there when it was called."""
    script = tmp_path / "nvcc"
    script.write_text(NVCC)
    script.chmod(0o755)
    shutil.copy(MINE, tmp_path)
    cache = tmp_path / "cache"
    for name, value in {
        "NVCC": script,
        specifications.CACHE: cache,
        specifications.SPECS: tmp_path,
    }.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "nvcc.log"


def test_each_kind_of_gpu_has_an_entry(asked):
    kinds = {
        (): 4,  # code for three, and PTX
        ("90",): 1,
        ("80",): 1,
        ("75", "90"): 2,
    }
    for number, (architectures, flags) in enumerate(kinds.items(), 1):
        address, reason = jit.cuda_table(NAME, architectures)
        assert address is not None and reason == ""
        told = asked.read_text().split()
        asked.unlink()
        assert len(told) == flags
        for one in architectures:
            assert f"-gencode=arch=compute_{one},code=sm_{one}" in told
        assert len(list(Path(os.environ[specifications.CACHE]).glob("*.cuda.so"))) == number
    for architectures in kinds:
        assert jit.cuda_table(NAME, architectures)[0] is not None
        assert not asked.exists()


def test_a_damaged_entry_is_made_again(asked):
    assert jit.cuda_table(NAME, ("90",))[0] is not None
    (entry,) = Path(os.environ[specifications.CACHE]).glob("*.cuda.so")
    whole = entry.read_bytes()
    for damaged in (b"half a library", whole[: len(whole) // 2], b""):
        asked.unlink()
        entry.unlink()  # this process has it mapped
        entry.write_bytes(damaged)
        assert jit.cuda_table(NAME, ("90",))[0] is not None
        assert asked.exists() and toolchain.is_whole(entry)


def test_kernels_that_cannot_run_here_are_not_used(asked, monkeypatch):
    monkeypatch.setenv("REFUSAL", "an old driver")
    assert jit.cuda_table(NAME, ("90",)) == (None, "an old driver")


def test_a_cache_that_cannot_be_written_is_read(asked, monkeypatch):
    assert jit.cuda_table(NAME, ("90",))[0] is not None
    asked.unlink()

    def refused(file):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache, "_turn", refused)
    assert jit.cuda_table(NAME, ("90",))[0] is not None
    assert not asked.exists()
    address, reason = jit.cuda_table(NAME, ("80",))
    assert address is None and "must be a folder that can be written" in reason
