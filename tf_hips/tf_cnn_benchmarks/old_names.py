# SPDX-License-Identifier: Apache-2.0
"""Names of `tensorflow.compat.v1` that TensorFlow 2.21 looks for in a Keras that is not there.

`tf.nn.rnn_cell` and `tf.layers` are loaded from Keras 2, which a second package would bring
(tf_keras, with TF_USE_LEGACY_KERAS=1: then `tf.keras` is another one for the whole process). Most
of both is still in TensorFlow itself, under names that nobody sees; what is not is batch
normalisation, which is ours.
"""

import types

import tensorflow.compat.v1 as tf
from tensorflow.python.keras.layers.legacy_rnn import rnn_cell_impl
from tensorflow.python.layers import layers

from tf_hips.tf_cnn_benchmarks import batch_normalization


def install() -> None:
    """Puts them where `import tensorflow.compat.v1 as tf` finds them, for the whole process."""
    found = types.ModuleType("tensorflow.compat.v1.layers", "Layers of TensorFlow 1.")
    for module in (layers, batch_normalization):
        for name in dir(module):
            if not name.startswith("_"):
                setattr(found, name, getattr(module, name))
    tf.layers = found
    tf.nn.rnn_cell = rnn_cell_impl
