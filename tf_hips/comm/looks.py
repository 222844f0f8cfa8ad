# SPDX-License-Identifier: Apache-2.0
"""When it is looked whether gradients were finite: once all collectives of a step have ended.

A look that finds something raises, on all ranks alike, and what has not begun then never does. If
some rank had begun a collective that another one has not, it would wait for it, or meet the one of
a later step. Collectives wait for nothing but their inputs, so who builds several sums says so with
`together`, and their looks wait for all of them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import tensorflow as tf

Look: TypeAlias = Callable[[], list[Any]]
"""Builds what raises; returns what has to be waited for."""

_open = threading.local()


@contextlib.contextmanager
def together() -> Iterator[list[Look]]:
    """Collects the looks of the sums that are built meanwhile in the present graph.

    Eagerly there are none: one sum has ended on all ranks before the next begins.
    """
    before = getattr(_open, "looks", None)
    looks: list[Look] = []
    _open.looks = None if tf.executing_eagerly() else (tf.compat.v1.get_default_graph(), looks)
    try:
        yield looks
    finally:
        _open.looks = before


def later(look: Look) -> bool:
    """Leaves a look to whoever collects them; False where nobody does in the present graph.

    What is built in a branch is looked at there.
    """
    found = getattr(_open, "looks", None)
    if found is None or found[0] is not tf.compat.v1.get_default_graph():
        return False
    found[1].append(look)
    return True
