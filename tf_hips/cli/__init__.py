# SPDX-License-Identifier: Apache-2.0
"""`tf-hips`: starts servers, parties, clusters; tells what they do; certificates, plans, versions.

Every sub-command is a module with `add(commands)`, which declares its options, and `run(options) ->
exit code`. Modules import what is slow inside `run`, and none of them imports TensorFlow: the
command answers at once.

Exit codes: 0, 2 for a wrong command line, 1 for other errors of the command itself, the first
failing child's own (78 where no restart would heal its error), and 128 + signal.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from tf_hips import streams

if TYPE_CHECKING:
    from tf_hips.cli import arguments

__all__ = ["main", "make_parser"]

# The module of each command, in the order of the help.
_COMMANDS = {
    "run": "run",
    "party": "party",
    "server": "server",
    "state-server": "state_server",
    "status": "status",
    "certs": "certs",
    "sync": "cluster",
    "up": "cluster",
    "down": "cluster",
    "deploy": "deploy",
    "profile": "profile",
    "plan": "plan",
    "train": "train",
    "evaluate": "evaluate",
    "data": "data",
    "summary": "report",
    "report": "report",
    "simulate": "simulate",
    "info": "info",
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one sub-command and exits with its code: 130 where Ctrl-C ends it, also at its start."""
    try:
        streams.fill()
        code = _run(argv)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def make_parser(command: str | None = None) -> "arguments.Parser":
    """The command line.

    Args:
        command: the sub-command that is wanted: others need not be declared. None, or one that
            does not exist: all of them are.
    """
    # All of it is imported here, where `main` catches Ctrl-C.
    import tf_hips
    from tf_hips.cli import arguments

    parser = arguments.Parser(
        prog="tf-hips",
        description="Train Keras models over slow links: parties, servers, certificates, plans.",
        epilog="`tf-hips COMMAND --help` has the options of a command. To begin with: "
        "tf-hips run --parties 2 --workers 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"tf-hips {tf_hips.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # What all of them import takes a third of the start of a command.
    homes = {_COMMANDS[command]} if command in _COMMANDS else dict.fromkeys(_COMMANDS.values())
    for home in homes:
        importlib.import_module(f"tf_hips.cli.{home}").add(commands)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(words[0] if words else None)
    from tf_hips.cli.arguments import UsageError
    from tf_hips.errors import TfHipsError, packages_wanted

    options = parser.parse_args(words)
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
