# SPDX-License-Identifier: Apache-2.0
"""The slots of a model's optimizers as they were before their first steps.

Where slots begin anew, so does what counts their steps: Adam divides a mean of j gradients by
1 - beta^j. Where the learning rate is a schedule, the optimizer's own count goes on for it, and the
step at which the slots began is kept beside it (`hooks.begun`). Keras accumulates gradients by that
count, too, so they go on with it, unless they may hold NaN.

A slot may begin as the weight that it belongs to (ScheduleFreeAdamW's iterate): it gets the weight
of the moment. Which ones do so is found by building the optimizer on marked variables.

All of this is seen in twins, which Keras makes of what `get_config` returns. Where it cannot, slots
begin as zeros after a loss that is no number; slots that begin anew in each round are refused.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks.optimizers import inner, parts_of
from tf_hips.errors import ConfigError
from tf_hips.strategies import hooks

# What a slot begins as: a value, or the weight of this place among those that are trained; None: it
# stays.
_First: TypeAlias = np.ndarray | int | None


class FirstSlots:
    """First values of a model's optimizers; a slot of one number takes the memory of one.

    What makes steps is an optimizer here, as each part of a `MultiOptimizer`. The count of the
    whole `MultiOptimizer`, which no step depends on, goes on.
    """

    def __init__(self, model: keras.Model, *, resets: bool = False) -> None:
        """Remembers the model; looks at nothing yet.

        Args:
            model: a compiled model.
            resets: whether slots begin anew in each round, and not only where they may hold NaN.
        """
        self._model = model
        self._resets = resets
        # By the optimizer: a model may be compiled again.
        self._first: weakref.WeakKeyDictionary[Any, list[_First]] = weakref.WeakKeyDictionary()
        # Steps that an optimizer counts no longer.
        self._forgotten: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._begun: list[tf.Variable] = []  # as of `hooks`, where a backup finds it
        self._counted: list[Any] = []  # the optimizers that they are of

    def make(self, make_variable: Callable[..., tf.Variable]) -> None:
        """Makes what is kept; what a backup has of it goes into it here."""
        for place, _ in enumerate(parts_of(self._model)):
            name = f"slots_begun_{place}" if place else "slots_begun"
            self._begun.append(make_variable(tf.zeros([], tf.int64), name))
        self._counted = [None] * len(self._begun)

    def count(self) -> None:
        """Lets the optimizers count the steps of their slots; before their first steps here.

        Raises:
            ConfigError: slots are to begin anew in each round, and nobody knows as what.
        """
        for one in parts_of(self._model) if self._resets else ():
            twin_of(one)
        kept = zip(parts_of(self._model), self._begun, strict=False)  # may be compiled again
        for place, (optimizer, begun) in enumerate(kept):
            counted = self._counted[place]
            if counted is optimizer or not _is_scheduled(optimizer):
                continue
            known = hooks.begun(optimizer)
            if counted is None and int(begun.numpy()):  # of a backup
                known.assign(begun)
            begun.assign(known)
            self._counted[place] = optimizer

    def restore(self, *, is_refused: bool = False) -> None:
        """Gives slots and counts their first values; learning rates and loss scales stay.

        The number of steps stays, too, where the learning rate depends on it, with the gradients
        that were accumulated by it; the slots count theirs from here.

        Args:
            is_refused: whether what was accumulated must not stay: it may hold NaN.
        """
        for place, optimizer in enumerate(parts_of(self._model)):
            if optimizer.built:  # else it has made no step
                before = int(optimizer._iterations.numpy())
                self._restore(optimizer, is_refused=is_refused)
                lost = before - int(optimizer._iterations.numpy())
                self._forgotten[optimizer] = self.forgotten(optimizer) + lost
            if _is_scheduled(optimizer):
                hooks.begun(optimizer).assign(optimizer._iterations.value)
                for begun in self._begun[place : place + 1]:
                    begun.assign(optimizer._iterations.value)

    def forgotten(self, optimizer: Any) -> int:
        """Steps that an optimizer of the model counts no longer, as its slots began anew."""
        return self._forgotten.get(inner(optimizer), 0)

    def place(self) -> list[int]:
        """What a backup keeps: the steps that are forgotten, in the order of `parts_of`."""
        return [self.forgotten(one) for one in parts_of(self._model)]

    def go_on(self, place: Sequence[int]) -> None:
        """Takes up the place that a backup has."""
        self._forgotten.clear()
        self._forgotten.update(zip(parts_of(self._model), place, strict=False))

    def _restore(self, optimizer: Any, *, is_refused: bool) -> None:
        if optimizer not in self._first:
            self._first[optimizer] = _first_values(optimizer)
        weights = optimizer._trainable_variables
        # Keras would divide what comes after by the number of all that were to be accumulated.
        goes_on = _is_scheduled(optimizer) and not is_refused
        kept = getattr(optimizer, "_accumulated_gradients", []) if goes_on else []
        for variable, first in zip(optimizer.variables, self._first[optimizer], strict=True):
            if any(variable is one for one in kept):
                continue
            if isinstance(first, int):
                variable.assign(weights[first])
            elif first is not None:
                variable.assign(np.broadcast_to(first, variable.shape))
        # The mean that `use_ema` keeps begins with the weights, also where steps go on counting.
        for mean, weight in zip(*_averaged(optimizer), strict=True):
            mean.assign(weight)


def _first_values(optimizer: keras.optimizers.Optimizer) -> list[_First]:
    trained = optimizer._trainable_variables
    kept = [getattr(optimizer, "_learning_rate", None)]
    if _is_scheduled(optimizer):
        kept.append(optimizer._iterations)
    try:
        places = _places(optimizer)
        # A slot that begins as anything else of the weights (their norm) begins as that of these.
        twin = _built_twin(optimizer, trained)
    except ConfigError as error:
        log.warning("Slots of %s begin as zeros. %s", optimizer.name, error)
        return [
            None if any(variable is one for one in kept) else _zero(variable)
            for variable in optimizer.variables
        ]
    values: list[_First] = []
    for variable, first, place in zip(optimizer.variables, twin.variables, places, strict=True):
        if any(variable is one for one in kept):
            values.append(None)
        elif place is not None:
            values.append(place)
        else:
            value = np.asarray(first.numpy())
            is_one_number = value.size > 1 and bool(np.all(value == value.flat[0]))
            values.append(value.reshape(-1)[:1].copy() if is_one_number else value)
    return values


def _places(optimizer: keras.optimizers.Optimizer) -> list[int | None]:
    """For each variable of `optimizer` the place of the weight that it begins as, if it does.

    Found by marks: compared with the weights themselves, most slots would begin as a bias of zeros.
    """
    marks = []
    for place, one in enumerate(optimizer._trainable_variables):
        mark = np.full(one.shape, 4.0)
        mark.flat[:64] = np.random.default_rng(place).uniform(3.0, 5.0, min(mark.size, 64))
        marks.append(np.asarray(tf.cast(mark, one.dtype)))

    def place_of(slot: np.ndarray) -> int | None:
        for place, mark in enumerate(marks):
            is_like = slot.size and slot.shape == mark.shape and slot.flat[0] == mark.flat[0]
            if is_like and np.array_equal(slot, mark):
                return place
        return None

    return [place_of(np.asarray(slot.numpy())) for slot in _built_twin(optimizer, marks).variables]


def twin_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """An optimizer like `optimizer`, as it is before it has slots; of the same schedule.

    Raises:
        ConfigError: it cannot be made from its configuration.
    """
    held, rate = vars(optimizer), getattr(optimizer, "_learning_rate", None)
    is_number = isinstance(rate, keras.Variable)
    try:
        if not is_number:  # a schedule or function that Keras cannot save: no slot begins as it
            held["_learning_rate"] = 0.5
        config = optimizer.get_config()
        if not is_number and "learning_rate" in config:
            config["learning_rate"] = rate
        twin = type(optimizer).from_config(config)
    except Exception as error:
        raise _odd(optimizer, f"{type(error).__name__}: {error}") from error
    finally:
        if not is_number:
            held["_learning_rate"] = rate
    if not is_number:
        twin.learning_rate = rate
    return twin


def _built_twin(optimizer: keras.optimizers.Optimizer, values: Sequence[Any]) -> Any:
    """A twin of `optimizer`, as it begins where it trains variables of these values."""
    twin = twin_of(optimizer)
    twin.build(
        [
            _like(one, value)
            for one, value in zip(optimizer._trainable_variables, values, strict=True)
        ]
    )
    here, there = ([tuple(one.shape) for one in each.variables] for each in (optimizer, twin))
    if here != there:
        raise _odd(optimizer, f"which has {len(here)} variables, and made again {len(there)}")
    return twin


def _odd(optimizer: keras.optimizers.Optimizer, why: str) -> ConfigError:
    return ConfigError(
        "An optimizer must be one that Keras can make again, for what its slots begin as to be "
        "known: override get_config, so that it returns all that the constructor takes. "
        f"Received: {type(optimizer).__name__}, {why}"
    )


def _like(variable: keras.Variable, value: Any) -> keras.Variable:
    made = keras.Variable(tf.identity(value), dtype=variable.dtype, name="twin")
    # Optimizers choose by it: Muon's `exclude_layers`.
    made._path = getattr(variable, "path", variable.name)
    return made


def _zero(variable: Any) -> np.ndarray:
    return np.asarray(tf.zeros([], variable.dtype))


def _is_scheduled(optimizer: Any) -> bool:
    rate = getattr(optimizer, "_learning_rate", None)
    return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)


def _averaged(optimizer: keras.optimizers.Optimizer) -> tuple[list[Any], list[Any]]:
    if not optimizer.use_ema:
        return [], []
    return optimizer._model_variables_moving_average, optimizer._trainable_variables
