# SPDX-License-Identifier: Apache-2.0
"""What methods of the field add to local steps and to their mean.

    proximal term      FedProx, Li et al., 2020: g + mu (w - w_before) in each local step
    control variates   SCAFFOLD, Karimireddy et al., 2020, option II: g - c_i + c in a local step;
                       c_i' = c_i - c + (w_before - w) / (K lr), for K lr the sum of the rates of
                       the optimizer's steps; c loses the members' mean of c_i - c_i', times the
                       share of members that took part
    normalisation      FedNova, Wang et al., 2020: x_i (sum p_j a_j) / a_i, a_i the optimizer's
                       steps by what momentum and the proximal term make of them
    participation      which members send in a round, a function of (seed, round)

Plain functions and small values; the loop asks them.
"""

import dataclasses
import hashlib
import math
import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_hips.callbacks.optimizers import inner, parts_of
from tf_hips.comm.compressed import MakeVariable
from tf_hips.errors import ConfigError
from tf_hips.loops import checked
from tf_hips.ops.compressor import Compressor
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.terms.tree import BETWEEN

# Options of SGD by which its steps are no multiples of gradients.
_NO_MULTIPLES = (
    "momentum", "gradient_accumulation_steps", "clipnorm", "global_clipnorm", "clipvalue",
    "ema_overwrite_frequency",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PostLocal:
    """Local steps by round: 1 in the first rounds, then more (post-local SGD, Lin et al., 2020).

    Attributes:
        steps: local steps of a round later on.
        after: number of rounds of one step.

    Raises:
        ValueError: one of them is below 1.
        TypeError: one of them is no integer.
    """

    steps: int
    after: int

    def __post_init__(self) -> None:
        checked.whole("steps", self.steps)
        checked.whole("after", self.after)

    def __call__(self, number: int) -> int:
        """Local steps of round `number`."""
        return 1 if number < self.after else self.steps


class Applied:
    """How often each optimizer of a model has made a step since a local phase began.

    In a step of Keras it need not be once: a loss scale skips those that overflow, a `train_step`
    of one's own may accumulate gradients or take two steps (SAM).
    """

    def __init__(self, model: keras.Model) -> None:
        """Remembers the model; looks at nothing yet."""
        self._model = model
        # By the optimizer: a model may be compiled again.
        self._before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._parts: list[Any] = []

    def begin(self, steps: int = 0) -> None:
        """A local phase begins, or goes on after `steps` local steps."""
        if not steps:
            self._before.clear()
            self._parts.clear()
        self.follow()
        for one in parts_of(self._model):
            # What is not known (in an older backup) was one in each of them.
            self._before.setdefault(one, max(_made(one) - steps, 0))

    def follow(self) -> None:
        """Counts for new optimizers what those in their places have made in this phase."""
        here = parts_of(self._model)
        gone = [one for one in self._parts if not any(one is other for other in here)]
        new = [one for one in here if not any(one is other for other in self._parts)]
        for old, one in zip(gone, new, strict=False):
            self._before[one] = _made(one) - self.of(old)
        self._parts = here

    def of(self, optimizer: Any) -> int:
        """Steps of one of `parts_of` the model; with accumulated gradients each adds some."""
        return max(_made(optimizer) - self._before.get(optimizer, 0), 0)

    def place(self) -> list[int]:
        """What a backup keeps: the steps before the local phase, in the order of `parts_of`."""
        return [self._before.get(one, 0) for one in parts_of(self._model)]

    def go_on(self, place: Sequence[int]) -> None:
        """Takes up the place that a backup has."""
        self._before.clear()
        self._before.update(zip(parts_of(self._model), place, strict=False))


def _made(optimizer: Any) -> int:
    return int(optimizer._iterations.numpy())


def weighed(
    model: keras.Model, steps: int, applied: Callable[[Any], int], prox_mu: float = 0.0
) -> float:
    """What local steps of a model weigh: `effective_steps` of its optimizer.

    Where several optimizers make them it is the mean over the elements that they train. With
    accumulated gradients those steps count that change weights.

    Args:
        model: what was trained.
        steps: local steps, for a model without an optimizer.
        applied: how many steps an optimizer has made in them, as `Applied.of`.
        prox_mu: of a proximal term; not counted with momentum.
    """
    optimizers = parts_of(model)
    if not optimizers:  # nobody knows what makes the steps
        return effective_steps(steps)
    if len(optimizers) > 1:  # one that was compiled may have nothing to do
        stepped = [one for one in optimizers if one.built and _made(one)]
        optimizers = stepped or optimizers[:1]
    found = []
    for one in optimizers:
        # Muon's `momentum` is inside a step whose length it does not change.
        has_velocity = isinstance(one, keras.optimizers.SGD | keras.optimizers.RMSprop)
        momentum = float(one.momentum or 0.0) if has_velocity else 0.0
        is_nesterov = bool(getattr(one, "nesterov", False))
        shrinks = prox_mu and not momentum
        shrinkage = min(prox_mu * float(one.learning_rate), 1.0) if shrinks else 0.0
        updates = applied(one) / (one.gradient_accumulation_steps or 1)
        found.append(effective_steps(updates, momentum, shrinkage, is_nesterov=is_nesterov))
    sizes = [sum(math.prod(each.shape) for each in one._trainable_variables) for one in optimizers]
    if len(found) == 1:
        return found[0]
    return math.fsum(n * one for n, one in zip(sizes, found, strict=True)) / sum(sizes)


def effective_steps(
    steps: float, momentum: float = 0.0, shrinkage: float = 0.0, *, is_nesterov: bool = False
) -> float:
    """The L1 norm of what `steps` gradients weigh in their sum: FedNova's a_i.

    Args:
        steps: local steps; with accumulated gradients those that change weights.
        momentum: of SGD or RMSprop; below 1.
        shrinkage: learning rate times mu of a proximal term; below 1. Not with momentum.
        is_nesterov: whether the momentum is Nesterov's: a step is b times the velocity, plus the
            gradient.
    """
    if momentum:
        late = momentum * (1.0 - momentum**steps) / (1.0 - momentum)
        velocities = (steps - late) / (1.0 - momentum)
        return momentum * velocities + steps if is_nesterov else velocities
    if shrinkage:
        return (1.0 - (1.0 - shrinkage) ** steps) / shrinkage
    return float(steps)


def gain(own: float, members: Sequence[tuple[float, float]]) -> float:
    """By what a movement is multiplied for all to be as long: FedNova's (sum p_j a_j) / a_i.

    Who has made no step, as where a loss scale has skipped them all, has no movement and does not
    count: the others share what it stands for.

    Args:
        own: a_i of this member.
        members: p_j and a_j of all.
    """
    mean = sum(share * one for share, one in members)
    if not own or not mean:
        return 1.0
    counting = 1.0 - math.fsum(share for share, one in members if not one)
    return mean / own / (counting * counting)


def sampled(seed: int, number: int, members: int, chosen: int) -> frozenset[int]:
    """Members that send in round `number`: the same on all of them, whoever asks."""

    def mark(member: int) -> bytes:
        return hashlib.sha256(f"{seed}/participation/{number}/{member}".encode()).digest()

    return frozenset(sorted(range(members), key=mark)[:chosen])


def number_chosen(participation: Any, members: int) -> int:
    """How many of `members` a share, or a number of them, is; at least one."""
    if isinstance(participation, numbers.Integral):
        return min(int(participation), members)
    return max(1, math.floor(participation * members + 0.5))


class Proximal:
    """FedProx: the gradient of mu/2 |w - w_before|^2, added to that of a local step."""

    def __init__(self, mu: float) -> None:
        """Of strength `mu`."""
        self.mu = mu

    def of(self, variable: tf.Variable, reference: tf.Variable) -> tf.Tensor:
        """What the gradient of `variable` gains."""
        # No tape may see it being read: the optimizer's step is a gradient function of its own.
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        return (value - reference.read_value()) * tf.cast(self.mu, variable.dtype)


def check_renewal(welcome: Welcome | None, downlink: Compressor | None) -> None:
    """Looks whether SCAFFOLD's c can become the mean of all c_i again when one is lost.

    Members drop what their own encoding has kept. What servers have kept of c comes down later, and
    c would be off by it for ever.

    Args:
        welcome: what the server has said.
        downlink: how it encodes what comes down.

    Raises:
        ConfigError: a server keeps some of it, or may.
    """
    received = ""
    if welcome is not None and any(BETWEEN in path for path in welcome.paths):
        received = "a tree, whose servers encode what they send up as they were told"
    elif downlink is not None and downlink.has_state:
        received = f"downlink={downlink.text}"
    if received:
        raise ConfigError(
            "A party of SCAFFOLD that has lost its backups can take another one's only where "
            "servers keep nothing of control variates, which would stay wrong for ever: give this "
            "party its own backup again, or begin a new run, below one server and with "
            f"`downlink=None` where backups may be lost again. Received: {received}"
        )


class ControlVariates:
    """SCAFFOLD: c of all members and c_i of this one, and how they change."""

    def __init__(self, model: keras.Model) -> None:
        """All are 0.

        Args:
            model: a compiled model.

        Raises:
            ConfigError: its optimizers' steps are no multiples of gradients.
        """
        self._model = model
        # Steps of the optimizer in the round, and the sum of their learning rates.
        self.rates = (0, 0.0)
        self.common: list[tf.Variable] = []
        self.own: list[tf.Variable] = []
        self._next: list[tf.Tensor] = []
        self._rate()

    def make(self, shapes: Sequence[Any], make: MakeVariable) -> None:
        """Makes the variables; float32, as what is exchanged."""
        for place, shape in enumerate(shapes):
            self.common.append(make(tf.zeros(shape), f"control_{place}"))
            self.own.append(make(tf.zeros(shape), f"own_control_{place}"))

    def forget_own(self) -> None:
        """Makes c_i what is known of all, c: local steps are not corrected until it is known."""
        for own, common in zip(self.own, self.common, strict=True):
            own.assign(common.read_value(), read_value=False)

    def begin_round(self) -> None:
        """Begins with no steps."""
        self.rates = (0, 0.0)

    def count(self, steps: int) -> None:
        """Counts the rates of steps: callbacks may change it within a round.

        Args:
            steps: of the optimizer in the round so far; those not counted yet had the rate of now.
        """
        counted, total = self.rates
        if steps > counted:
            self.rates = (steps, total + (steps - counted) * self._rate())

    def of(self, place: int, dtype: tf.DType) -> tf.Tensor:
        """What the gradient of variable `place` gains."""
        return tf.cast(self.common[place].read_value() - self.own[place].read_value(), dtype)

    def sent(
        self, moved: Sequence[tf.Tensor], *, counts: bool, is_anew: bool = False
    ) -> list[tf.Tensor]:
        """c_i - c_i' of a member that has moved by `moved` in the steps that are counted.

        Args:
            moved: w_before - w.
            counts: whether the member's movement goes into the mean.
            is_anew: whether all members send c - c_i' instead, so that c becomes their mean again.
        """
        _, total = self.rates
        if not counts or not total:  # a rate of 0, as of a warmup, shows nothing of gradients
            self._next = [one.read_value() for one in self.own]
        else:
            factor = tf.constant(1.0 / total, tf.float32)
            self._next = [
                own.read_value() - common.read_value() + tf.cast(one, tf.float32) * factor
                for own, common, one in zip(self.own, self.common, moved, strict=True)
            ]
        before = self.common if is_anew else self.own
        return [one.read_value() - after for one, after in zip(before, self._next, strict=True)]

    def take(self, received: Sequence[tf.Tensor], share: float, *, is_sent: bool) -> None:
        """Changes c by what has come down, and c_i if this member's has been counted.

        Args:
            received: the mean of c_i - c_i' over those that took part.
            share: of all members, those that took part.
            is_sent: whether this member did.
        """
        for common, one in zip(self.common, received, strict=True):
            common.assign_sub(one * tf.cast(share, tf.float32), read_value=False)
        for own, after in zip(self.own, self._next if is_sent else (), strict=is_sent):
            own.assign(after, read_value=False)

    def _rate(self) -> float:
        optimizer = inner(self._model.optimizer)
        rate = getattr(optimizer, "_learning_rate", None)
        names = [type(one).__name__ for one in parts_of(self._model)] or ["none"]
        found = {name: getattr(optimizer, name, None) for name in _NO_MULTIPLES}
        options = [f"{name}={value}" for name, value in found.items() if value]
        if (
            len(names) > 1  # a step of one's own may use any of them
            or type(optimizer) is not keras.optimizers.SGD
            or options
            or not isinstance(rate, keras.Variable)
        ):
            raise ConfigError(
                "SCAFFOLD divides by the learning rate of local steps: compile the model with "
                "keras.optimizers.SGD, its only optimizer, of a rate that is no schedule, without "
                "momentum, without gradient_accumulation_steps, without clipping and without "
                f"ema_overwrite_frequency. Received: {', '.join(names + options)}"
            )
        return float(rate)
