# SPDX-License-Identifier: Apache-2.0
"""Learning rates for many workers: gradual warm-up, and multipliers over the epochs.

A joined batch N times as large wants a learning rate about N times as large, but not from the first
step (Goyal et al. 2017). So compile with the large rate, and let the warm-up begin at a N-th of it:

    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1 * strategy.num_replicas_in_sync, momentum=0.9), ...)
    model.fit(..., callbacks=[tf_hips.callbacks.LearningRateWarmup(warmup_epochs=5)])

Rates are functions of epoch and step, so a resumed run continues where it was. Arguments mean what
they mean in Horovod, whose own callbacks do not run on Keras 3.

There is no momentum correction. Keras' SGD has its rate in its velocity,
`v = momentum * v - rate * gradient`, so a new rate reaches the old velocity only as that decays,
within some 1 / (1 - momentum) steps; and `momentum` is a constant of the traced step, which cannot
be another one for one step. In a warm-up of W steps the rate changes by (scale - 1) / W of its
first value per step, and the difference is as small. Adam and its like have no rate in their slots
and need no correction.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tf_hips import log
from tf_hips.callbacks import optimizers
from tf_hips.callbacks.party import Party

Multiplier = Callable[[float], float]


class _Rate(keras.callbacks.Callback):
    """Sets the learning rate of a model's optimizer."""

    def __init__(
        self, initial_lr: float | None, steps_per_epoch: int | None, momentum_correction: bool
    ) -> None:
        super().__init__()
        if momentum_correction:
            raise ValueError(
                "`momentum_correction` must be False, or left out: Keras' SGD has its rate in its "
                "velocity, so a new rate reaches that within some 1 / (1 - momentum) steps, and "
                "other optimizers need no correction. Received: "
                f"momentum_correction={momentum_correction!r}"
            )
        if initial_lr is not None and not initial_lr > 0:
            raise ValueError(f"`initial_lr` must be positive. Received: initial_lr={initial_lr}")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(
                f"`steps_per_epoch` must be at least 1. Received: steps_per_epoch={steps_per_epoch}"
            )
        self._given = self._initial = initial_lr
        self._last: tuple[Any, float] | None = None
        self._given_steps = steps_per_epoch
        self._epoch = 0

    def set_model(self, model: keras.Model) -> None:
        """Remembers the model and, where none was given, its optimizer's learning rate.

        Raises:
            ValueError: the optimizer's learning rate is a schedule, or each of its parts has one.
        """
        super().set_model(model)
        optimizer = optimizers.inner(model.optimizer)
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            raise ValueError(
                f"The model's optimizer must have one learning rate for {type(self).__name__} to "
                "set it; give the parts of a MultiOptimizer schedules. Received: "
                f"{optimizers.name(optimizer)}"
            )
        compiled, *held = optimizers.optimizers_of(model)
        others = [one.name for one in held if optimizers.parts(compiled) != optimizers.parts(one)]
        if others:
            log.warning(
                "%s sets the learning rate of the optimizer that `%s` was compiled with (%s), and "
                "not of others that the model has: %s. Give those schedules.",
                type(self).__name__,
                model.name,
                compiled.name,
                ", ".join(others),
            )
        # Read here, before anything is restored or changed.
        rate = getattr(optimizer, "_learning_rate", None)
        if not isinstance(rate, keras.Variable):
            raise ValueError(
                f"The learning rate of {type(optimizer).__name__} must be a float for "
                f"{type(self).__name__} to set it; a schedule computes it from the steps. "
                f"Received: learning_rate={type(rate).__name__}"
            )
        current = float(rate.numpy())
        # Every `fit` has its own, unless the last one was broken off in the middle of this.
        is_own = self._last is not None and self._last == (optimizer, current)
        if self._given is None and not is_own:
            self._initial = current

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the epoch."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the learning rate into the logs, as Keras' schedulers do."""
        if logs is not None:
            logs["learning_rate"] = float(
                keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)
            )

    def _steps_per_epoch(self) -> int:
        steps = self._given_steps or (self.params or {}).get("steps")
        if not steps:
            raise ValueError(
                f"`steps_per_epoch` must be given to {type(self).__name__} where Keras does not "
                "know how long an epoch is. Received: steps_per_epoch=None"
            )
        return int(steps)

    def _set(self, rate: float) -> None:
        self.model.optimizer.learning_rate = rate
        optimizer = optimizers.inner(self.model.optimizer)
        self._last = optimizer, float(np.float32(rate))


class LearningRateWarmup(_Rate):
    """Raises the learning rate linearly from `initial_lr / scale` to `initial_lr`.

    With W steps of warm-up, step t (from 0) runs with

        initial_lr / scale * (1 + (scale - 1) * (t + 1) / W)

    Afterwards the rate is `initial_lr`, and this callback leaves it to others. Steps that one
    execution runs together (`steps_per_execution`) get the rate of the first of them.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float | None = None,
        *,
        warmup_steps: int | None = None,
        scale: float | None = None,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = False,
        verbose: int = 0,
    ) -> None:
        """Plans a warm-up.

        Args:
            initial_lr: the rate after the warm-up, that of all workers together; None takes what
                the optimizer has when `fit` is called.
            warmup_epochs: length of the warm-up in epochs; 5 where nothing is said.
            warmup_steps: its length in steps, instead.
            scale: the ratio of the last rate to the first; None is the number of all workers, also
                where a loop lets them train apart.
            steps_per_epoch: steps of an epoch, where Keras does not know them.
            momentum_correction: Horovod's; there is none here, so only False.
            verbose: whether the worker that saves models prints a line after the epoch in which
                the warm-up has ended.

        Raises:
            ValueError: an argument is out of range, or both lengths are given.
        """
        super().__init__(initial_lr, steps_per_epoch, momentum_correction)
        if warmup_epochs is not None and warmup_steps is not None:
            raise ValueError(
                "Only one of `warmup_epochs` and `warmup_steps` must be given. Received: "
                f"warmup_epochs={warmup_epochs}, warmup_steps={warmup_steps}"
            )
        for name, value in [("warmup_epochs", warmup_epochs), ("warmup_steps", warmup_steps)]:
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be positive. Received: {name}={value}")
        if scale is not None and not scale >= 1:
            raise ValueError(f"`scale` must be at least 1. Received: scale={scale}")
        self._warmup_epochs = 5 if warmup_epochs is None else warmup_epochs
        self._warmup_steps = warmup_steps
        self._scale = scale
        self._verbose = verbose
        self._is_warming = self._has_ended = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Raises where the length of an epoch is not known."""
        self._is_warming = False
        self._steps_per_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the steps that begin."""
        step = self._epoch * self._steps_per_epoch() + batch
        if step < self._length():
            self._is_warming = True
            self._set(self.rate(step))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Sets the last rate when the warm-up is over."""
        step = self._epoch * self._steps_per_epoch() + batch + 1
        if self._is_warming and step >= self._length():
            # At the end of a step: what is saved here continues with the right rate.
            self._is_warming, self._has_ended = False, True
            self._set(self.rate(step))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tells that the warm-up is over, if it is to, and puts the learning rate into the logs."""
        super().on_epoch_end(epoch, logs)
        has_ended, self._has_ended = self._has_ended, False
        strategy = self.model.distribute_strategy
        is_first = not isinstance(strategy, Party) or strategy.may_write()
        if has_ended and self._verbose and is_first:
            sys.stdout.write(
                f"\nEpoch {epoch + 1}: the warm-up of the learning rate to {self._initial:g} is "
                "over.\n"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step of the run, counted from 0. Needs the model.

        Args:
            step: epoch * steps per epoch + step in its epoch.
        """
        if self._initial is None:
            raise ValueError("`initial_lr` must be given, or `fit` called. Received: None")
        length, scale = self._length(), self._scale
        if scale is None:
            scale = self._num_workers()
        if step + 1 >= length:
            return self._initial
        return self._initial / scale * (1 + (scale - 1) * (step + 1) / length)

    def _num_workers(self) -> int:
        strategy = self.model.distribute_strategy
        # A loop's: workers train apart in a local phase.
        loan = strategy.loan if isinstance(strategy, Party) else None
        with contextlib.nullcontext() if loan is None else loan.whole():
            return int(strategy.num_replicas_in_sync)

    def _length(self) -> int:
        if self._warmup_steps is not None:
            return self._warmup_steps
        return max(1, round(self._warmup_epochs * self._steps_per_epoch()))


class LearningRateMultiplier(_Rate):
    """Multiplies `initial_lr` in some epochs by what depends on the epoch.

        decay = [
            tf_hips.callbacks.LearningRateWarmup(rate, warmup_epochs=5),
            tf_hips.callbacks.LearningRateMultiplier(rate, 1.0, start_epoch=5, end_epoch=30),
            tf_hips.callbacks.LearningRateMultiplier(
                rate, lambda epoch: 0.1, start_epoch=30, end_epoch=60
            ),
        ]

    Epochs count from 0, and those before `start_epoch` or from `end_epoch` on are left as they are.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Multiplier,
        *,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = False,
    ) -> None:
        """Plans a schedule.

        Args:
            initial_lr: the rate that is multiplied.
            multiplier: a function of the epoch; or a number m, for `m ** (epoch - start_epoch)`.
            start_epoch: the first epoch that this applies to.
            end_epoch: the first epoch that it does not apply to any more; None: to all.
            staircase: whether the rate changes at the beginnings of epochs only; otherwise with
                every step, and `multiplier` gets a fraction.
            steps_per_epoch: steps of an epoch, where Keras does not know them and `staircase` is
                False.
            momentum_correction: Horovod's; there is none here, so only False.

        Raises:
            ValueError: an argument is out of range.
        """
        super().__init__(initial_lr, steps_per_epoch, momentum_correction)
        if end_epoch is not None and end_epoch < start_epoch:
            raise ValueError(
                "`end_epoch` must be at least `start_epoch`. "
                f"Received: start_epoch={start_epoch}, end_epoch={end_epoch}"
            )
        self._multiplier = multiplier
        self._start = start_epoch
        self._end = end_epoch
        self._staircase = staircase

    def on_train_begin(self, logs: Any = None) -> None:
        """Raises where the length of an epoch is needed and not known."""
        if not self._staircase:
            self._steps_per_epoch()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the rate of an epoch."""
        super().on_epoch_begin(epoch, logs)
        if self._staircase and self._applies():
            self._set(self._rate(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the steps that begin."""
        if not self._staircase and self._applies():
            self._set(self._rate(self._epoch + batch / self._steps_per_epoch()))

    def _applies(self) -> bool:
        return self._start <= self._epoch and (self._end is None or self._epoch < self._end)

    def _rate(self, epoch: float) -> float:
        if self._initial is None:
            raise ValueError("`initial_lr` must be a positive number. Received: initial_lr=None")
        if callable(self._multiplier):
            return float(self._initial * self._multiplier(epoch))
        return float(self._initial * self._multiplier ** (epoch - self._start))
