# SPDX-License-Identifier: Apache-2.0
"""Who says how many local steps come next: the server, what all have said, or the state server."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from tf_hips.comm import primitives
from tf_hips.config import Tls
from tf_hips.errors import ConfigError, ProtocolError
from tf_hips.esync.clock import wall_clock
from tf_hips.esync.pacer import Assignment, Pacer, Report
from tf_hips.esync.rule import Pace
from tf_hips.ps.calls.pacing import PaceClient
from tf_hips.ps.client.state_client import StateClient

# The meeting is over when this is waited for, so the answer is on its way.
_ANSWER_S = 2.0
# Of the first round, in which nobody knows how long others take for their first steps.
_FIRST_ROUND_S = 60.0
_PATIENT = 0.25  # of a step
_HTTPS, _HTTP = "https://", "http://"


class Paced:
    """The default rule, as one worker follows it.

    Below a server the assignment is the server's. Without one, and where the server gives no
    answer, it is what every worker computes of what all have said: of durations only, from one
    meeting to the next. Nobody's duration is longer than what has passed here since the last
    meeting, or since training began, on this worker's own clock: whoever meets has been on the way
    that long at most. As all say the same to all, all compute the same, but for what that cuts:
    a worker's plan is its own, and need not be that of the others.
    """

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is assigned.

        Args:
            pace: the rule's parameters.
            clock: tells seconds.
        """
        self.pace = pace
        self.assigned: Assignment | None = None
        self._clock = clock
        self._client: PaceClient | None = None
        self._pacer: Pacer | None = None
        self._begun_s: float | None = None  # when training began, on this worker's clock
        self._met_s: float | None = None  # when the last meeting was, on the same
        self._closed_s = 0.0  # the same on the clock that all have in common, made of durations
        self._found: Assignment | None = None
        self._reported: int | None = None  # the round of the newest report

    def arrived(self, number: int, report: Report, client: PaceClient | None) -> float:
        """Local steps have ended; tells the server, if there is one.

        Returns:
            Seconds since the last meeting.
        """
        if client is not None:
            self._client = client
        if self._client is not None and number != self._reported:
            self._client.report(number, report)
            self._reported = number
        return 0.0 if self._met_s is None else self._clock() - self._met_s

    def hear(
        self,
        number: int,
        own: int,
        told: Sequence[tuple[int, dict[str, Any]]],
        *,
        most: Callable[[Sequence[str | None]], str] | None = None,
    ) -> None:
        """Learns from what all members have said.

        Args:
            number: the round.
            own: which member this worker is of.
            told: of each member its steps and words; no words of one that is absent.
            most: where some may lie, what most members say, None of one that is absent: then one of
                another pace does not count.

        Raises:
            ProtocolError: members keep different paces; where some may lie, most another one.
        """
        paces = [words["pace"] if words else None for _, words in told]
        is_of_most = most is not None and most(paces) == self.pace.text
        now = self._clock()
        since = next((one for one in (self._met_s, self._begun_s) if one is not None), now)
        longest_s = max(now - since, 0.0)
        self._met_s = now
        if self._pacer is None:
            self._pacer = Pacer(self.pace, len(told))
        began_s = self._closed_s
        for member, (steps, words) in enumerate(told):
            if not words:
                continue  # a quorum has gone on without it
            if words["pace"] != self.pace.text:
                if is_of_most:
                    continue
                raise ProtocolError(
                    f"All members must keep one pace, here {self.pace.text}. Received: "
                    f"{words['pace'][:200]} of member {member}"
                )
            # One claim of a long step would have all others make all steps that there can be.
            arrived_s = began_s + min(words["span_s"], longest_s)
            step_s = min(words["step_s"], longest_s / max(steps, 1))
            report = Report(steps, step_s, min(words["local_s"], longest_s))
            self._pacer.arrived(member, number, arrived_s, report)
            self._closed_s = max(self._closed_s, arrived_s)
        self._found = self._pacer.assignment(own, number)

    def begin(self, *, is_shared: bool) -> int:
        """How many steps this worker makes in the local phase that begins.

        Args:
            is_shared: whether the workers of the party keep step, so that rank 0's holds for all.
        """
        if self._begun_s is None:
            self._begun_s = self._clock()
        found, self._found = self._found, None
        if self._client is not None:
            found = self._client.assignment(_ANSWER_S) or found
        if found is not None:
            self.assigned = found  # else what was assigned before: another `fit`, or a lost answer
        steps = self.pace.first_steps if self.assigned is None else self.assigned.steps
        if is_shared:
            steps = int(primitives.broadcast_object(steps, 0, "steps of the next round"))
        return steps

    @property
    def is_first(self) -> bool:
        """Whether nothing has been assigned to this worker yet."""
        return self.assigned is None

    def goes_on(self, number: int, report: Report, client: PaceClient | None) -> bool:
        """Whether local steps go on after those of the first round: until all have made theirs.

        With this the server hears that they are made; its answer says that everybody's are. Without
        a server nobody says so, and nothing goes on.

        Args:
            number: the round.
            report: of the steps so far.
            client: the server.
        """
        if not self.is_first or client is None:
            return False
        patience_s = 0.0
        if number != self._reported:
            self.arrived(number, report, client)
            # The last one to say so has its answer at once, and must not begin a long step.
            patience_s = min(_ANSWER_S, _PATIENT * report.busy_s / max(report.steps, 1))
        return report.busy_s < _FIRST_ROUND_S and not client.is_answered(patience_s)

    def is_over(self, steps: int, elapsed_s: float, planned: int) -> bool:
        """Whether local steps end here: by number, by time, or because the server says so."""
        if self._client is not None and steps and self._client.is_stopped():
            return True
        if self.assigned is None:
            return steps >= planned
        return self.assigned.is_over(steps, elapsed_s)

    def close(self) -> None:
        """Hears no more of this `fit`."""
        if self._client is not None:
            self._client.close()


class Asked:
    """The paper's rule, as one worker follows it: a question before every step."""

    def __init__(self, address: str, identity: Tls | None, rank: int, epsilon: float) -> None:
        """A worker that has not asked yet.

        Args:
            address: of the state server, `host:port`, with or without `http://`, or after
                `https://`.
            identity: certificate of the party, for `https://`.
            rank: number of this worker among all.
            epsilon: the rule's margin in seconds.

        Raises:
            ConfigError: the address is none, or there is no certificate for it.
        """
        is_secret = address.startswith(_HTTPS)
        if is_secret and identity is None:
            raise ConfigError(
                "A state server with TLS wants the certificate of a party, which an `uplink` has. "
                f"Received: {address!r} without one"
            )
        self._client = StateClient(
            address.removeprefix(_HTTPS).removeprefix(_HTTP).rstrip("/"),
            rank,
            identity if is_secret else None,
            clock=wall_clock,
        )
        self._rank = rank
        self._epsilon = epsilon
        self._last_s = 0.0

    def init(self, num_workers: int) -> None:
        """Begins a table; rank 0 does, before anybody asks."""
        if self._rank == 0:
            self._client.init(num_workers, self._epsilon)

    def begin(self, number: int) -> None:
        """This worker has the model of round `number`, and asks for its first step."""
        if number:
            self._client.reset(number + 1)
        self._client.apply(0, self._last_s)

    def is_ready(self, steps: int, last_s: float) -> bool:
        """Whether to aggregate after so many steps, the last of which took so many seconds."""
        self._last_s = last_s
        return self._client.apply(steps, last_s)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
