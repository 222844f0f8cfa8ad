# SPDX-License-Identifier: Apache-2.0
"""What Keras' own callbacks remember from epoch to epoch, so that a resumed run decides alike.

They begin every `fit` with nothing: after a restart ReduceLROnPlateau would take the first loss for
the best one, and EarlyStopping would wait anew.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips.callbacks import snapshot
from tf_hips.callbacks.snapshot import Entry

_REMEMBERED: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    # Between two epochs it has exchanged weights and averages, and it gives them back.
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}


def remembered(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, Any]]:
    """What callbacks remember, as JSON values; those that Keras does not bring are left out."""
    return [
        {"kind": kind.__name__}
        | {name: _plain(getattr(callback, name, None)) for name in _REMEMBERED[kind]}
        for kind, callback in _known(callbacks)
    ]


def remind(callbacks: Sequence[keras.callbacks.Callback], told: Sequence[dict[str, Any]]) -> None:
    """Gives callbacks back what `remembered` said; called after they began a `fit`.

    Args:
        callbacks: those of the new `fit`; the n-th of a kind gets what the n-th of it said.
        told: what `remembered` returned.
    """
    for number, (kind, callback) in enumerate(known := _known(callbacks)):
        place = sum(one is kind for one, _ in known[:number])
        same = [values for values in told if values["kind"] == kind.__name__]
        for name in _REMEMBERED[kind] if place < len(same) else ():
            setattr(callback, name, same[place][name])


def write_best_weights(folder: Path, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Writes the best weights that an EarlyStopping holds, if one does."""
    for number, callback in enumerate(_stoppers(callbacks)):
        if callback.best_weights is not None:
            snapshot.write(folder / f"best-weights-{number}", _entries(callback.best_weights))


def read_best_weights(folder: Path, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Reads what `write_best_weights` wrote."""
    for number, callback in enumerate(_stoppers(callbacks)):
        path = folder / f"best-weights-{number}"
        if path.with_name(f"{path.name}.index").exists():
            entries = _entries(callback.model.get_weights())
            snapshot.read(path, entries)
            callback.best_weights = [entry.variable.numpy() for entry in entries]


def _known(callbacks: Sequence[keras.callbacks.Callback]) -> list[tuple[type, Any]]:
    return [
        (kind, callback)
        for callback in callbacks
        for kind in _REMEMBERED
        if isinstance(callback, kind)
    ]


def _stoppers(callbacks: Sequence[keras.callbacks.Callback]) -> list[Any]:
    return [
        one
        for one in callbacks
        if isinstance(one, keras.callbacks.EarlyStopping) and one.restore_best_weights
    ]


def _entries(weights: Sequence[np.ndarray]) -> list[Entry]:
    with tf.device("/cpu:0"):
        return [Entry("best weight", tf.Variable(weight)) for weight in weights]


def _plain(value: Any) -> Any:
    return value if value is None else np.asarray(value).tolist()
