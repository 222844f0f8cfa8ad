# SPDX-License-Identifier: Apache-2.0
"""Weights in a file, as Keras writes them, on a disk that may be full.

Where HDF5 cannot write to a disk it raises a RuntimeError, or ends the process by a segmentation
fault when it closes the file. So Keras writes into memory here, and what has come of it goes to the
disk at once: that raises an OSError, and nothing else.
"""

import io
from pathlib import Path

import keras


class _InMemory(io.BytesIO):
    """A file of a name, which Keras goes by."""

    def __str__(self) -> str:
        return "model.weights.h5"


def write(model: keras.Model, path: Path) -> None:
    """Writes the weights of a model; takes as much memory as they do.

    Args:
        model: a built one, which this process may save.
        path: of the file; one that is there is replaced.

    Raises:
        OSError: the disk is full, or the like; a part may be left.
    """
    whole = _InMemory()
    model.save_weights(whole)
    path.write_bytes(whole.getbuffer())
