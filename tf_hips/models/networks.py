# SPDX-License-Identifier: Apache-2.0
"""Networks for images of any size, by the names of the trainers that this package replaces.

Those of keras.applications are Keras' own, without their weights and without a softmax.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras

from tf_hips.models import plain, residual, text
from tf_hips.models.names import TEXT_NETWORKS, canonical

# Of the shape of one sample, and the number of classes.
Make = Callable[[Any, int], keras.Model]

# The smallest sides that keras.applications takes.
_LEAST = {"InceptionV3": 75}
_LEAST_OF_OTHERS = 32


def _of_keras(name: str) -> Make:
    def make_it(shape: tuple[int, ...], classes: int) -> keras.Model:
        inputs = keras.Input(shape)
        hidden = plain.fitted(inputs, _LEAST.get(name, _LEAST_OF_OTHERS))
        return getattr(keras.applications, name)(
            weights=None,
            input_tensor=hidden,
            input_shape=tuple(hidden.shape[1:]),
            classes=classes,
            classifier_activation=None,
        )

    return make_it


_NETWORKS: dict[str, Make] = {
    "alexnet": plain.alexnet,
    "inception_v3": _of_keras("InceptionV3"),
    "lenet": plain.lenet,
    "mobilenet_v1": _of_keras("MobileNet"),
    "mobilenet_v2": _of_keras("MobileNetV2"),
    "resnet18_v1": residual.resnet18,
    "resnet20": functools.partial(residual.for_cifar, 20),
    "resnet32": functools.partial(residual.for_cifar, 32),
    "resnet50_v1": _of_keras("ResNet50"),
    "resnet50_v2": _of_keras("ResNet50V2"),
    "resnet110": functools.partial(residual.for_cifar, 110),
    "resnet152": _of_keras("ResNet152"),
    "simplenet": plain.simplenet,
    "transformer": text.transformer,
    "vgg11": functools.partial(plain.vgg, "vgg11"),
    "vgg13": functools.partial(plain.vgg, "vgg13"),
    "vgg16": functools.partial(plain.vgg, "vgg16"),
    "vgg19": functools.partial(plain.vgg, "vgg19"),
}
NETWORKS: Mapping[str, Make] = MappingProxyType(_NETWORKS)


def make(name: str, input_shape: Sequence[int], classes: int) -> keras.Model:
    """Makes a network for data of any size, with weights as Keras' initialisers draw them.

    Images smaller than a network can take are enlarged and get a margin, inside of the model; some
    networks have another form for them (docs/models.md).

    Args:
        name: one of `NETWORKS`.
        input_shape: (height, width, channels) of images; (length,) of texts.
        classes: number of classes.

    Returns:
        A model that ends in logits.

    Raises:
        ValueError: there is no such network, or it does not take such data.
    """
    found = canonical(name)
    shape = tuple(int(one) for one in input_shape)
    wanted = 1 if found in TEXT_NETWORKS else 3
    if len(shape) != wanted or min(shape) < 1:
        kind = "(length,) of texts" if wanted == 1 else "(height, width, channels) of images"
        raise ValueError(f"`input_shape` of {found} must be {kind}. Received: input_shape={shape}")
    if classes < 1:
        raise ValueError(f"`classes` must be at least 1. Received: classes={classes}")
    return NETWORKS[found](shape, classes)
