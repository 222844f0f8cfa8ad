# SPDX-License-Identifier: Apache-2.0
"""The models of the CNN benchmarks, by the names that tf_cnn_benchmarks gives them.

Those that Keras has are Keras' own; the small ones are here. They end in logits, have no
pretrained weights, and take images as the publication of each does.
"""

import dataclasses
from collections.abc import Callable

import keras
from keras import layers

Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Model:
    """One model of the list.

    Attributes:
        input_shape: height, width and channels of its images.
        classes: of the data set that it was published for.
        learning_rate: for plain SGD with batches of about 64.
        build: makes it for a number of classes.
    """

    input_shape: Shape
    classes: int
    learning_rate: float
    build: Callable[[int], keras.Model]


def build(name: str, classes: int | None = None) -> keras.Model:
    """Makes a model, with weights as Keras' initialisers draw them.

    Args:
        name: one of `MODELS`.
        classes: number of classes; None: those of the data set that it was published for.

    Raises:
        ValueError: there is no such model, or `classes` is below 1.
    """
    if name not in MODELS:
        raise ValueError(f"`name` must be one of {', '.join(MODELS)}. Received: name={name!r}")
    if classes is not None and classes < 1:
        raise ValueError(f"`classes` must be at least 1. Received: classes={classes}")
    model = MODELS[name]
    return model.build(classes if classes is not None else model.classes)


def trivial(classes: int) -> keras.Model:
    """Next to no computation, and 4 million parameters: what training costs besides the model.

    As tf_cnn_benchmarks' model of this name: the image as one number, 4096 of it, and the classes.
    """
    return _sequence(
        "trivial",
        MODELS["trivial"].input_shape,
        [
            layers.Flatten(),
            layers.Dense(1, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(classes),
        ],
    )


def lenet(classes: int) -> keras.Model:
    """LeNet-5, with every map of the third layer connected to all of the second.

    LeCun et al., Gradient-Based Learning Applied to Document Recognition (1998), section II B.
    """
    return _sequence(
        "lenet",
        MODELS["lenet"].input_shape,
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
    )


def alexnet(classes: int) -> keras.Model:
    """AlexNet in one column, without groups of channels, which TensorFlow's CPU cannot train.

    Krizhevsky, One weird trick for parallelizing convolutional neural networks (2014); dropout as
    in Krizhevsky, Sutskever and Hinton (NeurIPS 2012).
    """
    return _sequence(
        "alexnet",
        MODELS["alexnet"].input_shape,
        [
            layers.ZeroPadding2D(2),
            layers.Conv2D(64, 11, strides=4, activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(192, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(384, 3, padding="same", activation="relu"),
            layers.Conv2D(256, 3, padding="same", activation="relu"),
            layers.Conv2D(256, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(4096, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(4096, activation="relu"),
            layers.Dense(classes),
        ],
    )


def resnet20(classes: int) -> keras.Model:
    """ResNet-20 for images of 32 x 32; shortcuts have no weights, also where the shape changes.

    He et al., Deep Residual Learning for Image Recognition (CVPR 2016), section 4.2, option A.
    """
    inputs = keras.Input(MODELS["resnet20"].input_shape)
    hidden = layers.ReLU()(_convolution(inputs, 16, 1))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            strides = 2 if stage and not block else 1
            shortcut = hidden
            if strides == 2:
                # Every second pixel, and zeros for the channels that are new.
                shortcut = layers.MaxPooling2D(1, 2)(shortcut)
                shortcut = layers.Concatenate()([shortcut, layers.Rescaling(0.0)(shortcut)])
            inner = layers.ReLU()(_convolution(hidden, filters, strides))
            hidden = layers.ReLU()(layers.Add()([_convolution(inner, filters, 1), shortcut]))
    outputs = layers.Dense(classes)(layers.GlobalAveragePooling2D()(hidden))
    return keras.Model(inputs, outputs, name="resnet20")


def _convolution(inputs: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    convolution = layers.Conv2D(
        filters,
        3,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )
    return layers.BatchNormalization(momentum=0.9)(convolution(inputs))


def _sequence(name: str, shape: Shape, parts: list[layers.Layer]) -> keras.Model:
    return keras.Sequential([keras.Input(shape), *parts], name=name)


def _of_keras(name: str) -> Callable[[int], keras.Model]:
    def make(classes: int) -> keras.Model:
        return getattr(keras.applications, name)(
            weights=None, classes=classes, classifier_activation=None
        )

    return make


MODELS: dict[str, Model] = {
    "trivial": Model((224, 224, 3), 1000, 0.005, trivial),
    "lenet": Model((32, 32, 1), 10, 0.05, lenet),
    "alexnet": Model((224, 224, 3), 1000, 0.005, alexnet),
    "resnet20": Model((32, 32, 3), 10, 0.1, resnet20),
    "resnet50": Model((224, 224, 3), 1000, 0.05, _of_keras("ResNet50")),
    "vgg16": Model((224, 224, 3), 1000, 0.005, _of_keras("VGG16")),
    "vgg19": Model((224, 224, 3), 1000, 0.005, _of_keras("VGG19")),
    "inception3": Model((299, 299, 3), 1000, 0.05, _of_keras("InceptionV3")),
    "mobilenet": Model((224, 224, 3), 1000, 0.05, _of_keras("MobileNet")),
}
