# SPDX-License-Identifier: Apache-2.0
"""Ends a job whose ranks wait for each other for ever, and says why on all of them.

Each rank has a thread that writes what the rank is at to the launcher's store, every two seconds
and when it begins to wait. Only when this rank has waited for a while does the thread read what the
others say; the lowest rank that waits judges (see `verdicts`). A verdict goes to the store first,
so that all ranks tell the same story, and then Horovod is stopped: every pending collective fails,
and the error that comes out of it is replaced by the verdict.

What a rank waits in is marked by `waiting` where collectives are eager, and by variables where they
are in a graph (`places`, filled by the strategies' `Turns`).

Invariant: nothing here blocks or fails a rank whose store cannot be reached; it only loses its
watchdog, and says so once.
"""

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tf_hips import log
from tf_hips.comm import verdicts
from tf_hips.comm.here import Here, Place, marked, words_of_horovod
from tf_hips.comm.rendezvous import Store, store_of_launcher
from tf_hips.comm.verdicts import Notice, State, Verdict, View
from tf_hips.errors import ConfigError, PeerError, ProtocolError, TfHipsError, ended_in_a_step

_SCOPE = "tf_hips_watchdog"
_VERDICT = "verdict"

# Seconds.
_POLL_S = 0.5
_BEAT_S = 2.0
_NEWS_S = 1.0  # of waiting before it is told
_LOOK_S = 3.0  # of waiting before the others are looked at
_NAME_S = 3.0  # to find out who is gone, when a collective has failed
_RETRY_S = 5.0  # between two looks while the store does not answer

_MAX_FAILURES = 3  # of the store in a row, before that is told and it is asked less often


class Watchdog:
    """The thread of one rank, and what it has seen of the others."""

    def __init__(
        self, rank: int, size: int, store: Store, stop_horovod: Callable[[], None], stall_s: float
    ) -> None:
        """Starts nothing yet.

        Args:
            rank: this rank.
            size: ranks of the job.
            store: where they meet.
            stop_horovod: ends all pending collectives of all ranks.
            stall_s: seconds after which a rank that has not come is given up.
        """
        self._rank = rank
        self._size = size
        self._store = store
        self.stop_horovod = stop_horovod
        self._stall_s = stall_s
        self._process = os.getpid()
        self._beat = 0
        self._put_at = float("-inf")
        self._told: Any = None
        self._failures = 0
        self._judges_at = float("-inf")
        self._answered_at = time.monotonic()  # when the store was last there
        self._looks_at: Any = None
        self._warned_at: Any = None
        self._seen: dict[int, tuple[State, float, float]] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tf_hips-watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread; the end of the process is told to the others."""
        self._thread.start()
        atexit.register(self.end)

    def wake(self) -> None:
        """Lets the thread look at once."""
        self._wake.set()

    def end(self) -> None:
        """Stops, and tells the others that this rank is at its end."""
        if self._is_over.is_set() or os.getpid() != self._process:
            return
        self._is_over.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * _POLL_S)  # TensorFlow must not be asked as it goes down
        with contextlib.suppress(ConnectionError):
            self._put(time.monotonic(), has_ended=True)

    def publish(self) -> None:
        """Tells the others now what this rank is at."""
        with contextlib.suppress(ConnectionError):
            self._put(time.monotonic())

    def find_verdict(self) -> Verdict | None:
        """The verdict that any rank has reached."""
        if _here.verdict is None:
            with contextlib.suppress(ConnectionError, TypeError):
                told = self._store.get(_VERDICT)
                _here.verdict = None if told is None else Verdict(**told)
        return _here.verdict

    def find_departed(self) -> tuple[str, str]:
        """Who has ended this job's collectives.

        A rank that was killed has said nothing, so this may take seconds: they are the time in
        which the others show that they are there.

        Returns:
            Who, in a sentence, and the remedy; each "" where it is not known.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        began = time.monotonic()
        self._seen.clear()
        beats: dict[int, int] = {}
        alive: set[int] = set()
        with contextlib.suppress(ConnectionError):
            while True:
                now = time.monotonic()
                views = {other: self._view(other, now) for other in others}
                told = verdicts.departed(views)
                if told:
                    return told
                for other, view in views.items():
                    beat = view.state.beat if view.state is not None else 0
                    if beats.setdefault(other, beat) != beat:
                        alive.add(other)
                    if view.state is not None and view.state.is_freed:
                        alive.add(other)
                silent = [other for other in others if other not in alive]
                if silent and now - began > _NAME_S:
                    names = " or ".join(f"rank {other}" for other in silent)
                    # One that stands still is as silent as one that was killed.
                    return (
                        f"{names[0].upper()}{names[1:]} gives no sign of life (killed, stopped, or "
                        "its machine is gone?).",
                        "",
                    )
                if not silent:
                    return "", ""
                time.sleep(_POLL_S)
        return "", ""

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._wake.wait(_POLL_S if self._failures < _MAX_FAILURES else _RETRY_S)
            self._wake.clear()
            if self._is_over.is_set() or _here.verdict is not None:
                return
            self._try_to_look()

    def _try_to_look(self) -> None:
        """A look; a store that is not there ends nothing."""
        try:
            self.look()
            self._failures, self._answered_at = 0, time.monotonic()
        except Exception as error:  # noqa: BLE001 - a job must not suffer from its watchdog
            self._failures += 1
            now = time.monotonic()
            if now - self._answered_at > 2 * _BEAT_S:
                # What others have told may be old: they need not reach the store yet.
                self._judges_at = now + verdicts.SILENT_S
            if self._failures == _MAX_FAILURES and not self._is_over.is_set():
                log.warning("For now, ranks that wait for ever are not noticed. %r", error)

    def look(self) -> None:
        """One look: tells what is new, and judges where this rank has waited for long.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        now = time.monotonic()
        begun, wait = _here.sample(now)
        seconds = wait.seconds if wait is not None else 0.0
        news = (begun if seconds >= _NEWS_S else None, _here.failure(begun))
        if news != self._told or now - self._put_at >= _BEAT_S:
            self._put(now)
            self._told = news
        if seconds < _LOOK_S:
            return
        if self._looks_at != begun:
            self._looks_at = begun
            self._seen.clear()
        found = self.find_verdict() or (self._judge(now) if now >= self._judges_at else None)
        if isinstance(found, Verdict):
            self._end_job(found)
        elif found is not None and self._warned_at != begun:
            self._warned_at = begun
            log.warning("%s", found.text)

    def _judge(self, now: float) -> Verdict | Notice | None:
        views = {}
        for rank in range(self._size):
            if rank == self._rank:
                views[rank] = View(_here.state(now, self._beat), 0.0, float("inf"))
                continue
            views[rank] = view = self._view(rank, now)
            waits = view.state is not None and view.state.wait is not None
            if rank < self._rank and waits and view.silent_s < verdicts.SILENT_S:
                return None  # it judges; so the store is asked by few, and there is one verdict
        return verdicts.judge(self._rank, views, self._stall_s)

    def _view(self, rank: int, now: float) -> View:
        told = self._store.get(str(rank))
        before = self._seen.get(rank)
        if told is None:
            _, heard, _ = self._seen.setdefault(rank, (State(), now, now))
            return View(None, now - heard, 0.0)
        try:
            state = State.from_json(told)
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        heard = before[1] if before and before[0].beat == state.beat else now
        stood = before[2] if before and _stand(before[0]) == _stand(state) else now
        self._seen[rank] = (state, heard, stood)
        return View(state, now - heard, now - stood)

    def _put(self, now: float, has_ended: bool = False) -> None:
        if os.getpid() != self._process:
            return  # a child of a fork is not this rank
        with self._lock:
            self._beat += 1
            state = _here.state(now, self._beat, has_ended)
            self._store.put(str(self._rank), state.to_json())
            self._put_at = now

    def _end_job(self, verdict: Verdict) -> None:
        if self._is_over.is_set():
            return
        _here.verdict = verdict
        with contextlib.suppress(ConnectionError):
            self._store.put(_VERDICT, dataclasses.asdict(verdict))
        log.error("This job cannot go on and is ended. %s", verdict.text)
        self.stop_horovod()


_here = Here()
_watchdog: Watchdog | None = None


# The life of a process.


def stall_s() -> float:
    """Seconds after which a rank that has not come is given up, from the environment.

    Raises:
        ConfigError: `TF_HIPS_STALL_S` is no positive number.
    """
    text = os.environ.get(verdicts.STALL_VARIABLE, "")
    try:
        seconds = float(text or verdicts.STALL_S)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            f"{verdicts.STALL_VARIABLE} must be a positive number of seconds. Received: {text!r}"
        )
    return seconds


def start(rank: int, size: int, stop_horovod: Callable[[], None]) -> None:
    """Starts the watchdog of this process, once.

    One rank needs none, and without a launcher's store there is none.

    Args:
        rank: this rank.
        size: ranks of the job.
        stop_horovod: ends all pending collectives of all ranks; called on the watchdog's thread.

    Raises:
        ConfigError: `TF_HIPS_STALL_S` is no positive number.
    """
    global _watchdog
    limit_s = stall_s()
    store = store_of_launcher(_SCOPE)
    if size == 1 or store is None or _watchdog is not None:
        return
    _watchdog = Watchdog(rank, size, store, stop_horovod, limit_s)
    _watchdog.start()
    _explain_uncaught()


def stop() -> None:
    """Ends the watchdog; to the others, this rank has ended."""
    if _watchdog is not None:
        _watchdog.end()


# What a process tells.


def watch(place: Place) -> None:
    """Lets the watchdog ask `place`, for as long as it lives."""
    _here.add(place)


@contextlib.contextmanager
def doing(text: str, has_deadline: bool = False) -> Iterator[None]:
    """Tells what this rank is at while the context is open; what others wait for has a name then.

    Args:
        text: such as "epoch 3 of `fit`".
        has_deadline: whether it is a wait for somebody else that ends, or fails, by itself; then
            `TF_HIPS_STALL_S` does not end it.
    """
    entry = (text, has_deadline)
    _here.doings.append(entry)
    try:
        yield
    finally:
        _here.doings.remove(entry)


@contextlib.contextmanager
def waiting(text: str, key: str = "") -> Iterator[None]:
    """Marks that this rank waits in an eager collective while the context is open.

    Args:
        text: what is waited for, for a reader.
        key: what the other ranks must wait in too; when empty `text`, and the collectives inside
            mark themselves. Of nested contexts the innermost counts.

    Raises:
        ProtocolError: the job was ended because its ranks disagree.
        PeerError: the job was ended because a rank is gone.
    """
    check()
    entry = (text, key or text, time.monotonic())
    _here.begin(entry, covers=not key)
    try:
        yield
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        failed(explained)
        raise explained from None
    finally:
        _here.waits.remove(entry)


@contextlib.contextmanager
def named(text: str) -> Iterator[None]:
    """Gives the eager collectives inside a name that a reader knows; none when empty."""
    if not text:
        yield
        return
    _here.names.append(text)
    try:
        yield
    finally:
        _here.names.remove(text)


def failed(error: BaseException) -> None:
    """Tells that a step, or what was made of many, has ended with `error` on this rank.

    It is over when this rank begins its next collective. An error inside of something that goes on
    around it (an evaluation that a callback of `fit` makes) does not count: whoever caught it is
    late, and has not left.
    """
    if len(_here.doings) > 1:
        return
    _here.fail(error)
    if _watchdog is not None:
        _watchdog.wake()


# What a process is told.


def verdict() -> str | None:
    """Why this job was ended, None where it was not."""
    return _here.verdict.text if _here.verdict is not None else None


def check() -> None:
    """Raises the verdict, if there is one."""
    if _here.verdict is not None:
        raise _error(_here.verdict)


def explain(error: BaseException) -> TfHipsError | None:
    """What to raise in place of an error in which Horovod says that its job has ended.

    From then on it is the verdict of this process, and Horovod is stopped here too. May take
    seconds, where a rank was killed and nobody knows which.

    Returns:
        The verdict, or an error that names the rank that has gone; None for other errors.
    """
    words = words_of_horovod(error)
    if not words:
        return None
    found = _watchdog.find_verdict() if _watchdog is not None else _here.verdict
    if found is None:
        found = _here.verdict = _loss(words)
    if _watchdog is not None:
        _watchdog.stop_horovod()
    return _error(found)


def _loss(words: str) -> Verdict:
    """What is known when collectives have failed and nobody has judged why."""
    text = _here.wait_text()
    at = f" This rank waited in {text}." if text else ""
    departed, remedy = _watchdog.find_departed() if _watchdog is not None else ("", "")
    # Where a rank has said how it ended, Horovod's words are only the noise of that.
    rest = remedy or f"Horovod here: {words}"
    return Verdict("peer", f"{ended_in_a_step(departed)}{at} {rest}")


def _explain_uncaught() -> None:
    """Tells the others of an error that ends this process, and this user what is behind it.

    Errors come out of a `tf.function` of the user's own as TensorFlow's; here they get their name.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        explained = None
        with contextlib.suppress(Exception):  # the user's error comes first
            explained = explain(error)
            failed(explained or error)
            if _watchdog is not None:
                _watchdog.publish()
        if explained is not None:
            sys.last_value = explained
            kind, error = type(explained), explained.with_traceback(trace)
        before(kind, error, trace)

    sys.excepthook = hook


def _error(found: Verdict) -> TfHipsError:
    kind = ProtocolError if found.kind == "protocol" else PeerError
    return marked(kind(found.text))


def _stand(state: State) -> Any:
    return state.begun, state.wait.key if state.wait is not None else None
