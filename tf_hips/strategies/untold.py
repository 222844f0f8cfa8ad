# SPDX-License-Identifier: Apache-2.0
"""Weights that were set, and not made by steps, where a server has only heard of steps.

Under an asynchronous rule the server keeps how far weights have moved, and each party adds what
comes down to its own. What EarlyStopping restores, or `load_weights` brings, between two `fit`s
never goes up: the party would stay apart from the others for good. So weights are remembered when
an epoch has ended, before callbacks see it, and compared when the next one begins.

What a step has made since is not looked at. Nor is what our own BackupAndRestore restores: it comes
behind the first comparison of a `fit`, and its place in the run with it.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from tf_hips.errors import ProtocolError
from tf_hips.strategies.logs import digests

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy


class Untold:
    """Finds them in the models of one strategy."""

    def __init__(self, strategy: "PartyStrategy") -> None:
        """Remembers nothing yet."""
        self._strategy = strategy
        self._model: weakref.ref[keras.Model] | None = None
        self._steps: list[int] = []
        self._digests: dict[int, int] = {}

    def remember(self, model: keras.Model) -> None:
        """Takes the weights of a model as what steps have made of them."""
        if self._is_found():
            weights = model.trainable_weights
            self._model, self._steps = weakref.ref(model), self._steps_made()
            self._digests = dict(zip(map(id, weights), digests(weights), strict=True))

    def follow(self, variables: Sequence[Any], before: Sequence[int]) -> None:
        """Of `variables`, takes those that have been made equal for what steps have made.

        Args:
            variables: weights, and others.
            before: their digests before that.
        """
        if not self._is_found():
            return
        for one, digest, now in zip(variables, before, digests(variables), strict=True):
            if digest != now and self._digests.get(id(one)) == digest:
                self._digests[id(one)] = now

    def check(self, model: keras.Model) -> None:
        """Looks whether something else has set them since.

        Raises:
            ProtocolError: it has; names what.
        """
        is_known = self._model is not None and self._model() is model
        if not self._is_found() or not is_known or self._steps != self._steps_made():
            return
        known = [one for one in model.trainable_weights if id(one) in self._digests]
        changed = [
            one
            for one, digest in zip(known, digests(known), strict=True)
            if digest != self._digests[id(one)]
        ]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ProtocolError(
                f"With rule {self._strategy.rule} weights must stay what steps have made of them: "
                "the server knows how far they have moved, and nothing of what is set, so this "
                "party would stay apart from the others. Save these weights, and begin a new run "
                f"from them. Received: `{changed[0].path}`{more}, set since the last epoch ended "
                "(by EarlyStopping(restore_best_weights=True), `load_weights` or the like)"
            )

    def _is_found(self) -> bool:
        rule = self._strategy.rule
        return rule is not None and rule.is_asynchronous and self._strategy.loan is None

    def _steps_made(self) -> list[int]:
        return [int(one.step) for one in self._strategy._sums.values()]
