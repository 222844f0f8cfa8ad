# SPDX-License-Identifier: Apache-2.0
"""Codecs and robust aggregation on a GPU: are they right, how near to the speed of memory, how far
ahead of PyTorch.

    check   packets, decoded values, sums and residuals of every codec, against the NumPy reference;
            each pass of robust aggregation against its definition in NumPy, bit for bit
    share   the bytes that must be moved over the time, as a share of a device copy's bytes per time
    call    what a call on 1024 floats takes
    peers   the same algorithms in PyTorch, eager and compiled, over ours

Times are between two events around many calls, on several sets of buffers in turn, so that nothing
comes from the second-level cache that a call of its own would not find there. The host has launched
all calls before the first event: if it has not, the time is taken again with a longer head start.
But the calls on 1024 floats show what it costs to launch: one behind another, and by the host's
clock until it knows that a call is done, which is what a target counts. What must be moved, in
bytes per element: 4 for each time that the gradient is read (twice where a scale or a threshold of
the whole chunk comes first; of randomk only the sectors of 32 bytes that it draws from), 4 more
each time for a residual and 4 to write it, the packet's share, 4 for an output and 8 for one that
is added to, of a sparse packet for the sectors alone that are changed; of robust aggregation, 4 for
each row and each output. A copy of n floats moves 8 n bytes. Needs nvcc and NumPy; PyTorch where it
is there; no TensorFlow. Without a GPU everything is compiled, and "did not run" is said.

Each codec is checked in a process of its own, so that one that breaks the GPU's context is a line
and the others are measured. What is known is written to the file of --json after every part.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import compll
from benchmarks.gpu import checks, machine, peers, record, robust, shares
from benchmarks.gpu.binding import I32, I64, SET, Key
from benchmarks.gpu.machine import ROOT, Gpu, GpuCodec, GpuError, Memory
from benchmarks.gpu.record import Row

SIZES = (1 << 24, 1 << 26)
CALL_SIZE, CALLS, MANY_CALLS, ROUNDS = 1024, 20, 1000, 9
# What a GPU writes several times before a time begins (device.cu), but for calls on few elements.
HEAD_START_BYTES = 1 << 28
SPECS = ROOT / "tf_hips/ops/specs"
# Floats of all rows of a robust aggregation, over the elements of a codec's tensor.
ROBUST_FLOATS = 16
CHECK_DEADLINE_S = 240
NOTE = (
    f"Medians of {ROUNDS} rounds of {CALLS} calls, a share or a ratio with what it is measured "
    "against beside it in each round; intervals are quartiles of the rounds. What is measured: see "
    "`benchmarks/gpu/__main__.py`."
)

# Calls one behind another, and calls that are waited for.
_WAITS = ((0, ""), (1, ", waited for"))
Found = tuple[str, list[str]]


def main() -> int:
    """Builds, checks, measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", help="some codecs, or robust; nothing is stored")
    parser.add_argument("--arch", metavar="SM", help="compile for it alone, such as sm_90")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that is known there")
    parser.add_argument("--commit", metavar="ID", help="of this copy, if it has no .git")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="nothing is stored")
    parser.add_argument("--no-peers", action="store_true", help="nothing is stored")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(16, os.cpu_count() or 1),
        help="processes that check codecs at once; 0: this one does",
    )
    parser.add_argument("--check", metavar="CODEC", help="check one; print what is wrong as JSON")
    options = parser.parse_args()
    if options.check is not None:
        print(json.dumps(_check(Gpu(), options.check)))
        return 0
    if not machine.build(options.arch):
        return _did_not_run(f"not compiled: {os.environ.get('NVCC', 'nvcc')} is not here")
    gpu = Gpu()
    if gpu.count == 0 or gpu.refusal():
        return _did_not_run(f"compiled; {gpu.refusal() or 'CUDA finds no GPU'}")
    names = options.codecs or [*sorted(path.stem for path in SPECS.glob("*.pse")), robust.NAME]
    there = [name for name in names if (robust.has(gpu) if name == robust.NAME else gpu.has(name))]
    programs = {name: compll.compile_spec(_file(name)) for name in there if name != robust.NAME}
    wrong = {name: ["it is not in the library"] for name in names if name not in there}
    for name, found in _all(wrong, _checked(gpu, there, options.jobs)):
        wrong[name] = found
        print(f"{name}: {'equal to the reference' if not found else '; '.join(found)}", flush=True)
    good = {name: program for name, program in programs.items() if not wrong[name]}
    has_robust = robust.NAME in there and not wrong[robust.NAME]
    rows: list[Row] = []
    facts = record.environment(gpu, options.commit)

    def note(more: Iterator[Row]) -> None:
        rows.extend(more)
        if options.json is not None:
            record.write(options.json, record.result(facts, NOTE, wrong, rows))

    note(_calls(gpu, good))
    gpu.good("gpu_head_start", I64(HEAD_START_BYTES))
    for size in options.sizes:
        note(_shares(gpu, good, size, wrong, has_robust=has_robust))
    if not options.no_peers:
        for size in options.sizes:
            note(_peers(gpu, good, size))
    note(iter(_targets(rows, {name: wrong[name] for name in names if name != robust.NAME})))
    _show(rows)
    is_whole = options.codecs is None and tuple(options.sizes) == SIZES and not options.no_peers
    if is_whole and not any(wrong.values()):
        path = record.store(record.result(facts, NOTE, wrong, rows))
        print(f"written to {path.relative_to(ROOT)}")
    met = [row["met"] for row in rows if row["target"]]
    print(f"bench-gpu: {gpu.name}: {met.count('yes')} of {len(met)} targets met")
    return 1 if any(wrong.values()) else 0


def _did_not_run(why: str) -> int:
    print(f"bench-gpu: did not run: {why}; {len(_our_targets())} targets are not measured")
    return 0


def _our_targets() -> list[dict[str, Any]]:
    text = (ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8")
    targets: list[dict[str, Any]] = tomllib.loads(text)["target"]
    return [target for target in targets if target["command"] == "make bench-gpu"]


def _file(name: str) -> Path:
    return SPECS / f"{name}.pse"


def _check(gpu: Gpu, name: str) -> list[str]:
    """What is wrong with a codec, or with robust aggregation."""
    if name == robust.NAME:
        return robust.check(gpu)
    return checks.check(gpu, compll.compile_spec(_file(name)))


def _checked(gpu: Gpu, names: list[str], jobs: int) -> Iterator[Found]:
    """Names with what is wrong with them, in order."""
    if jobs < 1:
        yield from ((name, _check(gpu, name)) for name in names)
        return
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        yield from zip(names, pool.map(_check_apart, names), strict=True)


def _check_apart(name: str) -> list[str]:
    """As `_check`, by a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--check", name]
    # NumPy's own threads would fight over the processors.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=CHECK_DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            return [f"its process ended with {done.returncode}: {last[:300]}"]
        found: list[str] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return [f"it was not checked within {CHECK_DEADLINE_S} s"]


def _all(wrong: dict[str, list[str]], checked: Iterator[Found]) -> Iterator[Found]:
    """What is missing, and behind it what was checked."""
    yield from list(wrong.items())
    yield from checked


def _row(codec: str, what: str, values: Sequence[float], unit: str, **more: Any) -> Row:
    """`values`: of the rounds."""
    measured = round(statistics.median(values), 3) if values else math.nan
    start = {"id": "", "codec": codec, "what": what, "measured": measured, "unit": unit}
    ends = record.spread(values) if len(values) > 1 else {"interval": "", "min": "", "max": ""}
    return {**start, **ends, "us": "", "GB/s": "", "target": "", "met": "", **more}


def _shares(
    gpu: Gpu,
    programs: dict[str, compll.Program],
    n: int,
    wrong: dict[str, list[str]],
    *,
    has_robust: bool,
) -> Iterator[Row]:
    """What was timed and is not what the CPU computes is added to `wrong`."""
    timing, label = shares.Timing(gpu, CALLS, ROUNDS), f"{n >> 20} Mi"
    buffers = shares.Buffers(gpu, n)
    copies = [8 * n / time / 1e6 for (time,) in timing.turns(buffers.copy_time)]
    yield _row("copy", label, copies, "GB/s")
    for name, program in programs.items():
        for found in shares.of_codec(program, buffers, timing):
            what = f"{found.what}, {label}"
            if not found.is_right:
                wrong[name].append(f"{what}: what was timed is wrong")
                print(f"{name}: {wrong[name][-1]}", flush=True)
            yield _share(name, what, found)
    if has_robust:
        size = ROBUST_FLOATS * n
        for found in robust.shares(gpu, size, timing, buffers):
            yield _share(robust.NAME, f"{found.what}, {size >> 20} Mi", found)
    buffers.free()


def _share(name: str, what: str, found: shares.Share) -> Row:
    us, speed = round(1000 * found.time, 1), round(found.moved / found.time / 1e6)
    return _row(name, what, found.shares, "share", us=us, **{"GB/s": speed})


def _calls(gpu: Gpu, programs: dict[str, compll.Program]) -> Iterator[Row]:
    x = np.random.default_rng(0).standard_normal(CALL_SIZE, dtype=np.float32)
    gradient, out = (Memory(gpu, CALL_SIZE, np.float32).put(x) for _ in range(2))
    timing = shares.Timing(gpu, MANY_CALLS, ROUNDS)
    for name, program in programs.items():
        codec = GpuCodec(gpu, program, CALL_SIZE)
        packets = Memory(gpu, codec.wire_bytes).put(codec.encode(gradient, Key(1, 2, 3, 0)))
        for waits, waited in _WAITS:
            gpu.good("gpu_wait_for_each", I32(waits))
            rounds = timing.turns(
                functools.partial(codec.time_encode, [gradient], None),
                functools.partial(codec.time_decode, [packets], [out], SET),
            )
            for what, times in zip(("encode", "decode"), zip(*rounds, strict=True), strict=True):
                yield _row(name, f"call, {what}{waited}", [1000 * time for time in times], "us")
        codec.free()
        packets.free()
    gpu.good("gpu_wait_for_each", I32(0))
    gradient.free()
    out.free()


def _peers(gpu: Gpu, programs: dict[str, compll.Program], n: int) -> Iterator[Row]:
    try:
        known = peers.encoders()
    except ImportError:
        yield _row("", "PyTorch is not here: not compared", [0], "")
        return
    timing, buffers = shares.Timing(gpu, CALLS, ROUNDS), shares.Buffers(gpu, n)
    for name in known:
        if name not in programs:
            continue
        codec = GpuCodec(gpu, programs[name], n, sets=buffers.num_sets)
        ours = functools.partial(buffers.encode_time, codec)
        for compiled, what in ((False, "eager"), (True, "torch.compile")):
            try:
                theirs = peers.timer(
                    *(name, n),
                    compiled=compiled,
                    sets=buffers.num_sets,
                    head_start_bytes=HEAD_START_BYTES,
                )
                rounds = timing.turns(theirs, ours)
            except GpuError:
                raise
            except Exception as error:  # noqa: BLE001 - what PyTorch raises has no common base
                yield _row(name, f"PyTorch {what}: {type(error).__name__}", [0], "")
                continue
            what = f"PyTorch {what}, {n >> 20} Mi"
            us = round(1000 * statistics.median(time for time, _ in rounds), 1)
            yield _row(name, what, [time / our for time, our in rounds], "x", us=us)
        codec.free()
    buffers.free()


def _targets(rows: list[Row], wrong: dict[str, list[str]]) -> list[Row]:
    """The rows of benchmarks/targets.toml: of all that a target speaks of, the slowest counts."""
    found = []
    for target in _our_targets():
        is_sparse, is_call = "sparse" in target["id"], target["id"].endswith("call")
        names = [name for name in wrong if is_call or (name in shares.SPARSE) == is_sparse]
        # But merges, whose bounds no target has.
        begins = "call" if is_call else ("encode", "decode")
        some = [row for row in rows if row["codec"] in names and row["what"].startswith(begins)]
        slowest: Row = (max if is_call else min)(
            some, key=lambda row: row["measured"], default={"codec": "", "what": "nothing"}
        )
        worst = slowest.get("measured", math.nan)
        bound: Any = target.get("at_least", target.get("at_most"))
        is_met = worst <= bound if "at_most" in target else worst >= bound
        bad = [name for name in names if wrong[name]]
        is_met = is_met and not bad
        shown = f"{'<=' if 'at_most' in target else '>='} {bound}"
        found.append(
            _row(
                slowest["codec"],
                f"{slowest['what']}: {target['figure']}"
                + (f"; wrong or not there: {', '.join(bad)}" if bad else ""),
                [worst],
                target["unit"],
                id=target["id"],
                target=shown,
                met="yes" if is_met else "no",
            )
        )
    return found


def _show(rows: list[Row]) -> None:
    """A plain table: this machine may lack what draws better ones."""
    keys = list(rows[0])
    texts = [keys, *([str(row[key]) for key in keys] for row in rows)]
    widths = [max(len(line[k]) for line in texts) for k in range(len(keys))]
    for line in texts:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GpuError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        sys.exit(1)
