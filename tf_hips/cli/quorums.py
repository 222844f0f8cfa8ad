# SPDX-License-Identifier: Apache-2.0
"""Options by which a server closes rounds without some of its parties."""

import argparse
from typing import Any

from tf_hips.cli import arguments

_ADAPTIVE = "adaptive"


def deadline(text: str) -> float | str:
    """A number of seconds, or `adaptive`."""
    if text == _ADAPTIVE:
        return text
    try:
        return arguments.seconds(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"must be `{_ADAPTIVE}` or a number of seconds") from error


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options; what they mean together is checked by `ps.terms.quorum`."""
    group = parser.add_argument_group("rounds without some of the parties", "docs/quorum.md")
    group.add_argument(
        "--quorum",
        type=arguments.count,
        metavar="Q",
        help="close a round with Q parties when its deadline is over (default: all, always)",
    )
    group.add_argument(
        "--round-deadline",
        type=deadline,
        metavar="S",
        help="with --quorum, seconds after the opening of a round, or `adaptive`: median + "
        "--deadline-mads MADs of past arrivals (default adaptive)",
    )
    group.add_argument(
        "--deadline-mads",
        type=arguments.seconds,
        metavar="K",
        help="see --round-deadline (default 5)",
    )
    group.add_argument(
        "--late",
        choices=("next", "drop"),
        help="with --quorum or --close-at, what becomes of an update that comes later: it counts "
        "in the next round, or is dropped (default next)",
    )
    group.add_argument(
        "--close-at",
        type=arguments.count,
        metavar="K",
        help="close a round with the update of the K-th party, without a deadline",
    )
    group.add_argument(
        "--below-quorum-s",
        type=arguments.seconds,
        metavar="S",
        help="seconds that fewer parties may be there before the run, and the server, end "
        "(default 300, or half of --round-timeout where that is less)",
    )


def of(options: argparse.Namespace) -> dict[str, Any]:
    """What they say, as values of `ServerConfig`."""
    names = ("quorum", "round_deadline", "deadline_mads", "late", "close_at", "below_quorum_s")
    return {name: getattr(options, name) for name in names}
