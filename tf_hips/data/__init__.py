# SPDX-License-Identifier: Apache-2.0
"""Batches that are a function of (seed, epoch, step), for one group of workers among several.

The lowest layer: it knows neither strategies nor Horovod. `sets` finds and reads data sets by name,
`splits` deals rows out unevenly; both are plain NumPy, so names are loaded on first use (PEP 562)
and a command line that lists data sets never pays for TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_hips.data import sets, splits
    from tf_hips.data.feed import Feed
    from tf_hips.data.position import Position, check_whole, positions_of
    from tf_hips.data.shards import shard

__all__ = ["Feed", "Position", "check_whole", "positions_of", "sets", "shard", "splits"]

_HOMES = {
    "Feed": "tf_hips.data.feed",
    "Position": "tf_hips.data.position",
    "check_whole": "tf_hips.data.position",
    "positions_of": "tf_hips.data.position",
    "shard": "tf_hips.data.shards",
}
_MODULES = ("sets", "splits")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tf_hips.data.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tf_hips.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
