# SPDX-License-Identifier: Apache-2.0
"""What of a Keras model must be equal on all workers, and who has something else.

replicated   what training changes: all optimizers' variables, and the weights that they train
frozen       weights that were made to be trained, and are not trained now
moving       weights that were made not to be trained, as BatchNormalization's statistics: a
             layer moves them by the rows of its own worker, so they may differ after a step

Together these are the model's weights and the slots of its optimizers.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import keras

from tf_hips.callbacks import optimizers
from tf_hips.strategies.agreeing import Named


def replicated(model: keras.Model) -> list[Any]:
    """All optimizers' variables, and what is trained.

    The learning rate comes early: where it differs all differs, and it is the cause. Gradients that
    are still being accumulated are each worker's own.
    """
    slots = {id(slot): slot for one in optimizers.optimizers_of(model) for slot in one.variables}
    for part in optimizers.parts_of(model):
        for one in getattr(part, "_accumulated_gradients", []):
            slots.pop(id(one), None)
    return [*slots.values(), *model.trainable_weights]


def frozen(model: keras.Model) -> list[Any]:
    """Weights that an optimizer could train, of layers that are frozen."""
    moved = {id(one) for one in moving(model)}
    return [one for one in model.non_trainable_weights if id(one) not in moved]


def moving(model: keras.Model) -> list[Any]:
    """Weights that were made not to be trained, of frozen layers, too."""
    # Keras remembers how each was made: freezing a layer changes `trainable` of its weights only.
    made = {id(one) for layer in model._flatten_layers() for one in layer._non_trainable_variables}
    return [one for one in model.non_trainable_weights if id(one) in made]


def difference(variables: Sequence[Any], everyone: Named) -> str:
    """Who has what that the first of them has not; "" for nobody.

    Args:
        variables: this worker's.
        everyone: digests of the variables, of each worker.
    """
    first, values = everyone[0]
    for who, one in everyone:
        for place, (here, there) in enumerate(itertools.zip_longest(values or [], one or [])):
            if here != there:
                name = name_of(variables[place]) if place < len(variables) else "a variable"
                return f"`{name}` of {who} is not that of {first}"
    return ""


def name_of(variable: Any) -> str:
    """What a variable of Keras or of TensorFlow is called in messages."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")
