# SPDX-License-Identifier: Apache-2.0
"""The mean training loss of a local phase, taken from the mean that Keras keeps of an epoch.

    phase begins ... epoch ends, Keras begins a new mean ... phase ends

Nothing is computed for it, and it is read twice in an epoch or a phase. Of a member that makes one
step in a round it is the loss of one batch, so what is told is smoothed over the rounds.
"""

import math

import keras

# Of the newest phase in what is told; all members smooth alike, so all lag behind alike.
_NEWEST = 0.2


class PhaseLoss:
    """That of one model. Models whose `train_step` keeps no mean of the loss have none."""

    def __init__(self, model: keras.Model) -> None:
        """Begins a phase."""
        self._model = model
        self._smoothed: float | None = None
        self.begin()

    def begin(self) -> None:
        """A phase begins, at any step of an epoch."""
        self._total = self._rows = 0.0
        self._seen = self._read()

    def begin_epoch(self) -> None:
        """Keras has begun a new mean."""
        self._seen = self._read()

    def end_epoch(self) -> None:
        """The steps of an epoch are over; a validation that follows has a mean of its own."""
        total, rows = self._read()
        if rows > self._seen[1]:
            self._total += total - self._seen[0]
            self._rows += rows - self._seen[1]
        self._seen = total, rows

    @property
    def mean(self) -> float | None:
        """The mean over the rows of this phase; None: not known, or no finite number."""
        self.end_epoch()
        mean = self._total / self._rows if self._rows > 0 else math.nan
        return mean if math.isfinite(mean) else None

    def smoothed(self) -> float | None:
        """Ends a phase: the mean of the phases so far, the newest ones first; None: not known."""
        mean, before = self.mean, self._smoothed
        if mean is not None:
            self._smoothed = mean if before is None else before + _NEWEST * (mean - before)
        return self._smoothed

    def _read(self) -> tuple[float, float]:
        mean = getattr(self._model, "_loss_tracker", None)
        if not isinstance(mean, keras.metrics.Mean):
            return 0.0, 0.0
        return float(mean.total), float(mean.count)
