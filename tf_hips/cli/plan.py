# SPDX-License-Identifier: Apache-2.0
"""`tf-hips plan`: from a profile and a model to a plan, as a table and as a file.

The model is a Keras file, which a process of its own loads, or HiPress' `name,num_elements` lines.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_hips import tables
from tf_hips.cli import arguments

if TYPE_CHECKING:
    from tf_hips.comm.plan import Plan

_FILES = {"yaml": "plan.yaml", "secopa": "SeCoPaPlan.txt"}
_KERAS = (".keras", ".h5", ".hdf5")
_KERAS_S = 120.0


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "plan",
        help="choose for each gradient: compressed or not, how, in how many parts",
        description="Makes a plan for CompressedRing(plan=FILE) from a profile and a model.",
    )
    parser.add_argument(
        "--profile", required=True, metavar="FILE", help="what `tf-hips profile` wrote"
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="FILE",
        help="a Keras file, or lines of `name,num_elements`",
    )
    parser.add_argument(
        "--compression",
        type=arguments.codec,
        action="append",
        metavar="TEXT",
        help="a compressor that may be used; may be given several times (default: all of the "
        "profile)",
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="a way that packets may take; may be given several times (default: all)",
    )
    parser.add_argument(
        "--ranks",
        type=arguments.count,
        metavar="N",
        help="ranks to plan for (default: those of the profile); others are an extrapolation",
    )
    parser.add_argument(
        "--backward-ms",
        type=_milliseconds,
        metavar="MS",
        help="how long the backward pass takes, which the sums overlap",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="the backward pass leaves the cores to the codecs"
    )
    parser.add_argument(
        "--from-secopa",
        metavar="FILE",
        help="take the choices from HiPress' SeCoPaPlan.txt, instead of making them",
    )
    parser.add_argument(
        "--format", choices=sorted(_FILES), default="yaml", help="of the file (default yaml)"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"where to write it (default {' or '.join(_FILES.values())})",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plans, prints and writes."""
    from tf_hips.comm import planner
    from tf_hips.comm.cost_model import Backward
    from tf_hips.comm.profile import Profile
    from tf_hips.comm.tasks import topologies

    if options.gpu and options.backward_ms is None:
        raise arguments.UsageError("--gpu is about the backward pass and needs --backward-ms")
    profile = Profile.read(options.profile)
    if options.ranks is not None:
        profile = profile.for_ranks(options.ranks)
    known = [codec.compression for codec in profile.codecs]
    candidates = list(dict.fromkeys(options.compression or known))
    for text in candidates:
        if text not in known:
            raise arguments.UsageError(
                f"--compression must be one of the profile's: {', '.join(known) or 'none'}. "
                f"Received: {text!r}"
            )
    ways = topologies(profile)
    for name in options.topology or []:
        if name not in ways:
            raise arguments.UsageError(
                f"--topology must be one of {', '.join(ways) or 'none'} for {profile.num_ranks} "
                f"ranks. Received: {name!r}"
            )
    path = Path(options.output or _FILES[options.format])
    arguments.check_output("--output", str(path))
    gradients = _gradients(options.model)
    backward = None
    if options.backward_ms is not None:
        backward = Backward.even(len(gradients), options.backward_ms / 1e3, not options.gpu)
    if options.from_secopa is not None:
        plan = _from_secopa(options, candidates, profile.num_ranks, gradients)
        plan = planner.predicted(plan, profile, backward)
    else:
        plan = planner.make_plan(profile, gradients, candidates, backward, options.topology)
    show(plan, planner.exact_seconds(profile, gradients, backward))
    if options.format == "secopa":
        path.write_text(plan.to_secopa(), encoding="utf-8")
    else:
        plan.write(path)
    sys.stdout.write(f"wrote {path}\n")
    return 0


def show(plan: "Plan", exact_seconds: float) -> None:
    """Prints a plan, a gradient a line, and what it promises."""
    columns = (
        tables.Column("gradient", folds=True),
        *tables.numbers("elements"),
        tables.Column("compression", folds=True),
        tables.Column("topology"),
        *tables.numbers("parts", "alone"),
    )
    rows = []
    for choice in plan.choices:
        alone = choice.predicted_seconds
        row = (
            choice.name,
            str(choice.num_elements),
            choice.compression or "-",
            choice.topology if choice.num_elements else "as rows",
            str(choice.partitions),
            "" if alone is None else _shown(alone),
        )
        rows.append(row)
    tables.show(columns, rows)
    compressed = sum(choice.compression is not None for choice in plan.choices)
    planned = plan.predicted_seconds or 0.0
    gain = f", {exact_seconds / planned:.2f}x" if planned else ""
    tables.console().print(
        f"{plan.num_ranks} ranks, {compressed} of {len(plan.choices)} gradients compressed; "
        f"predicted step: {_shown(exact_seconds)} exact, {_shown(planned)} planned{gain}",
        soft_wrap=True,
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _from_secopa(
    options: argparse.Namespace,
    candidates: list[str],
    num_ranks: int,
    gradients: list[tuple[str, int]],
) -> "Plan":
    from tf_hips.comm.plan import PS, Plan

    if len(candidates) != 1 or len(options.topology or []) > 1:
        raise arguments.UsageError(
            "--from-secopa must come with one --compression, and one --topology at most, because "
            f"the file names none. Received: {', '.join(candidates) or 'none'}"
        )
    topology = (options.topology or [PS])[0]
    return Plan.from_secopa(options.from_secopa, num_ranks, candidates[0], topology, gradients)


def _gradients(model: str) -> list[tuple[str, int]]:
    """Name and elements of each gradient.

    Raises:
        ConfigError: the file is no model.
    """
    from tf_hips.comm.plan import read_lines
    from tf_hips.errors import ConfigError

    path = Path(model)
    if path.suffix not in _KERAS or not path.is_file():
        return read_lines(path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tf_hips.comm.keras_file", str(path)],
            capture_output=True,
            text=True,
            timeout=_KERAS_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{model} must be loaded by Keras within {_KERAS_S:g} s.") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(lines[-1].removeprefix("tf_hips.errors.ConfigError: "))
    return [(name, size) for name, size in json.loads(done.stdout.splitlines()[-1])]


def _milliseconds(text: str) -> float:
    """A number of milliseconds from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number of milliseconds >= 0. Received: {text!r}"
        )
    return value
