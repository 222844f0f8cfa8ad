# SPDX-License-Identifier: Apache-2.0
"""Networks of one path: LeNet, AlexNet, VGG, SimpleNet; and how small images are made to fit.

Two forms each of AlexNet and VGG: that of the publication for images of 224 pixels a side and more,
and the one that is used on CIFAR for smaller ones. All end in logits.
"""

import keras
from keras import layers

Shape = tuple[int, int, int]

# Sides of images from which the publications' forms make sense.
PUBLISHED_SIDE = 224
SMALL_SIDE = 32
_BLOCKS_OF_VGG = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}


def fitted(inputs: keras.KerasTensor, least: int) -> keras.KerasTensor:
    """Images whose sides are at least `least` pixels.

    Smaller ones are enlarged a whole number of times, by repeating pixels, as far as that goes, and
    then get a margin of zeros, as LeCun et al. (1998) gave the 28 x 28 digits for LeNet.
    """
    height, width = inputs.shape[1:3]
    times = max(1, least // max(height, width))
    if times > 1:
        inputs = layers.UpSampling2D(times)(inputs)
        height, width = inputs.shape[1:3]
    missing = [max(0, least - side) for side in (height, width)]
    if any(missing):
        inputs = layers.ZeroPadding2D([(one // 2, one - one // 2) for one in missing])(inputs)
    return inputs


def lenet(shape: Shape, classes: int) -> keras.Model:
    """LeNet-5, with every map of the third layer connected to all of the second.

    LeCun et al., Gradient-Based Learning Applied to Document Recognition (1998), section II B.
    """
    return sequence(
        "lenet",
        shape,
        [
            layers.Conv2D(6, 5, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 5, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(120, activation="tanh"),
            layers.Dense(84, activation="tanh"),
            layers.Dense(classes),
        ],
        SMALL_SIDE,
    )


def alexnet(shape: Shape, classes: int) -> keras.Model:
    """AlexNet in one column, without groups of channels, which TensorFlow's CPU cannot train.

    Krizhevsky, One weird trick for parallelizing convolutional neural networks (2014); dropout as
    in Krizhevsky, Sutskever and Hinton (NeurIPS 2012). Images below 224 pixels a side get the form
    for CIFAR: the same five convolutions, pools of 2 x 2, and no layer between them and the
    classes.
    """
    is_small = min(shape[:2]) < PUBLISHED_SIDE
    pool = 2 if is_small else 3
    parts = [
        layers.ZeroPadding2D(5 if is_small else 2),
        layers.Conv2D(64, 11, strides=4, activation="relu"),
        layers.MaxPooling2D(pool, 2),
        layers.Conv2D(192, 5, padding="same", activation="relu"),
        layers.MaxPooling2D(pool, 2),
        layers.Conv2D(384, 3, padding="same", activation="relu"),
        layers.Conv2D(256, 3, padding="same", activation="relu"),
        layers.Conv2D(256, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(pool, 2),
        layers.Flatten(),
    ]
    if not is_small:
        parts += [
            layers.Dropout(0.5),
            layers.Dense(4096, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(4096, activation="relu"),
        ]
    return sequence("alexnet", shape, [*parts, layers.Dense(classes)], SMALL_SIDE)


def vgg(name: str, shape: Shape, classes: int) -> keras.Model:
    """VGG-11, -13, -16 or -19.

    Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition (ICLR
    2015), table 1. Images below 224 pixels a side get batch normalisation, without which the deep
    ones do not begin to learn, and two dense layers of 512 instead of 4096.
    """
    is_small = min(shape[:2]) < PUBLISHED_SIDE
    parts: list[layers.Layer] = []
    for repeats, filters in zip(_BLOCKS_OF_VGG[name], (64, 128, 256, 512, 512), strict=True):
        for _ in range(repeats):
            if is_small:
                parts += normalised(filters, 3)
            else:
                parts.append(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        parts.append(layers.MaxPooling2D(2))
    parts.append(layers.Flatten())
    for _ in range(2):
        parts += [layers.Dropout(0.5)] if is_small else []
        parts.append(layers.Dense(512 if is_small else 4096, activation="relu"))
    return sequence(name, shape, [*parts, layers.Dense(classes)], SMALL_SIDE)


def simplenet(shape: Shape, classes: int) -> keras.Model:
    """SimpleNet: thirteen small convolutions.

    Hasanpour et al., Lets keep it simple (2016), the net of 5.5 million parameters.
    """
    parts: list[layers.Layer] = []
    widths = ((64, 128, 128, 128), (128, 128, 256), (256, 256), (512,))
    for group in widths:
        for filters in group:
            parts += normalised(filters, 3)
        parts += [layers.MaxPooling2D(2), layers.Dropout(0.1)]
    parts += [*normalised(2048, 1), *normalised(256, 1), layers.MaxPooling2D(2)]
    parts += [*normalised(256, 3), layers.GlobalMaxPooling2D(), layers.Dropout(0.1)]
    return sequence("simplenet", shape, [*parts, layers.Dense(classes)], SMALL_SIDE)


def normalised(filters: int, kernel: int) -> list[layers.Layer]:
    """Convolution, batch normalisation, ReLU."""
    return [
        layers.Conv2D(filters, kernel, padding="same", kernel_initializer="he_normal"),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
    ]


def sequence(name: str, shape: Shape, parts: list[layers.Layer], least: int) -> keras.Model:
    """A model of layers in a row, for images that are made at least `least` pixels large."""
    inputs = keras.Input(shape)
    hidden = fitted(inputs, least)
    for part in parts:
        hidden = part(hidden)
    return keras.Model(inputs, hidden, name=name)
