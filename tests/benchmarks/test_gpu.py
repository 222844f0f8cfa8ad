# SPDX-License-Identifier: Apache-2.0
"""`make bench-gpu` as far as it goes without a GPU: on emulated kernels it finds what is wrong."""

import ctypes
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import (
    binding,
    checks,
    cpu,
    machine,
    once,
    record,
    robust,
    robust_reference,
    shares,
    timed,
)
from tests.compll import hurry
from tests.compll.emulation import build
from tests.compll.support import spec
from tests.robust import emulated
from tests.robust.test_kernels import rows_of
from tf_hips.ops import native_robust

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]  # runs of g++ where nothing is cached

ROOT = machine.ROOT


@pytest.fixture
def small(monkeypatch):
    """An emulated GPU, and sizes that it can do."""
    helper = (ROOT / "benchmarks/gpu/device.cu").read_text(encoding="utf-8")
    library = build(spec("terngrad"), more=helper)
    monkeypatch.setattr(machine, "build", lambda arch: True)
    monkeypatch.setattr(machine.Gpu.__init__, "__defaults__", (library,))
    monkeypatch.setattr(cpu, "FLAGS", hurry.flags())
    monkeypatch.setattr(checks, "SIZES", (0, 17, 1025))
    monkeypatch.setattr(checks, "LARGE_SIZES", ())  # see the test of those
    for name, value in {"CALLS": 1, "MANY_CALLS": 1, "ROUNDS": 1, "HEAD_START_BYTES": 64}.items():
        monkeypatch.setattr(bench, name, value)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(
        sys, "argv", ["bench", "--no-peers", "--jobs", "0", "--sizes", "4096", *arguments]
    )
    if "--codecs" not in arguments:
        sys.argv += ["--codecs", "terngrad"]
    return bench.main()


def test_it_checks_measures_and_closes_with_a_line(small, monkeypatch, capsys, tmp_path):
    file = tmp_path / "rows.json"
    assert run(monkeypatch, "--json", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "terngrad: equal to the reference"
    assert lines[-1].endswith("of 3 targets met")
    rows = json.loads(file.read_text())["rows"]
    assert {"encode, 0 Mi", "merge of 16, 0 Mi", "call, decode", "call, decode, waited for"} <= {
        row["what"] for row in rows
    }
    targets = [row for row in rows if row["id"]]
    assert [row["id"] for row in targets] == ["gpu-quantisers", "gpu-sparse", "gpu-call"]
    # The row that counts is named.
    slowest = min(
        (row for row in rows if row["what"].startswith(("encode", "decode")) and not row["id"]),
        key=lambda row: row["measured"],
    )
    assert targets[0]["codec"] == "terngrad"
    assert targets[0]["what"].startswith(f"{slowest['what']}: on a GPU")
    assert targets[1]["what"].startswith("nothing: on a GPU")


def test_a_record_tells_how_it_was_made(small, monkeypatch, tmp_path):
    """On a machine that has NumPy alone: neither rich nor PyTorch."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "benchmarks.harness", raising=False)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "ROUNDS", 3)
    file = tmp_path / "some.json"
    assert run(monkeypatch, "--json", str(file), "--commit", "0123abc") == 0
    found = json.loads(file.read_text())
    facts = found["environment"]
    assert found["command"].startswith("make bench-gpu ARGS='--no-peers --jobs 0")
    assert facts["commit"] == "0123abc"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    assert {"cpu", "cores", "gpu", "driver", "os", "python"} <= facts.keys()
    versions = facts["versions"]
    assert versions["CUDA of the driver"] == "12.4"
    assert versions["CUDA of the library"] == "13.0"
    assert {"nvcc", "numpy", "torch"} <= versions.keys()
    [row] = [row for row in found["rows"] if row["what"] == "encode, 0 Mi"]
    low, high = (float(end) for end in row["interval"].split(" - "))
    assert row["min"] <= low <= row["measured"] <= high <= row["max"]
    made = record.store(found)
    assert made.name == f"gpu_emulation_{facts['date'][:7].replace('-', '')}.json"
    page = made.with_suffix(".md").read_text()
    assert "commit 0123abc" in page
    assert "CUDA of the driver 12.4" in page
    assert "| encode, 0 Mi |" in page


def test_the_commit_is_gits(small):
    assert record.environment(machine.Gpu(), None)["commit"] != "unknown"


def test_a_copy_is_timed_beside_each_round(small, monkeypatch):
    seen = []
    measure = machine.Gpu.milliseconds

    def note(self, name, *arguments):
        seen.append(name)
        return measure(self, name, *arguments)

    monkeypatch.setattr(machine.Gpu, "milliseconds", note)
    gpu = machine.Gpu()
    buffers, timing = shares.Buffers(gpu, 4096), shares.Timing(gpu, calls=2, rounds=3)
    found = next(shares.of_codec(spec("terngrad"), buffers, timing))
    assert seen[:6] == ["gpu_time_copy", "gpu_time_encode"] * 3
    assert len(found.shares) == 3
    copy, ours = found.rounds[1]
    assert found.shares[1] == pytest.approx(found.moved / ours / (8 * 4096 / copy))


def test_a_codec_that_is_not_there_is_a_miss(small, monkeypatch, capsys):
    assert run(monkeypatch, "--codecs", "terngrad", "onebit") == 1
    told = capsys.readouterr().out
    assert told.startswith("onebit: it is not in the library\nterngrad: equal")
    [line] = [line for line in told.splitlines() if line.startswith("gpu-quantisers")]
    assert "; wrong or not there: onebit" in line


def test_a_time_with_the_hosts_own_in_it_is_taken_again(small, monkeypatch):
    gpu = machine.Gpu()
    gpu.good("gpu_head_start", binding.I64(64))
    buffers, seen = shares.Buffers(gpu, 4096), []

    def copy(calls):
        seen.append(calls)
        return buffers.copy_time(calls)

    gpu.call("emulation_early", 2)
    assert len(shares.Timing(gpu, calls=3, rounds=1).turns(copy)) == 1
    assert seen == [3, 3, 3]
    # It ends: the head start does not grow for ever.
    gpu.call("emulation_early", 100)
    shares.Timing(gpu, calls=3, rounds=1).turns(copy)
    assert len(seen) == 3 + 5
    gpu.call("emulation_early", 0)


def test_what_touches_few_elements_has_more_sets(small, monkeypatch):
    """Else all of them would stay in the cache."""
    gpu, seen = machine.Gpu(), {}
    measure = machine.Gpu.milliseconds

    def note(self, name, *arguments):
        seen.setdefault(name, []).append(arguments)
        return measure(self, name, *arguments)

    monkeypatch.setattr(machine.Gpu, "milliseconds", note)
    # For what it takes to see it, the codec here is one of those.
    for names in ("SPARSE", "_SAMPLES"):
        monkeypatch.setattr(shares, names, ("terngrad",))
    buffers = shares.Buffers(gpu, 4096)
    found = list(shares.of_codec(spec("terngrad"), buffers, shares.Timing(gpu, 20, 1)))
    assert all(share.is_right for share in found)
    encode, feedback = seen["gpu_time_encode"]
    decode, add, merge = seen["gpu_time_decode"]
    assert len(set(encode[3])) == len(set(encode[6])) == 20
    assert len(set(add[2])) == len(set(add[5])) == 20
    assert [call[-2].value for call in (encode, feedback, decode, add, merge)] == [20, 8, 8, 20, 8]


def test_wrong_packets_are_told_and_not_measured(small, monkeypatch, capsys):
    # The kernels get another step than the reference.
    monkeypatch.setattr(checks, "Key", lambda **key: binding.Key(**{**key, "step": 4}))
    assert run(monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("terngrad: n=17 plain: encode; ")
    assert not any("call, encode" in line for line in lines)


def test_large_tensors_have_several_tiles_a_block():
    text = (ROOT / "tf_hips/cc/cuda/device.cuh").read_text(encoding="utf-8")
    many = int(re.search(r"define TF_HIPS_MANY_BLOCKS (\d+)", text).group(1))
    assert max(checks.SIZES) < 2 * 1024 * many <= min(checks.LARGE_SIZES)
    assert max(checks.LARGE_SIZES) >= 4 * 1024 * many
    assert max(checks.LARGE_SIZES) % (4 * 1024) != 0


def test_large_tensors_are_compared_with_the_cpu(small, monkeypatch):
    monkeypatch.setattr(checks, "SIZES", ())
    monkeypatch.setattr(checks, "LARGE_SIZES", (checks.CHUNK + 1027,))
    encode = cpu.Cpu.encode
    assert checks.check(machine.Gpu(), spec("terngrad")) == []
    monkeypatch.setattr(cpu.Cpu, "encode", lambda self, x, **key: encode(self, x + 1, **key))
    found = checks.check(machine.Gpu(), spec("terngrad"))
    assert f"n={checks.CHUNK + 1027} plain, not aligned: encode" in found


@pytest.mark.parametrize("name", ["terngrad", "dgc"])
def test_what_was_timed_is_compared_with_the_cpu(small, monkeypatch, name):
    """A byte that is not as the last call on the last set left it is seen."""
    if name == "dgc":
        helper = (ROOT / "benchmarks/gpu/device.cu").read_text(encoding="utf-8")
        monkeypatch.setattr(machine.Gpu.__init__, "__defaults__", (build(spec(name), more=helper),))
    gpu, n, calls = machine.Gpu(), 4099, 13
    buffers = shares.Buffers(gpu, n)
    codec = machine.GpuCodec(gpu, spec(name), n, sets=buffers.num_sets)
    rows = [machine.Memory(gpu, codec.wire_bytes) for _ in range(16 * buffers.num_sets)]
    for k, row in enumerate(rows):
        codec.encode_to(row, buffers.gradients[0].at + 4 * (k % 16), binding.Key(k % 16))
    some = timed.Timed(codec, cpu.Cpu(spec(name)), buffers, rows, calls)
    if codec.num_states:
        cases = [(some.encode_state(), [codec.sets[-1], codec.states[-1]])]
    else:
        cases = [
            (some.encode(), [codec.sets[-1]]),
            (some.encode_feedback(), [codec.sets[-1], buffers.residuals[-1]]),
        ]
    for case in (some.decode(), some.decode_add(buffers.num_sets), some.merge()):
        cases.append((case, [buffers.outs[-1]]))
    for case, results in cases:
        for result in results:
            case.reset()
            case.run(calls)
            assert case.is_right(), case.what
            values = result.get()
            values.view(np.uint8)[-1] ^= 1
            result.put(values)
            assert not case.is_right(), case.what


def test_a_wrong_result_of_what_was_timed_is_told(small, monkeypatch, capsys):
    monkeypatch.setattr(timed, "KEY", {"seed": 1, "step": 2, "tensor_id": 4})
    assert run(monkeypatch) == 1
    assert "terngrad: encode, 0 Mi: what was timed is wrong" in capsys.readouterr().out


def test_without_nvcc_or_gpu_it_says_so(small, monkeypatch, capsys):
    monkeypatch.setattr(machine.Gpu, "refusal", lambda self: "an old driver")
    last = "3 targets are not measured\n"
    assert run(monkeypatch) == 0
    assert capsys.readouterr().out == f"bench-gpu: did not run: compiled; an old driver; {last}"
    monkeypatch.setattr(machine, "build", lambda arch: False)
    assert run(monkeypatch) == 0
    told = f"bench-gpu: did not run: not compiled: nvcc is not here; {last}"
    assert capsys.readouterr().out == told


def test_calls_take_turns_on_buffers_and_rows_are_distinct(small, monkeypatch):
    """What one call leaves in a cache is not what the next one reads."""
    gpu = machine.Gpu()
    seen = {}
    measure = machine.Gpu.milliseconds

    def note(self, name, *arguments):
        seen.setdefault(name, []).append(arguments)
        return measure(self, name, *arguments)

    monkeypatch.setattr(machine.Gpu, "milliseconds", note)
    buffers = shares.Buffers(gpu, 4096)
    timing = shares.Timing(gpu, calls=9, rounds=1)
    assert buffers.num_sets == 8
    found = list(shares.of_codec(spec("terngrad"), buffers, timing))
    feedback, merge = seen["gpu_time_encode"][1], seen["gpu_time_decode"][2]
    for pointers in (feedback[3], feedback[4], feedback[6], merge[5]):
        assert len(set(pointers)) == 8
    assert len(set(merge[2])) == 8 * 16
    moved = {share.what: share.moved for share in found}
    wire = machine.GpuCodec(gpu, spec("terngrad"), 4096).wire_bytes
    assert moved["encode, feedback"] == 20 * 4096 + wire
    assert moved["merge of 16"] == 4 * 4096 + 16 * wire


def test_cuda_says_what_is_wrong(small):
    gpu = machine.Gpu()
    codec = machine.GpuCodec(gpu, spec("terngrad"), 17)
    gradient = machine.Memory(gpu, 17, np.float32)
    gpu.call("emulation_fail", 1, 0)
    with pytest.raises(machine.GpuError, match=r"encode with terngrad .* an emulated error"):
        codec.encode(gradient, binding.Key())
    gpu.call("emulation_fail", 1, 0)
    with pytest.raises(machine.GpuError, match=r"gpu_time_encode .* an emulated error"):
        codec.time_encode([gradient], None, 1)


def test_the_compiler_is_the_one_that_a_variable_names(monkeypatch, tmp_path):
    monkeypatch.setenv("NVCC", str(tmp_path / "nvcc"))
    assert machine.nvcc() is None
    assert not machine.build(None)
    (tmp_path / "nvcc").touch(mode=0o755)
    assert machine.nvcc() == str(tmp_path / "nvcc")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (subprocess.TimeoutExpired("nvcc", 580), r"nvcc must be done within 580 s; .* run this"),
        (subprocess.CalledProcessError(1, "nvcc"), r"build_cuda\.py must return 0. Received: 1"),
    ],
)
def test_a_compiler_that_fails_is_a_line(monkeypatch, error, told):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(machine, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(machine.GpuError, match=told):
        machine.build("sm_90")


@pytest.fixture
def passes(monkeypatch):
    """The same with robust aggregation in place of a codec, and one shape."""
    monkeypatch.setattr(machine.Gpu.__init__, "__defaults__", (emulated.build(),))
    monkeypatch.setattr(robust, "SHAPES", ((9, 513),))
    monkeypatch.setattr(robust, "RULES", robust.RULES[:2])
    monkeypatch.setattr(machine, "build", lambda arch: True)
    for name, value in {"CALLS": 1, "ROUNDS": 1, "HEAD_START_BYTES": 0}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "ROBUST_FLOATS", 4)


def test_robust_aggregation_is_checked_and_measured(passes, monkeypatch, capsys):
    assert run(monkeypatch, "--codecs", "robust") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "robust: equal to the reference"
    told = "\n".join(lines)
    for what in ("median of 16, squares, 0 Mi", "distances of 45, 0 Mi", "16 sums of 16, 0 Mi"):
        assert what in told, what


def test_wrong_passes_are_told_and_not_measured(passes, monkeypatch, capsys):
    # The reference leaves out another value than the kernels.
    monkeypatch.setattr(robust_reference, "_mean", lambda values, count: values.max(axis=0))
    assert run(monkeypatch, "--codecs", "robust") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("robust: n=9 d=513 skew=0: coordinate, rule 1; ")
    assert not any("distances of" in line for line in lines)


def test_the_reference_of_passes_has_the_bits_of_the_library():
    for n, d in ((1, 513), (15, 700), (4, 40_000)):
        rows = rows_of(n, d)
        for rule, drop in zip(
            native_robust.CoordinateRule, (0, (n - 1) // 3, n // 3, 0), strict=True
        ):
            found = robust_reference.coordinate(rows, rule, drop)
            wanted, squares = native_robust.coordinate(rows, rule, drop)
            assert found.tobytes() == wanted.tobytes(), (n, d, rule)
        assert robust_reference.squares(rows).tobytes() == squares.tobytes()
        assert (
            robust_reference.distances(rows).tobytes() == native_robust.distances(rows)[1].tobytes()
        )
        weights = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
        assert (
            robust_reference.mix(rows, weights).tobytes()
            == native_robust.mix(rows, weights).tobytes()
        )


def test_a_profiler_sees_each_kernel(small, monkeypatch):
    monkeypatch.setattr(once, "SIZE", 5000)
    gpu = machine.Gpu()
    before = gpu.call("emulation_launches", result=ctypes.c_longlong)
    once.once(gpu, "terngrad")
    assert gpu.call("emulation_launches", result=ctypes.c_longlong) - before >= 8
