# SPDX-License-Identifier: Apache-2.0
"""Options of `tf-hips train` for the way down and for the ways inside a party."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from tf_hips.cli import arguments, hints
from tf_hips.errors import ConfigError

if TYPE_CHECKING:
    from tf_hips.trainer.links import Links

_AUTO = "auto"


def topology(text: str) -> str:
    """A way that packets take."""
    from tf_hips.comm.plan import COMPRESSED

    if text not in COMPRESSED:
        near = hints.near(text, COMPRESSED) or "."
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(COMPRESSED)}{near} Received: {text!r}"
        )
    return text


def plan(text: str) -> str:
    """`auto`, or the file of a plan; returns its absolute path."""
    from tf_hips.comm.plan import Plan

    if text == _AUTO:
        return text
    try:
        Plan.read(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return str(Path(text).absolute())


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    group = parser.add_argument_group(
        "links", "how gradients travel, beside --compression: docs/train.md"
    )
    group.add_argument(
        "--downlink",
        type=arguments.downlink,
        metavar="TEXT",
        help="how what comes down from a server is encoded, as `tf-hips server --downlink` has it: "
        "same as up, fp32, ... (default same; streaming: fp32)",
    )
    group.add_argument(
        "--local-compression",
        type=arguments.codec,
        metavar="TEXT",
        help="below a server, how gradients are encoded inside a party (default: not at all)",
    )
    group.add_argument(
        "--topology",
        type=topology,
        metavar="NAME",
        help="which way packets take inside a party: ps, ring, butterfly, blocks, allgather, ...: "
        "docs/api.md (default: by the number of workers)",
    )
    group.add_argument(
        "--comp-threshold",
        type=arguments.index,
        metavar="N",
        default=0,
        help="gradients of fewer elements are summed exactly inside a party (default 0)",
    )
    group.add_argument(
        "--plan",
        type=plan,
        metavar="FILE|auto",
        help="instead of what encodes inside a party, what is done with each gradient: the file of "
        "`tf-hips plan`, or auto: measured before the first step",
    )


def links_of(options: argparse.Namespace) -> "Links":
    """What a trainer is told."""
    from tf_hips.trainer.links import Links

    return Links(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Links)}
    )
