# SPDX-License-Identifier: Apache-2.0
"""Parts `aggregation`, `process` and `load` of `make bench-ps`: the server by itself."""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import harness, ps_processes
from benchmarks.collectives_jobs import Row, row
from benchmarks.ps_options import ONEBIT, Options
from benchmarks.ps_processes import Process

AGGREGATED = {"dense": "fp32", "onebit": ONEBIT, "tbq": "error_feedback(tbq)"}
_AGGREGATED_TOLD = {"fp16": "fp16", "int8": "error_feedback(int8)", "topk": "error_feedback(topk)"}
STARTS = 5
CHILDREN = 4
ALLOWANCE = 256 << 20  # bytes beside those that grow with the model
LOAD_CHILDREN = 64
LOAD_PROCESSES = 4
LOAD_SHAPES = [(100, 100), (100,)]
LOAD_WARM_UP = 0.2  # of all rounds
LOAD_BLOCK = 25  # rounds


def aggregation(options: Options) -> Iterator[Row]:
    """Gigabytes of gradients per second and core: decode, sum, encode again."""
    for name, text in {**AGGREGATED, **_AGGREGATED_TOLD}.items():
        order = json.dumps(
            {"shapes": options.shapes, "text": text, "rounds": max(3, options.rounds)}
        )
        with tempfile.TemporaryDirectory(prefix="hips-bench") as folder:
            command = [sys.executable, "-m", "benchmarks.ps_merge", order]
            process = Process(command, log=Path(folder) / "merge.log")
            try:
                found = process.hear()
            finally:
                process.end()
        yield row(
            "aggregation",
            f"{CHILDREN} children, {text}, through the store",
            found["median"]["stored"],
            "GB/s",
            interval=harness.interval_text(found["stored"]),
            against=f"without looking for NaN {found['median']['kernel']:.3g}, "
            f"copy {found['median']['copy']:.3g}",
            about=f"ps-aggregation-{name}" if name in AGGREGATED else "",
        )


def process(options: Options) -> Iterator[Row]:
    """How fast a server starts, and what memory it takes."""
    seconds = []
    for _ in range(STARTS):
        with ps_processes.server(CHILDREN) as server:
            seconds.append(server.start_s)
            has_tensorflow = "tensorflow" in server.libraries()
    yield row(
        "process",
        "from the start of the process until it listens, TLS, durable",
        statistics.median(seconds) if not has_tensorflow else float("inf"),
        "s",
        interval=harness.interval_text(seconds),
        against="a process that maps TensorFlow counts as infinite",
        about="ps-start-seconds",
    )
    dense = 4 * sum(int(np.prod(shape)) for shape in options.shapes)
    bound = dense * (2 + CHILDREN) + ALLOWANCE
    for name, text in (("dense", "fp32"), ("onebit", ONEBIT)):
        with (
            ps_processes.server(CHILDREN) as server,
            ps_processes.children(CHILDREN) as children,
        ):
            children.join(server, options.shapes, text, text)
            for number in range(options.rounds):
                children.rounds(number)
            now, most = server.memory()
            children.leave()
        yield row("process", f"memory after {options.rounds} rounds, {text}", now / 1e6, "MB")
        yield row(
            "process",
            f"most memory, {text}, over parameters x 4 x (2 + {CHILDREN}) + 256 MiB",
            most / bound,
            "",
            against=f"{most / 1e6:.0f} MB of {bound / 1e6:.0f} MB",
            about=f"ps-memory-{name}",
        )


def load(options: Options) -> Iterator[Row]:
    """Many children for many rounds: does memory grow, how long do rounds take."""
    seconds: list[float] = []
    resident: list[int] = []
    with (
        ps_processes.server(LOAD_CHILDREN) as server,
        ps_processes.children(LOAD_CHILDREN, num_processes=LOAD_PROCESSES) as children,
    ):
        children.join(server, LOAD_SHAPES, ONEBIT, ONEBIT)
        for first in range(0, options.load_rounds, LOAD_BLOCK):
            seconds += children.rounds(first, LOAD_BLOCK)["seconds"]
            resident.append(server.memory()[0])
        children.leave()
    warm = round(LOAD_WARM_UP * len(resident))
    # A snapshot comes and goes every some hundred rounds, so a fifth of the rounds is one figure.
    first, last = (statistics.mean(some) for some in (resident[warm : 2 * warm], resident[-warm:]))
    yield row(
        "load",
        f"{LOAD_CHILDREN} children, {len(seconds)} rounds: memory of the last fifth over that of "
        "the second",
        100 * (last / first - 1),
        "%",
        against=f"{first / 1e6:.1f} MB, {last / 1e6:.1f} MB; from {min(resident) / 1e6:.1f} to "
        f"{max(resident) / 1e6:.1f} MB",
        about="ps-load-flat",
    )
    for name, share in (("median", 50), ("p99", 99)):
        value = float(np.percentile(seconds[warm * LOAD_BLOCK :], share))
        yield row("load", f"{LOAD_CHILDREN} children, a round, {name}", 1e3 * value, "ms")
