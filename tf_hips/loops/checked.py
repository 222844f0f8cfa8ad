# SPDX-License-Identifier: Apache-2.0
"""Numbers that loops are given: looked at before anything begins, named where they are wrong."""

import numbers
import operator
from typing import Any


def whole(name: str, value: Any, least: int = 1) -> int:
    """An integer, NumPy's and TensorFlow's included.

    Args:
        name: of the argument.
        value: what was given.
        least: what it must be at least.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if found < least:
        raise ValueError(f"`{name}` must be at least {least}. Received: {name}={value!r}")
    return found


def real(name: str, value: Any, below: float) -> float:
    """A number from 0 on.

    Args:
        name: of the argument.
        value: what was given.
        below: what it must be less than.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}")
    if not 0.0 <= float(value) < below:
        raise ValueError(f"`{name}` must be from 0 to below {below:g}. Received: {name}={value!r}")
    return float(value)
