# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads and processes do, whether they tell of it or not."""

import contextlib
import threading
import time
from collections.abc import Callable

_PAUSE_S = 0.01


def eventually(
    is_so: Callable[[], bool],
    seconds: float = 20.0,
    why: str = "what the test waits for does not come",
    *,
    changed: threading.Condition | None = None,
) -> None:
    """Returns as soon as `is_so()` is true.

    Args:
        is_so: what the test waits for. It is looked at anew every few milliseconds: a plain
            `Condition.wait_for` sleeps until its limit where a test looks at something of which
            the code under test has no reason to notify.
        seconds: how long.
        why: what an error says.
        changed: a lock to hold while looking; its notifications wake at once.

    Raises:
        AssertionError: it was not so in time.
    """
    deadline = time.monotonic() + seconds
    wait = changed.wait if changed is not None else threading.Event().wait
    with changed if changed is not None else contextlib.nullcontext():
        while not is_so():
            assert time.monotonic() < deadline, why
            wait(_PAUSE_S)
