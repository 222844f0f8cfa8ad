# SPDX-License-Identifier: Apache-2.0
"""`tf-hips deploy`: files for systemd, Kubernetes, Horovod, SkyPilot and an image of a cluster."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tf_hips.cli import cluster

_KINDS = ("systemd", "kubernetes", "horovod", "skypilot", "container")


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "deploy",
        help="write a cluster's files for systemd, Kubernetes and others",
        description="Writes what starts a cluster's servers and parties by other means than "
        "`tf-hips up`. Files of an earlier call are replaced.",
    )
    cluster.add_source(parser)
    parser.add_argument(
        "--to", dest="folder", required=True, metavar="DIR", help="folder to write to"
    )
    parser.add_argument(
        "--only",
        type=_kinds,
        default=_KINDS,
        metavar="KIND,...",
        help=f"some of {', '.join(_KINDS)} (default: all)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the files, and says which."""
    from tf_hips.cluster import deploy

    folder = Path(options.folder)
    for name in deploy.write(cluster.load(options.source), folder, options.only):
        sys.stdout.write(f"{folder / name}\n")
    return 0


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if set(names) - set(_KINDS) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(
            f"must be some of {', '.join(_KINDS)}, each once. Received: {text!r}"
        )
    return names
