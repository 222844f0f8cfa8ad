# SPDX-License-Identifier: Apache-2.0
"""Options of `tf-hips train` for the modes with local steps, and what the seeds call them."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tf_hips.cli import arguments, robust_training
from tf_hips.esync import RULES

if TYPE_CHECKING:
    from tf_hips.trainer.local import Local

_SCHEMES = ("https://", "http://")
# A flag of DETOX that the trainer has no place for, and what there is.
REPLACED: Mapping[tuple[str, ...], str] = {
    ("--checkpoint-step",): "a run goes on from its backups, and begins with weights; see "
    "--backup-dir and --resume-from",
}


def participation(text: str) -> int | float:
    """`3`: so many members; `0.25`: such a share of them."""
    if text.isdecimal():
        return arguments.count(text)
    share = arguments.number(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            f"must be a share above 0 and at most 1, or a whole number. Received: {text!r}"
        )
    return share


def state_server(text: str) -> str:
    """`HOST:PORT`, or the same after `https://`."""
    scheme = next((one for one in _SCHEMES if text.startswith(one)), "")
    return scheme + arguments.endpoint(text.removeprefix(scheme))


def pace(text: str) -> str:
    """Parameters of ESync's rule."""
    from tf_hips.esync.rule import Pace

    try:
        Pace.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    group = parser.add_argument_group(
        "local steps", "of the modes fedavg, esync, hfa, diloco and streaming: docs/train.md"
    )
    group.add_argument(
        "--local-steps",
        type=arguments.count,
        metavar="N",
        help="steps between two meetings (hfa: 20, diloco and streaming: 50)",
    )
    group.add_argument(
        *("--local-epochs", "--num-local-epochs", "-le"),
        type=arguments.count,
        metavar="N",
        help="instead of it, passes through a worker's own rows (fedavg: 1); makes fedavg of sync",
    )
    group.add_argument(
        *("--local-lr", "-ll"),
        type=arguments.number,
        metavar="RATE",
        help="the same as --learning-rate: of the local optimizer",
    )
    group.add_argument(
        *("--global-lr", "-gl"),
        type=arguments.number,
        metavar="RATE",
        help="by which the mean of the movements is multiplied (1)",
    )
    group.add_argument(
        "--server-optimizer",
        type=arguments.rule,
        metavar="TEXT",
        help="instead of it, a rule: fedavgm, fedadam, diloco, ...: docs/rules.md",
    )
    group.add_argument(
        "--weighting",
        metavar="samples|uniform|workers",
        help="what counts in a mean (fedavg: samples, with --rule compat: workers, "
        "others: uniform)",
    )
    group.add_argument(
        "--participation",
        type=participation,
        metavar="SHARE",
        help="members that send in a round: a share like 0.25, or a whole number (1.0)",
    )
    group.add_argument(
        "--prox-mu", type=arguments.number, metavar="MU", help="FedProx' proximal term"
    )
    for name, text in (
        ("--scaffold", "control variates of SCAFFOLD"),
        ("--normalise", "FedNova's mean of movements by steps"),
    ):
        group.add_argument(
            name, type=arguments.switch, nargs="?", const=True, default=False, help=text
        )
    group.add_argument(
        "--rule",
        type=robust_training.rule,
        metavar="default|compat|TEXT",
        help="compat: of fedavg HiPS' own mean, of esync the rule of its paper; other texts are "
        "what the server makes of gradients, as `tf-hips run --rule` says it: median, ...",
    )
    group.add_argument(
        "--party-rounds",
        type=arguments.count,
        metavar="N",
        help="of hfa, meetings in a party for one over parties (10)",
    )
    group.add_argument(
        "--fragments",
        type=arguments.count,
        metavar="N",
        help="of streaming, of the model (5); --local-steps must be a multiple of it",
    )
    group.add_argument(
        "--overlap",
        type=arguments.index,
        metavar="N",
        help="of streaming, steps for which a fragment is under way; fewer than --local-steps over "
        "--fragments (5, or the most that fit)",
    )
    group.add_argument(
        "--pace", type=pace, metavar="TEXT", help="of esync, as slowest_steps=20: docs/esync.md"
    )
    group.add_argument(
        "--averaging",
        metavar="bounded|normalised|uniform",
        help="of esync: how much a member counts for the number of its steps: docs/esync.md",
    )
    group.add_argument(
        "--state-server",
        type=state_server,
        metavar="HOST:PORT",
        help="of esync with --rule compat: where `tf-hips state-server` listens",
    )
    group.add_argument(
        *("--state-server-ip", "-ip"), metavar="HOST", help="the same, with --state-server-port"
    )
    group.add_argument(
        *("--state-server-port", "-port"),
        type=arguments.count,
        metavar="PORT",
        help="(10010)",
    )
    group.add_argument(
        "--epsilon",
        type=arguments.number,
        metavar="S",
        help="of the same rule: its margin in seconds (0.5)",
    )


def mode_of(options: argparse.Namespace) -> str:
    """The mode: HiPS' `-m sync -le N` is FedAvg."""
    if options.mode == "sync" and options.local_epochs is not None:
        return "fedavg"
    return robust_training.mode_of(options, str(options.mode))


def rate_of(options: argparse.Namespace) -> float | None:
    """The rate of the local optimizer.

    Raises:
        UsageError: it is given twice, or the mode has no such optimizer.
    """
    from tf_hips.trainer.modes import MODES

    if options.local_lr is None:
        given: float | None = options.learning_rate
        return given
    users = [name for name, one in MODES.items() if one.options]
    if mode_of(options) not in users:
        raise arguments.UsageError(
            f"--local-lr is for the modes {', '.join(users)}; take --learning-rate. Received: "
            f"--mode {options.mode}"
        )
    if options.learning_rate is not None:
        raise arguments.UsageError("--local-lr and --learning-rate exclude each other")
    return float(options.local_lr)


def local_of(options: argparse.Namespace) -> "Local":
    """What a trainer is told of local steps.

    Raises:
        UsageError: the state server is given twice.
        ConfigError: a value is out of range.
    """
    import dataclasses

    from tf_hips.trainer.local import STATE_SERVER_PORT, Local

    values: dict[str, Any] = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(Local)
    }
    if values["rule"] not in RULES:
        values["rule"] = None  # of a server
    host, port = options.state_server_ip, options.state_server_port
    if host is not None or port is not None:
        if options.state_server is not None:
            raise arguments.UsageError(
                "--state-server and --state-server-ip, --state-server-port exclude each other"
            )
        host = host or "127.0.0.1"
        text = f"[{host}]" if ":" in host and not host.startswith("[") else host
        try:
            values["state_server"] = arguments.endpoint(f"{text}:{port or STATE_SERVER_PORT}")
        except argparse.ArgumentTypeError as error:
            raise arguments.UsageError(f"--state-server-port: {error}") from error
    return Local(**values)
