# SPDX-License-Identifier: Apache-2.0
"""A strategy whose parties may vote in groups; see `groups`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_hips import log
from tf_hips.errors import ProtocolError
from tf_hips.ops.compressor import Compressor
from tf_hips.ps.client.seat import SeatClient
from tf_hips.ps.client.shards import Connection
from tf_hips.ps.client.welcome import Welcome
from tf_hips.strategies.alike import replica_facts
from tf_hips.strategies.groups import Groups, check_steps
from tf_hips.strategies.party import PartyStrategy
from tf_hips.strategies.replicas import on_rank_0


class GroupedStrategy(PartyStrategy):
    """What of a strategy depends on the group that its party sits in; without votes nothing."""

    round_step: tf.Variable | None = None  # the next round, once a list of gradients has rounds

    def noise_group(self) -> tuple[int, int]:
        """Which group of workers this one shares the noise of its model with, and of how many.

        Where workers sit in other groups in every round, all of them have the same.
        """
        return (0, 1) if self.seats is not None else self.sample_group()

    def sampling_seed(self, step: Any = None) -> tf.Tensor:
        """The seed of this worker's group in a step, int64: for noise that a group has in common.

        Equal at all members of the group, other in each group and step.

        Args:
            step: the number of the step, as the server counts; None: the next one's.

        Raises:
            ProtocolError: parties do not vote in groups, or a loop counts local steps.
        """
        if self.groups is None:
            return super().sampling_seed(step)
        if self.loan is not None:
            raise ProtocolError(
                "Seeds of groups are of steps that are rounds. Received: a strategy that serves a "
                "loop, whose rounds have local steps"
            )
        if step is None:
            made = self.round_step
            step = tf.constant(self.groups.first, tf.int64) if made is None else made.read_value()
        return self.groups.sampling_seed(step)

    def _sit_down(self, welcome: Welcome | None, connected: Callable[[], Connection]) -> None:
        """Where parties vote in groups, finds this one's, and says what decides on its bits."""
        votes = None if welcome is None else welcome.voting
        if votes is None or welcome is None:
            return

        def ask(number: int) -> int:
            return SeatClient(connected()).seat(number).group

        def say(facts: str) -> None:
            differs = SeatClient(connected()).say_replica(facts)
            if differs is not None:
                log.warning("%s. Votes are tolerant, so the run goes on.", differs)

        # Where this raises, whoever has joined leaves as it may: others wait for it.
        self.groups = Groups(votes, welcome, self.config.seed, self.failures.kept(ask))
        facts = replica_facts()
        on_rank_0(lambda: say(facts))

    def _codec_seed(self, up: Compressor) -> int | Callable[[tf.Tensor], tf.Tensor]:
        """The seed of this party's packets, or what says it for a round where a group shares it."""
        if self.groups is not None and not up.draws_alike:
            return self.groups.sampling_seed
        site = self.config.uplink.site if self.config.uplink else ""
        return up.encoder_seed(self.config.seed, f"party/{site}")

    def _open_round(self, number: int) -> None:
        """Round `number` is the next one."""
        if self.groups is not None:
            self.groups.open(number)

    def _check_rounds(self, optimizer: Any) -> None:
        """Raises ConfigError if an optimizer would take steps that are no rounds."""
        if self.seats is not None:
            check_steps(optimizer)
