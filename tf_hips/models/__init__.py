# SPDX-License-Identifier: Apache-2.0
"""Networks by name: `build` makes those of the CNN benchmarks, `make` any for data of any size.

They end in logits and have no pretrained weights.
"""

from tf_hips.models.networks import NETWORKS, canonical, make
from tf_hips.models.published import MODELS, Model, build
from tf_hips.models.text import TOKENS

__all__ = ["MODELS", "NETWORKS", "TOKENS", "Model", "build", "canonical", "make"]
