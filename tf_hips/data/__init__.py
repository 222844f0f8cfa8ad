# SPDX-License-Identifier: Apache-2.0
"""Batches that are a function of (seed, epoch, step), for one group of workers among several.

The lowest layer: it knows neither strategies nor Horovod.
"""

from tf_hips.data.feed import Feed
from tf_hips.data.position import Position, check_whole, positions_of
from tf_hips.data.shards import shard

__all__ = ["Feed", "Position", "check_whole", "positions_of", "shard"]
