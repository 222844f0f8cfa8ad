# SPDX-License-Identifier: Apache-2.0
"""What a strategy and its optimizer owe to the update rule of a server."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_hips import config as configuration
from tf_hips.comm.staged import Reducer
from tf_hips.errors import ConfigError
from tf_hips.ps import rules
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.rules import UpdateRule
from tf_hips.robust import Aggregator, Sketched
from tf_hips.robust.detox import Detox

Robust: TypeAlias = Aggregator | Sketched | Detox | str


def rule_of_both(
    rule: UpdateRule | Robust | None, robust_global: Robust | None
) -> UpdateRule | Robust | None:
    """The one of both that is given: `robust_global` is the `rule` that must be robust.

    Raises:
        ValueError, TypeError: both are given, or it is not robust.
    """
    if robust_global is None:
        return rule
    if rule is not None:
        raise ValueError(
            "`robust_global` is a robust `rule`, so give one of them. Received: "
            f"robust_global={robust_global}, rule={rule}"
        )
    if not rules.resolve(robust_global, "robust_global").is_robust:
        raise ValueError(
            "`robust_global` must be a robust rule, such as robust.krum(f=1), or begin with one. "
            f"Received: robust_global={robust_global}"
        )
    return robust_global


def chosen_local(
    given: Robust | None, run: configuration.Run, *, has_servers: bool
) -> UpdateRule | None:
    """The rule that a script wants the server of its party to have; None: whatever it has.

    Args:
        given: of the script.
        run: what this process is told about its run.
        has_servers: whether workers meet at a server of their party.

    Raises:
        ValueError, TypeError: parties have no servers, or it is not a robust rule alone.
        ConfigError: there is no server in this run.
    """
    if given is None:
        return None
    if not has_servers:
        raise ValueError(
            '`robust_local` is the rule of a party\'s server, which there is with `intra="ps"`; '
            "among ranks without a server it is `CompressedRing(robust=...)`. Received: "
            f"robust_local={given}"
        )
    if run.uplink is None:
        raise ConfigError(
            "`robust_local` needs a run with servers: `tf-hips run --intra ps --robust-local`. "
            f"Received: robust_local={given} without an uplink"
        )
    chosen = rules.resolve(given, "robust_local")
    if not chosen.is_robust or chosen.gives_steps or chosen.sketch is not None:
        raise ValueError(
            "`robust_local` must be a robust rule alone, such as robust.krum(f=1): what is made of "
            f"gradients, the rule of the topmost server says. Received: robust_local={given}"
        )
    return chosen


def check_local(wanted: UpdateRule | None, welcome: Welcome, server: str) -> None:
    """Looks whether the party's server has the rule that a script wants.

    Raises:
        ConfigError: it has another one, or none.
    """
    if wanted is None:
        return
    has = None if welcome.robust is None else rules.parse(welcome.robust)
    if has != wanted:
        raise ConfigError(
            f"`robust_local` must be what server {server} was started with (`tf-hips run "
            f"--robust-local`, `tf-hips server --uplink ... --rule`): {has}. Received: "
            f"robust_local={wanted}"
        )


def chosen_rule(given: UpdateRule | Robust | None, run: configuration.Run) -> UpdateRule | None:
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
        ConfigError: the optimizer would make other steps of them, or parties that do not wait for
            each other would each project weights of its own.
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
    if not rule.is_asynchronous:
        return
    trained = optimizer._trainable_variables  # none yet where it is not built
    bound = [one for one in trained if getattr(one, "constraint", None) is not None]
    if bound:
        raise ConfigError(
            f"With rule {rule} what is trained must have no constraint: each party would project "
            "its own weights, of which the server hears nothing, and the parties would stay apart. "
            "Take a synchronous rule, or a loop (FedAvg), whose movements have the projections in "
            f"them. Received: `{bound[0].path}` with {type(bound[0].constraint).__name__}"
            + (f", and {len(bound) - 1} more" if len(bound) > 1 else "")
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


def unlike(first: Mapping[str, str], now: Mapping[str, str]) -> str:
    """How a list of variables differs from that of the first step, and what to do.

    Args:
        first: names of the first step's variables, by their ids.
        now: the same of what there are gradients of now.
    """
    missing = [name for one, name in first.items() if one not in now]
    new = [name for one, name in now.items() if one not in first]
    if len(new) == len(now):
        return "gradients of other variables; start another run for another model"
    if not missing and not new:
        return "gradients of the variables of the first step in another order; keep their order"
    count = len(first)
    text = f"gradients of {count - len(missing)} of the {count} variables of the first step"
    if missing:
        text += f", without {some(missing)}"
    if new:
        text += f", and of {some(new)}"
    return (
        f"{text}; give zeros for what is not trained in a step, and to train other layers begin a "
        "new run from saved weights"
    )


def some(names: Sequence[str]) -> str:
    """The first of `names`, and how many there are; for messages."""
    if not names:
        return "nothing"
    return f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


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
