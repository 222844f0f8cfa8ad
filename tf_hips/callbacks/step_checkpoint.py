# SPDX-License-Identifier: Apache-2.0
"""`StepCheckpoint`: weights by step, for another process to evaluate while training goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tf_hips import log
from tf_hips.callbacks import weights_file
from tf_hips.callbacks.checkpoint_folder import CheckpointFolder
from tf_hips.callbacks.folder import is_count
from tf_hips.callbacks.optimizers import optimizers_of
from tf_hips.callbacks.peers import Peers


class StepCheckpoint(keras.callbacks.Callback):
    """Writes `model_step_N` every so many steps, whole or not at all, and a note at the end.

        model.fit(x, y, callbacks=[tf_hips.callbacks.StepCheckpoint("models", every=50)])

        tf-hips evaluate --model-dir models --follow --network lenet --dataset mnist

    Give it to `fit` on all workers; the one that saves models writes. It holds weights, not what a
    run needs to go on; that is `BackupAndRestore`. A disk that is full ends no run: what could not
    be written is said, and the next one is tried. Writing takes as much memory as the weights.
    """

    def __init__(
        self,
        directory: str | Path,
        every: int,
        *,
        keep: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Plans checkpoints; nothing is written before `fit`.

        Args:
            directory: where they are, for this run alone.
            every: steps between two of them, counted through all epochs; with
                `steps_per_execution` the first step that is seen after a multiple of it.
            keep: how many stay; None: all.
            facts: what the model is, JSON values that the evaluator reads: `network`, `dataset`;
                `run`, if the run has a name, and `began`, that of its first session if a run that
                is started again has another.

        Raises:
            ValueError: an argument is out of range.
        """
        super().__init__()
        if not is_count(every):
            raise ValueError(f"`every` must be an int, at least 1. Received: every={every!r}")
        if keep is not None and not is_count(keep):
            raise ValueError(f"`keep` must be an int, at least 1. Received: keep={keep!r}")
        self._folder = CheckpointFolder(directory)
        self._every = every
        self._keep = keep
        self._facts = dict(facts or {})
        self._begins = False
        self._writes = False  # before `fit` has begun
        self._epoch = 0
        self._last = 0
        self._counting: Any = None  # the optimizer whose steps are those of this `fit`

    def set_model(self, model: keras.Model) -> None:
        """Remembers the model and who trains it."""
        super().set_model(model)
        self._peers = Peers(model)
        strategy = self._peers.strategy
        self._writes = strategy is None or strategy.may_write()

    def on_train_begin(self, logs: Any = None) -> None:
        """The first epoch looks at the folder: a run that goes on is at its step only then."""
        del logs
        self._begins = True
        self._counting = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Makes the folder ready, before the first epoch.

        Raises:
            ConfigError: it holds another run's checkpoints, or cannot be written.
        """
        del logs
        self._epoch = epoch + 1  # as logs count them
        self._begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes one, if one is due; the last one waits for what the end makes of the weights."""
        del logs
        step = self._step()
        if step // self._every > self._last // self._every and not self._is_last(batch):
            self._write(step)
        self._last = step

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the last one, and that there are no more."""
        del logs
        has_trained = not self._begins  # a run that goes on may have no step left
        self._begin()
        step = self._step()
        # Also where one of this step is there: it was written before the end was known.
        if step > 0 and (has_trained or step not in self._folder.steps()):
            self._write(step)
        self.end()

    def end(self, reason: str | None = None) -> None:
        """Says that training has ended; `fit` that fails leaves that to its caller.

        Args:
            reason: why it failed; None: it did not.
        """
        if self._writes:
            strategy = self._peers.strategy
            session = None if strategy is None else strategy.config.run
            try:
                self._folder.end(self._last, reason, self._facts.get("run", session))
            except OSError as error:
                log.warning("The end of training cannot be noted: %s", error)

    def _is_last(self, batch: int) -> bool:
        """Whether `fit` ends behind this step: then a loop meets, and `use_ema` sets means."""
        params = self.params or {}
        num_steps, num_epochs = params.get("steps"), params.get("epochs")
        if num_steps is not None and num_epochs is not None:
            is_end = batch + 1 >= num_steps and self._epoch >= num_epochs
        else:
            is_end = False  # of data of unknown length nobody knows it yet: written twice
        return is_end or bool(self.model.stop_training)

    def _begin(self) -> None:
        if self._begins:
            self._begins = False
            self._last = self._step()
            self._peers.together(self._make_ready)

    def _make_ready(self) -> None:
        if self._writes:
            self._folder.begin(self._last, self._facts.get("began", self._facts.get("run")))

    def _step(self) -> int:
        if self._counting is None:
            # Where a step of one's own has other optimizers, the compiled one may stay at 0.
            made = self._peers.steps_made
            stepped = [one for one in optimizers_of(self.model) if made(one)]
            if not stepped:
                return 0
            is_compiled = stepped[0] is self.model.optimizer
            self._counting = stepped[0] if is_compiled else max(stepped, key=made)
        return self._peers.steps_made(self._counting)

    def _write(self, step: int) -> None:
        if not self._writes:
            return
        try:
            self._folder.write(
                step, self._epoch, self._facts, lambda path: weights_file.write(self.model, path)
            )
            if self._keep is not None:
                self._folder.prune(self._keep)
        except OSError as error:
            log.error(
                "The checkpoint of step %d cannot be written to %s, and training goes on: %s",
                step,
                self._folder.path,
                error,
            )
