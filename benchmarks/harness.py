# SPDX-License-Identifier: Apache-2.0
"""Timing, the facts of the machine, and result files.

A benchmark hands its rows to `write`, which prints them as a table and stores them, with the
machine and the versions, as `results/<theme>_<hardware>_<yyyymm>.json` and the same table as `.md`;
the hardware is the number of cores and the CPU's family, or the GPU. Machines are shared and noisy:
times are medians of several runs, ratios are formed from figures of one run only, and `interval`
is always the one of the function `interval`.
"""

import contextlib
import datetime
import itertools
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
# Of the environment, told of each part of a result.
PART_FACTS = ("date", "time", "commit", "cpu", "cores")
# An interval that is wider, as a share of the median, says that the machine was busy. If it is on
# one side of a target, that is an answer all the same.
NOISE = 0.1
# What a CPU's name says beside its family.
_MARKS = re.compile(r"\((r|tm|c)\)|@.*|\b(intel|amd|genuine|processor|cpu|\d+-core)\b", re.I)


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


def between(low: float, high: float) -> str:
    """An interval as rows have it."""
    return f"{low:.4g} - {high:.4g}"


def interval_text(values: Sequence[float]) -> str:
    """The interval of a median as rows have it; of one value there is none."""
    return between(*interval(values)) if len(values) > 1 else ""


def verdict(row: dict[str, Any], target: dict[str, Any]) -> str:
    """Whether a figure meets its target: "yes", "no", or "noisy": its interval holds the bound.

    Args:
        row: has the figure as "measured", and perhaps as "interval" "LOW - HIGH".
        target: an entry of `targets.toml`.
    """
    is_least = "at_least" in target
    limit = target["at_least"] if is_least else target["at_most"]
    if low_high := _ends(row):
        low, high = low_high
        if low < limit < high:
            return "noisy"
    is_met = row["measured"] >= limit if is_least else row["measured"] <= limit
    return "yes" if is_met else "no"


def is_noisy(row: dict[str, Any], limit: float) -> bool:
    """Whether a figure's interval holds `limit`, and is as wide as on a machine that was busy.

    One that is narrow and holds it is an answer: the figure is what was promised, or next to it.

    Args:
        row: has the figure as "measured", and as "interval" "LOW - HIGH", or nothing.
        limit: of the target.
    """
    if not (low_high := _ends(row)):
        return False
    low, high = low_high
    return bool(high - low > NOISE * row["measured"] and low <= limit <= high)


def _ends(row: dict[str, Any]) -> tuple[float, float] | None:
    text = row.get("interval", "")
    if " - " not in text:
        return None
    low, high = text.split(" - ")
    return float(low), float(high)


def environment(gpu: str = "none") -> dict[str, Any]:
    """Hardware, versions, commit and date of this run; `gpu`: the one that was measured."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    now = datetime.datetime.now()
    return {
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M:%S"),
        "cpu": cpu(),
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


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model of this machine's CPU, with its family where a cloud calls all of them alike."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    name = facts.get("model name")
    if name is None:
        return platform.processor() or platform.machine()
    if re.search(r"\d", name) or "cpu family" not in facts:
        return name
    return f"{name} (family {facts['cpu family']}, model {facts.get('model', 'unknown')})"


def family(name: str) -> str:
    """A CPU's family, for names of files: "xeon" of an "Intel(R) Xeon(R) CPU @ 2.20GHz"."""
    words = re.findall(r"[a-z0-9]+", _MARKS.sub(" ", name).lower())
    return words[0] if words else "cpu"


def named(facts: dict[str, Any]) -> str:
    """CPU and registers of an environment, as far as it tells of them."""
    return ", ".join(facts[key] for key in ("cpu", "vectors") if key in facts)


def is_machine(facts: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether a result's environment tells of a machine like this one.

    Args:
        facts: of the result; the first ones do not say which registers there were.
        here: this one's environment.
    """
    names = ("cpu", "cores", "vectors", "gpu") if here["gpu"] == "none" else ("gpu",)
    return all(facts.get(name, here[name]) == here[name] for name in names)


def when(facts: dict[str, Any]) -> tuple[str, str]:
    """Day and time of a result; the first ones did not have the time."""
    return facts["date"], facts.get("time", "")


def vectors() -> str:
    """The widest registers here that codecs know: "AVX-512", "AVX2", "NEON" or "none"."""
    if platform.machine() == "aarch64":
        return "NEON"
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
    parts: dict[str, dict[str, Any]] | None = None,
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
        parts: of each part of the rows `PART_FACTS` of its run and a "note", if they were not all
            measured in one.
    """
    facts = environment(gpu)
    hardware = f"{facts['cores']}cpu_{family(facts['cpu'])}"
    if gpu != "none":
        hardware = re.sub(r"\W+", "", gpu).lower()
    if by_vectors and facts["vectors"] != "AVX-512":
        hardware += f"_{facts['vectors'].lower()}"
    stem = _stem(theme, hardware, facts)
    result = {
        "theme": theme,
        "command": command,
        "note": note,
        "environment": facts,
        **({"parts": parts} if parts else {}),
        "rows": list(rows),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = stem.with_suffix(".json")
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    if is_shown:
        show(theme, rows)
    console().print(f"written to {path.relative_to(ROOT)}")
    return path


def _stem(theme: str, hardware: str, facts: dict[str, Any]) -> Path:
    """Where a result of this machine goes: not where one of another machine lies."""
    month = facts["date"][:7].replace("-", "")
    for number in itertools.count(1):
        stem = RESULTS / f"{theme}_{hardware}{f'-{number}' if number > 1 else ''}_{month}"
        path = stem.with_suffix(".json")
        if not path.exists():
            break
        if is_machine(json.loads(path.read_text(encoding="utf-8"))["environment"], facts):
            break
    return stem


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints `rows` (equal keys) as a table."""
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
    for key in rows[0]:
        is_text = isinstance(rows[0][key], str)
        table.add_column(key, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(value) for value in row.values()))
    needed = rich.console.Console(width=10_000).measure(table).maximum
    console(needed).print(table)


def cell(value: object) -> str:
    """A value in a table: a figure has four digits where it was not rounded to few places."""
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value) and value != round(value, 3):
        return str(float(f"{value:.4g}"))
    return str(value)


def markdown(result: dict[str, Any]) -> str:
    """A result as its `.md` has it."""
    facts, rows = result["environment"], result["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        f"# {result['theme']}",
        "",
        f"`{result['command']}`, {facts['date']}, commit {facts['commit']}.",
        f"{named(facts)}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"GPU: {facts['gpu']}; {facts['os']}; "
        f"Python {facts['python']}, {versions}.",
        "",
    ]
    if result["note"]:
        lines += [result["note"], ""]
    if told := _parts(result.get("parts", {})):
        lines += ["Parts were measured by themselves:", "", *told, ""]
    lines.append("| " + " | ".join(rows[0]) + " |")
    lines.append("|" + " --- |" * len(rows[0]))
    lines += ["| " + " | ".join(cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _parts(parts: dict[str, dict[str, Any]]) -> list[str]:
    """A line for those of each run: when, on what, and what was said of it; none of one run."""
    named: dict[str, list[str]] = {}
    for name, facts in parts.items():
        at = " ".join(one for one in when(facts) if one)
        machine = f"{facts['cpu']}, {facts['cores']} cores"
        line = f"{at}, commit {facts['commit']}, {machine}. {facts['note']}".rstrip()
        named.setdefault(line, []).append(name)
    if len(named) < 2:
        return []
    return [f"* {', '.join(names)}: {line}" for line, names in named.items()]


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
