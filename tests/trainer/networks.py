# SPDX-License-Identifier: Apache-2.0
"""A network in place of those of the trainer, for tests of what is done around a training."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def dense(name: str, shape: tuple[int, ...], classes: int) -> "keras.Model":
    """One dense layer, whatever `name` says: half of a short run of LeNet goes into its graphs."""
    del name
    import keras

    layers = [keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(shape), *layers])
