# SPDX-License-Identifier: Apache-2.0
"""`compll`: what is started first, and loads the commands (`compll.commands`)."""

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code, 130 where Ctrl-C ends it, also while it loads."""
    try:
        from compll import commands

        return commands.main(arguments)
    except KeyboardInterrupt:
        return 130
