# SPDX-License-Identifier: Apache-2.0
"""`FedAvg`: local steps or epochs, then a mean of how far they have led."""

from typing import Any

import keras

from tf_hips.loops.engine import Loop


class FedAvg(Loop):
    """Local training, then a synchronisation."""

    def __init__(
        self,
        model: keras.Model,
        strategy: Any,
        *,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        server_optimizer: Any = None,
        weighting: str = "samples",
        reset_optimizer: bool = False,
    ) -> None:
        super().__init__(
            model,
            strategy,
            server_optimizer=server_optimizer,
            weighting=weighting,
            reset_optimizer=reset_optimizer,
        )
        self._local_steps = local_steps
        self._local_epochs = local_epochs

    def plan(self, number: int) -> int | None:
        """The steps that were asked for."""
        del number
        return self._local_steps

    def is_enough_at_epoch_end(self) -> bool:
        """Whether the epochs that were asked for are over."""
        return self._local_epochs is not None and self._epochs >= self._local_epochs
