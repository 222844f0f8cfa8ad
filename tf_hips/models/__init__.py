# SPDX-License-Identifier: Apache-2.0
"""Networks by name: `build` makes those of the CNN benchmarks, `make` any for data of any size.

They end in logits and have no pretrained weights. Names are loaded on first use (PEP 562): a
command line that checks the name of a network never pays for TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tf_hips import errors

if TYPE_CHECKING:
    from tf_hips.models.names import canonical
    from tf_hips.models.networks import NETWORKS, make
    from tf_hips.models.published import MODELS, Model, build
    from tf_hips.models.text import TOKENS

__all__ = ["MODELS", "NETWORKS", "TOKENS", "Model", "build", "canonical", "make"]

_HOMES = {
    "MODELS": "tf_hips.models.published",
    "Model": "tf_hips.models.published",
    "NETWORKS": "tf_hips.models.networks",
    "TOKENS": "tf_hips.models.text",
    "build": "tf_hips.models.published",
    "canonical": "tf_hips.models.names",
    "make": "tf_hips.models.networks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tf_hips.models' has no attribute {name!r}")
    with errors.packages_wanted(f"tf_hips.models.{name}"):
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
