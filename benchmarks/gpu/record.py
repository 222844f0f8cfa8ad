# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: its rows with the machine, versions, commit, command and date.

In the form of `benchmarks.harness`, which a machine with nvcc and NumPy alone cannot import.
"""

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import ROOT, Gpu, nvcc

RESULTS = ROOT / "benchmarks/results"

Row = dict[str, Any]


def spread(values: Sequence[float]) -> Row:
    """Of the values of two rounds or more: quartiles, least and largest."""
    low, _, high = statistics.quantiles(values, method="inclusive")
    return {
        "interval": f"{low:.3f} - {high:.3f}",
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def command() -> str:
    """Which repeats this run; where else its result went is of this machine alone."""
    given = iter(sys.argv[1:])
    kept = [word for word in given if not (word in ("--json", "--commit") and next(given, ""))]
    arguments = shlex.join(kept)
    return "make bench-gpu" + (f" ARGS={shlex.quote(arguments)}" if arguments else "")


def environment(gpu: Gpu, commit: str | None) -> Row:
    """Hardware, versions, commit and date; `commit`: of a copy without git."""
    cpu = _line("/proc/cpuinfo", "model name", ":") or platform.machine()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    smi = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
    release = re.search(r"V(\d+\.\d+\.\d+)", _said(nvcc() or "nvcc", "--version"))
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "gpu": gpu.name,
        "driver": smi or "unknown",
        "os": _line("/etc/os-release", "PRETTY_NAME", "=") or platform.system(),
        "python": platform.python_version(),
        "versions": {
            "CUDA of the driver": gpu.cuda_version("driver"),
            "CUDA of the library": gpu.cuda_version("library"),
            "nvcc": release.group(1) if release else "unknown",
            **{name: _version(name) for name in ("numpy", "torch")},
        },
        "commit": commit
        or _said("git", "describe", "--always", "--dirty", "--exclude=*")
        or "unknown",
    }


def result(facts: Row, note: str, wrong: dict[str, list[str]], rows: Sequence[Row]) -> Row:
    """All that is known."""
    head = {"theme": "gpu", "command": command(), "note": note, "environment": facts}
    return {**head, "wrong": {name: why for name, why in wrong.items() if why}, "rows": list(rows)}


def store(found: Row) -> Path:
    """Writes a result to where those of all benchmarks are; returns the path of the JSON file."""
    facts = found["environment"]
    hardware = re.sub(r"\W+", "", facts["gpu"]).lower()
    path = RESULTS / f"gpu_{hardware}_{facts['date'][:7].replace('-', '')}.json"
    RESULTS.mkdir(parents=True, exist_ok=True)
    write(path, found)
    path.with_suffix(".md").write_text(_page(found), encoding="utf-8")
    return path


def write(path: Path, found: Row) -> None:
    """Writes a result as JSON."""
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _page(found: Row) -> str:
    facts, rows = found["environment"], found["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        "# gpu",
        "",
        f"`{found['command']}`, {facts['date']}, commit {facts['commit']}.",
        f"{facts['gpu']}, driver {facts['driver']}; {facts['cpu']}, {facts['cores']} cores, "
        f"{facts['memory_gib']} GiB; {facts['os']}; Python {facts['python']}, {versions}.",
        "",
        found["note"],
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + " --- |" * len(rows[0]),
    ]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _line(file: str, key: str, separator: str) -> str:
    """The value of a key in a file; empty where it is not."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = [line.split(separator, 1)[1] for line in lines if line.startswith(key)]
    return found[0].strip().strip('"') if found else ""


def _said(*arguments: str) -> str:
    """What a program prints; empty if it fails or is not here."""
    try:
        done = subprocess.run(
            arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
