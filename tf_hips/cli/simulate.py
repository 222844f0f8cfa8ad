# SPDX-License-Identifier: Apache-2.0
"""`tf-hips simulate`: round time, idle share and bytes of the sites that a file describes."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_hips import tables
from tf_hips.cli import arguments

if TYPE_CHECKING:
    from tf_hips.simulation import Description, Result

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# On a narrow terminal, in this order: what says least about which method to take.
_LEFT_OUT = ("least", "most", "95 %", "transfer", "compute", "stale", "down/round")


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "simulate",
        help="predict rounds of many uneven sites",
        description="Predicts round time, idle share and bytes of synchronous training, fedavg, "
        "ESync and FedBuff for the sites that a YAML file describes (docs/esync.md).",
    )
    parser.add_argument("file", metavar="FILE.yaml", help="sites, links, model and methods")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE, too; - prints")
    parser.add_argument(
        "--calibrate",
        metavar="DIR",
        help="write FILE.yaml, which must not exist, from the event logs of a run with ESync, and "
        "simulate nothing",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulates, prints and writes."""
    from tf_hips import config
    from tf_hips.simulation import Description, calibrated, simulate
    from tf_hips.simulation.description import VERSION

    if options.calibrate is not None:
        if options.json is not None:
            raise arguments.UsageError("--calibrate simulates nothing and excludes --json")
        if Path(options.file).exists():  # somebody may have written it by hand
            raise arguments.UsageError(
                f"--calibrate writes a new file; remove the old one or name another. Received: "
                f"{options.file}, which is there already"
            )
        config.write(calibrated(options.calibrate), options.file, VERSION)
        sys.stdout.write(f"wrote {options.file}\n")
        return 0
    if options.json not in (None, "-"):
        arguments.check_output("--json", options.json)
    description = Description.read(options.file)
    began = time.monotonic()

    def tell(label: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"{label} ...\n")

    results = simulate(description, tell)
    took_s = time.monotonic() - began
    if options.json is not None:
        told = {
            "sites": description.num_sites,
            "simulated_in_s": round(took_s, 3),
            "methods": [dataclasses.asdict(one) for one in results],
        }
        text = json.dumps(told, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return 0
        Path(options.json).write_text(text, encoding="utf-8")
    _show(description, results, took_s)
    return 0


def _show(description: "Description", results: "list[Result]", took_s: float) -> None:
    columns = (
        tables.Column("method"),
        *tables.numbers("round", "95 %", "compute", "transfer", "idle", "steps", "least", "most"),
        *tables.numbers("steps/s", "up/round", "down/round", "stale"),
    )
    rows = [
        (
            one.method,
            _seconds(one.round_s),
            _seconds(one.round_p95_s),
            f"{one.compute_share:.1%}",
            f"{one.transfer_share:.1%}",
            f"{one.idle_share:.1%}",
            tables.short(one.steps_per_site, 4),
            str(one.least_steps),
            str(one.most_steps),
            tables.short(one.steps_per_s, 4),
            _bytes(one.up_bytes),
            _bytes(one.down_bytes),
            f"{one.staleness:.1f}" if one.staleness else "-",
        )
        for one in results
    ]
    tables.show(columns, rows, leave_out=_LEFT_OUT, hint="--json - prints all")
    tables.console().print(
        f"{description.num_sites} sites, {_counted(description, results)} (least and most steps: "
        f"in the last one); simulated in {took_s:.1f} s",
        soft_wrap=True,
    )


def _counted(description: "Description", results: "list[Result]") -> str:
    """How many rounds of the methods the table is about."""
    named = list(zip(description.methods, results, strict=True))
    common = [one.rounds for method, one in named if method.name != "fedbuff"]
    told = [f"{common[0]} rounds of each method after the first three"] if common else []
    told += [
        f"{one.rounds} steps of the server with {method.label}"
        for method, one in named
        if method.name == "fedbuff"
    ]
    return ", ".join(told)


def _seconds(value: float) -> str:
    return f"{tables.short(value, 4)} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{tables.short(value)} {_UNITS[unit]}"
