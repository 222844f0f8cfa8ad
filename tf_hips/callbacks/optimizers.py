# SPDX-License-Identifier: Apache-2.0
"""All optimizers of a Keras model, not only the one that was compiled.

A step of one's own may have several, held as attributes (a GAN); and an optimizer may have others
inside: `LossScaleOptimizer` one, `MultiOptimizer` one for each group of variables.

    optimizers_of   whole ones: what is saved, restored and made equal
    parts_of        those that make steps: what has slots, a learning rate, an average
"""

from collections.abc import Iterable, Iterator
from typing import Any

import keras


def optimizers_of(model: keras.Model) -> list[Any]:
    """The compiled optimizer, then those among the model's attributes, each once.

    Attributes come by their names, and so do the values of dictionaries: in an order that is the
    same on all workers, and in a new process, however the model came to have them.
    """
    compiled = getattr(model, "optimizer", None)
    # TensorFlow's own records of attributes name them again, as they came.
    attributes = {key: one for key, one in vars(model).items() if not key.startswith("_self_")}
    return _each_once([compiled, *_held([attributes], set())])


def inner(optimizer: Any) -> Any:
    """What a `LossScaleOptimizer` has inside; another one is itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def parts(optimizer: Any) -> list[Any]:
    """What makes the steps of an optimizer: itself, or what it has inside."""
    own = inner(optimizer)
    if isinstance(own, keras.optimizers.MultiOptimizer):
        return list(own.optimizers)
    return [] if own is None else [own]


def parts_of(model: keras.Model) -> list[Any]:
    """What makes the steps of all optimizers of a model, each once."""
    return _each_once(part for one in optimizers_of(model) for part in parts(one))


def counter(optimizer: Any) -> Any:
    """The variable that counts the steps of an optimizer: with accumulated gradients all of them.

    `iterations` are then those that change weights, and no variable. (A `MultiOptimizer` has one.)
    """
    return inner(optimizer)._iterations


def name(optimizer: Any) -> str:
    """The class of an optimizer, and of its parts where it has several; for messages, too."""
    own = inner(optimizer)
    told = type(own).__name__
    if isinstance(own, keras.optimizers.MultiOptimizer):
        told += f"({', '.join(type(one).__name__ for one in own.optimizers)})"
    return told


def _held(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                # By their names, where the order of names is that of any process.
                has_names = all(isinstance(key, str | int) for key in value)
                keys = sorted(value, key=str) if has_names else list(value)
                value = [value[key] for key in keys]
            yield from _held(value, seen)


def _each_once(optimizers: Iterable[Any]) -> list[Any]:
    return list({id(one): one for one in optimizers if one is not None}.values())
