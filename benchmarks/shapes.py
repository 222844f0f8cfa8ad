# SPDX-License-Identifier: Apache-2.0
"""Shapes of the trainable variables of published models, in the order of the layers.

Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition (ICLR
2015), configuration E; He et al., Deep Residual Learning for Image Recognition (CVPR 2016), table
1. As in HiPress' `input.txt`, VGG19 has 38 tensors and 143.67 million floats.
"""

import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def vgg19(scale: int = 1) -> list[Shape]:
    """Kernels and biases; `scale` > 1 makes all widths that many times narrower."""
    found: list[Shape] = []
    before, side = 3, 224
    for filters, layers in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(layers):
            now = filters // scale
            found += [(3, 3, before, now), (now,)]
            before = now
        side //= 2
    before *= side * side
    for units in (4096 // scale, 4096 // scale, 1000):
        found += [(before, units), (units,)]
        before = units
    return found


def resnet50(scale: int = 1) -> list[Shape]:
    """Kernels without biases, scale and offset of each batch normalisation, the classifier."""
    found: list[Shape] = []

    def convolution(size: int, before: int, now: int) -> None:
        found.extend([(size, size, before, now), (now,), (now,)])

    before = 64 // scale
    convolution(7, 3, before)
    for filters, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        inner, outer = filters // scale, 4 * filters // scale
        for block in range(blocks):
            if block == 0:
                convolution(1, before, outer)
            convolution(1, before, inner)
            convolution(3, inner, inner)
            convolution(1, inner, outer)
            before = outer
    found += [(before, 1000), (1000,)]
    return found


MODELS = {"vgg19": vgg19, "resnet50": resnet50}


def num_elements(shapes: Sequence[Shape]) -> int:
    """Floats of all variables."""
    return sum(math.prod(shape) for shape in shapes)
