# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a process that was started without them, by `>&-` or as a daemon."""

import os
import sys

_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def fill() -> None:
    """Has those of the standard streams that are closed lead nowhere.

    Python has None in their place, and their numbers would go to the next files that are opened, as
    a connection or a journal, which gets what somebody prints, or a library writes there.
    """
    # A new descriptor is the lowest that is free.
    while (number := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD):
        os.set_inheritable(number, True)
        name, mode = _STANDARD[number]
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    os.close(number)
