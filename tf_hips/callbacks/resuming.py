# SPDX-License-Identifier: Apache-2.0
"""Going on in the middle of an epoch of `keras.Model.fit`.

Keras begins an epoch at its step 0. Here the first steps of one epoch are left out: callbacks see
the steps that are left, with their numbers, and the data goes on where it was. Who can tell the
data where to begin (a strategy's `fit` does) asks `first_step`; otherwise batches are read and
dropped up to there.

Callbacks know neither the iterator of `fit` nor the list that they are in, so both are read from
the frames of the callers.
"""

import dataclasses
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.data.position import positions_of

_MAX_FRAMES = 40


@dataclasses.dataclass
class _Place:
    """Where a `fit` goes on."""

    epoch: int
    step: int
    is_told: bool = False  # whether the data know


_places: weakref.WeakKeyDictionary[keras.Model, _Place] = weakref.WeakKeyDictionary()


def first_step(model: keras.Model, epoch: int) -> int:
    """The step at which an epoch of a `fit` begins: 0, or more where it is resumed.

    Who asks must let the iterator of that epoch begin with that step, and asks before the iterator
    is made. Where nobody asks, the steps before are read from the iterator and dropped.
    """
    place = _places.get(model)
    if place is None or place.epoch != epoch:
        return 0
    place.is_told = True
    return place.step


def go_on(model: keras.Model, epoch: int, step: int) -> None:
    """Remembers where the `fit` of `model` that has begun goes on."""
    _places[model] = _Place(epoch, step)


def begin_anew(model: keras.Model) -> None:
    """Forgets it: the `fit` of `model` begins at a beginning."""
    _places.pop(model, None)


def left_out(model: keras.Model, epoch: int) -> int:
    """Steps of an epoch of the running `fit` that a resumed run has made already; mostly 0."""
    place = _places.get(model)
    return place.step if place is not None and place.epoch == epoch else 0


def initial_epoch(model: keras.Model) -> int:
    """The first epoch that the running `fit` of `model` was asked for."""
    return _Fit(model).initial_epoch


def epoch_iterator(model: keras.Model) -> Any:
    """What the running `fit` of `model` takes its steps from: an EpochIterator of Keras'."""
    return _Fit(model).steps


def put_first(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Moves a callback to the beginning of the list that calls it right now; returns the others."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            others = [one for one in owner.callbacks if one is not callback]
            owner.callbacks = [callback, *others]
            return others
    return []


def put_last(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Moves a callback to the end of the list that calls it right now; returns the others."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            # A new list: the old one is being iterated over.
            others = [one for one in owner.callbacks if one is not callback]
            owner.callbacks = [*others, callback]
            return others
    return []


class _Fit:
    """The `fit` of a model that runs right now."""

    def __init__(self, model: keras.Model) -> None:
        for frame in _frames():
            variables = frame.f_locals
            if variables.get("self") is model and "epoch_iterator" in variables:
                self.initial_epoch = int(variables.get("initial_epoch") or 0)
                self.steps: Any = variables["epoch_iterator"]
                self.data: Any = variables.get("x")
                self.is_shuffled = bool(variables.get("shuffle", True))
                if hasattr(self.steps, "_enumerate_iterator"):
                    return
        raise RuntimeError(
            "An epoch can be resumed in its middle only by `keras.Model.fit`, as Keras "
            f"3.15 has it. Received: Keras {keras.__version__}, and no such call"
        )


def set_epoch(model: keras.Model, epoch: int) -> None:
    """Lets sharded data of the running `fit` begin with `epoch`, unless who asked has done it."""
    if not _places[model].is_told:
        for position in _positions(_Fit(model).data):
            position.set(epoch)


def data_offset(model: keras.Model, epoch: int) -> int | None:
    """How much further sharded data count than the running `fit` counts its epochs.

    Only where a strategy tells the data its epochs; None without such data.

    Args:
        model: the model whose `fit` runs.
        epoch: the one that runs, or has just ended.
    """
    counted = [position.next_of_fit - 1 for position in _positions(_Fit(model).data)]
    return max(counted) - epoch if counted else None


def go_on_counting(model: keras.Model, offset: int | None) -> None:
    """Lets the data of the `fit` that begins count on from `data_offset`."""
    for position in _positions(_Fit(model).data):
        position.offset_of_resumed = offset


def leave_out(
    model: keras.Model,
    epoch: int,
    step: int,
    begin: Callable[[Any], None],
    *,
    is_over: bool = False,
    is_of_others: bool = False,
) -> None:
    """Lets the epoch that `fit` is about to begin start at a step in its middle.

    Called from a callback's `on_epoch_begin`, after `go_on`.

    Args:
        model: the model whose `fit` runs.
        epoch: number of the epoch.
        step: steps that are left out; a multiple of `steps_per_execution`.
        begin: called once, when all callbacks have begun the epoch and nothing of it has run; gets
            the last batch that was dropped, or None.
        is_over: whether the steps behind `step` are left out, too: the epoch was stopped there.
        is_of_others: whether another party was at that step, whose data may have another length.

    Raises:
        RuntimeError: no `fit` runs.
    """
    fit = _Fit(model)
    steps, place = fit.steps, _places[model]
    if not _positions(fit.data) and (fit.is_shuffled or not _is_array(fit.data)):
        log.warning(
            "Epoch %d goes on at step %d, and the data before are read and dropped. The run is the "
            "same as an undisturbed one only if their order does not depend on what was read in "
            "earlier epochs; that of `tf_hips.shard` does not.",
            epoch + 1,
            step,
        )

    # Of this object, where somebody cuts its executions.
    whole = vars(steps).pop("_enumerate_iterator", steps._enumerate_iterator)

    def rest() -> Iterator[Any]:
        del steps._enumerate_iterator  # the next epoch is a whole one
        batch = None
        has_begun = False
        for first, last, iterator in whole():
            if first < step:
                for number in range(first, last + 1):
                    if not place.is_told:
                        batch = _next(iterator, number, step, is_of_others=is_of_others)
                continue
            if not has_begun:
                has_begun = True
                begin(batch)
            if is_over:
                _tell_metrics(model)
                return
            yield first, last, iterator

    steps._enumerate_iterator = rest


def _tell_metrics(model: keras.Model) -> None:
    """Lets the epoch that runs end with what the metrics hold, though no step of it is made."""
    result = model._get_metrics_result_or_logs

    def once(logs: Any) -> Any:
        del model._get_metrics_result_or_logs  # that of the class is there again
        return result(logs or model.get_metrics_result())

    model._get_metrics_result_or_logs = once


def _next(iterator: Any, number: int, step: int, *, is_of_others: bool) -> Any:
    try:
        return next(iterator)
    except StopIteration:
        wanted = "The data must be as long as when the run was stopped"
        if is_of_others:
            wanted = (
                "Where it is not known how many steps an epoch has, another party's backup can be "
                "taken only with data as long as there. In a new run give `steps_per_epoch` to "
                "`fit` in all parties, and data that repeat, or give the data "
                "`tf.data.experimental.assert_cardinality`"
            )
        raise ValueError(
            f"{wanted}. Received: data that ends at step {number} of an epoch that goes on at "
            f"step {step}"
        ) from None


def _positions(data: Any) -> list[Any]:
    return positions_of(data) if isinstance(data, tf.data.Dataset) else []


def _is_array(data: Any) -> bool:
    return all(isinstance(one, np.ndarray | tf.Tensor) for one in keras.tree.flatten(data))


def _frames() -> Iterator[types.FrameType]:
    """The frames of the callers, nearest first."""
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
