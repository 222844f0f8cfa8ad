# SPDX-License-Identifier: Apache-2.0
"""The executions of a running `fit`, counted, and cut where a local phase ends.

Keras calls `model.train_function` once for `steps_per_execution` steps. Here it calls a function
that runs it and then says so, before any callback of the batch: what follows sees a model whose
workers have met. No callback of batches is needed, for which Keras would fetch the logs of every
step.

A callback may make another train function while `fit` runs, as when it freezes layers: that one is
called from here, too.

An execution that would pass the end of a local phase is cut into two; the shorter one is traced
once for each of its lengths. Keras numbers steps as before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras

from tf_hips.callbacks import resuming

_ENUMERATE = "_enumerate_iterator"


class _Steps(int):
    """A number of steps that Keras never takes for its case of one.

    There it asks for data without looking whether there are any, and where there are none parts of
    a step have run when the error comes: the optimizer has counted it.
    """

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False


class Executions:
    """Those of one model."""

    def __init__(
        self,
        model: keras.Model,
        ran: Callable[[], None],
        left: Callable[[], int | None],
        made: Callable[[], None],
    ) -> None:
        """Counts nothing yet.

        Args:
            model: a compiled model.
            ran: called after each execution.
            left: says how many steps the local phase has left; None: not known before.
            made: called where a callback has made another train function.
        """
        self._model = model
        self._ran = ran
        self._left = left
        self._made = made
        self._window = 1
        self._inner: Any = None
        self._shorter: dict[int, Callable[[Any], Any]] = {}

    def begin(self) -> None:
        """Stands between the `fit` that has begun and its train function."""
        self._stand_between()
        self._model.make_train_function = self._make
        self._window = int(self._model.steps_per_execution)

    def end(self) -> None:
        """Gives the model its train function back."""
        if self._model.train_function == self._run:
            self._model.train_function = self._inner
        if vars(self._model).get("make_train_function") == self._make:
            del self._model.make_train_function

    def begin_epoch(self, epoch: int) -> None:
        """Cuts the executions of an epoch that is about to begin."""
        if self._model.steps_per_execution == 1:
            return
        steps = resuming.epoch_iterator(self._model)
        begin = resuming.left_out(self._model, epoch)

        def cut() -> Iterator[Any]:
            for first, last, iterator in getattr(type(steps), _ENUMERATE)(steps):
                if steps.steps_per_epoch is None and steps.num_batches:
                    last = min(last, steps.num_batches - 1)
                while first <= last:
                    left = begin - first if first < begin else self._left()
                    end = last if left is None else min(last, first + max(left, 1) - 1)
                    self._window = end - first + 1
                    yield first, end, iterator
                    first = end + 1

        setattr(steps, _ENUMERATE, cut)

    def _stand_between(self) -> None:
        function = self._model.train_function
        if function != self._run:  # else what a `fit` that failed has left
            self._inner = function
            self._shorter = {}
        self._model.train_function = self._run

    def _make(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `make_train_function`, whose function is called from here."""
        made = type(self._model).make_train_function(self._model, *args, **kwargs)
        self._stand_between()
        self._made()
        return made

    def _run(self, iterator: Any) -> Any:
        model = self._model
        if self._window == model.steps_per_execution:
            logs = self._inner(iterator)
        else:
            logs = self._run_shorter(iterator)
        self._ran()
        return logs

    def _run_shorter(self, iterator: Any) -> Any:
        model, window = self._model, self._window
        whole = model.steps_per_execution
        if window not in self._shorter:
            self._shorter[window] = model._make_function(model.train_step)
        model.steps_per_execution = _Steps(window)  # read while the function is traced
        try:
            return self._shorter[window](iterator)
        finally:
            model.steps_per_execution = whole
