# SPDX-License-Identifier: Apache-2.0
"""Residual networks that keras.applications does not have: ResNet-18, and those for CIFAR.

He et al., Deep Residual Learning for Image Recognition (CVPR 2016).
"""

import keras
from keras import layers

from tf_hips.models.plain import SMALL_SIDE, Shape, fitted

# Below, a stem that divides the sides by four leaves nothing for four stages.
_STEM_SIDE = 64


def for_cifar(depth: int, shape: Shape, classes: int) -> keras.Model:
    """A ResNet of depth 6n + 2 for images of 32 x 32.

    Section 4.2, option A: shortcuts have no weights, also where the shape changes.
    """
    inputs = keras.Input(shape)
    hidden = layers.ReLU()(_convolution(fitted(inputs, SMALL_SIDE), 16, 3, 1))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            strides = 2 if stage and not block else 1
            shortcut = hidden
            if strides == 2:
                # Every second pixel, and zeros for the channels that are new.
                shortcut = layers.MaxPooling2D(1, 2)(shortcut)
                shortcut = layers.Concatenate()([shortcut, layers.Rescaling(0.0)(shortcut)])
            inner = layers.ReLU()(_convolution(hidden, filters, 3, strides))
            hidden = layers.ReLU()(layers.Add()([_convolution(inner, filters, 3, 1), shortcut]))
    outputs = layers.Dense(classes)(layers.GlobalAveragePooling2D()(hidden))
    return keras.Model(inputs, outputs, name=f"resnet{depth}")


def resnet18(shape: Shape, classes: int) -> keras.Model:
    """ResNet-18, table 1; projections where the shape changes (option B).

    Images below 64 pixels a side get a convolution of 3 x 3 in place of the stem, as is usual for
    CIFAR.
    """
    inputs = keras.Input(shape)
    hidden = fitted(inputs, SMALL_SIDE)
    if min(shape[:2]) < _STEM_SIDE:
        hidden = layers.ReLU()(_convolution(hidden, 64, 3, 1))
    else:
        hidden = layers.ReLU()(_convolution(hidden, 64, 7, 2))
        hidden = layers.MaxPooling2D(3, 2, padding="same")(hidden)
    for stage, filters in enumerate((64, 128, 256, 512)):
        for block in range(2):
            strides = 2 if stage and not block else 1
            shortcut = _convolution(hidden, filters, 1, strides) if strides == 2 else hidden
            inner = layers.ReLU()(_convolution(hidden, filters, 3, strides))
            hidden = layers.ReLU()(layers.Add()([_convolution(inner, filters, 3, 1), shortcut]))
    outputs = layers.Dense(classes)(layers.GlobalAveragePooling2D()(hidden))
    return keras.Model(inputs, outputs, name="resnet18_v1")


def _convolution(
    inputs: keras.KerasTensor, filters: int, kernel: int, strides: int
) -> keras.KerasTensor:
    convolution = layers.Conv2D(
        filters,
        kernel,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )
    return layers.BatchNormalization(momentum=0.9)(convolution(inputs))
