# SPDX-License-Identifier: Apache-2.0
"""What the networks are called, and what data they take; without Keras, for the command line."""

import difflib

NAMES = (
    "alexnet",
    "inception_v3",
    "lenet",
    "mobilenet_v1",
    "mobilenet_v2",
    "resnet18_v1",
    "resnet20",
    "resnet32",
    "resnet50_v1",
    "resnet50_v2",
    "resnet110",
    "resnet152",
    "simplenet",
    "transformer",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
)
TEXT_NETWORKS = ("transformer",)
# How the seeds and tf_cnn_benchmarks call some of them.
_OTHER_NAMES = {
    "inception3": "inception_v3",
    "mobilenet": "mobilenet_v1",
    "resnet18": "resnet18_v1",
    "resnet50": "resnet50_v1",
}


def canonical(name: str) -> str:
    """One of `NAMES`; `ResNet-18` and `resnet18-v1` are known, too.

    Raises:
        ValueError: there is no such network.
    """
    plainly = name.lower().replace("-", "_")
    squeezed = plainly.replace("_", "")
    for one in (plainly, squeezed):
        one = _OTHER_NAMES.get(one, one)
        if one in NAMES:
            return one
    near = difflib.get_close_matches(plainly, (*NAMES, *_OTHER_NAMES), 1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ValueError(f"`name` must be one of {', '.join(NAMES)}{hint} Received: name={name!r}")
