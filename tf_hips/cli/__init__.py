# SPDX-License-Identifier: Apache-2.0
"""`tf-hips`: starts servers, parties, clusters; tells what they do; certificates, plans, versions.

Every sub-command is a module with `add(commands)`, which declares its options, and `run(options) ->
exit code`. Modules import what is slow inside `run`, and none of them imports TensorFlow: the
command answers at once.

Exit codes: 0, 2 for a wrong command line, 1 for other errors of the command itself, the first
failing child's own (78 where no restart would heal its error), and 128 + signal.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tf_hips.cli import arguments

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one sub-command and exits with its code: 130 where Ctrl-C ends it, also at its start."""
    try:
        code = _run(argv)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def make_parser() -> "arguments.Parser":
    """The command line, with all sub-commands."""
    # All of it is imported here, where `main` catches Ctrl-C.
    import tf_hips
    from tf_hips.cli import (
        arguments,
        certs,
        cluster,
        data,
        deploy,
        evaluate,
        info,
        party,
        plan,
        profile,
        report,
        run,
        server,
        simulate,
        state_server,
        status,
        train,
    )

    parser = arguments.Parser(
        prog="tf-hips",
        description="Train Keras models over slow links: parties, servers, certificates, plans.",
        epilog="`tf-hips COMMAND --help` has the options of a command. To begin with: "
        "tf-hips run --parties 2 --workers 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"tf-hips {tf_hips.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        *(run, party, server, state_server, status, certs, cluster, deploy, profile, plan),
        *(train, evaluate, data, report, simulate, info),
    ):
        module.add(commands)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = make_parser()
    from tf_hips.cli.arguments import UsageError
    from tf_hips.errors import TfHipsError, packages_wanted

    options = parser.parse_args(argv)
    try:
        with packages_wanted(f"tf-hips {options.command}"):
            code: int = options.run(options)
    except UsageError as error:
        return _complain(options.command, error, 2)
    except (TfHipsError, OSError, ValueError) as error:
        return _complain(options.command, error, 1)
    return code


def _said(error: Exception) -> str:
    """The text of an error; `[Errno 2]` and the like tell a user nothing."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    return f"{where}{error.strerror}"


def _complain(command: str, error: Exception, code: int) -> int:
    text = " ".join(_said(error).split()) or type(error).__name__
    sys.stderr.write(f"tf-hips {command}: error: {text}\n")
    return code
