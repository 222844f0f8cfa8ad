# SPDX-License-Identifier: Apache-2.0
"""What a trainer is told of robust rules, of liars, and of workers it plays itself.

No TensorFlow here. `server_rule` is the one place where the options of DETOX become what a server
is asked for.
"""

import dataclasses
from typing import Any

from tf_hips.errors import ConfigError
from tf_hips.ops.native import derive_seed
from tf_hips.ps import rules
from tf_hips.ps.rules.votes import split as split_votes
from tf_hips.robust import detox
from tf_hips.robust import parse as parse_robust
from tf_hips.robust.adversary import LABEL_FLIP, Adversary, parse
from tf_hips.robust.attacks import RANDOM
from tf_hips.robust.detox import BASELINE, MAJ_VOTE, OF_GROUPS, Detox

# In which what a worker sends can be a lie.
_MODES = ("sync", "async", "dcasgd", "fedavg", "esync", "hfa", "diloco", "simulated")
_IN_EVERY_STEP = ("sync", "async", "dcasgd")


@dataclasses.dataclass(frozen=True)
class Robust:
    """Options of robust aggregation and of attacks; see docs/train.md.

    Attributes:
        rule: an update rule that the server is asked for, or a robust rule of simulated workers.
        approach: one of `robust.detox.APPROACHES`; None: none was asked for.
        aggregation: what aggregates rows, or votes, as DETOX spells it.
        group_size: workers of a group that votes; None: 5.
        bucket_size: how many means of votes the rule gets; 0: the votes themselves.
        err_mode: text of an attack, or `label_flip`; None: nobody lies.
        worker_fail: how many lie; with `approach` or `aggregation` also how many a rule with
            f="auto" must bear, 0: none. None: nobody lies, and the rule bears as many as it can.
        redraw: whether others lie in each step.
        placement: where liars sit, one of `attacks.PLACEMENTS`; "worst" is of simulated workers in
            groups that vote, and who lies then knows the groups of each step.
        simulated_workers: workers that this one process plays; None: it is one itself.
        vote: how groups vote, one of `robust.detox.VOTES`; None: by digest.
        fixed_groups: whether neighbours are a group, and stay.
    """

    rule: str | None = None
    approach: str | None = None
    aggregation: str | None = None
    group_size: int | None = None
    bucket_size: int = 0
    err_mode: str | None = None
    worker_fail: int | None = None
    redraw: bool = False
    placement: str = RANDOM
    simulated_workers: int | None = None
    vote: str | None = None
    fixed_groups: bool = False

    def __post_init__(self) -> None:
        """Checks each value, and those that exclude each other.

        Raises:
            ConfigError: one is out of range, or two exclude each other.
        """
        for name in ("worker_fail", "bucket_size"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"`{name}` must be at least 0. Received: {name}={value}")
        for name in ("group_size", "simulated_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` must be at least 1. Received: {name}={value}")
        if self.err_mode is not None and not self.worker_fail:
            raise ConfigError(
                f"`err_mode` needs `worker_fail`, how many lie. Received: err_mode={self.err_mode}"
            )
        if self.redraw and self.err_mode is None:
            raise ConfigError("`redraw` is about liars: give `err_mode`. Received: none")
        if self.placement != RANDOM and self.err_mode is None:
            raise ConfigError("`placement` is about liars: give `err_mode`. Received: none")
        if self.placement != RANDOM and self.redraw:
            raise ConfigError(
                "`placement` and `redraw` exclude each other: the groups say who lies in a step. "
                f"Received: placement={self.placement}, redraw=True"
            )
        if self.rule is not None and (self.approach or self.aggregation):
            raise ConfigError(
                "`rule` excludes `approach` and DETOX's modes, which make one. Received: "
                f"rule={self.rule}, approach={self.approach}, mode={self.aggregation}"
            )
        for name in OF_GROUPS:
            if getattr(self, name) and self._approach == BASELINE:
                having = "detox" if name == "bucket_size" else "maj_vote and detox"
                raise ConfigError(
                    f"`{name}` is for `approach` {having}. Received: "
                    f"{name}={getattr(self, name)}, approach={self.approach}"
                )
        chosen = self.detox()
        if self.placement != RANDOM and (
            self.simulated_workers is None or chosen is None or chosen.r == 1
        ):
            raise ConfigError(
                "`placement` is about groups that vote, of `simulated_workers` (`approach` "
                "maj_vote or detox, or such a `rule`). Received: "
                f"placement={self.placement} without them"
            )
        self.adversary(0)
        self.check_groups(self._group_size(chosen))

    def check_groups(self, r: int) -> None:
        """Looks whether liars can do what they are told to in groups of r.

        Raises:
            ConfigError: they have no rows of their own.
        """
        if self.err_mode == LABEL_FLIP and r > 1:
            raise ConfigError(
                "Labels are flipped in a worker's own rows, and groups share theirs. Received: "
                f"err_mode={LABEL_FLIP}, groups of {r}"
            )

    @property
    def _approach(self) -> str:
        return self.approach or (MAJ_VOTE if self.aggregation == MAJ_VOTE else BASELINE)

    def _group_size(self, chosen: Detox | None) -> int:
        """How many workers have the same rows, whoever groups them; 1: each has its own."""
        if chosen is not None:
            return chosen.r
        try:
            votes = None if self.rule is None else split_votes(self.rule)[0]
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return 1 if votes is None else votes.r

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        found = {name: getattr(self, name) for name in defaults}
        return {name: value for name, value in found.items() if value != defaults[name]}

    def adversary(self, seed: int) -> Adversary | None:
        """Who lies in a run of this seed; None: nobody.

        Raises:
            ConfigError: there is no such attack.
        """
        if self.err_mode is None:
            return None
        try:
            attack = None if self.err_mode == LABEL_FLIP else parse(self.err_mode)
            own = derive_seed(seed, "adversary") % 2**63
            worst: dict[str, Any] = {}
            voting = None if self.placement == RANDOM else self.detox()
            if voting is not None:
                worst = {"r": voting.r, "group_seed": None if voting.fixed else seed}
            return Adversary(
                attack,
                self.worker_fail or 0,
                own,
                self.redraw,
                placement=self.placement,
                **worst,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def detox(self) -> Detox | None:
        """What aggregates the rows of workers; None: nothing is asked for but their mean.

        Raises:
            ConfigError: there is no such approach or rule.
        """
        try:
            if self.rule is not None and self.simulated_workers is not None:
                votes, rest = split_votes(self.rule)
                then = parse_robust(rest)
                return Detox(1, then) if votes is None else votes.with_rule(then)
            if self.approach is None and self.aggregation is None:
                return None
            # A study may have more liars than a rule bears that says for itself how many.
            mode = self.aggregation or "normal"
            is_budget = self._approach != MAJ_VOTE and parse_robust(mode).is_auto
            # Of the baseline groups of one: nothing else has none.
            return detox.approach(
                self._approach,
                mode,
                group_size=self.group_size,
                worker_fail=self.worker_fail if is_budget else None,
                bucket_size=self.bucket_size,
                vote=self.vote,
                fixed=self.fixed_groups,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error


def server_rule(told: Robust) -> str | None:
    """The text of the rule that a server is asked for; None: as the launcher or the server says."""
    chosen = None if told.rule is not None else told.detox()
    if chosen is None:
        return told.rule
    if told._approach == BASELINE:
        return chosen.then.text
    return rules.resolve(chosen).text  # groups of one, too: they have `q` and buckets


def check(mode: str, told: Robust) -> None:
    """What modes ask of these options.

    Raises:
        ConfigError: one means nothing in the mode.
    """
    if mode == "simulated" and told.simulated_workers is None:
        raise ConfigError(
            "The mode simulated plays several workers: --simulated-workers N. Received: none"
        )
    if mode != "simulated" and told.simulated_workers is not None:
        raise ConfigError(
            "`simulated_workers` is a mode of its own, where all gradients meet in every step. "
            f"Received: simulated_workers={told.simulated_workers} with the mode {mode}"
        )
    if told.err_mode is not None and mode not in _MODES:
        raise ConfigError(
            f"Liars are simulated in the modes {', '.join(_MODES)}. Received: err_mode="
            f"{told.err_mode} with the mode {mode}"
        )
    asks_for_rule = told.rule or told.approach or told.aggregation
    if asks_for_rule and mode in ("local", "async", "dcasgd"):
        raise ConfigError(
            f"The mode {mode} has no rule over workers; a server has that of its launcher, "
            "`tf-hips run --rule`. Received: "
            + ", ".join(f"{name}={value}" for name, value in told.given.items())
        )
    adversary = told.adversary(0)
    is_nan = adversary is not None and adversary.text == "nan"
    asked = server_rule(told)
    is_refused = mode == "sync" and asked is not None and rules.parse(asked).is_robust
    if is_nan and mode in _IN_EVERY_STEP and not is_refused:
        raise ConfigError(
            f"In the mode {mode} a gradient that is not finite ends the run on its own worker, "
            "before it is sent; simulate NaN with a robust rule in the mode sync, in modes with "
            "local steps, or with --simulated-workers. Received: err_mode=nan"
        )
    attack = None if adversary is None else adversary.attack
    if attack is not None and attack.name == "optimal" and told.simulated_workers is None:
        raise ConfigError(
            "The attack optimal is made of the rows of all: it is for --simulated-workers. "
            f"Received: err_mode={told.err_mode}"
        )
    if told.simulated_workers is not None and adversary is not None:
        try:
            adversary.check(told.simulated_workers)
        except ValueError as error:
            raise ConfigError(
                f"Liars must fit {told.simulated_workers} simulated workers: {error}"
            ) from error
