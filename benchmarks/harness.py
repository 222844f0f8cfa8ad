# SPDX-License-Identifier: Apache-2.0
"""Timing, the facts of the machine, and result files.

A benchmark hands its rows to `write`, which prints them as a table and stores them, with the
machine and the versions, as `results/<theme>_<hardware>_<yyyymm>.json` and the same table as `.md`.
Times are minimum, median and maximum of several runs: machines are shared and noisy, so ratios are
formed from figures of one run only.
"""

import contextlib
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# An interval that is wider, as a share of the median, says that the machine was busy. If it is on
# one side of a target, that is an answer all the same.
NOISE = 0.1


def timed(
    call: Callable[[], object], *, runs: int = 9, warm_up: int = 2
) -> tuple[float, float, float]:
    """Seconds of one `call`: (minimum, median, maximum) of `runs`, after `warm_up` uncounted."""
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds), statistics.median(seconds), max(seconds)


def console(at_least: int = 160) -> rich.console.Console:
    """A console as wide as a table: a log file or a narrow terminal must not lose columns."""
    return rich.console.Console(width=max(rich.console.Console().width, at_least), soft_wrap=True)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Two of the values between which the median is with a probability of about 0.9."""
    ranked = sorted(ratios)
    # How many of n values are below the median is binomial: n / 2, with deviation sqrt(n) / 2.
    below = max(0, math.floor(len(ranked) / 2 - 1.645 * math.sqrt(len(ranked)) / 2))
    return ranked[below], ranked[-1 - below]


def is_noisy(row: dict[str, Any], limit: float) -> bool:
    """Whether the interval of a figure is too wide to say on which side of `limit` it is.

    Args:
        row: has the figure as "measured", and as "interval" "LOW - HIGH", or nothing.
        limit: of the target.
    """
    if not row["interval"]:
        return False
    low, high = (float(value) for value in row["interval"].split(" - "))
    return bool(high - low > NOISE * row["measured"] and low <= limit <= high)


def environment(gpu: str = "none") -> dict[str, Any]:
    """Hardware, versions, commit and date of this run; `gpu`: the one that was measured."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "vectors": vectors(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "gpu": gpu,
        "os": _os_name(),
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("tensorflow", "keras", "horovod", "numpy", "grpcio")
        },
        "commit": _commit(),
    }


def vectors() -> str:
    """The widest registers of this machine that codecs know: "AVX-512", "AVX2" or "none"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    found = set(next((line for line in lines if line.startswith("flags")), "").split())
    return "AVX-512" if "avx512bw" in found else "AVX2" if "avx2" in found else "none"


def on_ranks(module: str, num_ranks: int) -> list[dict[str, Any]] | None:
    """Runs `python -m MODULE rank` as the ranks of one job on this machine.

    Returns:
        The rows that rank 0 printed as JSON in its last line; None if a rank failed.
    """
    from tf_hips.comm.launch import local_rank_environments

    with local_rank_environments(num_ranks) as environments, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, "rank"],
                    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for environment in environments
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return None
    rows: list[dict[str, Any]] = json.loads(outputs[0].splitlines()[-1])
    return rows


def write(
    theme: str,
    rows: Sequence[dict[str, Any]],
    *,
    command: str,
    note: str = "",
    gpu: str = "none",
    is_shown: bool = True,
    by_vectors: bool = False,
) -> Path:
    """Prints `rows` (equal keys) as a table and stores them; returns the path of the JSON file.

    Args:
        theme: begins the name of the files.
        rows: of the table.
        command: that makes it.
        note: what a reader must know.
        gpu: the one that was measured.
        is_shown: False where the caller prints its own tables.
        by_vectors: figures are of the machine's registers, so those of a machine without AVX-512
            do not take the place of others'.
    """
    facts = environment(gpu)
    hardware = f"{facts['cores']}cpu" if gpu == "none" else re.sub(r"\W+", "", gpu).lower()
    if by_vectors and facts["vectors"] != "AVX-512":
        hardware += f"_{facts['vectors'].lower()}"
    stem = RESULTS / f"{theme}_{hardware}_{facts['date'][:7].replace('-', '')}"
    result = {
        "theme": theme,
        "command": command,
        "note": note,
        "environment": facts,
        "rows": list(rows),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = stem.with_suffix(".json")
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(_markdown(result), encoding="utf-8")
    if is_shown:
        show(theme, rows)
    console().print(f"written to {path.relative_to(ROOT)}")
    return path


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints `rows` (equal keys) as a table."""
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
    for key in rows[0]:
        is_text = isinstance(rows[0][key], str)
        table.add_column(key, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    needed = rich.console.Console(width=10_000).measure(table).maximum
    console(needed).print(table)


def _markdown(result: dict[str, Any]) -> str:
    facts, rows = result["environment"], result["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        f"# {result['theme']}",
        "",
        f"`{result['command']}`, {facts['date']}, commit {facts['commit']}.",
        f"{facts['cpu']}, {facts['vectors']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"GPU: {facts['gpu']}; {facts['os']}; "
        f"Python {facts['python']}, {versions}.",
        "",
    ]
    if result["note"]:
        lines += [result["note"], ""]
    lines.append("| " + " | ".join(rows[0]) + " |")
    lines.append("|" + " --- |" * len(rows[0]))
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _os_name() -> str:
    for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.split("=", 1)[1].strip('"')
    return platform.system()


def _version(name: str) -> str:
    for candidate in (name, f"{name}-cpu"):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
