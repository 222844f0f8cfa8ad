# SPDX-License-Identifier: Apache-2.0
"""Errors that are raised inside a running graph, brought out as what they are.

TensorFlow turns an exception of a Python callback into an `UnknownError` with a stack trace for a
message. `Failures` keeps the exception itself; `translated` raises it in place of TensorFlow's.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_hips.errors import PeerError

# What Horovod says on the ranks that did not fail themselves.
_HOROVOD_TEXTS = (
    "Horovod has been shut down",
    "HorovodInternalError",
    "Connection reset by peer",
    "Connection closed",
)


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
                raise

        return call

    def translated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, raising what was remembered in place of TensorFlow's error about it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.first = None  # what was raised and caught in an earlier call is over
            try:
                return function(*args, **kwargs)
            except tf.errors.OpError as error:
                if self.first is not None:
                    raise self.first from None
                lines = error.message.splitlines()
                telling = [line for line in lines if any(text in line for text in _HOROVOD_TEXTS)]
                if telling:
                    self.first = PeerError(
                        "Another rank of this party ended in the middle of a step; its own output "
                        f"says why. Horovod here waited for it: {telling[0].strip()}"
                    )
                    raise self.first from None
                raise

        return call
