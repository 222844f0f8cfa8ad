# SPDX-License-Identifier: Apache-2.0
"""What is said beside a name that a command does not know, or an option that it did not get."""

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
# The command that it is mostly meant for, where this one has nothing of the kind.
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


def behind(script: str, arguments: Sequence[str], known: Sequence[str]) -> str:
    """What is to be said of arguments of a script that are options of its launcher; or nothing.

    Args:
        script: as the command line has it.
        arguments: what stands behind it.
        known: options of the launcher. Its short ones are any script's, and so is `--help`; `-np`
            is not.
    """
    own = {one for one in known if one.startswith("--")} - {"--help"} | {"-np"} & {*known}
    given = (one.partition("=")[0] for one in arguments)
    found = list(dict.fromkeys(f"`{one}`" for one in given if one in own))
    if not found:
        return ""
    stand, go = ("stands", "goes") if len(found) == 1 else ("stand", "go")
    return (
        f"{', '.join(found)} {stand} behind {script} and {go} to the script; options of tf-hips "
        "stand before it"
    )
