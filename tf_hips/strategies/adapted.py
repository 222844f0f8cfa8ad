# SPDX-License-Identifier: Apache-2.0
"""What layers learn by `adapt`: on all workers it must be the same.

It is no weight, so nothing makes it equal: a vocabulary is a table, boundaries are a list, and
`Normalization` computes with constants that it has made of its weights. Workers that adapt, each to
its own shard, would train one set of weights on inputs that mean something else on each of them.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tf_hips.errors import ProtocolError
from tf_hips.ops.native import Bytes

Adapted: TypeAlias = list[list[str]]
"""Name of a layer and a digest of what it has learned, for each layer that adapts."""

# In the layers of Keras; a subclass that adapts keeps it there as well, or has no state besides
# its weights.
_LEARNED = ("mean", "variance", "bin_boundaries", "idf_weights")


def adapted(model: keras.Model) -> Adapted:
    """What the layers of `model` have learned by `adapt`; small, whatever they have learned."""
    return [
        [layer.name, _digest(layer)] for layer in model._flatten_layers() if hasattr(layer, "adapt")
    ]


def check_equal(everyone: Sequence[tuple[str, Adapted]]) -> None:
    """Raises if layers have learned different things.

    Args:
        everyone: pairs of a name and what `adapted` says, of all workers or parties.

    Raises:
        ProtocolError: names the first layer that differs.
    """
    whose, first = everyone[0]
    for who, one in everyone:
        for (name, here), (_, there) in zip(one, first, strict=False):
            if here != there:
                raise ProtocolError(
                    "Layers must have learned the same on all workers: call `adapt` with the same "
                    "data on all of them, or load what one has learned, vocabulary or weights, on "
                    f"all of them. Received: what `{name}` of {who} has learned is not that of "
                    f"{whose}"
                )


def is_adapted(told: Any) -> bool:
    """Whether another worker may have told this: it is what `adapted` says of some layers."""
    return isinstance(told, list) and all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(text, str) for text in one)
        for one in told
    )


def as_bytes(own: Adapted) -> Bytes:
    """What `check_bytes` of another party compares: uint8."""
    return np.frombuffer(bytes.fromhex("".join(digest for _, digest in own)), np.uint8)


def check_bytes(own: Adapted, first: Bytes) -> None:
    """Raises if this party's layers have learned other things than those of the first one.

    Args:
        own: of this party.
        first: what `as_bytes` says of the first one; as long as this party's own.

    Raises:
        ProtocolError: names the first layer that differs.
    """
    told = first.tobytes().hex()
    size = len(told) // max(1, len(own))
    theirs = [
        [name, told[size * place : size * (place + 1)]] for place, (name, _) in enumerate(own)
    ]
    check_equal([("party 0", theirs), ("party 1", own)])


def _digest(layer: Any) -> str:
    digest = hashlib.sha256()
    for name in _LEARNED:
        value = getattr(layer, name, None)
        is_symbolic = tf.is_tensor(value) and not hasattr(value, "numpy")
        if value is not None and not callable(value) and not is_symbolic:
            digest.update(name.encode() + np.asarray(value).tobytes())
    if hasattr(layer, "get_vocabulary"):
        for word in layer.get_vocabulary():
            digest.update(repr(word).encode())
    return digest.hexdigest()
