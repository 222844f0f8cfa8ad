# SPDX-License-Identifier: Apache-2.0
"""Children that are further than a session which was restored.

Nobody is told what is not durable, so the state that it was restored from is older than the run: a
copy, or a disk that has lost what it had synced. Part of a session, and under its lock.

Where others go on without a child (a quorum, asynchronous rounds) one that lies must not end the
run by that for all: most children have to be ahead, and until then each is refused alone. Elsewhere
one that leaves ends the run anyway.
"""

from collections.abc import Callable
from typing import TypeVar

from tf_hips import log
from tf_hips.errors import StateError
from tf_hips.ps.session.members import Members
from tf_hips.ps.terms.recorder import AheadError, Recorder

_Made = TypeVar("_Made")


class Ahead:
    """Tells an older state from a child that takes a wrong turn."""

    def __init__(
        self, members: Members, recorder: Recorder, bears_losses: Callable[[], bool]
    ) -> None:
        """No child has called.

        Args:
            members: of the run.
            recorder: knows whether the session was restored, and from what.
            bears_losses: whether others go on without a child.
        """
        self._members = members
        self._recorder = recorder
        self._bears_losses = bears_losses
        self._here: set[int] = set()  # children that have taken a right turn since
        self._ahead: set[int] = set()  # children that have not, and were further

    def taken(self, child: int, turn: Callable[[], _Made]) -> _Made:
        """What `turn` makes, the beginning of a gather or of a round of `child`.

        Raises:
            ProtocolError: it is not its turn.
            StateError: the state is older than the run, which ends with that; nothing more is kept.
        """
        made = self.checked(child, turn)
        self._here.add(child)
        self._ahead.discard(child)
        return made

    def checked(self, child: int, check: Callable[[], _Made]) -> _Made:
        """What `check` makes, which is no turn yet: whether `child` can come back to a round.

        Raises:
            ProtocolError: it cannot.
            StateError: as for `taken`.
        """
        try:
            return check()
        except AheadError as error:
            state = None if child in self._here else self._recorder.restored_from
            if state is None:
                raise
            text = (
                f"Site `{self._members.site(child)}` is in {error.what}, and the state in {state} "
                f"ends at {error.end}"
            )
            is_first = child not in self._ahead
            self._ahead.add(child)
            if self._bears_losses() and 2 * len(self._ahead) <= len(self._members.children):
                if is_first:
                    log.warning("%s. Where most sites say so, the state is older.", text)
                raise
            text += (
                ": it is older than the run (a restored copy, or a disk that lost what it had "
                "synced). Put the newest state there and start again; or remove it, and all sites "
                "begin anew from their backups."
            )
            self._recorder.disown(text)
            raise StateError(text) from error
