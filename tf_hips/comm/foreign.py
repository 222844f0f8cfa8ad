# SPDX-License-Identifier: Apache-2.0
"""Other people's scripts that call Horovod themselves."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd


@contextlib.contextmanager
def allreduce_replaced(replacement: Callable[..., Any]) -> Iterator[None]:
    """While the context is open, `horovod.tensorflow.allreduce` is another function.

    For code that is built into a graph meanwhile and asks Horovod for each of its sums; nothing of
    ours may be summed in it.

    Args:
        replacement: takes what `horovod.tensorflow.allreduce` takes.
    """
    original = hvd.allreduce
    hvd.allreduce = replacement
    try:
        yield
    finally:
        hvd.allreduce = original
