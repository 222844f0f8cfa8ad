# SPDX-License-Identifier: Apache-2.0
"""What a strategy does otherwise where its party votes in a group of others (docs/detox.md).

    group           whose batch this party computes: the same for ever, or drawn for each round
    batches         of the group, not of the worker (`shard`)
    noise           of a codec comes from the group and the step, so that equal gradients become
                    equal packets; of the model it is the same at all workers, or the group's
    replicas        say before the first round what decides on their bits

Groups that are drawn are told one round at a time, when the round before it is over.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.data.seats import Seats
from tf_hips.errors import ConfigError
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.rules.votes import Votes
from tf_hips.robust import detox


class Groups:
    """Where this worker sits.

    Attributes:
        votes: how parties vote.
        count: how many groups of workers with batches of their own there are in the whole tree.
        seats: in which group this worker sits in each round; None: always in `fixed`.
        fixed: the first such group of its party, which always sits in one; None: they are drawn.
        first: the first round.
    """

    def __init__(
        self, votes: Votes, welcome: Welcome, seed: int, ask: Callable[[int], int]
    ) -> None:
        """The groups of a run that has been joined.

        Args:
            votes: how parties vote.
            welcome: what the server has said.
            seed: of the run.
            ask: the group of a round, from the server; on rank 0.

        Raises:
            ConfigError: groups change, and the party has several workers.
        """
        workers = welcome.workers[welcome.child]
        self.votes = votes
        self.count = welcome.groups
        self.first = welcome.round
        self._seed = seed
        self.seats: Seats | None = None
        self.fixed: int | None = None
        if votes.fixed:
            self.fixed = welcome.first_group
        elif workers > 1:
            raise ConfigError(
                "Parties of several workers can vote in groups that stay (`fixed=True`): of groups "
                f"that are drawn only one worker would hear. Received: {workers} workers in "
                f"party {welcome.parties[welcome.child]}"
            )
        else:
            self.seats = Seats(self.count, ask, welcome.round)

    def open(self, number: int) -> None:
        """Round `number` is the next one."""
        if self.seats is not None:
            self.seats.open(number)

    def seed_of(self, number: int) -> int:
        """The seed of this worker's group in a round, in [0, 2^64)."""
        group = self.fixed if self.seats is None else self.seats.group(number)
        return detox.sampling_seed(self._seed, number, int(group or 0))

    def sampling_seed(self, step: tf.Tensor) -> tf.Tensor:
        """The same as an int64 scalar with the same bits, in a graph or outside."""

        def seed(number: np.int64) -> np.int64:
            value = self.seed_of(int(number))
            return np.int64(value - (value >> 63 << 64))

        if tf.executing_eagerly():
            return tf.constant(seed(np.int64(step)), tf.int64)
        return tf.ensure_shape(tf.numpy_function(seed, [step], tf.int64), [])


def check_steps(optimizer: Any) -> None:
    """Looks whether an optimizer has a round in each step, as groups that change must.

    Raises:
        ConfigError: some steps would have none.
    """
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    if accumulates or hasattr(optimizer, "inner_optimizer"):
        what = (
            f"gradient_accumulation_steps={accumulates}"
            if accumulates
            else type(optimizer).__name__
        )
        raise ConfigError(
            "Where groups change from round to round, each step must be a round, or a local step "
            "of one: without accumulation of gradients, and without a scale of the loss. "
            f"Received: {what}"
        )
