# SPDX-License-Identifier: Apache-2.0
"""The calls of gathers: each child delivers its payload, and waits for those of all.

With a server above, theirs go up together, and what comes down from there is the answer (`answer`).
Part of a session, and under its lock. The payloads are kept by `gather`.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from tf_hips.errors import ProtocolError
from tf_hips.ps.rounds.gather import Upload
from tf_hips.ps.session.ahead import Ahead
from tf_hips.ps.session.closing import Closing
from tf_hips.ps.session.comeback import Comeback
from tf_hips.ps.session.members import Caller, Child
from tf_hips.ps.session.moves import GATHER, Moves
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Wait, Waiting
from tf_hips.ps.terms import tree
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.transport import wire


class Gathering:
    """The gathers of one run, as its children call for them."""

    def __init__(
        self,
        state: State,
        ahead: Ahead,
        waiting: Waiting,
        comeback: Comeback,
        check: Callable[[Caller], Child],
        check_there: Callable[[str, Iterable[int]], None],
        moves: Moves,
        closing: Closing | None = None,
    ) -> None:
        """No call has come.

        Args:
            state: of the run.
            ahead: knows whether a child is further than what was restored.
            waiting: the session's waiting calls.
            comeback: knows what children that have come back may do.
            check: called first by each call, with the lock held; raises if the caller may not.
            check_there: gets what is waited for, and for whom; raises if one of them has left.
            moves: whether anything goes on in the session.
            closing: closes gathers without some children; None: they wait for all.
        """
        self.changed = state.changed
        self._ahead = ahead
        self._gathers = state.gathers
        self._members = state.members
        self._recorder = state.recorder
        self._waiting = waiting
        self._comeback = comeback
        self._joined = check
        self._check_there = check_there
        self._moves = moves
        self._closing = closing

    def begin(self, caller: Caller, number: int) -> Upload:
        """What takes in the caller's payload for gather `number`.

        Raises:
            ProtocolError: it is not the gather's turn.
            StateError: the session was restored from a state that is older than the run.
        """
        with self.changed:
            self._joined(caller)
            return self._ahead.taken(
                caller.child, lambda: self._gathers.begin(caller.child, number)
            )

    def has_payload(self, caller: Caller, number: int) -> bool:
        """Whether the caller need not send its payload for gather `number` again.

        Where the gather was closed without it, it must: what it is now decides what it hears.
        """
        with self.changed:
            is_absent = self._gathers.is_absent(caller.child, number)
            return self._gathers.has(caller.child, number) and not is_absent

    def wait(
        self, caller: Caller, number: int, upload: Upload, have: Iterable[int] = ()
    ) -> list[tuple[int, wire.Buffer]] | None:
        """Delivers the caller's payload, and waits for those of all others.

        Args:
            caller: the call.
            number: the gather.
            upload: what came in; nothing, if the payload came before.
            have: leaves whose payloads the caller has.

        Returns:
            Pairs of leaf and payload, in their order, but those in `have` and empty ones. None
            where some are missing and something goes on: the child should hear so, and the call be
            made again.

        Raises:
            ProtocolError: what came is no payload, or not the one that came before; or the children
                gather different things, which ends the run for all, or with a quorum for those that
                gather something else than most.
            PeerError: a child has left, or did not come in time.
        """
        with self.changed:
            gathers = self._gathers
            self._joined(caller)
            try:
                came = upload.finish()
            finally:
                gathers.end(caller.child, upload)
            if came is not None:
                label, payload = came
                child = self._members.children[caller.child]
                if child.num_returns > 0:
                    self._comeback.check_gather(caller, number, label)
                if gathers.is_absent(caller.child, number):
                    if label != gathers.agreed(number):
                        raise self._differs(caller, number, label)
                elif self._closing is None or not self._closing.has_begun:
                    whats = {**self._whats(number), caller.child: _gather(number, label)}
                    if len(set(whats.values())) > 1:
                        self._waiting.end_differing(whats)
                is_again = child.num_returns > 0
                if is_again and number < gathers.newest:
                    self._moves.done_again(
                        caller.child, GATHER, child.num_returns, number, gathers.newest
                    )
                if gathers.deliver(caller.child, number, label, payload, is_again=is_again):
                    self._recorder.add(
                        Kind.GATHERED, payload, child=caller.child, number=number, label=label
                    )
                self.changed.notify_all()
            elif not gathers.has(caller.child, number):
                raise ProtocolError("A gather has one packet of each site. Received: none")
            if self._closing is not None and not gathers.is_closed(number):
                # Whether it has brought something or not: a server that was killed may have kept
                # what came, and not what was decided then.
                self._waiting.settle(self._whats(number))
                self._closing.look_at_gather()
            label = gathers.labels(number).get(caller.child, "")

            moved, began = self._moves.count, time.monotonic()

            def is_ready() -> bool:
                if gathers.is_over(number) or self._moves.tells(moved, began):
                    return True
                self._check_there(_gather(number, label), needs())
                return False

            def needs() -> list[int]:
                missing = gathers.missing(number)
                return sorted(missing) if self._closing is None else self._closing.needed(missing)

            self._waiting.until(
                caller,
                Wait(
                    _gather(number, label),
                    is_ready,
                    lambda: (
                        f"these have not sent their values of `{label}`: "
                        + (
                            self._members.names(gathers.missing(number))
                            or "none here; the server above has not answered"
                        )
                    ),
                    needs,
                    lambda: self._moves.count + int(not gathers.missing(number)),
                ),
            )
            said = label if came is None else came[0]
            is_odd = said not in ("", gathers.agreed(number))
            if is_odd and gathers.is_absent(caller.child, number):
                raise self._differs(caller, number, said)
            return gathers.answer(number, have) if gathers.is_over(number) else None

    def _whats(self, number: int) -> dict[int, str]:
        """What each child waits in that has come to gather `number`."""
        labels = self._gathers.labels(number)
        return {child: _gather(number, label) for child, label in labels.items()}

    def _differs(self, caller: Caller, number: int, label: str) -> ProtocolError:
        return ProtocolError(
            f"Exact value {number} was closed without site `{self._members.site(caller.child)}`, "
            f"as `{self._gathers.agreed(number)}`. Received: `{label}`; all parties must take the "
            "same steps"
        )

    def answer(self, number: int, payloads: Sequence[bytes | None]) -> None:
        """Takes the payloads of all leaves of the tree from the server above."""
        with self.changed:
            self._gathers.take_answer(number, payloads)
            data = tree.bundle(payloads) if self._recorder.is_keeping else b""
            self._recorder.add(Kind.ANSWERED, data, number=number, count=len(payloads))
            self.changed.notify_all()


def _gather(number: int, label: str) -> str:
    return f"exact value {number} (`{label}`)"
