# SPDX-License-Identifier: Apache-2.0
"""How the modes train: which strategy, which optimizer, and which loop.

A new mode is a function here, or in a module of its own such as `rounds`, and its entry in
`modes.MODES`.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tf_hips import config, robust
from tf_hips.errors import ConfigError
from tf_hips.ps import rules as update_rules
from tf_hips.strategies.hierarchical_ps import HierarchicalPS
from tf_hips.strategies.party import PartyStrategy
from tf_hips.strategies.ring import CompressedRing
from tf_hips.trainer.robustness import server_rule
from tf_hips.trainer.settings import Training

DEFAULT_RATE = 0.01
WORKERS_VARIABLE = "HOROVOD_SIZE"


@dataclasses.dataclass(frozen=True)
class Way:
    """What a mode is made of.

    Attributes:
        strategy: of this worker.
        optimizer: of the model, made inside the strategy's scope.
        rounds: where workers make local steps: makes what leads them through their rounds, a
            `rounds.Rounds`, of the model and its `sources.Source`; None: they meet in every step.
        level: where they make local steps, within what they stay equal: "party" or "worker".
        crowd: workers that this process plays, a `simulated.Crowd`; None: it is one itself.
    """

    strategy: PartyStrategy
    optimizer: keras.optimizers.Optimizer
    rounds: Callable[[keras.Model, Any], Any] | None = None
    level: str | None = None
    crowd: Any | None = None


def synchronous(settings: Training, run: config.Run) -> Way:
    """Parties through their server where there is one, else the workers of one Horovod job."""
    if run.uplink is None:
        ring = ring_of(settings, run, _rule_over_ranks(settings, run))
        with ring.scope():
            return Way(ring, local_optimizer(settings))
    parties = parties_of(settings, run)
    with parties.scope():
        above = parties.rule
        if above is None or not above.gives_steps:
            return Way(parties, local_optimizer(settings))
        if above.is_asynchronous:
            raise ConfigError(
                f"The mode sync needs a rule that waits for all parties. Received: rule={above}; "
                "take --mode async or dcasgd"
            )
        if settings.learning_rate is not None or settings.momentum:
            raise ConfigError(
                "`learning_rate` and `momentum` are the server's where its rule makes the steps. "
                f"Received: rule={above}"
            )
        if settings.optimizer != "sgd" or settings.optimizer_options:
            raise ConfigError(
                "`optimizer` is the server's where its rule makes the steps. Received: "
                f"rule={above}, optimizer={settings.optimizer}"
                + "".join(f", optimizer.{name}" for name in settings.optimizer_options)
            )
        return Way(parties, keras.optimizers.SGD(1.0))


def asynchronous(settings: Training, run: config.Run) -> Way:
    """ASGD: the server makes a step of what a party sends at once; with momentum, if asked for."""
    rate = settings.learning_rate or DEFAULT_RATE
    rule = f"asgd(learning_rate={rate!r})"
    if settings.momentum:
        rule = (
            f"momentum(learning_rate={rate!r}, momentum={settings.momentum!r}, asynchronous=True)"
        )
    return _of_a_server(settings, run, rule)


def delay_compensated(settings: Training, run: config.Run) -> Way:
    """DC-ASGD with a shadow copy for each party."""
    rate = settings.learning_rate or DEFAULT_RATE
    return _of_a_server(settings, run, f"dc_asgd(learning_rate={rate!r})")


def alone(settings: Training, run: config.Run) -> Way:
    """One worker, bit for bit what Keras does without a strategy.

    It has one all the same: that is who puts the data where a backup was made.
    """
    import tf_hips

    if run.uplink is not None or int(os.environ.get(WORKERS_VARIABLE, "1")) > 1:
        raise ConfigError(
            "The mode local trains on one device: start it without a launcher, or with `tf-hips "
            "run --parties 1 --workers 1`. Received: one of several workers"
        )
    ring = tf_hips.CompressedRing(config=run)
    with ring.scope():
        return Way(ring, local_optimizer(settings))


def _of_a_server(settings: Training, run: config.Run, rule: str) -> Way:
    if run.uplink is None:
        raise ConfigError(
            f"The mode {settings.mode} needs a server: `tf-hips run`, `tf-hips party --server`. "
            "Received: none"
        )
    if run.rule is not None and (settings.learning_rate is not None or settings.momentum):
        raise ConfigError(
            "`learning_rate` and `momentum` are in the rule of the launcher. Received: "
            f"rule={run.rule}, learning_rate={settings.learning_rate}, "
            f"momentum={settings.momentum!r}"
        )
    chosen = None if run.rule is not None else rule
    strategy = _hierarchical(settings, run, chosen)
    if strategy.rule is None or not strategy.rule.is_asynchronous:
        raise ConfigError(
            f"The mode {settings.mode} needs a rule that waits for nobody. Received: "
            f"rule={strategy.rule}; take --mode sync"
        )
    with strategy.scope():
        return Way(strategy, keras.optimizers.SGD(1.0))


def ring_of(settings: Training, run: config.Run, rule: str | None = None) -> CompressedRing:
    """The workers of one Horovod job.

    Args:
        settings: how gradients travel.
        run: what this process is told about its run.
        rule: in place of their mean; None: there is none.

    Raises:
        ConfigError: a server was meant, or options or the rule do not go together.
    """
    import tf_hips

    links = settings.links
    links.check_way(has_server=False)
    try:
        return tf_hips.CompressedRing(
            settings.compression, config=run, robust=rule, **links.in_party
        )
    except ValueError as error:
        what = "" if rule is None else "The rule of a job without a server: "
        raise ConfigError(f"{what}{error}") from error


def parties_of(
    settings: Training, run: config.Run, downlink: str | None = "same"
) -> HierarchicalPS:
    """Parties with a server, whose rule is the one that was asked for.

    Args:
        settings: how gradients travel, and the rule.
        run: what this process is told about its run.
        downlink: that of the mode, where none was asked for.

    Raises:
        ConfigError: the server has no such rule, or options do not go together.
    """
    rule = server_rule(settings.robust)
    if rule is not None:
        try:
            update_rules.parse(rule)
        except ValueError as error:
            raise ConfigError(
                f"The rule of a server: {error}; without one, --simulated-workers N has all rules"
            ) from error
    return _hierarchical(settings, run, rule, downlink)


def _hierarchical(
    settings: Training, run: config.Run, rule: str | None, downlink: str | None = "same"
) -> HierarchicalPS:
    import tf_hips

    links = settings.links
    try:
        return tf_hips.HierarchicalPS(
            settings.compression,
            downlink=links.downlink or downlink,
            local_compression=links.local_compression,
            config=run,
            rule=rule,
            **links.in_party,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _rule_over_ranks(settings: Training, run: config.Run) -> str | None:
    """What is made of all workers' gradients where there is no server; None: the mean.

    Raises:
        ConfigError: only a server has the rule, or there is one worker only.
    """
    rule = server_rule(settings.robust)
    if rule in (None, "mean"):
        return None
    try:
        robust.parse(rule)
    except ValueError:
        check_has_server(settings, run)
    if int(os.environ.get(WORKERS_VARIABLE, "1")) == 1:
        raise ConfigError(
            "`rule` needs the gradients of several workers: `horovodrun`, `tf-hips run`, or "
            f"--simulated-workers N. Received: {rule} of one worker"
        )
    return rule


def check_has_server(settings: Training, run: config.Run) -> None:
    """Raises a ConfigError where a rule is asked for and there is nobody to apply it."""
    rule = server_rule(settings.robust)
    if run.uplink is None and rule not in (None, "mean"):
        raise ConfigError(
            "Votes, rules behind which an optimizer stands, and rules over local steps need a "
            "server (`tf-hips run`, `tf-hips party --server`), or --simulated-workers N. Received: "
            f"{rule} without a server"
        )


def local_optimizer(settings: Training) -> keras.optimizers.Optimizer:
    """The Keras optimizer of a worker.

    Raises:
        ConfigError: it does not take one of its arguments.
    """
    options = {**settings.optimizer_options, "learning_rate": _local_rate(settings)}
    try:
        if settings.optimizer == "adam":
            return keras.optimizers.Adam(**options)
        if settings.optimizer == "adamw":
            return keras.optimizers.AdamW(**options)
        return keras.optimizers.SGD(momentum=settings.momentum, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`optimizer` options must be those of Keras' {settings.optimizer}. Received: "
            f"{dict(settings.optimizer_options)} ({error})"
        ) from error


def rate_of(settings: Training, way: Way) -> float:
    """The learning rate of a worker's steps: of the server's rule, where that makes them."""
    rule = way.strategy.rule
    if way.rounds is None and rule is not None and rule.gives_steps:
        rate = np.float32(rule.get("learning_rate", 1.0))  # fedasync has none
        return float(str(rate))  # 0.3 and not 0.30000001192092896
    return _local_rate(settings)


def _local_rate(settings: Training) -> float:
    own = settings.optimizer_options.get("learning_rate")
    return own if own is not None else settings.learning_rate or DEFAULT_RATE
