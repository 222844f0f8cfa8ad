# SPDX-License-Identifier: Apache-2.0
"""`tf.distribute` strategies for Keras: gradients are summed in a party, and over parties.

A training step under a strategy of this package does what it would do alone on the joined batch:
all replicas begin with the same weights, get the same sum of gradients, and so stay equal bit for
bit.
"""

from tf_hips.strategies.hierarchical_ps import HierarchicalPS
from tf_hips.strategies.hooks import local
from tf_hips.strategies.lying import simulate_liars
from tf_hips.strategies.replicas import fingerprint
from tf_hips.strategies.ring import CompressedRing
from tf_hips.strategies.sharding import gather, set_epoch, shard

__all__ = [
    "CompressedRing",
    "HierarchicalPS",
    "fingerprint",
    "gather",
    "local",
    "set_epoch",
    "shard",
    "simulate_liars",
]
