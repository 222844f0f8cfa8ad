# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of the gradients of a Keras model in a file, as one line of JSON.

A program of its own, `python -m tf_hips.comm.keras_file FILE`: who asks need not import Keras.
Keras' safe mode is on: a file that brings code of its own is refused.
"""

import json
import math
import sys

from tf_hips.comm.plan import LARGE_TABLE_ROWS
from tf_hips.errors import ConfigError, print_in_one_line


def gradients(path: str) -> list[tuple[str, int]]:
    """Name and number of elements of each trainable variable, in the model's order.

    0 elements of a large table of an embedding: its rows travel, beside what is planned.

    Raises:
        ConfigError: Keras does not load the file.
    """
    import keras

    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        lines = str(error).split("\n")
        raise ConfigError(
            f"the model must be a file that Keras loads, or lines of `name,num_elements`. "
            f"Received: {path}: {type(error).__name__}: {lines[0]}"
        ) from error
    embeddings = [
        layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)
    ]
    apart = {
        id(one)
        for layer in embeddings
        for one in layer.trainable_variables
        if one.shape[0] >= LARGE_TABLE_ROWS
    }
    return [
        (one.path, 0 if id(one) in apart else math.prod(one.shape))
        for one in model.trainable_variables
    ]


if __name__ == "__main__":
    print_in_one_line()
    sys.stdout.write(json.dumps(gradients(sys.argv[1])) + "\n")
