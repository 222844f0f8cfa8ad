# SPDX-License-Identifier: Apache-2.0
"""The workers that run one `fit` together, as a callback sees them.

Every method is called by all of them, in the same order. What fails on one is raised on all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tf_hips.callbacks import optimizers
from tf_hips.callbacks.party import Backups, Party
from tf_hips.comm import primitives
from tf_hips.errors import PeerError


class Peers:
    """Workers of one model: the ranks of a party, or one process alone."""

    def __init__(self, model: keras.Model) -> None:
        """Sees who trains `model`.

        Args:
            model: a Keras model, under a strategy of tf_hips or not.
        """
        strategy = model.distribute_strategy
        # Without a strategy of ours every process trains on its own, under whatever launcher.
        self.strategy = strategy if isinstance(strategy, Party) else None
        self.rank = primitives.rank() if self.strategy is not None else 0
        self.size = primitives.size() if self.strategy is not None else 1
        uplink = None if self.strategy is None else self.strategy.config.uplink
        # This party's name, where there are several.
        self.site: str | None = None if uplink is None else uplink.site

    @property
    def backups(self) -> Backups | None:
        """How this party comes back to a run that goes on; None: no server waits for it."""
        return None if self.strategy is None else self.strategy.backups

    @property
    def cuts_executions(self) -> bool:
        """Whether executions may be shorter than `steps_per_execution`, as a loop cuts them."""
        return self.strategy is not None and self.strategy.loan is not None

    def steps_made(self, optimizer: Any) -> int:
        """Training steps that an optimizer of the model has counted.

        Also those before a loop has let its slots begin anew, and what counts them.
        """
        loan = None if self.strategy is None else self.strategy.loan
        forgotten = 0 if loan is None else loan.forgotten_steps(optimizer)
        return int(optimizers.counter(optimizer).numpy()) + forgotten

    def gather(self, value: Any) -> list[Any]:
        """JSON values of all ranks of the party, in rank order."""
        if self.strategy is None:
            return [value]
        return primitives.gather_objects(value, "what BackupAndRestore does")

    def gather_from_all(self, value: Any, label: str) -> list[Any]:
        """JSON values of all workers of all parties, but of those that are absent."""
        if self.strategy is None:
            return [value]
        everyone = self.strategy.gather_objects(value, label)
        return [one for one in everyone if one is not None]

    def settle(self, variables: Sequence[Any], what: str, *, in_party: bool) -> str:
        """Compares `variables`, and makes equal what differs by rounding alone.

        Args:
            variables: in an order that all have.
            what: they are, for messages, the same on all.
            in_party: whether only the ranks of this party meet.

        Returns:
            Which of whom is not that of whom; "" where nothing differs.
        """
        if self.strategy is None:
            return ""
        return self.strategy.settle(variables, what, in_party=in_party)

    @property
    def has_rounds(self) -> bool:
        """Whether parties train apart in the rounds of a loop, and meet in between."""
        loan = None if self.strategy is None else self.strategy.loan
        return loan is not None and loan.has_server and loan.keeps_step

    @property
    def has_equal_steps(self) -> bool:
        """Whether all parties make equally many steps, however many an epoch of each has."""
        loan = None if self.strategy is None else self.strategy.loan
        return loan is not None and loan.has_equal_steps

    def gather_from_whole_run(self, value: Any, label: str) -> list[Any]:
        """JSON values of all workers of all parties, also where a loop keeps these apart."""
        if self.strategy is None or self.strategy.loan is None:
            return self.gather_from_all(value, label)
        with self.strategy.loan.whole():
            return self.gather_from_all(value, label)

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on all ranks; returns their JSON values when all are done.

        Raises:
            Exception: what `action` raised here, or a `PeerError` about what it raised elsewhere.
        """
        value, error = None, None
        try:
            value = action()
        except Exception as raised:  # noqa: BLE001 - raised again, when the others know
            error = raised
        told = None if error is None else f"{type(error).__name__}: {error}"
        everyone = self.gather([told, value])
        if error is not None:
            raise error
        failed = {rank: told for rank, (told, _) in enumerate(everyone) if told is not None}
        if failed:
            first = next(iter(failed))
            others = ", ".join(str(rank) for rank in failed if rank != first)
            more = f" So did {others}." if others else ""
            raise PeerError(f"Rank {first} failed.{more} {failed[first]}")
        return [value for _, value in everyone]

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0 only; returns its JSON value on all ranks.

        Raises:
            Exception: as in `together`.
        """
        return self.together(lambda: action() if self.rank == 0 else None)[0]
