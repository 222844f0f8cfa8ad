# SPDX-License-Identifier: Apache-2.0
"""`HFA`: workers meet in their party after some local steps, and parties more rarely.

GeoMX's hierarchical frequency aggregation, HierFAVG (Liu et al., 2020).
"""

from typing import Any

import keras

from tf_hips.errors import ConfigError
from tf_hips.loops import checked
from tf_hips.loops.engine import Loop
from tf_hips.loops.meeting import UNIFORM
from tf_hips.ps.rules import UpdateRule
from tf_hips.strategies.loan import WORKER
from tf_hips.strategies.party import PartyStrategy


class HFA(Loop):
    """Local steps of each worker, then a mean in the party; every few of these, one over parties.

        HFA(model, strategy, local_steps=20, party_rounds=10)

    sends a 200th of what gradients of each step would. Equal weights of workers and of parties are
    GeoMX' own; slots of the optimizer stay with their worker.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: PartyStrategy,
        *,
        local_steps: int,
        party_rounds: int,
        server_optimizer: UpdateRule | str | None = None,
        weighting: str = UNIFORM,
        reset_optimizer: bool = False,
    ) -> None:
        """Takes the uplink of the strategy; before the first step of the model.

        Args:
            model: built and compiled in the scope of `strategy`.
            strategy: `HierarchicalPS` with a server.
            local_steps: steps between two meetings of a party's workers: K1.
            party_rounds: meetings of the workers for one of the parties: K2.
            server_optimizer: as for `FedAvg`, of the mean over the parties.
            weighting: what counts in both means: "uniform", "samples" or "workers".
            reset_optimizer: whether slots of the optimizer begin anew in each round.

        Raises:
            ValueError, TypeError: an argument is out of range, or no integer.
            ConfigError: there is no server, or it has another rule.
            ProtocolError: the strategy has trained already, or serves another loop.
        """
        local_steps = checked.whole("local_steps", local_steps)
        party_rounds = checked.whole("party_rounds", party_rounds)
        if not strategy.has_server:
            raise ConfigError(
                "HFA is for parties with a server above them; in one group of workers use FedAvg. "
                "Received: a strategy without an uplink"
            )
        if strategy.above is not None:
            raise ConfigError(
                "HFA is for parties whose workers meet by Horovod; those of a party's server "
                '(`intra="ps"`) meet there in every round. Received: intra="ps"'
            )
        self._local_steps = local_steps
        super().__init__(
            model,
            strategy,
            level=WORKER,
            server_optimizer=server_optimizer,
            weighting=weighting,
            party_rounds=party_rounds,
            reset_optimizer=reset_optimizer,
        )

    def plan(self, round_number: int) -> int | None:
        """The steps that were asked for."""
        del round_number
        return self._local_steps

    def has_equal_steps(self) -> bool:
        """All make the steps that were asked for."""
        return True

    def why_not_voted(self) -> str | None:
        """None: steps and meetings are as many for all, so groups can vote."""
        return None

    def facts(self) -> dict[str, Any]:
        """What must be equal where a backup is taken up."""
        return {**super().facts(), "`local_steps`": self._local_steps}
