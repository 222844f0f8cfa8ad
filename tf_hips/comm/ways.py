# SPDX-License-Identifier: Apache-2.0
"""The topologies of compressed sums, by name."""

from collections.abc import Callable

import tensorflow as tf

from tf_hips.comm import primitives, schedules
from tf_hips.comm.hierarchy import Hierarchy
from tf_hips.comm.topologies import Gather, Hops, Owners, Topology
from tf_hips.ops.compressor import Compressor

PS = "ps"

_TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    PS: lambda: Owners(primitives.size()),
    "ring": lambda: Hops(schedules.ring(primitives.size())),
    "butterfly": lambda: Hops(schedules.butterfly(primitives.size())),
    "blocks": lambda: Hops(schedules.blocks(primitives.size())),
    "allgather": Gather,
    "hierarchical": lambda: Hierarchy(primitives.nodes()),
    "hierarchical_fp16": lambda: Hierarchy(primitives.nodes(), tf.float16),
}
COMPRESSED = tuple(_TOPOLOGIES)


def best_topology(num_ranks: int, compressor: Compressor) -> str:
    """The topology of a job that names none.

    Two ranks send each other as many bytes with either, and `allgather` encodes each element once;
    with more ranks it sends more. What is best on a certain link a plan can tell. What makes no
    packets has but one.
    """
    return "allgather" if num_ranks == 2 and compressor.makes_packets else PS


def make_topology(topology: str) -> Topology:
    """Makes a topology for the ranks of this job; called eagerly, on all ranks.

    Raises:
        ValueError: there is no such topology, or it does not take so many ranks.
    """
    if topology not in _TOPOLOGIES:
        raise ValueError(
            f"`topology` must be one of {', '.join(COMPRESSED)}. Received: topology={topology!r}"
        )
    return _TOPOLOGIES[topology]()
