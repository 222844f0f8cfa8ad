# SPDX-License-Identifier: Apache-2.0
"""Profiles that nobody measured, and shapes of models, for tests of the cost model and planner."""

from tf_hips.comm.profile import Codec, Collective, Cost, MergeCost, Profile

ONEBIT = "error_feedback(onebit)"
DGC = "dgc(ratio=0.01, momentum=0.9, nesterov=0, clip_norm=0)"

# VGG19, as HiPress' SeCoPa lists it: 38 gradients, 143.67 million elements.
VGG19 = [
    *(1728, 64, 36864, 64, 73728, 128, 147456, 128, 294912, 256),
    *((589824, 256) * 3),
    *(1179648, 512),
    *((2359296, 512) * 7),
    *(102760448, 4096, 16777216, 4096, 4096000, 1000),
]


def codec(text: str, bytes_per_element: float, cost: float = 1.0) -> Codec:
    """A codec of some nanoseconds per element."""
    return Codec(
        text,
        packet=Cost(24, bytes_per_element),
        sum_packet=Cost(24, bytes_per_element),
        encode=Cost(2e-5, cost * 8e-10),
        decode=Cost(2e-5, cost * 4e-10),
        decode_sum=Cost(2e-5, cost * 4e-10),
        merge=MergeCost(2e-5, cost * 3e-10, cost * 1e-10),
        recode=MergeCost(2e-5, cost * 8e-10, cost * 1e-10),
    )


def profile(
    num_ranks: int,
    bytes_per_second: float,
    *,
    latency: float = 5e-4,
    cpu: float = 0.0,
    codecs: tuple[Codec, ...] = (),
) -> Profile:
    """A profile of hosts with two cores and one rank each."""

    def collective(moved: float) -> Collective:
        return Collective(latency, latency / 5, moved / bytes_per_second, cpu)

    return Profile(
        num_ranks,
        ranks_per_host=1,
        cores=2,
        allreduce=collective(2 * (num_ranks - 1) / num_ranks),
        alltoall=collective(1),
        allgather=collective(1),
        broadcast=collective(1),
        add=Cost(1e-5, 3e-10),
        copy=Cost(1e-5, 6e-10),
        codecs=codecs or (codec(ONEBIT, 1 / 8),),
    )


def named(sizes: list[int]) -> list[tuple[str, int]]:
    """Gradients with names."""
    return [(f"gradient_{place}", size) for place, size in enumerate(sizes)]
