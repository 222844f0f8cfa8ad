# SPDX-License-Identifier: Apache-2.0
"""`make bench-gpu` as far as it goes without a GPU: on emulated kernels it finds what is wrong."""

import json
import sys

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import binding, checks, machine
from tests.compll.emulation import build
from tests.compll.support import spec

ROOT = machine.ROOT


@pytest.fixture
def small(monkeypatch):
    """An emulated GPU, and sizes that it can do."""
    helper = (ROOT / "benchmarks/gpu/device.cu").read_text(encoding="utf-8")
    library = build(spec("terngrad"), more=helper)
    monkeypatch.setattr(machine, "build", lambda arch: True)
    monkeypatch.setattr(machine.Gpu.__init__, "__defaults__", (library,))
    monkeypatch.setattr(checks, "SIZES", (0, 17, 1025))
    for name, value in {"CALLS": 1, "MANY_CALLS": 1, "ROUNDS": 1}.items():
        monkeypatch.setattr(bench, name, value)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(
        sys, "argv", ["bench", "--no-peers", "--jobs", "0", "--sizes", "4096", *arguments]
    )
    return bench.main()


def test_it_checks_measures_and_closes_with_a_line(small, monkeypatch, capsys, tmp_path):
    file = tmp_path / "rows.json"
    assert run(monkeypatch, "--json", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "terngrad: equal to the reference"
    assert lines[-1].endswith("of 3 targets met")
    rows = json.loads(file.read_text())["rows"]
    assert {"encode, 0 Mi", "merge of 16, 0 Mi", "call, decode"} <= {row["what"] for row in rows}
    assert [row["id"] for row in rows if row["id"]] == ["gpu-quantisers", "gpu-sparse", "gpu-call"]


def test_wrong_packets_are_told_and_not_measured(small, monkeypatch, capsys):
    # The kernels get another step than the reference.
    monkeypatch.setattr(checks, "Key", lambda **key: binding.Key(**{**key, "step": 4}))
    assert run(monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("terngrad: n=17 plain: encode; ")
    assert not any("call, encode" in line for line in lines)


def test_without_nvcc_or_gpu_it_says_so(small, monkeypatch, capsys):
    monkeypatch.setattr(machine.Gpu, "call", lambda *_, **__: 0)
    assert run(monkeypatch) == 0
    assert capsys.readouterr().out == "bench-gpu: compiled; not run: there is no GPU here\n"
    monkeypatch.setattr(machine, "build", lambda arch: False)
    assert run(monkeypatch) == 0
    assert capsys.readouterr().out.startswith("bench-gpu: not compiled: nvcc is not here")
