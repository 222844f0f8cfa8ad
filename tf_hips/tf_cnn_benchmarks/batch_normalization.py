# SPDX-License-Identifier: Apache-2.0
"""The layer `tf.layers.BatchNormalization` of TensorFlow 1, which TensorFlow 2.21 has no longer.

Variables have the names, shapes and order that they had there, so old checkpoints can be read.
"""

from typing import Any

import tensorflow.compat.v1 as tf


class BatchNormalization:
    """Batch normalisation of images, in graphs of TensorFlow 1.

    Follows Ioffe and Szegedy, Batch Normalization (ICML 2015), with moving averages for inference.
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        fused: bool | None = None,
        name: str | None = None,
        _scope: Any = None,
    ) -> None:
        """Takes the arguments of TensorFlow 1 that its users gave.

        Args:
            axis: of the channels: -1 or 3 for NHWC, 1 for NCHW.
            momentum: what a step leaves of the moving averages.
            epsilon: added to variances.
            center: whether there is an offset, `beta`.
            scale: whether there is a factor, `gamma`.
            fused: nothing else is known here; None or True.
            name: of the scope of the variables, where `_scope` is not given.
            _scope: the variable scope in which the variables are made.

        Raises:
            ValueError: `axis` or `fused` is something else.
        """
        if axis not in (-1, 1, 3):
            raise ValueError(f"`axis` must be -1, 1 or 3, of images. Received: axis={axis}")
        if fused not in (None, True):
            raise ValueError(f"`fused` must be None or True. Received: fused={fused}")
        self._data_format = "NCHW" if axis == 1 else "NHWC"
        self._momentum = momentum
        self._epsilon = epsilon
        self._center = center
        self._scale = scale
        self._scope = _scope if _scope is not None else (name or "batch_normalization")

    def __call__(self, inputs: Any, training: bool = False) -> Any:
        """As `apply`."""
        return self.apply(inputs, training)

    def apply(self, inputs: Any, training: bool = False) -> Any:
        """Adds the layer to the present graph.

        Args:
            inputs: images, float16 or float32, of known channels.
            training: whether this batch's own statistics are used, and noted in the moving ones by
                operations in the collection UPDATE_OPS.

        Returns:
            A tensor like `inputs`.
        """
        channels = int(inputs.shape[1 if self._data_format == "NCHW" else 3])
        with tf.variable_scope(self._scope):
            # Statistics and what they are multiplied with stay float32, as fused_batch_norm asks.
            gamma = self._variable("gamma", channels, 1.0, self._scale)
            beta = self._variable("beta", channels, 0.0, self._center)
            moving = [
                tf.get_variable(
                    name,
                    [channels],
                    tf.float32,
                    initializer=tf.constant_initializer(value),
                    trainable=False,
                )
                for name, value in (("moving_mean", 0.0), ("moving_variance", 1.0))
            ]
            given = {} if training else {"mean": moving[0], "variance": moving[1]}
            outputs, *batch = tf.nn.fused_batch_norm(
                inputs,
                gamma,
                beta,
                epsilon=self._epsilon,
                data_format=self._data_format,
                is_training=training,
                **given,
            )
            if training:
                for variable, value in zip(moving, batch, strict=True):
                    change = (variable - value) * (1.0 - self._momentum)
                    # The operation, for what assign_sub returns for a resource variable bears the
                    # variable's name, and those who look for updates look in the present scope.
                    tf.add_to_collection(
                        tf.GraphKeys.UPDATE_OPS, tf.assign_sub(variable, change).op
                    )
        return outputs

    def _variable(self, name: str, channels: int, value: float, is_there: bool) -> Any:
        if not is_there:
            return tf.constant(value, tf.float32, [channels])
        return tf.get_variable(
            name, [channels], tf.float32, initializer=tf.constant_initializer(value)
        )


def batch_normalization(inputs: Any, *, training: bool = False, **arguments: Any) -> Any:
    """The function of the same layer: `BatchNormalization(**arguments).apply(inputs, training)`."""
    return BatchNormalization(**arguments).apply(inputs, training=training)
