# SPDX-License-Identifier: Apache-2.0
"""The slow tier of one list of gradients: the party's sums in, those of all parties out.

Rank 0 encodes, exchanges packets with the server, and commits what its encoding keeps when the
server has answered; every rank of the party decodes the same bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.compressed import MakeVariable
from tf_hips.comm.staged import Reducer, StagedSum
from tf_hips.ops import graph, stages
from tf_hips.ops.compressor import Compressor
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.from_rank_0 import from_rank_0
from tf_hips.strategies.withheld import NONE, find, unless, zeros_of


@dataclasses.dataclass(frozen=True)
class Way:
    """Whom rank 0 exchanges packets with.

    Attributes:
        exchange: the number of a round and this party's packets in, and the position of a gradient
            that is not finite, or `withheld.NONE`; the merged packets out.
        num_parties: how many parties there are.
        seed: of this party's encoder; or what says it, an int64 scalar, for the number of a round.
        failures: where exceptions raised in a step are kept.
        may_withhold: whether a round goes on without this party where a gradient is not finite.
    """

    exchange: Callable[[np.int64, np.ndarray, np.int64], np.ndarray]
    num_parties: int
    seed: int | Callable[[tf.Tensor], tf.Tensor]
    failures: Failures
    may_withhold: bool = False


def make_uplink(
    way: Way,
    up: Compressor,
    down: Compressor,
    sizes: Sequence[int],
    label: str,
    make_variable: MakeVariable,
) -> Reducer:
    """How one list of gradients is summed over the parties; called eagerly, once per list.

    The stages of a warm-up follow the number of the round, here as on the server.

    Args:
        way: whom to exchange packets with.
        up: how this party encodes.
        down: how the server encodes what it answers.
        sizes: elements of each gradient.
        label: part of the collectives' names.
        make_variable: makes a non-trainable variable from an initial value and a name.

    Returns:
        A function of vectors and the number of the round.
    """
    kept: dict[int, tf.Variable] = {}
    if up.has_state and primitives.rank() == 0:
        what = "residual" if up.has_residual else "state"
        kept = {
            position: make_variable(tf.zeros(up.state_shape([size])), f"uplink_{what}_{position}")
            for position, size in enumerate(sizes)
            if size and up.of_size(size).has_state
        }
    parts = stages.joint(up, down)
    if len(parts) == 1:
        return _Uplink(way, up, down, sizes, label, kept)
    return StagedSum(
        [
            (first, _Uplink(way, one, other, sizes, f"{label}.stage{place}", kept))
            for place, (first, one, other) in enumerate(parts)
        ]
    )


class _Uplink:
    """One stage of it: packets of fixed lengths."""

    def __init__(
        self,
        way: Way,
        up: Compressor,
        down: Compressor,
        sizes: Sequence[int],
        label: str,
        kept: dict[int, tf.Variable],
    ) -> None:
        self._way = way
        self._up, self._down = up, down
        self._sizes = list(sizes)
        self._label = label
        self._down_bytes = [down.wire_bytes(size) if size else 0 for size in sizes]
        self._kept = kept

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        if not any(self._sizes):
            return list(vectors)
        inputs: list[tf.Tensor] = []
        kept: list[tuple[tf.Variable, tf.Tensor]] = []
        if primitives.rank() == 0:
            spoilt = tf.constant(NONE, tf.int64)
            if self._way.may_withhold:
                spoilt = find(vectors)
                vectors = unless(spoilt != NONE, vectors, functools.partial(zeros_of, vectors))
            clipped = graph.clip(self._up, vectors, self._way.num_parties)
            packets, kept = self._encode(clipped, step)
            if self._way.may_withhold and kept:
                # What is not looked at must not be taken for what has arrived.
                variables = [variable for variable, _ in kept]
                news = unless(
                    spoilt != NONE,
                    [value for _, value in kept],
                    lambda: [variable.read_value() for variable in variables],
                )
                kept = list(zip(variables, news, strict=True))
            inputs = [step, packets, spoilt]
        reply = from_rank_0(
            self._way.exchange,
            inputs,
            sum(self._down_bytes),
            f"{self._label}.uplink",
            self._way.failures,
        )
        with tf.control_dependencies([reply]):
            committed = [variable.assign(value, read_value=False) for variable, value in kept]
        with tf.control_dependencies([one for one in committed if one is not None]):
            reply = tf.identity(reply)
        return [
            graph.decode(self._down.of_size(size), packet, size) if size else tf.zeros([0])
            for packet, size in zip(tf.split(reply, self._down_bytes), self._sizes, strict=True)
        ]

    def _encode(
        self, vectors: Sequence[tf.Tensor], step: tf.Tensor
    ) -> tuple[tf.Tensor, list[tuple[tf.Variable, tf.Tensor]]]:
        """All packets in one tensor, and what the variables will be."""
        packets, news = [], []
        seed = self._way.seed if isinstance(self._way.seed, int) else self._way.seed(step)
        for position, (vector, size) in enumerate(zip(vectors, self._sizes, strict=True)):
            if not size:
                continue
            kept = self._kept.get(position)
            packet, new_kept = graph.encode(
                self._up.of_size(size),
                vector,
                seed=seed,
                step=step,
                tensor_id=position,
                kept=None if kept is None else kept.read_value(),
            )
            packets.append(packet)
            if kept is not None:
                news.append((kept, new_kept))
        return tf.concat(packets, 0), news
