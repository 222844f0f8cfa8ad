# SPDX-License-Identifier: Apache-2.0
"""How long a call may wait while nothing moves."""

import contextlib
import threading
import time
from collections.abc import Iterator

import grpc


class Patience:
    """Time that may pass while nothing moves. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """Begins to count now."""
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    def renew(self) -> None:
        """Something has moved."""
        self._deadline = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds left; never 0, because gRPC takes that for no limit at all."""
        return max(0.001, self._deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() >= self._deadline

    @contextlib.contextmanager
    def bounding(self, call: grpc.Future) -> Iterator[None]:
        """Cancels `call` when no time is left; it needs no deadline of its own."""
        done = threading.Event()

        def guard() -> None:
            while not done.wait(self.left_s):
                if self.is_over:
                    call.cancel()
                    return

        thread = threading.Thread(target=guard, name="tf_hips-patience", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
