# SPDX-License-Identifier: Apache-2.0
"""What the modes with local steps are told, and which mode takes what. No TensorFlow here.

Invariant: None, or False, means that an option was not given; a mode that has no use for one that
was given refuses it.
"""

import dataclasses
from typing import Any

from tf_hips.errors import ConfigError
from tf_hips.esync import RULES

WEIGHTINGS = ("samples", "uniform", "workers")
AVERAGINGS = ("bounded", "normalised", "uniform")
STATE_SERVER_PORT = 10010


@dataclasses.dataclass(frozen=True)
class Local:
    """Options of local steps and of the meetings between them; see docs/loops.md, docs/esync.md.

    Attributes:
        local_steps: steps between two meetings.
        local_epochs: instead of it, passes through a worker's own rows.
        party_rounds: of HFA: meetings in a party for each one over parties.
        fragments: of Streaming DiLoCo: parts of the model.
        overlap: of Streaming DiLoCo: steps for which a fragment is under way.
        server_optimizer: rule of the step that is made of the mean.
        global_lr: rate of that step, where it is FedAvg's.
        weighting: what counts in the mean, one of `WEIGHTINGS`.
        prox_mu: strength of FedProx' proximal term.
        participation: share of members that send in a round, or as an int their number.
        scaffold: whether steps are corrected by SCAFFOLD's control variates.
        normalise: whether movements are normalised by local steps, as in FedNova.
        rule: one of `RULES`; `compat` is HiPS' own mean, or with esync the paper's rule.
        pace: of ESync: parameters of its own rule.
        averaging: of ESync: one of `AVERAGINGS`.
        state_server: of ESync with the paper's rule: where `tf-hips state-server` listens.
        epsilon: of the paper's rule: its margin in seconds.
    """

    local_steps: int | None = None
    local_epochs: int | None = None
    party_rounds: int | None = None
    fragments: int | None = None
    overlap: int | None = None
    server_optimizer: str | None = None
    global_lr: float | None = None
    weighting: str | None = None
    prox_mu: float | None = None
    participation: int | float | None = None
    scaffold: bool = False
    normalise: bool = False
    rule: str | None = None
    pace: str | None = None
    averaging: str | None = None
    state_server: str | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        """Checks each value, and those that exclude each other in every mode.

        Raises:
            ConfigError: one is out of range, or two exclude each other.
        """
        for name in ("local_steps", "local_epochs", "party_rounds", "fragments"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` must be at least 1. Received: {name}={value}")
        for name in ("overlap", "prox_mu", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"`{name}` must be at least 0. Received: {name}={value}")
        if self.global_lr is not None and not 0 < self.global_lr < float("inf"):
            raise ConfigError(f"`global_lr` must be positive. Received: global_lr={self.global_lr}")
        for name, known in (
            ("rule", RULES),
            ("weighting", WEIGHTINGS),
            ("averaging", AVERAGINGS),
        ):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ConfigError(f"`{name}` must be one of {', '.join(known)}. Received: {value}")
        self._check_texts()
        for one, other in (
            ("local_steps", "local_epochs"),
            ("server_optimizer", "global_lr"),
            ("scaffold", "normalise"),
        ):
            if is_given(getattr(self, one)) and is_given(getattr(self, other)):
                raise ConfigError(
                    f"`{one}` and `{other}` exclude each other. Received: "
                    f"{one}={getattr(self, one)}, {other}={getattr(self, other)}"
                )

    def _check_texts(self) -> None:
        # The command line starts without these.
        from tf_hips.esync.rule import Pace
        from tf_hips.ps import rules

        share = self.participation
        if share is not None and not (share >= 1 if isinstance(share, int) else 0 < share <= 1):
            raise ConfigError(
                "`participation` must be a share above 0 and at most 1, or a whole number of "
                f"members. Received: participation={share}"
            )
        try:
            if self.server_optimizer is not None:
                rules.parse(self.server_optimizer)
            if self.pace is not None:
                Pace.parse(self.pace)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if is_given(value)}

    @property
    def is_compat(self) -> bool:
        """Whether the rule is that of a seed."""
        return self.rule == "compat"

    @property
    def outer(self) -> str | None:
        """Text of the rule of the server's step; None: the loop's default."""
        if self.global_lr is not None:
            return f"fedavg(learning_rate={self.global_lr!r})"
        return self.server_optimizer


def is_given(value: Any) -> bool:
    """Whether an option says something."""
    return value is not None and value is not False


def check_fedavg(local: Local) -> None:
    """What FedAvg asks of its options.

    Raises:
        ConfigError: HiPS' own mean is asked for, with what changes means.
    """
    changed = [name for name in ("weighting", "scaffold", "normalise") if name in local.given]
    if local.is_compat and changed:
        raise ConfigError(
            "`rule` compat is HiPS' own mean, each worker the same. Received: "
            + ", ".join(f"{name}={local.given[name]}" for name in changed)
        )
    if local.scaffold and local.weighting not in (None, "uniform"):
        raise ConfigError(
            f"SCAFFOLD has `weighting` uniform. Received: weighting={local.weighting}"
        )


def check_esync(local: Local) -> None:
    """What ESync asks of its options.

    Raises:
        ConfigError: they are of different rules.
    """
    if local.weighting == "samples":
        raise ConfigError(
            "ESync's `weighting` must be uniform or workers: samples of a round would count for "
            "the speed of a member. Received: weighting=samples"
        )
    if local.is_compat and local.state_server is None:
        raise ConfigError(
            "The paper's rule asks a state server: start `tf-hips state-server`, and give "
            "--state-server HOST:PORT. Received: rule=compat without one"
        )
    if local.is_compat and local.pace is not None:
        raise ConfigError(
            f"`pace` is of the default rule. Received: rule=compat, pace={local.pace}"
        )
    for name in () if local.is_compat else ("state_server", "epsilon"):
        if name in local.given:
            raise ConfigError(
                f"`{name}` is for --rule compat, the paper's. Received: {name}={local.given[name]}"
            )
