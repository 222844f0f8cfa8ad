# SPDX-License-Identifier: Apache-2.0
"""What a strategy and its optimizer owe to the update rule of a server."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_hips import config as configuration
from tf_hips.comm.staged import Reducer
from tf_hips.errors import ConfigError
from tf_hips.ps import rules
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.welcome import Welcome
from tf_hips.robust import Aggregator, Sketched
from tf_hips.robust.detox import Detox


def chosen_rule(
    given: UpdateRule | Aggregator | Sketched | Detox | str | None, run: configuration.Run
) -> UpdateRule | None:
    """The rule that a script gives, or else what its configuration names; None: the server's.

    Raises:
        ValueError, TypeError: what the script gives is no rule.
        ConfigError: what the configuration names is none, or is not what the script gives; or there
            is no server that could apply it.
    """
    chosen = None if given is None else rules.resolve(given)
    if run.rule is not None:
        try:
            named = rules.parse(run.rule)
        except ValueError as error:
            raise ConfigError(f"`rule` of the run's configuration: {error}") from error
        if chosen is not None and chosen != named:
            raise ConfigError(
                "`rule` must be the same in the script and in the run's configuration, or be in "
                f"one of them only. Received: {chosen} in the script, {named} in the configuration"
            )
        chosen = named
    needs_server = chosen is not None and (chosen.gives_steps or chosen.is_robust)
    if run.uplink is None and needs_server:
        raise ConfigError(
            "`rule` must be `sum` or `mean` without an uplink: other rules are applied by a server "
            f"(`tf-hips run --server`, `tf-hips party --server`). Received: rule={chosen}"
        )
    return chosen


def check_optimizer(rule: UpdateRule, optimizer: Any) -> None:
    """Looks whether workers take the steps of `rule` as they are.

    Raises:
        ConfigError: the optimizer would make other steps of them.
    """
    if not rule.gives_steps:
        return
    changed = _changes(optimizer)
    if changed is not None:
        raise ConfigError(
            f"With rule {rule} the server makes the steps, and the optimizer of the workers must "
            "take them as they are: keras.optimizers.SGD(learning_rate=1.0), without momentum, "
            f"decay, clipping, averages or accumulation. Received: {changed}"
        )


def _changes(optimizer: Any) -> str | None:
    """What an optimizer does to a step beside subtracting it."""
    if type(optimizer) is not keras.optimizers.SGD:
        return type(optimizer).__name__
    rate = getattr(optimizer, "_learning_rate", None)
    if not isinstance(rate, keras.Variable) or float(rate) != 1.0:
        shown = float(rate) if isinstance(rate, keras.Variable) else type(rate).__name__
        return f"SGD with learning_rate={shown}"
    if optimizer.momentum:
        return f"SGD with momentum={optimizer.momentum}"
    for name in (
        "weight_decay",
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "use_ema",
        "loss_scale_factor",
        "gradient_accumulation_steps",
    ):
        value = getattr(optimizer, name, None)
        if value is not None and value is not False:
            return f"SGD with {name}={value}"
    return None


def weight_of(rule: UpdateRule, welcome: Welcome) -> float | None:
    """What this party stands for where the rule takes a mean: its workers."""
    return float(welcome.workers[welcome.child]) if rule.is_mean else None


def as_mean(rule: UpdateRule, welcome: Welcome, uplink: Reducer) -> Reducer:
    """`uplink`, for a rule that takes a mean of the parties' means.

    What comes is the party's share of the mean over all workers, because Keras divides by their
    number; what goes up is the mean over the workers of the party. Weighted by the numbers of
    workers, means are then what shares were in sum.
    """
    if not rule.is_mean:
        return uplink
    factor = sum(welcome.workers) / welcome.workers[welcome.child]

    def reduce(vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        return uplink([vector * factor for vector in vectors], step)

    return reduce
