# SPDX-License-Identifier: Apache-2.0
"""The calls of one run that wait for other children, and the end of the run.

A call waits until what it waits for is there, the run has ended, its caller is gone, or its
patience is over. Two things end the run long before that, because no patience helps:

    crossed   children wait for each other in different calls: one in a gather, one in a round;
              with a quorum those lose that do something else than more than half of all
    failed    a child whose last step ended with an error does not come for the next

Not thread-safe: the session's lock guards it, and is given up while a call waits.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping

from tf_hips import log
from tf_hips.errors import ENDED, PeerError, ProtocolError, TfHipsError
from tf_hips.ps.session.members import Caller, Members

# The reason of a server that is told to end.
STOPPED = "The server was stopped."
# Seconds that others wait for a child whose step failed; its script may catch the error and go on.
FAILED_AFTER_S = 10.0

_FAILURE_CHARACTERS = 1000


@dataclasses.dataclass(frozen=True)
class Wait:
    """What one call waits for.

    Attributes:
        what: its name for messages, by which children wait for the same thing or not.
        is_ready: whether it is there; may raise why it will never be.
        missing: who or what is missing, for the error of a call that has waited long enough.
        needs: the children that must come before it is there.
        progress: grows while it comes, and buys time.
    """

    what: str
    is_ready: Callable[[], bool]
    missing: Callable[[], str]
    needs: Callable[[], Collection[int]] = tuple
    progress: Callable[[], int] = int


class HungUpError(PeerError):
    """The other end of a call has gone, so that nobody hears an answer."""


class Waiting:
    """The waiting calls of one run, and how the run has ended."""

    def __init__(
        self, changed: threading.Condition, members: Members, at_end: Callable[[], None]
    ) -> None:
        """No call waits.

        Args:
            changed: the session's lock, notified whenever something may be ready.
            members: the children.
            at_end: called when the run ends.
        """
        self.ended: str | None = None
        self.error: type[TfHipsError] = PeerError
        # Gets a child that has failed, and why; whether others go on without it.
        self.lets_go: Callable[[int, str], bool] = lambda child, reason: False
        # Whether others can go on without a child that is lost, now.
        self.bears_losses: Callable[[], bool] = lambda: False
        self._changed = changed
        self._members = members
        self._at_end = at_end
        self._num_calls = 0
        self._last_call = time.monotonic()
        self._newest: dict[int, tuple[Caller, Wait]] = {}
        self._failures: dict[int, tuple[str, float]] = {}

    def end(self, reason: str, error: type[TfHipsError] = PeerError) -> None:
        """Ends the run for all, by `error`; the first reason stands."""
        if self.ended is None:
            # Sites say why in words of their own, and all are told.
            self.ended, self.error = log.printable(reason), error
            self._at_end()
        self._changed.notify_all()

    def check(self, caller: Caller) -> None:
        """Raises if the run has ended or the caller is gone."""
        if self.ended is not None:
            # Nothing is lost of a run that has not begun: who starts again may find it beginning.
            has_begun = self._members.is_started
            raise self.error(f"{ENDED}{self.ended}" if has_begun else self.ended)
        if caller.is_gone:
            raise HungUpError(f"Site `{self._members.site(caller.child)}` has hung up.")

    def idle_s(self) -> float:
        """Seconds since the last call ended or began; 0 while one waits."""
        return 0.0 if self._num_calls else time.monotonic() - self._last_call

    def note_call(self, child: int) -> None:
        """A child goes on: what failed before is over."""
        self._last_call = time.monotonic()
        self._failures.pop(child, None)

    def failures(self) -> dict[int, str]:
        """The children whose last step ended with an error, and what it was."""
        return {child: text for child, (text, _) in self._failures.items()}

    def note_failure(self, child: int, text: str, grace_s: float = 0.0) -> None:
        """The last step of a child ended with an error, which counts after `grace_s` seconds."""
        self._last_call = time.monotonic()
        self._failures[child] = text[:_FAILURE_CHARACTERS], self._last_call + grace_s
        self._changed.notify_all()  # those that wait for it look at the clock

    def until(self, caller: Caller, wait: Wait) -> None:
        """Waits with the lock held until `wait.is_ready()`.

        Raises:
            PeerError: the run has ended, the caller is gone, or its patience is over.
            ProtocolError: children wait for each other in different calls.
        """
        entered = began = time.monotonic()
        seen = wait.progress()
        self._num_calls += 1
        newest = self._newest.get(caller.child)
        if newest is None or newest[0].number <= caller.number:
            # An older call is one whose connection is lost, and the end of which was not noticed.
            self._newest[caller.child] = caller, wait
        try:
            while True:
                self.check(caller)
                if wait.is_ready():
                    return
                if wait.progress() != seen:
                    began, seen = time.monotonic(), wait.progress()
                left = began + caller.patience_s - time.monotonic()
                if left <= 0:
                    raise PeerError(f"Waited {time.monotonic() - began:.0f} s; {wait.missing()}.")
                self._end_if_crossed()
                left = min(left, self._time_for_failed(wait, entered))
                if self.ended is None:
                    self._changed.wait(left)
        finally:
            newest = self._newest.get(caller.child)
            if newest is not None and newest[0] is caller:
                del self._newest[caller.child]
            self._num_calls -= 1
            self._last_call = time.monotonic()

    def end_differing(self, whats: Mapping[int, str]) -> None:
        """Ends the run because children wait for each other in different calls."""
        told = "; ".join(
            f"site `{self._members.site(child)}` waits in {what}"
            for child, what in sorted(whats.items())
        )
        self.end(
            f"The parties wait for each other in different calls: {told}. All workers of all "
            "parties must take the same steps in the same order: give each a shard of equal length "
            "(`tf_hips.shard`), and call `fit`, `evaluate` and `strategy.reduce` on all of them.",
            ProtocolError,
        )

    def settle(self, whats: Mapping[int, str]) -> None:
        """Children do different things that all must do alike: the odd ones are lost, or all end.

        With a quorum those are lost that do something else than more than half of all children.
        While there is no such half, and some are still to come, it is not known who is odd.

        Args:
            whats: what each child does that has come.
        """
        counts = collections.Counter(whats.values())
        if len(counts) < 2:
            return
        [(most, count)] = counts.most_common(1)
        if not self.bears_losses():
            self.end_differing(whats)
        elif 2 * count > len(self._members.terms.parties):
            for child, what in whats.items():
                if what != most:
                    self.lets_go(
                        child,
                        f"Site `{self._members.site(child)}` waits in {what}, most others in "
                        f"{most}.",
                    )
        elif self._members.living <= set(whats):
            self.end_differing(whats)

    def _end_if_crossed(self) -> None:
        if len({wait.what for _, wait in self._newest.values()}) < 2:
            return
        stuck = {
            child: wait for child, (_, wait) in self._newest.items() if not _is_over(wait.is_ready)
        }
        # A child makes one call at a time. So one that needs a child that waits in another call
        # waits until that call is over; what remains here is a circle, or waits for one.
        while True:
            free = [
                child
                for child, wait in stuck.items()
                if not any(
                    other in stuck and stuck[other].what != wait.what for other in wait.needs()
                )
            ]
            if not free:
                break
            for child in free:
                del stuck[child]
        if stuck:
            self.settle({child: wait.what for child, wait in stuck.items()})

    def _time_for_failed(self, wait: Wait, entered: float) -> float:
        """Seconds that `wait` goes on at least, as far as failed children are concerned."""
        left = threading.TIMEOUT_MAX
        for child in wait.needs() if self._failures else ():
            if child not in self._failures:
                continue
            text, failed = self._failures[child]
            left = min(left, max(entered, failed) + FAILED_AFTER_S - time.monotonic())
            if left <= 0:
                reason = (
                    f"Site `{self._members.site(child)}` does not come to {wait.what}: its last "
                    f"step ended with an error. {text}"
                )
                if not self.lets_go(child, reason):
                    self.end(reason)
                return 0.0
        return left


def _is_over(is_ready: Callable[[], bool]) -> bool:
    with contextlib.suppress(TfHipsError):
        return is_ready()
    return True  # it will raise that when it wakes
