# SPDX-License-Identifier: Apache-2.0
"""What is said beside a name that a command does not know."""

import difflib
from collections.abc import Iterable, Sequence

# Lower, and `--vote` is near to `--port`.
_LEAST_RATIO = 0.75

# What other programs, or other commands of this one, call an option.
_SYNONYMS = {
    "--address": ("--bind",),
    "--bs": ("--batch-size",),
    "--ca": ("--authority",),
    "--cert": ("--certificate",),
    "--host": ("--bind",),
    "--listen": ("--bind",),
    "--name": ("--site",),
    "--np": ("-np", "--workers"),
    "--num-proc": ("--workers",),
    "--num-workers": ("--workers", "-np"),
    "--port": ("--bind",),
    "--workers": ("-np",),
    "-np": ("--workers",),
}
# The one command that has it, where others have something near.
_OWNERS = {
    "--bind": "server",
    "--downlink": "server",
    "--late": "server",
    "--lost-after": "server",
    "--quorum": "server",
    "--slowdown": "run",
    "--state": "server",
    "--workers": "run",
}


def near(text: str, known: Iterable[str]) -> str:
    """What is to be said behind a wrong name: `; did you mean NAME?`, or nothing."""
    found = difflib.get_close_matches(text, list(known), 1, _LEAST_RATIO)
    return f"; did you mean {found[0]}?" if found else ""


def option(name: str, known: Sequence[str]) -> str:
    """What is to be said behind an option that a command with the options `known` does not have."""
    for one in _SYNONYMS.get(name, ()):
        if one in known:
            return f"; did you mean {one}?"
    if name in _OWNERS:
        return f"; {name} is an option of `tf-hips {_OWNERS[name]}`"
    return near(name, known)
