# SPDX-License-Identifier: Apache-2.0
"""Errors that are raised inside a running graph, brought out as what they are.

TensorFlow turns an exception of a Python callback into an `UnknownError` with a stack trace for a
message, and an error of an operation of our own is text among TensorFlow's. `Failures` keeps the
exception itself, and finds such text; `translated` raises it in place of TensorFlow's. An error
about collectives that have ended is replaced by what the watchdog knows. All of them are told to
the other ranks, who may wait.
"""

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_hips.comm import watchdog
from tf_hips.errors import NonFiniteError
from tf_hips.strategies import hooks

# What `ops.flow.finite` complains with in a sum of gradients; all of a NonFiniteError.
_NONFINITE = re.compile(r"Gradient .* must be finite.* in step -?\d+")


class Failures:
    """The first exception that a callback raised."""

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self.first: Exception | None = None

    def kept(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """`callback`, with its exceptions remembered on their way out."""

        def call(*args: Any) -> Any:
            try:
                return callback(*args)
            except Exception as error:
                self.first = self.first or error
                watchdog.failed(error)
                raise

        return call

    def translated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, raising what was remembered in place of TensorFlow's error about it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.first = None  # what was raised and caught in an earlier call is over
            watchdog.check()
            try:
                return function(*args, **kwargs)
            except (tf.errors.OutOfRangeError, StopIteration):
                raise  # the data has ended, which is no failure
            except BaseException as error:
                found = self._behind(error) if isinstance(error, tf.errors.OpError) else None
                if not hooks.is_local():
                    watchdog.failed(found or error)
                if found is not None:
                    raise found from None
                raise

        return call

    def _behind(self, error: BaseException) -> BaseException | None:
        """What TensorFlow's error is about, if it is known; it is told once."""
        first, self.first = self.first, None
        found = _NONFINITE.search(str(error))
        return first or (NonFiniteError(found[0]) if found else watchdog.explain(error))
