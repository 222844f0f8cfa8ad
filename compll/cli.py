# SPDX-License-Identifier: Apache-2.0
"""`compll`: what is started first, and loads the commands (`compll.commands`)."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code, 130 where Ctrl-C ends it, also while it loads."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with `>&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - to the end
    try:
        from compll import commands

        return commands.main(arguments)
    except KeyboardInterrupt:
        return 130
