# SPDX-License-Identifier: Apache-2.0
"""Statistics of layers in runs where parties do not wait for each other.

They go up with the gradients, as tensors of their own: how far each worker's have moved since the
last round, scaled such that the server's rule, which knows nothing of them, makes averages of them.
What comes down is taken off what they were, on all workers of the party.

    asgd, momentum      the sum of all parties' movements, each a P-th of what it was
    fedbuff, fedasync   the mean that the rule makes of what local steps have moved, or what a
                        robust rule before `fedbuff` makes of these

A sum of movements is an average only of parties that keep step. One that comes late measures from
what it had: its variance falls from 1 to .9 where the others' is .001 by now. So what must stay
above 0, as a variance, moves by the inverse of `softplus`: among numbers above 1 that is itself;
below, its logarithm, of which a late party takes a tenth from what there is, and not .1. Nothing is
cut off, so each value stays what the server's sum makes of the first one, and the next movement is
measured from what was kept.

`adam` divides by what it has seen, `dc_asgd` adds the square of what comes, and a majority has no
size, so there they stay the party's own. So they do where a codec does more than to round each
number by itself: one channel's variance is no noise on another's; what does not reach a threshold
never moves; and what waits in a residual is measured once more by the next round.

Invariant: after a round the statistics of a party's workers are equal, bit for bit.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_hips.comm.compressed import MakeVariable
from tf_hips.ps.rules import UpdateRule
from tf_hips.strategies.replicated import moving

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

# Names that Keras' BatchNormalization gives to what it divides by, and layers like it.
_ABOVE_0 = ("moving_variance", "moving_stddev", "renorm_stddev")
# What is smaller counts as this: layers add a larger number before they divide. It bounds how far
# a channel that was dead moves when it comes back.
_LEAST = 1e-9


def factor_of(rule: UpdateRule, num_parties: int) -> float | None:
    """What a party's movement is multiplied by; None: the rule makes no average of it."""
    is_of_signs = rule.robust is not None and rule.robust.rule.name == "majority"
    if rule.name in ("adam", "dc_asgd") or is_of_signs:
        return None
    if rule.name == "fedasync":
        return 1.0  # it takes a mean with what there is
    rate = float(rule.get("learning_rate", 1.0))
    if rule.name == "fedbuff":
        return 1.0 / rate
    return (1.0 - float(rule.get("momentum", 0.0))) / (rate * num_parties)


def factor_for(strategy: "PartyStrategy") -> float | None:
    """`factor_of` in the run of a strategy; None, too, where parties wait, or for its codecs.

    All children of a server come to the same: their codecs are the same.
    """
    rule, welcome = strategy.rule, strategy.welcome
    if rule is None or welcome is None or not rule.is_asynchronous:
        return None
    told = strategy._codecs()
    codecs = (told["compression"], told["downlink"], strategy.above)
    if not all(codec is None or codec.rounds_each for codec in codecs):
        return None
    return factor_of(rule, len(welcome.parties))


def floating_statistics(model: keras.Model) -> list[tf.Variable]:
    """The floating variables of a model that no optimizer trains."""
    return _floating(model.non_trainable_variables)


def moving_statistics(model: keras.Model) -> list[tf.Variable]:
    """Those of them that were made not to be trained, and to be averaged.

    Frozen weights never move; a share of a sum, and what the first replica says, are no averages.
    """
    return _floating([one for one in moving(model) if one.aggregation in ("none", "mean")])


def _floating(variables: Sequence[Any]) -> list[tf.Variable]:
    return [
        variable.value if isinstance(variable, keras.Variable) else variable
        for variable in variables
        if tf.as_dtype(keras.backend.standardize_dtype(variable.dtype)).is_floating
    ]


def movement(variable: tf.Variable, before: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
    """How far a statistic has moved down, as it goes up to a server.

    Args:
        variable: the statistic itself; its name says what it is.
        before: what it was, of its type.
        now: what it is.
    """
    if not _is_above_0(variable):
        return before - now
    return tf.cast(_unbounded(before) - _unbounded(now), variable.dtype)


def moved_by(variable: tf.Variable, before: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """What a statistic becomes that was `before`, when `step` has come down; as `movement`."""
    if not _is_above_0(variable):
        return before - tf.cast(step, variable.dtype)
    unbounded = _unbounded(before)
    value = tf.nn.softplus(unbounded - tf.cast(step, unbounded.dtype))
    # What nobody moves keeps its bits.
    return tf.where(step == 0, before, tf.cast(value, variable.dtype))


def _is_above_0(variable: tf.Variable) -> bool:
    return variable.name.removesuffix(":0").rpartition("/")[2] in _ABOVE_0


def _unbounded(value: tf.Tensor) -> tf.Tensor:
    """The inverse of `softplus`, at least in float32."""
    wide = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
    wide = tf.maximum(wide, _LEAST)
    return wide + tf.math.log(-tf.math.expm1(-wide))


class Statistics:
    """Those of one model."""

    def __init__(
        self, variables: Sequence[tf.Variable], factor: float, make_variable: MakeVariable
    ) -> None:
        """Takes the values that they have, equal on all parties.

        Args:
            variables: floating, not trained.
            factor: as of `factor_for`, over the number of the party's workers.
            make_variable: makes a non-trainable variable from an initial value and a name.
        """
        self.variables = list(variables)
        self._factor = factor
        self._before = [
            make_variable(tf.identity(variable.read_value()), f"statistic_{place}")
            for place, variable in enumerate(self.variables)
        ]

    def moved(self) -> list[tf.Tensor]:
        """What this worker adds to what goes up."""
        return [
            movement(variable, before.read_value(), variable.read_value())
            * tf.cast(self._factor, variable.dtype)
            for before, variable in zip(self._before, self.variables, strict=True)
        ]

    def take(self, steps: Sequence[tf.Tensor]) -> None:
        """Sets them to what they were, moved by what has come down."""
        for before, variable, step in zip(self._before, self.variables, steps, strict=True):
            value = moved_by(variable, before.read_value(), step)
            variable.assign(value, read_value=False)
            before.assign(value, read_value=False)
