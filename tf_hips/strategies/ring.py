# SPDX-License-Identifier: Apache-2.0
"""`CompressedRing`: one party, no server; gradients are summed by compressed collectives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_hips import config as configuration
from tf_hips.comm.plan import Plan
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import Compressor
from tf_hips.strategies.gradients import Gradient, Summing
from tf_hips.strategies.in_party import InParty
from tf_hips.strategies.party import PartyStrategy, chosen_compression


class CompressedRing(PartyStrategy):
    """Data-parallel training over the ranks of one Horovod job, with compressed gradients.

    Gradients travel in buckets, while the backward pass goes on, and one bucket is encoded while
    another travels. Which way packets take is the `topology`:

        ps         to the owner of each chunk, which merges and encodes again, and to everyone; two
                   collectives, the default of more than two ranks
        allgather  every packet to everyone, encoded once; half of the codecs' work, but N - 1
                   packets come in with N ranks; the default of two
        ring, butterfly, blocks
                   hop by hop to the owner, with an encoding at each hop; `butterfly` takes a power
                   of two of ranks, `blocks` (binary blocks) any number
        hierarchical
                   exact sums inside each machine, `ps` between machines
        hierarchical_fp16
                   the same, and gradients are sent as float16 inside each machine

    Start one process per worker with `horovodrun` or `tf-hips run --parties 1`; without a launcher
    it is one worker, and training is bit for bit what plain Keras does.

        strategy = tf_hips.CompressedRing(compression="error_feedback(onebit)")
        with strategy.scope():
            model = ...; model.compile(...)
        model.fit(dataset)
    """

    def __init__(
        self,
        compression: Compressor | str | None = None,
        nonfinite: str = "raise",
        config: configuration.Run | None = None,
        *,
        plan: Plan | str | Path | None = None,
        topology: str | None = None,
        comp_threshold: int = 0,
    ) -> None:
        """Starts Horovod.

        Args:
            compression: how gradients are encoded, as a value or its text; None takes what the
                run's configuration names, and sums them as they are if it names nothing.
            nonfinite: what to do about NaN and infinities in gradients: "raise" a `NonFiniteError`,
                replace them by "zero", or "propagate" them.
            config: what this process is told about its run; None reads `TF_HIPS_CONFIG`.
            plan: instead of one compression, what is done with each gradient: the file that
                `tf-hips plan` wrote, its value, or "auto": measured in some seconds before the
                first step, and kept for the next run.
            topology: which way packets take; None chooses by the number of ranks.
            comp_threshold: gradients of fewer elements are summed exactly.

        Raises:
            ValueError: an argument is unknown, or a plan came with what it decides.
            ConfigError: the run has a server and other parties, which this strategy never meets;
                its configuration names another compression; or the file is no plan.
        """
        run = config if config is not None else configuration.current()
        if run.uplink is not None:  # each party would train a model of its own
            raise ConfigError(
                "CompressedRing must run in one party, without a server: use HierarchicalPS, or "
                f"`tf-hips run --parties 1`. Received: party `{run.uplink.site}` of the server "
                f"{run.uplink.server}"
            )
        self._in_party = InParty(
            chosen_compression(compression, run), plan, topology, comp_threshold
        )
        super().__init__(nonfinite, run)

    def _codecs(self) -> dict[str, Compressor | None]:
        return self._in_party.codecs()

    def _way_facts(self) -> dict[str, Any]:
        return self._in_party.facts()

    def _make_summing(self, gradients: Sequence[Gradient], label: str) -> Summing:
        return self._in_party.summing(
            gradients,
            label,
            seed=self._run.seed,
            worker=self.global_rank,
            make_variable=self._make_variable,
            complain=self._complaint(gradients),
        )
