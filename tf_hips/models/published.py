# SPDX-License-Identifier: Apache-2.0
"""The models of the CNN benchmarks, by the names that tf_cnn_benchmarks gives them.

Those that Keras has are Keras' own; the small ones are here. They end in logits, have no
pretrained weights, and take images as the publication of each does.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
from keras import layers

from tf_hips.models import plain, residual
from tf_hips.models.plain import Shape


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
    return plain.sequence(
        "trivial",
        MODELS["trivial"].input_shape,
        [
            layers.Flatten(),
            layers.Dense(1, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(classes),
        ],
        1,
    )


def _as_published(
    name: str, make: Callable[[Shape, int], keras.Model]
) -> Callable[[int], keras.Model]:
    return lambda classes: make(MODELS[name].input_shape, classes)


def _of_keras(name: str) -> Callable[[int], keras.Model]:
    def make(classes: int) -> keras.Model:
        return getattr(keras.applications, name)(
            weights=None, classes=classes, classifier_activation=None
        )

    return make


MODELS: dict[str, Model] = {
    "trivial": Model((224, 224, 3), 1000, 0.005, trivial),
    "lenet": Model((32, 32, 1), 10, 0.05, _as_published("lenet", plain.lenet)),
    "alexnet": Model((224, 224, 3), 1000, 0.005, _as_published("alexnet", plain.alexnet)),
    "resnet20": Model(
        (32, 32, 3), 10, 0.1, _as_published("resnet20", functools.partial(residual.for_cifar, 20))
    ),
    "resnet50": Model((224, 224, 3), 1000, 0.05, _of_keras("ResNet50")),
    "vgg16": Model((224, 224, 3), 1000, 0.005, _of_keras("VGG16")),
    "vgg19": Model((224, 224, 3), 1000, 0.005, _of_keras("VGG19")),
    "inception3": Model((299, 299, 3), 1000, 0.05, _of_keras("InceptionV3")),
    "mobilenet": Model((224, 224, 3), 1000, 0.05, _of_keras("MobileNet")),
}
