# SPDX-License-Identifier: Apache-2.0
"""Signals that end a process; those of a launcher are bytes of a socket, for its selector."""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle(
    numbers: Iterable[signal.Signals], handler: Callable[[int, Any], object]
) -> dict[signal.Signals, Any]:
    """Sets a handler of signals; returns those of before.

    An ignored signal stays ignored: nohup, background jobs and `tf-hips up` ask for that.
    """
    return {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }


class Signals:
    """SIGCHLD, and those of the signals that end a process that are not ignored."""

    def open(self) -> None:
        """From now on they come here; to be called in the main thread.

        A selector may wait for this object, which has a `fileno`.
        """
        self._in, self._out = socket.socketpair()
        for end in (self._in, self._out):
            end.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._out.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, _ignore)}
        self._old_handlers |= handle(_ENDING, _ignore)

    def close(self) -> None:
        """They do again what they did before `open`."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._in.close()
        self._out.close()

    def fileno(self) -> int:
        """The descriptor that can be read when one has come."""
        return self._in.fileno()

    def read(self) -> bytes:
        """The numbers of those that have come since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            return self._in.recv(4096)
        return b""


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing: the wake-up socket carries the signal."""
