# SPDX-License-Identifier: Apache-2.0
"""What callbacks ask of a strategy of tf_hips, whose modules are above them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tf_hips.config import Run
from tf_hips.ps.transport.parcel import Intake


class Lent(Protocol):
    """The uplink of a strategy in the hands of a loop."""

    @property
    def has_server(self) -> bool:
        """Whether there is a server above the party."""

    @property
    def keeps_step(self) -> bool:
        """Whether those who exchange with a server wait for each other."""

    @property
    def is_over(self) -> bool:
        """Whether all have met for the last time in this `fit`."""

    @property
    def has_equal_steps(self) -> bool:
        """Whether members make equally many steps in a round, however many an epoch of each has."""

    def forgotten_steps(self, optimizer: Any) -> int:
        """Steps of an optimizer that it counts no longer, as the loop let its slots begin anew."""

    def whole(self) -> AbstractContextManager[None]:
        """While all replicas meet: the strategy reduces and gathers over all of them."""


class Backups(Protocol):
    """How a party whose server waits for it comes back to a run that goes on."""

    def place(self) -> dict[str, Any] | None:
        """Where this run is, as JSON values: what a backup needs so that `come_back` may follow.

        None where there was no round yet.
        """

    def note(self, place: dict[str, Any]) -> None:
        """Called on rank 0 when a backup of `place` is whole."""

    def can_come_back(self, place: dict[str, Any] | None) -> bool:
        """Whether the run that goes on without this process is the one that `place` is of."""

    def come_back(self, place: dict[str, Any]) -> None:
        """Takes part in the run again, from `place` on; called on all ranks."""

    def is_lacking(self) -> bool:
        """Whether a run goes on without this process, and only a backup of it leads there.

        Else there is none, or all its rounds can be done again.
        """

    def fetch(self, intake: Intake) -> None:
        """Fetches another party's newest backup of this run; called on rank 0."""

    def offer(self, newest: Callable[[], Path]) -> None:
        """From now on gives `newest`, a folder, to parties that have lost theirs.

        Called on rank 0; `newest` is called by another thread, and may raise an OSError.
        """

    def when_left(self, action: Callable[[], None]) -> None:
        """Calls `action` when this process has left the run in peace, and comes back no more.

        Called on rank 0. Where the process ends otherwise, or the run has, it is never called.
        """


@runtime_checkable
class Party(Protocol):
    """A strategy of tf_hips: all of them derive from this, and no other does.

    Attributes:
        config: what this process is told about its run.
    """

    config: Run

    @property
    def loan(self) -> Lent | None:
        """While a loop decides when replicas meet."""

    @property
    def backups(self) -> Backups | None:
        """None where no server waits for a party that was killed."""

    @property
    def state(self) -> Any:
        """Residuals and numbers of steps of this worker."""

    def may_write(self) -> bool:
        """Whether this process is the one that saves models: rank 0 of a party that does."""

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """JSON values of all workers of all parties, by global rank, on all of them. Eager.

        None where a party is absent: a server with a quorum has gone on without it. That may be
        this one; all parties hear the same.

        Args:
            value: this worker's.
            label: what it is, for messages.
        """

    def settle(self, variables: Sequence[Any], what: str, *, in_party: bool) -> str:
        """Makes equal what differs by rounding alone; says what differs by more, "" for nothing.

        Eager; called by all workers that gather now, or by all ranks of this party.

        Args:
            variables: in an order that all have.
            what: they are, for messages, the same on all.
            in_party: whether only the ranks of this party call it.
        """
