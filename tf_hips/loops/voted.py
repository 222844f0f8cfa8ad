# SPDX-License-Identifier: Apache-2.0
"""Loops whose members vote in groups (docs/detox.md): what is equal at all members of a group.

    batches      those of the group that a member sits in, for all local steps of a round
    steps        equally many of all; where groups change as many in each round, since batches are
                 dealt out before it is known when a round ends
    movement     from equal weights, by equal batches: equal bytes, which are what is voted on
    slots        of the inner optimizer are a member's history. Where groups change there must be
                 none, or they begin anew in each round
    statistics   of layers are averaged over all members, so each round begins with equal ones

What members say of themselves when they meet is voted on by nobody, so no movement may depend on
it.
"""

import weakref
from typing import Any

import keras
import tensorflow as tf

from tf_hips.callbacks.optimizers import parts, parts_of
from tf_hips.errors import ConfigError
from tf_hips.loops.meeting import Meeting
from tf_hips.loops.slots import twin_of
from tf_hips.strategies.party import PartyStrategy


def check(loop: Any, strategy: PartyStrategy) -> None:
    """Looks whether members of a loop can vote, if they do; then batches follow its rounds.

    Args:
        loop: a `Loop` that has the uplink.
        strategy: its strategy.

    Raises:
        ConfigError: what members of a group send could not be equal.
    """
    if strategy.groups is None:
        return
    why_not = loop.why_not_voted()
    if why_not is not None:
        raise ConfigError(f"Members of a group that votes must send equal bytes: {why_not}")
    seats = strategy.seats
    if seats is None:
        return
    steps = loop.steps_of_round()
    if steps is None:
        raise ConfigError(
            "Where groups change from round to round, each round must have the same number of "
            "local steps, as in `FedAvg(model, strategy, local_steps=8)`; groups that stay are "
            f"`detox(r=3, fixed=True)`. Received: {type(loop).__name__} without such a number"
        )
    follows = weakref.ref(loop)

    def done() -> int:
        followed = follows()
        left = None if followed is None else followed.steps_left
        return 0 if left is None else steps - left

    seats.follow(steps, done)


def check_optimizer(strategy: PartyStrategy, model: Any, *, resets: bool) -> None:
    """Looks whether slots of the inner optimizer are equal in a group.

    Args:
        strategy: that of a loop.
        model: what it trains; one that is not compiled yet is looked at when it is trained.
        resets: whether slots begin anew in each round.

    Raises:
        ConfigError: they would be those of other groups, or nobody knows which there are.
    """
    if resets or strategy.seats is None:
        return
    compiled = parts(getattr(model, "optimizer", None))
    for inner in parts_of(model):
        if not inner.built and not any(inner is one for one in compiled):
            continue  # it may never step
        twin = twin_of(inner)
        twin.build([keras.Variable(tf.zeros([1]), name="any")])
        counted = (twin.iterations, getattr(twin, "_learning_rate", None))
        slots = [one.name for one in twin.variables if not any(one is other for other in counted)]
        if slots:
            raise ConfigError(
                "Where groups change from round to round, inner optimizers must keep nothing from "
                "round to round, or members of a group would differ: take SGD without momentum, "
                f"or `reset_optimizer=True`. Received: {type(inner).__name__}, which keeps "
                f"{', '.join(slots)}"
            )


def begin(strategy: PartyStrategy) -> None:
    """A loop has begun to count the steps of the next round."""
    if strategy.seats is not None:
        strategy.seats.begin()


def note(strategy: PartyStrategy, meeting: Meeting) -> None:
    """Members of all parties have met; where nothing was exchanged there was no round."""
    if strategy.seats is not None and meeting.is_void:
        strategy.seats.skip()
