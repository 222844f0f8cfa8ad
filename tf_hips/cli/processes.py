# SPDX-License-Identifier: Apache-2.0
"""A job of local processes that begin together, fail together and leave nothing behind.

One thread and one selector: the pipes of all children, and a socket that carries signals (SIGCHLD
of the children, SIGINT and SIGTERM of the user). So lines never interleave and exits are seen in
the order in which they happen. Where nobody reads its output, the thread waits for the reader and
for signals at once.

The child that failed first is the one to name: its peers mostly fail because it did. One that has
heard from a server that another site left the run ends sooner than who left it, and says so; then a
child of that site is named.

Children may form a group that is started again, all of it, when one of them fails. A follower that
fails for good decides nothing: the workers go on to their end, and it is named then.
"""

import contextlib
import math
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tf_hips.cli.children import (
    TRACEBACK_WINDOW_S,
    Child,
    Failure,
    Group,
    limit_files,
    spawn,
    take_more_files,
)
from tf_hips.cli.output import Printer, Splitter
from tf_hips.cli.signals import Signals

# After the last worker, a server of one run ends by itself; this is how long it may take.
_SERVICE_GRACE_S = 15.0
# A follower has to evaluate what the last worker has left, or finds that this never came.
_FOLLOWER_GRACE_S = 3600.0
_LAST_WORDS_S = 0.5  # for what a child that has ended has printed
_READ_BYTES = 1 << 16


class Job:
    """The processes of one job; a context manager, to be used in the main thread."""

    def __init__(
        self,
        *,
        out: IO[bytes] | None = None,
        err: IO[bytes] | None = None,
        progress_role: str | None = None,
        grace_s: float = 5.0,
    ) -> None:
        """Prepares an empty job.

        Args:
            out: where the children's standard output goes; the launcher's own by default.
            err: the same for standard error.
            progress_role: the child whose progress bar is shown.
            grace_s: seconds between SIGTERM and SIGKILL.
        """
        self._printer = Printer(
            out or sys.stdout.buffer, err or sys.stderr.buffer, progress_role, self._takes
        )
        self._grace_s = grace_s
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[IO[bytes], Callable[[], None]] = {}
        self._signals = Signals()
        self._signal: int | None = None  # the first that ends the job
        self._writes_until = math.inf  # of `time.monotonic`
        self._closing = False
        self._group: Group | None = None  # the one that is being started

    def __enter__(self) -> "Job":
        self._signals.open()
        self._file_limits = take_more_files()
        self._selector.register(self._signals, selectors.EVENT_READ, self._read_signals)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            self._signals.close()
            self._selector.close()
            for pipe in self._pipes:
                pipe.close()
            limit_files(self._file_limits)

    def start(
        self,
        role: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        is_service: bool = False,
        is_follower: bool = False,
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> int:
        """Starts one process and returns its pid.

        Args:
            role: the name that prefixes its lines.
            command: program and arguments.
            environment: the whole environment of the process.
            is_service: the job is over when all others have ended; this one is then expected to
                end, too.
            is_follower: it may be long about what the workers have left, but not for ever. They go
                on without it; its failure is that of the job where nothing else has failed.
            death_signal: what the process gets when the launcher dies.

        Raises:
            OSError: the program cannot be started.
        """
        process = spawn(command, environment, death_signal, self._file_limits)
        child = Child(role, process, is_service, is_follower, self._group)
        self._children.append(child)
        self._watch(child, process.stdout, is_error=False)
        self._watch(child, process.stderr, is_error=True)
        return process.pid

    def start_group(
        self,
        name: str,
        start: Callable[[int], None],
        max_restarts: int,
        *,
        only_killed: bool = False,
    ) -> None:
        """Starts several processes that are ended and started again when one of them fails.

        Args:
            name: of the group, for messages.
            start: starts them all; gets how often they were started before.
            max_restarts: how often they are started again; then a failure is that of the job, and
                so is one that no restart heals (`errors.NO_RESTART`).
            only_killed: whether they are started again only where a signal has ended one.
        """
        self._start_group(Group(name, start, max_restarts, only_killed))

    def wait_for_file(self, path: Path, seconds: float) -> str | None:
        """The text of `path` once it is there; None when a child failed or a signal came first.

        A child whose group may be started again has not failed: it has `seconds` once more.

        Raises:
            TimeoutError: neither happened in `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not self._is_told_to_end():
            if any(child.decides for child in self._children):
                if not self._restart():
                    return None
                deadline = time.monotonic() + seconds
                continue
            if path.exists() and (text := path.read_text(encoding="utf-8")).strip():
                return text.strip()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name} did not appear within {seconds:g} s")
            self._turn(0.05)
        return None

    def wait(
        self,
        service_grace_s: float = _SERVICE_GRACE_S,
        follower_grace_s: float = _FOLLOWER_GRACE_S,
    ) -> Failure | None:
        """Waits for the end of the job, ends what is left; returns the first failure, if any.

        A follower that is still there `follower_grace_s` seconds after the last worker is a
        failure, too, and a service `service_grace_s` seconds after the last of the others. A signal
        to the launcher cuts every wait short.
        """
        self._wait_for_workers(follower_grace_s)
        while not self._is_told_to_end() and self._restart():
            self._wait_for_workers(follower_grace_s)
        if self._is_told_to_end():
            return self._end_by_signal()
        if not self._is_decided():
            late = next(child for child in self._running() if child.is_follower)
            self.stop()
            return Failure(
                late.role, 1, f"still there {follower_grace_s:g} s after the last worker"
            )
        if not any(child.decides for child in self._children):
            self._turn_until(lambda: self._is_over() or self._is_told_to_end(), service_grace_s)
            if self._is_told_to_end():
                return self._end_by_signal()
            stuck = self._running()
            if stuck:
                self.stop()
                reason = f"still there {service_grace_s:g} s after the last worker"
                return Failure(stuck[0].role, 1, reason, is_stuck=True)
        self._hear_suspects()
        # Those that fail from here on were ended by us.
        failed = [child for child in self._children if child.failed]
        self.stop()
        if not failed:
            return None
        accused = {child.accuses for child in failed}
        # A site that has ended the run may have had it from one of its own workers.
        suspects = [child for child in failed if child.site in accused] or failed
        suspects = [child for child in suspects if child.role in accused] or suspects
        # At the same instant, a signal is the cause and an exit code the consequence.
        culprit = min(
            suspects,
            key=lambda c: (c.is_given_up, c.trouble_s, (c.code or 0) > 0),
        )
        return culprit.failure

    def _hear_suspects(self) -> None:
        """Waits for those whose trouble may be why the first has failed; they may end after it."""
        first = min((c for c in self._children if c.decides), key=lambda c: c.ended_s, default=None)
        if first is None:
            return

        def is_heard() -> bool:
            accused = {child.accuses for child in self._children if child.failed}
            return self._is_told_to_end() or not any(
                child.is_suspect(first) or {child.site, child.role} & accused
                for child in self._running()
            )

        # Its last words may come behind the news of its end. A process that left its group can hold
        # the pipe open.
        self._turn_until(lambda: first.has_spoken or self._is_told_to_end(), _LAST_WORDS_S)
        self._turn_until(is_heard, TRACEBACK_WINDOW_S)
        self._turn_until(
            lambda: (
                self._is_told_to_end()
                or all(child.has_spoken for child in self._children if child.failed)
            ),
            _LAST_WORDS_S,
        )

    def _wait_for_workers(self, follower_grace_s: float) -> None:
        self._turn_until(
            lambda: (
                self._is_decided()
                or all(child.is_service or child.is_follower for child in self._running())
            ),
            None,
        )
        self._turn_until(self._is_decided, follower_grace_s)

    def _end_by_signal(self) -> Failure:
        ended_by = signal.Signals(self._signal or signal.SIGTERM)
        self.stop()
        return Failure("launcher", 128 + ended_by, f"got {ended_by.name}")

    def stop(self) -> None:
        """Ends all processes: SIGTERM to their groups, after the grace (or a signal) SIGKILL."""
        self._closing = True
        for child in self._running():
            child.send(signal.SIGTERM)
        if self._signal is not None:
            self._writes_until = time.monotonic() + self._grace_s  # for the children's last words
        self._signal = None
        self._turn_until(lambda: self._is_over() or self._signal is not None, self._grace_s)
        for child in self._running():
            child.send(signal.SIGKILL)
        self._turn_until(self._is_over, None)
        # A process that left its group can hold a pipe open; what the others wrote is there
        # already.
        self._turn_until(lambda: not self._pipes, _LAST_WORDS_S)
        self._printer.finish()

    def _start_group(self, group: Group) -> None:
        self._group = group
        try:
            group.start(group.attempt)
        finally:
            self._group = None

    def _restart(self) -> bool:
        """Starts groups again of which a child has failed; False where nothing is to be done.

        A follower that may not be started again is given up.
        """
        # One that is ending may say by its code that no restart helps.
        self._turn_until(
            lambda: self._is_told_to_end() or not self._is_group_ending(), TRACEBACK_WINDOW_S
        )
        failed = [child for child in self._children if child.decides]
        lost = [child for child in failed if not (child.group and child.group.may_restart(child))]
        if self._is_told_to_end() or not failed or not all(child.is_follower for child in lost):
            return False
        for child in lost:
            child.is_given_up = True
            if any(not one.is_service for one in self._running()):
                self._say(f"{child.role} failed ({child.failure.reason}); the workers go on")
        failed = [child for child in failed if child not in lost]
        groups = list({id(one.group): one.group for one in failed if one.group}.values())
        ended = [child for child in self._children if child.group in groups]
        for group in groups:
            first = min((c for c in failed if c.group is group), key=lambda c: c.ended_s)
            group.attempt += 1
            self._say(
                f"{first.role} failed ({first.failure.reason}); {group.name} starts again "
                f"({group.attempt} of {group.max_restarts})"
            )
        self._end(ended)
        self._children = [child for child in self._children if child not in ended]
        began = time.monotonic()
        # Each after its own pause, not after those of the others, too.
        for group in sorted(groups, key=Group.pause_s):
            left_s = began + group.pause_s() - time.monotonic()
            self._turn_until(self._is_told_to_end, max(0.0, left_s))
            if not self._is_told_to_end():
                self._start_group(group)
        return True

    def _is_group_ending(self) -> bool:
        """Whether one of a group that has failed has printed an exception, and still runs."""
        groups = [child.group for child in self._children if child.decides and child.group]
        since = time.monotonic() - TRACEBACK_WINDOW_S
        return any(
            child.group in groups and child.traceback_s is not None and child.traceback_s > since
            for child in self._running()
        )

    def _end(self, children: Sequence[Child]) -> None:
        """Ends some processes: SIGTERM, after the grace (or a signal to the launcher) SIGKILL."""

        def is_over() -> bool:
            return all(child.code is not None for child in children)

        for number, until in (
            (signal.SIGTERM, lambda: is_over() or self._is_told_to_end()),
            (signal.SIGKILL, is_over),
        ):
            for child in children:
                if child.code is None:
                    child.send(number)
            self._turn_until(until, self._grace_s if number == signal.SIGTERM else None)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a disk that is full ends no training
            if self._takes(sys.stderr.buffer):
                sys.stderr.write(f"tf-hips: {text}\n")
                sys.stderr.flush()

    def _takes(self, stream: IO[bytes]) -> bool:
        """Waits until `stream` takes bytes; False: a signal came first, or no time is left.

        A write that waits for its reader would be begun again after each signal (PEP 475), of which
        the launcher would not hear.
        """
        try:
            descriptor = stream.fileno()
        except OSError:
            return True  # it is in memory
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        poll.register(self._signals, select.POLLIN)
        while True:
            left_s = 0.0 if self._is_told_to_end() else self._writes_until - time.monotonic()
            ready = poll.poll(max(0.0, left_s) * 1000 if left_s < math.inf else None)
            if descriptor in (number for number, _ in ready):
                return True  # or it has failed, which writing says
            if not ready:
                return False
            self._read_signals()

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.code is None]

    def _is_told_to_end(self) -> bool:
        return self._signal is not None

    def _is_over(self) -> bool:
        return not self._running()

    def _is_decided(self) -> bool:
        return (
            self._signal is not None
            or any(child.decides for child in self._children)
            or all(child.is_service for child in self._running())
        )

    def _turn_until(self, done: Callable[[], bool], seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self._turn(left)

    def _turn(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()
        if self._printer.is_broken and not self._closing:
            self._signal = signal.SIGPIPE

    def _read_signals(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGCHLD:
                for child in self._running():
                    child.reap()
            elif self._signal is None:
                self._signal = number

    def _watch(self, child: Child, pipe: IO[bytes] | None, *, is_error: bool) -> None:
        if pipe is None:
            raise ValueError("`pipe` must be an open pipe. Received: None")
        os.set_blocking(pipe.fileno(), False)
        splitter = Splitter()

        def read() -> None:
            try:
                data = os.read(pipe.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            lines = splitter.feed(data) if data else splitter.finish()
            for line in lines:
                child.note_line(line)
                self._printer.line(child.role, line, is_error=is_error)
            self._printer.state(child.role, splitter.state)
            if not data:
                self._selector.unregister(pipe)
                del self._pipes[pipe]
                pipe.close()

        self._pipes[pipe] = read
        self._selector.register(pipe, selectors.EVENT_READ, read)
