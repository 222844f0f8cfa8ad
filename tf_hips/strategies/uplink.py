# SPDX-License-Identifier: Apache-2.0
"""The slow tier of one list of gradients: the party's sums in, those of all parties out.

Rank 0 encodes, exchanges packets with the server, and commits what its encoding keeps when the
server has answered; every rank of the party decodes the same bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.compressed import MakeVariable
from tf_hips.comm.parts import cut
from tf_hips.comm.staged import Reducer, StagedSum
from tf_hips.ops import graph, stages
from tf_hips.ops.compressor import Compressor
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.from_rank_0 import from_rank_0
from tf_hips.strategies.withheld import NONE, find, may_overflow, unless, zeros_of

Seed: TypeAlias = int | Callable[[tf.Tensor], tf.Tensor]
_News: TypeAlias = list[tuple[tf.Variable, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class SlowTier:
    """The slow tier: whom rank 0 exchanges packets with.

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
    seed: Seed
    failures: Failures
    may_withhold: bool = False


def make_uplink(
    tier: SlowTier,
    up: Compressor,
    down: Compressor,
    sizes: Sequence[int],
    label: str,
    make_variable: MakeVariable,
    kind: "type[Uplink] | None" = None,
) -> Reducer:
    """How one list of gradients is summed over the parties; called eagerly, once per list.

    The stages of a warm-up follow the number of the round, here as on the server.

    Args:
        tier: whom to exchange packets with.
        up: how this party encodes.
        down: how the server encodes what it answers.
        sizes: elements of each gradient.
        label: part of the collectives' names.
        make_variable: makes a non-trainable variable from an initial value and a name.
        kind: of each stage; None: `Uplink`.

    Returns:
        A function of vectors and the number of the round.
    """
    stage = Uplink if kind is None else kind
    kept: dict[int, tf.Variable] = {}
    if up.has_state and primitives.rank() == 0:
        kept = {
            position: make_variable(
                tf.zeros(up.of_size(size).state_shape([size])), kept_name(up, position)
            )
            for position, size in enumerate(sizes)
            if size and up.of_size(size).has_state
        }
    parts = stages.joint(up, down)
    if len(parts) == 1:
        return stage(tier, up, down, sizes, label, kept)
    return StagedSum(
        [
            (first, stage(tier, one, other, sizes, f"{label}.stage{place}", kept))
            for place, (first, one, other) in enumerate(parts)
        ]
    )


def kept_name(up: Compressor, position: int) -> str:
    """What a variable is called that holds what `up` keeps of one vector."""
    return f"uplink_{'residual' if up.has_residual else 'state'}_{position}"


def seed_at(seed: Seed, step: tf.Tensor) -> int | tf.Tensor:
    """The seed of an encoder in one round."""
    return seed if isinstance(seed, int) else seed(step)


class Uplink:
    """One stage of it: packets of fixed lengths."""

    def __init__(
        self,
        tier: SlowTier,
        up: Compressor,
        down: Compressor,
        sizes: Sequence[int],
        label: str,
        kept: dict[int, tf.Variable],
    ) -> None:
        """Prepares a stage; arguments are those of `make_uplink`, and what `up` keeps."""
        self._tier = tier
        self._up, self._down = up, down
        self._sizes = list(sizes)
        self._label = label
        self._up_bytes = [up.wire_bytes(size) if size else 0 for size in sizes]
        self._down_bytes = [down.wire_bytes(size) if size else 0 for size in sizes]
        self._may_overflow = tier.may_withhold and any(
            may_overflow(codec) for codec in {up.of_size(size) for size in sizes if size}
        )
        self._kept = kept

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """The vectors summed over the parties, in round `step`."""
        if not any(self._sizes):
            return list(vectors)
        inputs: list[tf.Tensor] = []
        kept: _News = []
        if primitives.rank() == 0:
            spoilt = tf.constant(NONE, tf.int64)
            if self._tier.may_withhold:
                packets, kept, spoilt = self._encode_row(vectors, step)
            else:
                packets, kept = self._encode(vectors, step)
            inputs = [step, packets, spoilt]
        reply = from_rank_0(
            self._tier.exchange,
            inputs,
            self._reply_bytes(),
            f"{self._label}.uplink",
            self._tier.failures,
        )
        with tf.control_dependencies([reply]):
            committed = [variable.assign(value, read_value=False) for variable, value in kept]
        with tf.control_dependencies([one for one in committed if one is not None]):
            reply = tf.identity(reply)
        return self._merged(reply)

    def _reply_bytes(self) -> int:
        """Length of what an exchange brings."""
        return sum(self._down_bytes)

    def _merged(self, reply: tf.Tensor) -> list[tf.Tensor]:
        """The sums in what an exchange has brought."""
        return self._decoded(self._down, reply, self._down_bytes)

    def _decoded(
        self, codec: Compressor, packets: tf.Tensor, lengths: Sequence[int]
    ) -> list[tf.Tensor]:
        return [
            graph.decode(codec.of_size(size), packet, size) if size else tf.zeros([0])
            for packet, size in zip(cut(packets, lengths), self._sizes, strict=True)
        ]

    def _encode_row(
        self, vectors: Sequence[tf.Tensor], step: tf.Tensor
    ) -> tuple[tf.Tensor, _News, tf.Tensor]:
        """As `_encode`, and the position of a gradient that is not finite, or `NONE`.

        Where there is one, packets are those of zeros and what is kept stays.
        """
        spoilt = find(vectors)
        zeros = functools.partial(zeros_of, vectors)
        packets, news = self._encode(unless(spoilt != NONE, vectors, zeros), step)
        if self._may_overflow:
            late = find(self._decoded(self._up, packets, self._up_bytes))
            spoilt = tf.where(spoilt == NONE, late, spoilt)
            [packets] = unless(
                late != NONE, [packets], lambda: [self._encode(zeros(), step, anew=True)[0]]
            )
        stays = unless(
            spoilt != NONE,
            [value for _, value in news],
            lambda: [variable.read_value() for variable, _ in news],
        )
        kept = [(variable, value) for (variable, _), value in zip(news, stays, strict=True)]
        return packets, kept, spoilt

    def _encode(
        self, vectors: Sequence[tf.Tensor], step: tf.Tensor, *, anew: bool = False
    ) -> tuple[tf.Tensor, _News]:
        """All packets in one tensor, and what the variables will be; `anew`, as if they were 0."""
        vectors = graph.clip(self._up, vectors, self._tier.num_parties)
        packets, news = [], []
        seed = seed_at(self._tier.seed, step)
        for position, (vector, size) in enumerate(zip(vectors, self._sizes, strict=True)):
            if not size:
                continue
            variable = self._kept.get(position)
            kept = None if variable is None else variable.read_value()
            packet, new_kept = graph.encode(
                self._up.of_size(size),
                vector,
                seed=seed,
                step=step,
                tensor_id=position,
                kept=tf.zeros_like(kept) if anew and kept is not None else kept,
            )
            packets.append(packet)
            if variable is not None:
                news.append((variable, new_kept))
        return tf.concat(packets, 0), news
