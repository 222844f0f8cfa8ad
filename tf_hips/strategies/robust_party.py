# SPDX-License-Identifier: Apache-2.0
"""How a robust rule aggregates the gradients of the ranks of a party.

Keras divides gradients by the number of ranks, for their sum. A rule is of what ranks have found,
not of a share of it: so what it makes of shares is multiplied by that number, and is then in the
place of the mean.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tf_hips import config, log, robust
from tf_hips.comm import primitives
from tf_hips.comm.compressed import Complain, MakeVariable
from tf_hips.comm.plan import PS
from tf_hips.comm.robust_rows import check
from tf_hips.comm.robust_sum import TOPOLOGIES, Tell, TellChosen, make_robust_reducer
from tf_hips.errors import ConfigError
from tf_hips.ops import call_text
from tf_hips.ops.algorithms import fp32
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import derive_seed
from tf_hips.ps import rules
from tf_hips.robust import Aggregator
from tf_hips.robust.bearing import why_nobody, why_unbounded
from tf_hips.robust.codecs import why_noisy, why_not
from tf_hips.strategies.gradients import Gradient, Summing
from tf_hips.strategies.in_party import InParty
from tf_hips.strategies.kept_plans import Keeper


def chosen_aggregator(given: Aggregator | str | None, run: config.Run) -> Aggregator | None:
    """The rule over ranks: what a script gives, or else what its configuration names; None: none.

    Raises:
        ValueError: there is no such rule.
        TypeError: it is neither a rule nor a text.
        ConfigError: what the configuration names is none for ranks, or is not what the script
            gives.
    """
    own = robust.parse(given) if isinstance(given, str) else given
    if own is not None and not isinstance(own, Aggregator):
        raise call_text.wrong_kind(
            "robust", "a rule such as `tf_hips.robust.median()`, or its text", given
        )
    if run.rule is None:
        return own
    try:
        if rules.parse(run.rule).is_plain:  # what ranks do without a rule
            return own
        named = robust.parse(run.rule)
    except ValueError as error:
        raise ConfigError(
            "`rule` of the run's configuration must be sum, mean or a robust rule without a "
            f"server, which alone applies others. Received: {error}"
        ) from error
    if own is not None and own != named:
        raise ConfigError(
            "`robust` must be the `rule` of the run's configuration, or be in one of them only. "
            f"Received: {own} in the script, {named} in the configuration"
        )
    return named


class RobustParty(InParty):
    """What a strategy was told, and the results that come of it."""

    def __init__(
        self,
        rule: Aggregator,
        compression: Compressor | None,
        topology: str | None,
        *,
        has_plan: bool,
        comp_threshold: int,
        tell: Callable[[Aggregator, Sequence[Gradient]], tuple[Tell, TellChosen]],
    ) -> None:
        """Checks it.

        Args:
            rule: what is made of the ranks' gradients.
            compression: how gradients are encoded; None: as float32.
            topology: which way packets take; None: `ps`.
            has_plan: whether there is a plan.
            comp_threshold: must be 0.
            tell: makes what is told of a list of gradients: of refused rows, and of chosen ones.

        Raises:
            ValueError: they do not go together.
            ToleranceError: the rule needs more ranks.
        """
        if has_plan or comp_threshold:
            raise ValueError(
                "`robust` must come without a `plan` and without `comp_threshold`: gradients that "
                "are summed exactly would go past the rule. Received: "
                f"plan={'given' if has_plan else None}, comp_threshold={comp_threshold}"
            )
        if topology is not None and topology not in TOPOLOGIES:
            raise ValueError(
                f"`topology` must be one of {', '.join(TOPOLOGIES)} with `robust`: others add on "
                f"the way. Received: topology={topology!r}"
            )
        super().__init__(compression or fp32(), None, topology or PS, 0)
        if self.compression is not None:
            if why := why_not(rule, self.compression):
                raise ValueError(why)
            weak = why_nobody(rule, primitives.size(), "ranks")
            for told in (weak, why_unbounded(rule), why_noisy(rule, self.compression.text)):
                if told is not None:
                    log.warning("%s", told)
        if primitives.size() > 1:  # one rank alone trains as plain Keras does
            check(rule, primitives.size())
        self._rule = rule
        self._tell_of = tell

    def facts(self) -> dict[str, Any]:
        """What decides about results beside the codecs, as JSON values by name."""
        return {**super().facts(), "the robust rule": self._rule.text}

    def summing(
        self,
        gradients: Sequence[Gradient],
        label: str,
        *,
        seed: int,
        worker: int,
        make_variable: MakeVariable,
        complain: Complain | None,
        nonfinite: str = "propagate",
        keeper: Keeper | None = None,
    ) -> Summing:
        """How one list of gradients is aggregated; see `InParty.summing`.

        What is not finite is refused by row, whatever a strategy was told to do with it:
        `complain` is never called.
        """
        del complain, keeper  # there is no plan
        self._compare(gradients, nonfinite, seed)
        tell, tell_chosen = self._tell_of(self._rule, gradients)
        compression = self.compression or fp32()
        reducer = make_robust_reducer(
            [gradient.shape for gradient in gradients],
            compression,
            self._rule,
            label=label,
            worker_seed=compression.encoder_seed(seed, f"worker/{worker}"),
            owner_seed=compression.for_sums.encoder_seed(seed, f"owner/{primitives.rank()}"),
            rule_seed=derive_seed(seed, "everyone"),
            make_variable=make_variable,
            tell=tell,
            tell_chosen=tell_chosen,
            topology=self._chosen_topology(),
            scale=float(primitives.size()),
        )
        return Summing(reducer, only_float32=True, complains=True)
