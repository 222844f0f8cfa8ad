# SPDX-License-Identifier: Apache-2.0
"""What this process is at: collectives, work, failures, and where its main thread stands.

Written by the threads of the process, read by that of the watchdog. Imports no TensorFlow: what
waits inside a graph is asked through `Place`.
"""

import dataclasses
import re
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any, Protocol

from tf_hips import log
from tf_hips.comm.verdicts import State, Verdict, Wait
from tf_hips.errors import TfHipsError

_MAX_CHARACTERS = 300  # of an error that is told to others

# Code that is nobody's script.
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(log.__file__).resolve().parent))
_PACKAGES = ("site-packages", "dist-packages")

# What Horovod says where a rank did not fail itself.
_HOROVOD_TEXTS = (
    "Horovod has been shut down",
    "Horovod has not been initialized",
    "HorovodInternalError",
)
# What Gloo says, in lines that name its source; data from elsewhere may be cut off as well.
_GLOO_TEXTS = ("Connection reset by peer", "Connection closed", "Timed out", "Broken pipe")

# Lines that TensorFlow writes before what has happened in a graph.
_AROUND_ERRORS = re.compile(
    r'Graph execution error:|Detected at node |<stack traces unavailable>|File ".*", line \d+, in '
)

_MARK = "_tf_hips_is_of_watchdog"


class Place(Protocol):
    """What knows whether a graph of this process waits in a collective."""

    def where(self) -> tuple[int, tuple[str, str] | None]:
        """Collectives begun, and the text and the key of the one that is waited in, if any is."""

    def leave(self) -> None:
        """Forgets a wait that has ended with an error."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An error, in what, after how many collectives, when, and whether another rank caused it."""

    text: str
    doing: str
    begun: int
    time_s: float
    is_freed: bool


class Here:
    """What this process is at; written by its threads, read by the watchdog's."""

    def __init__(self) -> None:
        """Is at nothing.

        Attributes:
            begun: eager collectives begun; all ranks that make the same count the same.
            waits: text, key and beginning of those that go on; the innermost last.
            names: what a reader knows them by, the outermost first.
            doings: what this process is at, and whether that has a deadline of its own.
            verdict: why its job was ended.
        """
        self._places: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.begun = 0
        self.waits: list[tuple[str, str, float]] = []
        self.names: list[str] = []
        self.doings: list[tuple[str, bool]] = []
        self.verdict: Verdict | None = None
        self._failure: _Failure | None = None
        self._graph_since: tuple[Any, float] = (None, 0.0)
        self._is_counted = False  # the next collective, by the context around it

    def begin(self, wait: tuple[str, str, float], *, covers: bool) -> None:
        """Adds to `waits`, and counts.

        Args:
            wait: its text, key and beginning.
            covers: whether it goes around collectives, of which it is the first.
        """
        is_outermost = not self.waits
        if is_outermost or not self._is_counted:
            self.begun += 1
        self._is_counted = is_outermost and covers
        self.waits.append(wait)

    def add(self, place: Place) -> None:
        """Asks `place` about graphs from now on, for as long as it lives."""
        with self._lock:
            self._places.add(place)

    def places(self) -> list[Place]:
        """Who is asked about graphs."""
        with self._lock:
            return list(self._places)

    def sample(self, now: float) -> tuple[int, Wait | None]:
        """Collectives begun so far, and the wait that goes on.

        Args:
            now: seconds on the monotonic clock.
        """
        begun = self.begun
        marked: tuple[str, str] | None = None
        for place in self.places():
            count, at = place.where()
            begun += count
            marked = at or marked
        waits = list(self.waits)
        if waits:
            # The outermost has a text for people, the innermost is what Horovod pairs.
            text = (self.names or [waits[0][0]])[0]
            return begun, Wait(text, waits[-1][1], now - waits[0][2])
        if marked is None:
            self._graph_since = (None, now)
            return begun, None
        if self._graph_since[0] != begun:
            self._graph_since = (begun, now)
        # A function that has failed leaves its mark behind.
        if not _is_in_tensorflow():
            return begun, None
        return begun, Wait(*marked, now - self._graph_since[1])

    def wait_text(self) -> str:
        """What is waited in, or was when it failed; "" for nothing."""
        marks = [place.where()[1] for place in self.places()]
        texts = [*self.names, *(wait[0] for wait in self.waits), *(one[0] for one in marks if one)]
        return texts[0] if texts else ""

    def fail(self, error: BaseException) -> None:
        """Remembers an error until the next collective begins."""
        for place in self.places():
            place.leave()
        now = time.monotonic()
        is_freed = hasattr(error, _MARK) or bool(words_of_horovod(error))
        text, begun, before = _short(error), self.sample(now)[0], self._failure
        doing = self._doing()
        if before is not None and (before.text, before.begun) == (text, begun):
            doing = before.doing  # the same error, further out
        self._failure = _Failure(text, doing, begun, now, is_freed)

    def failure(self, begun: int) -> str | None:
        """The error that counts after so many collectives."""
        return self._failure.text if self._failure and self._failure.begun == begun else None

    def state(self, now: float, beat: int, has_ended: bool = False) -> State:
        """All that others are told.

        Args:
            now: seconds on the monotonic clock.
            beat: number of this telling.
            has_ended: whether this process is at its end.
        """
        begun, wait = self.sample(now)
        failure = self._failure if self.failure(begun) is not None else None
        return State(
            beat=beat,
            begun=begun,
            wait=wait,
            doing=failure.doing if failure else self._doing(),
            place=_line_of_user(),
            has_deadline=any(is_bounded for _, is_bounded in list(self.doings)),
            failure=failure.text if failure else None,
            failed_s=now - failure.time_s if failure else 0.0,
            is_freed=failure.is_freed if failure else False,
            has_ended=has_ended,
        )

    def _doing(self) -> str:
        doings = list(self.doings)
        return doings[-1][0] if doings else ""


def words_of_horovod(error: BaseException) -> str:
    """The line in which Horovod says that its job has ended; "" in other errors."""
    if isinstance(error, TfHipsError):
        return ""
    lines = str(getattr(error, "message", error)).splitlines()
    telling = [
        line
        for line in lines
        if any(text in line for text in _HOROVOD_TEXTS)
        or ("gloo" in line and any(text in line for text in _GLOO_TEXTS))
    ]
    return telling[0].strip()[:_MAX_CHARACTERS] if telling else ""


def marked(error: TfHipsError) -> TfHipsError:
    """`error`, known from now on as one that other ranks have caused."""
    setattr(error, _MARK, True)
    return error


def _short(error: BaseException) -> str:
    told = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in told if not _AROUND_ERRORS.match(line)] or told
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MAX_CHARACTERS]


def _is_in_tensorflow() -> bool:
    """Whether any thread of this process is inside a call of TensorFlow."""
    return any(
        "tensorflow" in Path(frame.f_code.co_filename).parts
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident()
    )


def _line_of_user() -> str:
    """Where the main thread is in the user's own code, as "file:line"; "" when it is nowhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for one, line in traceback.walk_stack(frame) if frame is not None else ():
        name = one.f_code.co_filename
        if not name.startswith(("<", *_LIBRARIES)) and not any(one in name for one in _PACKAGES):
            return f"{Path(name).name}:{line}"
    return ""
