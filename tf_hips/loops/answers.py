# SPDX-License-Identifier: Apache-2.0
"""What the engine asks a loop, and the answers of one that decides nothing itself."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_hips.comm.compressed import MakeVariable
from tf_hips.loops.meeting import Meeting, Word
from tf_hips.strategies.gradients import Gradient


class Answers:
    """Derived classes say other things; see the head of `engine`."""

    def plan(self, round_number: int) -> int | None:
        """Local steps of this worker in a round; None: `is_enough` says when it ends."""
        del round_number
        return None

    def note_steps(self) -> None:
        """Called after each execution, before the loop may meet and callbacks change anything."""

    def is_enough_at_epoch_end(self) -> bool:
        """Whether the local phase ends with an epoch; asked before its validation."""
        return False

    def drawn(self, round_number: int) -> frozenset[int] | None:
        """The members that send in a round, the same on all; None: all do.

        One that does not takes what comes down.
        """
        del round_number
        return None

    def why_not_voted(self) -> str | None:
        """Why groups cannot vote on what members send: equal batches do not make equal bytes.

        None: they can.
        """
        return (
            "members of this loop make other numbers of steps, or send a part at a time; FedAvg "
            f"with fixed local steps can be voted on. Received: {type(self).__name__}"
        )

    def steps_of_round(self) -> int | None:
        """Local steps between two exchanges of the parties; None: not always as many."""
        return None

    def has_equal_steps(self) -> bool:
        """Whether all members make equally many steps in a round, however much data each has.

        Then a member that takes up another one's backup has made as many steps, too.
        """
        return False

    def words(self) -> dict[str, Any]:
        """What this worker says in a meeting beside `Told`: JSON values by name."""
        return {}

    def vocabulary(self) -> dict[str, Word]:
        """What `words` may say, by name: all members say all of it, and nothing else."""
        return {}

    def hear(self, meeting: Meeting) -> None:
        """Called with what all have said, before anything is exchanged."""

    def more(self, trained: Sequence[Gradient]) -> list[Gradient]:
        """Tensors that are exchanged beside those that are trained."""
        del trained
        return []

    def outgoing(
        self, moved: list[tf.Tensor], meeting: Meeting, place: tuple[int, int]
    ) -> list[tf.Tensor]:
        """What goes up, in the order of the trained tensors and `more`.

        Args:
            moved: w_before - w_now of this member.
            meeting: what all have said.
            place: party and number of this worker in there.
        """
        del meeting, place
        return moved

    def incoming(
        self, received: list[tf.Tensor], meeting: Meeting, place: tuple[int, int]
    ) -> list[tf.Tensor]:
        """What the trained tensors lose, of what has come down for all of them and `more`."""
        del meeting, place
        return received

    def make_state(self, make: MakeVariable) -> None:
        """Makes variables of the loop's own; called once, when weights are equal.

        Args:
            make: makes a variable of a value and a name.
        """

    def check_taking(self) -> None:
        """Looks whether the run can bear that another party's backup is taken here.

        Raises:
            ConfigError: it would train wrongly from there on.
        """

    def forget_own(self) -> None:
        """What `make_state` has made holds another party's values: its own ones begin anew."""
