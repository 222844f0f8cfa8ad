# SPDX-License-Identifier: Apache-2.0
"""A rank is one process: those that it starts inherit its environment, not its place.

A launcher tells a process by its environment which rank it is, and whatever that process starts has
the same. A child that began Horovod with it would meet nobody, or the children of other ranks, and
train on as if it were the rank; at a server its party would be there twice. So a process that takes
a place leaves a mark in its environment, and one that finds another process's mark is refused.

It is none of a rank's children: who replaces it (`exec`), what a launcher starts in it, which has a
place of its own, and who comes when the rank has ended. Nor do children of the one rank of a job
without a run of ours miss anybody: they may train.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from tf_hips.config import CONFIG_VARIABLE
from tf_hips.errors import ConfigError

CLAIM_VARIABLE = "TF_HIPS_CLAIM"
# What tells a rank of a launcher from all others.
_PLACE = (
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_RANK",
)
_CLAIM = re.compile(r"process (?P<pid>\d{1,10}), started at (?P<start>\d+), is (?P<place>.*)")
# Fields of /proc/PID/stat behind the name: the state, and when the process was started.
_STATE, _START = 0, 19
_ENDED = ("Z", "X")
_holder: int | None = None  # the process that has taken a place; a fork has the number of another


def claim(environment: MutableMapping[str, str]) -> None:
    """Takes the place that a launcher has given to this process; once more does nothing.

    Args:
        environment: of this process; gets the mark.

    Raises:
        ConfigError: a process that is there has taken it, and this one was started by that.
    """
    global _holder
    # It meets nobody, and neither do its children; but for forks, in which Horovod seems to run.
    is_alone = environment.get("HOROVOD_SIZE") == "1" and CONFIG_VARIABLE not in environment
    place = _place(environment)
    start = _start_of(os.getpid())
    if place is None or start is None:
        return
    found = _CLAIM.fullmatch(environment.get(CLAIM_VARIABLE, ""))
    if found is not None and found["place"] == place:
        holder = int(found["pid"])
        is_let_in = holder == os.getpid() or (is_alone and holder != _holder)
        if not is_let_in and _start_of(holder) == found["start"]:
            raise ConfigError(
                "A rank must be one process: make the strategy in that which the launcher has "
                'started, behind `if __name__ == "__main__":` where children import the script '
                "again. A child that is to train alone needs an environment without HOROVOD_* and "
                f"{CONFIG_VARIABLE}. Received: a strategy in process {os.getpid()}, which has the "
                f"environment of process {holder}, rank {environment['HOROVOD_RANK']}"
            )
    _holder = os.getpid()
    environment[CLAIM_VARIABLE] = f"process {os.getpid()}, started at {start}, is {place}"


def _place(environment: Mapping[str, str]) -> str | None:
    """Which rank of which launcher a process is; None: no launcher says so."""
    if not all(environment.get(name) for name in _PLACE):
        return None
    return " ".join(environment[name] for name in _PLACE)


def _start_of(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None: it is not there.

    A number is used again, a number and a time are not.
    """
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = told.rpartition(")")[2].split()
    return None if fields[_STATE] in _ENDED else fields[_START]
