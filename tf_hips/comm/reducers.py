# SPDX-License-Identifier: Apache-2.0
"""From a compressor to the reducer that sums gradients over the ranks of a party."""

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.compressed import Complain, CompressedSum, MakeVariable
from tf_hips.comm.low_rank import LowRankSum
from tf_hips.comm.plan import PS
from tf_hips.comm.staged import Reducer, StagedSum
from tf_hips.ops.compressor import Compressor


def make_reducer(
    shapes: Sequence[Sequence[int]],
    compressor: Compressor,
    *,
    label: str,
    worker_seed: int,
    owner_seed: int,
    common_seed: int,
    make_variable: MakeVariable,
    topology: str = PS,
    partitions: Mapping[int, int] | None = None,
    complain: Complain | None = None,
) -> Reducer:
    """How one list of gradients is summed; called eagerly, once per list, on every rank alike.

    A stage of a warm-up that sends exact values sums them with `plain`; what the later stages keep
    stays as it is meanwhile. Momentum is kept in all stages.

    Args:
        shapes: of the gradients, which come and go as float32 vectors.
        compressor: how to encode.
        label: part of the collectives' names.
        worker_seed: seed of this rank's encoder of gradients.
        owner_seed: seed of this rank's encoder of sums.
        common_seed: seed of what all ranks do alike.
        make_variable: makes a non-trainable variable from an initial value and a name.
        topology: which way packets take; one of `plan.COMPRESSED`.
        partitions: positions of gradients that travel in so many buckets of their own.
        complain: called on all ranks where a gradient of one of them is not finite and a codec
            would hide it. An exact stage of a warm-up does not: there it shows in the sum.

    Returns:
        A function of vectors and the number of the step.

    Raises:
        ValueError: the topology does not go with the compressor or the number of ranks.
    """
    if not compressor.makes_packets and topology != PS:
        raise ValueError(
            f"`topology` must be left out where nothing is encoded. Received: {topology} for "
            f"{compressor.text}"
        )

    def compressed(
        stage: Compressor, stage_label: str, shares: CompressedSum | None
    ) -> CompressedSum:
        return CompressedSum(
            [math.prod(shape) for shape in shapes],
            stage,
            label=stage_label,
            worker_seed=worker_seed,
            owner_seed=owner_seed,
            make_variable=make_variable,
            topology=topology,
            partitions=partitions,
            complain=complain,
            shares=shares,
        )

    def low_rank(stage: Compressor, stage_label: str) -> LowRankSum:
        return LowRankSum(
            shapes,
            stage,
            label=stage_label,
            seed=common_seed,
            make_variable=make_variable,
            complain=complain,
        )

    if not compressor.is_warmup or primitives.size() == 1:
        stage = compressor.stages[-1][1]
        return compressed(stage, label, None) if stage.makes_packets else low_rank(stage, label)
    found: list[tuple[int, Reducer]] = []
    last: CompressedSum | None = None
    for place, (first, stage) in reversed(list(enumerate(compressor.stages))):
        name = f"{label}.stage{place}"
        if stage.codec.name == "fp32" and not stage.has_momentum:
            found.append((first, _Plain(name)))
        elif not stage.makes_packets:
            # Before it there are exact values only, so it shares nothing.
            found.append((first, low_rank(stage, name)))
        else:
            last = compressed(stage, name, last)
            found.append((first, last))
    return StagedSum(found[::-1])


class _Plain:
    """Exact sums as a reducer."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        del step
        return plain(vectors, self._label)
