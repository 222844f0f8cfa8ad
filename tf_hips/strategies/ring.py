# SPDX-License-Identifier: Apache-2.0
"""`CompressedRing`: one party, no server; gradients are summed by compressed collectives."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tf_hips import config as configuration
from tf_hips.comm import primitives
from tf_hips.comm.plan import Plan
from tf_hips.comm.robust_sum import Tell, TellChosen
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import Compressor
from tf_hips.robust import Aggregator
from tf_hips.strategies.chosen import chosen_compression
from tf_hips.strategies.gradients import Gradient, Summing
from tf_hips.strategies.in_party import InParty
from tf_hips.strategies.party import PartyStrategy
from tf_hips.strategies.refusals import Refusals
from tf_hips.strategies.robust_party import RobustParty, chosen_aggregator


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

    With `robust=` a rule of `tf_hips.robust` stands in place of the mean, so that ranks whose
    gradients are wrong, in whatever way, do not decide: docs/robustness.md says what that protects
    from, and what not. It takes `ps` (the default) or `allgather`.

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
        *,
        nonfinite: str = "raise",
        config: configuration.Run | None = None,
        plan: Plan | str | Path | None = None,
        topology: str | None = None,
        comp_threshold: int = 0,
        robust: Aggregator | str | None = None,
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
            robust: a rule in place of the mean of the ranks, such as `tf_hips.robust.median()`, or
                its text; without `plan` and `comp_threshold`. None takes what the run's
                configuration names (`tf-hips party --rule`).

        Raises:
            ValueError: an argument is unknown, or a plan came with what it decides; or the rule
                cannot have rows that are encoded so.
            ToleranceError: the rule needs more ranks; a `ValueError`, too.
            ConfigError: the run has a server and other parties, which this strategy never meets;
                its configuration names another compression or rule; or the file is no plan.
        """
        run = config if config is not None else configuration.current()
        if run.uplink is not None:  # each party would train a model of its own
            raise ConfigError(
                "CompressedRing must run in one party, without a server: use HierarchicalPS, or "
                "`tf-hips run --parties 1` without --server, --servers, --intra ps, --compression, "
                "--rule, --approach, --deadline and --max-restarts, each of which starts one "
                "(`tf-hips party -np N` takes --compression and --rule and starts none). Received: "
                f"party `{run.uplink.site}` of the server {run.uplink.server}"
            )
        chosen = chosen_compression(compression, run)
        rule = chosen_aggregator(robust, run)
        if rule is None:
            self._in_party = InParty(chosen, plan, topology, comp_threshold)
        else:
            primitives.init()  # what a rule needs depends on how many ranks there are
            self._in_party = RobustParty(
                rule,
                chosen,
                topology,
                has_plan=plan is not None,
                comp_threshold=comp_threshold,
                tell=self._refusals,
            )
        self.is_robust = rule is not None
        super().__init__(nonfinite, run)

    def _codecs(self) -> dict[str, Compressor | None]:
        return self._in_party.codecs()

    def _way_facts(self) -> dict[str, Any]:
        return self._in_party.facts()

    def _make_summing(self, gradients: Sequence[Gradient], label: str) -> Summing:
        return self._in_party.summing(
            gradients,
            label,
            seed=self.config.seed,
            worker=self.global_rank,
            make_variable=self.make_variable,
            complain=self._complaint(gradients),
            nonfinite=self._nonfinite,
            keeper=self._state,
        )

    def _refusals(self, rule: Aggregator, gradients: Sequence[Gradient]) -> tuple[Tell, TellChosen]:
        told = Refusals(gradients, rule, primitives.rank(), self.write_event)
        return self.failures.kept(told), told.chosen

    def _party_summing(self, tensors: Sequence[Gradient], label: str) -> Summing:
        if self.is_robust:  # weighted by samples, or control variates: no rows of one kind
            raise ConfigError(
                "`robust` must be left out under a loop of tf_hips.loops, which sums weighted "
                f"movements and not gradients: see docs/robust-ranks.md. Received: {label}"
            )
        return super()._party_summing(tensors, label)

    def _sparse_gradients(
        self, values: Sequence[Any], gradients: Sequence[Gradient]
    ) -> tuple[Collection[int], Collection[int]]:
        if self.is_robust:
            return (), ()  # what stays sparse is summed, past the rule
        return super()._sparse_gradients(values, gradients)
