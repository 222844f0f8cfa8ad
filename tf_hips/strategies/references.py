# SPDX-License-Identifier: Apache-2.0
"""Variables by what they are, and not by what they hold; references to them keep none alive."""

import weakref
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

References = dict[int, weakref.ref[tf.Variable]]

# So many may be of variables that are gone. Of more, these are forgotten at powers of two.
_MANY = 64


def add(references: References, new: Iterable[tf.Variable]) -> None:
    """Adds variables, and forgets those that are gone, of which a search may leave a million."""
    before = max(_MANY, len(references))
    for variable in new:
        references[id(variable)] = weakref.ref(variable)
    if len(references).bit_length() > before.bit_length():
        for key in [key for key, one in references.items() if one() is None]:
            del references[key]


def holds(references: References, variable: tf.Variable) -> bool:
    """Whether a variable is among them."""
    # An id is used again when its owner is gone.
    reference = references.get(id(variable))
    return reference is not None and reference() is variable


def unique(owned: Iterable[Any]) -> list[tf.Variable]:
    """The TensorFlow variables behind `owned`, each once."""
    raw = [one.value if isinstance(one, keras.Variable) else one for one in owned]
    return list({id(one): one for one in raw}.values())


def may_be_trained(variable: tf.Variable) -> bool:
    """Whether a variable was made to be trained, and can be."""
    return bool(variable.trainable) and variable.dtype.is_floating
