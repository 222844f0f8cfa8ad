# SPDX-License-Identifier: Apache-2.0
"""The compressed sum of a list of gradients over the ranks of a party.

Gradients are cut into chunks, chunks are joined in buckets, and each bucket is summed on its own
(see `topologies`): while one is encoded another travels, and the first begins as soon as the
gradients in it are there, while the backward pass goes on. What encoding drops stays in a residual
where it was dropped, so over the steps nothing is lost (but by `hierarchical_fp16`, which rounds
before it encodes).

Invariant: all ranks decode the same bytes in the same order, so their sums are equal bit for bit.
Invariant: what is sent for an element depends on the topology and the number of ranks, not on the
    buckets.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_hips.comm import looks, plan, primitives
from tf_hips.comm.hierarchy import Hierarchy
from tf_hips.comm.partition import BUCKET_ELEMENTS, Piece, piece_buckets, pieces, spread
from tf_hips.comm.schedules import HOPS
from tf_hips.comm.topologies import Bucket, Gather, Hops, Owners, Topology, culprit, note_of
from tf_hips.ops import graph
from tf_hips.ops.compressor import CHUNK, Compressor
from tf_hips.ops.flow import opaque, yielded

MakeVariable = Callable[[tf.Tensor, str], tf.Variable]
# Step, position of a gradient, rank: raises what there is to say about a gradient that is not
# finite.
Complain = Callable[[np.int64, int, int], np.int64]


class CompressedSum:
    """The compressed sum of one list of float32 vectors, with the residuals that belong to it.

    Make it once per list of gradients, outside of graphs, on every rank alike.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        compressor: Compressor,
        *,
        label: str,
        worker_seed: int,
        owner_seed: int,
        make_variable: MakeVariable,
        topology: str = plan.PS,
        partitions: Mapping[int, int] | None = None,
        complain: Complain | None = None,
        shares: "CompressedSum | None" = None,
        bucket_elements: int | None = None,
        piece_elements: int = CHUNK,
    ) -> None:
        """Plans the buckets and makes the residuals.

        Args:
            sizes: elements of each vector.
            compressor: how to encode, on the way to the sums and back; no warm-up (see `reducers`).
            label: part of the collectives' names.
            worker_seed: seed of this rank's encoder of gradients.
            owner_seed: seed of this rank's encoder of sums.
            make_variable: makes a non-trainable variable from an initial value and a name.
            topology: which way packets take; one of `plan.COMPRESSED`.
            partitions: positions of vectors that travel in so many buckets of their own.
            complain: called on all ranks where a gradient of one of them is not finite; None lets
                the codec do with it what it does.
            shares: another sum of vectors of the same sizes, by a compressor that keeps the same:
                its residuals are these, too.
            bucket_elements: elements from which on a bucket is full; None: `BUCKET_ELEMENTS`.
            piece_elements: of what is owned and travels as one; fewer than of a chunk only where
                nothing is encoded.

        Raises:
            ValueError: the topology is not known, does not take so many ranks, or encodes partial
                sums, which this compressor must not.
        """
        self._sizes = list(sizes)
        self.compressor = compressor
        self._worker_seed = worker_seed
        self._owner_seed = owner_seed
        self._complain = complain
        self._topology = made = _made(topology)
        if made.encodes_sums and compressor.for_sums != compressor:
            raise ValueError(
                f"`{topology}` must have a compressor without momentum, which it would apply again "
                f"at every hop: use ps or allgather. Received: {compressor.text}"
            )
        self._sums = compressor if made.gathers else compressor.for_sums
        rank, num_ranks = primitives.rank(), primitives.size()
        everything = pieces(self._sizes, piece_elements)
        segments = spread([piece.num_elements for piece in everything], made.num_segments)
        self._buckets = [
            Bucket(
                f"{label}.{topology}.bucket_{number}",
                tuple(everything[place] for place in places),
                tuple(segments[place] for place in places),
            )
            for number, places in enumerate(
                piece_buckets(
                    everything, bucket_elements or BUCKET_ELEMENTS, partitions or {}, segments
                )
            )
        ]
        self.residuals: dict[Piece, tf.Variable] = {}
        self.owner_residuals: dict[Piece, tf.Variable] = {}
        if shares is not None:
            self.residuals, self.owner_residuals = shares.residuals, shares.owner_residuals
            return
        if num_ranks == 1:
            return
        encoded, recoded = set(made.encoded(rank)), set(made.recoded(rank))
        if compressor.has_state:
            kept = "residual" if compressor.has_residual else "state"
            self.residuals = {
                piece: make_variable(
                    tf.zeros(compressor.state_shape([piece.num_elements])), f"{kept}_{piece.name}"
                )
                for piece, segment in zip(everything, segments, strict=True)
                if segment in encoded
            }
        if self._sums.has_state:
            self.owner_residuals = {
                piece: make_variable(
                    tf.zeros(self._sums.state_shape([piece.num_elements])),
                    f"owner_residual_{piece.name}",
                )
                for piece, segment in zip(everything, segments, strict=True)
                if segment in recoded
            }

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Sums `vectors` over the ranks.

        Args:
            vectors: float32 [sizes[i]] each.
            step: int64 scalar, the same on all ranks; with the seed and the position it determines
                the noise.

        Returns:
            Vectors like `vectors`, equal on all ranks; exactly `vectors` where there is one rank.
        """
        if primitives.size() == 1 or not self._buckets:
            return [tf.identity(vector) for vector in vectors]
        vectors = graph.clip(self.compressor, vectors, primitives.size())
        arrived: dict[Piece, tf.Tensor] = {}
        notes = []
        sent: list[tf.Tensor] = []
        for bucket in self._buckets:
            # Whole buckets one after the other: TensorFlow would encode a little of each, and the
            # link would wait for the last. What begins a collective goes before the next bucket.
            with tf.control_dependencies([yielded(one) for one in sent]):
                values = [cut(vectors[piece.tensor], piece) for piece in bucket.pieces]
            note = None if self._complain is None else note_of(bucket, values)
            travelled = self._topology(bucket, values, self, step, note)
            sent = [travelled.sent]
            arrived.update(zip(bucket.pieces, travelled.packets, strict=True))
            notes.append(travelled.notes)
        sums = self._decode(arrived)
        if self._complain is None:
            return sums

        # Not before all buckets have come: a rank that stopped here would leave others waiting.
        def look() -> list[tf.Tensor]:
            return self._look(tf.concat(notes, 0), step)

        if looks.later(look):
            return sums
        with tf.control_dependencies(look()):
            return list(opaque(sums))

    def encode(self, piece: Piece, value: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The packet of this rank's gradient, or of a partial sum with it; once per step."""
        kept = self.residuals.get(piece)
        return encoded(self.compressor, value, piece, step, seed=self._worker_seed, kept=kept)

    def recode(self, piece: Piece, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The packet of the sum of what the rows decode to, encoded with `for_sums`."""
        kept = self.owner_residuals.get(piece)
        packet, new_kept = graph.recode_sum(
            self.compressor,
            rows,
            piece.num_elements,
            None if kept is None else kept.read_value(),
            seed=self._owner_seed,
            step=step,
            tensor_id=piece.tensor,
            offset=piece.offset,
        )
        if kept is not None:
            kept.assign(new_kept, read_value=False)
        return packet

    def _look(self, notes: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
        worst = tf.reduce_max(notes)

        def complain() -> tf.Tensor:
            return tf.numpy_function(self._raise, [step, worst], tf.int64)

        return [tf.cond(worst == 0, lambda: tf.constant(0, tf.int64), complain)]

    def _raise(self, step: np.int64, worst: np.int64) -> np.int64:
        if self._complain is None:
            return np.int64(0)
        return self._complain(step, *culprit(int(worst)))

    def _decode(self, arrived: Mapping[Piece, tf.Tensor]) -> list[tf.Tensor]:
        vectors = [tf.zeros([0]) for _ in self._sizes]
        in_order = sorted(arrived, key=lambda piece: (piece.tensor, piece.offset))
        for tensor, run in itertools.groupby(in_order, key=lambda piece: piece.tensor):
            parts = [arrived[piece] for piece in run]
            packets = parts[0] if len(parts) == 1 else tf.concat(parts, -1)
            size = self._sizes[tensor]
            vectors[tensor] = (
                graph.merge(self._sums, packets, size)
                if self._topology.gathers
                else graph.decode(self._sums, packets, size)
            )
        return vectors


def cut(vector: tf.Tensor, piece: Piece) -> tf.Tensor:
    """A piece of its tensor; chunks begin at aligned places, so TensorFlow copies nothing."""
    if piece.is_whole:
        return tf.identity(vector)
    return tf.slice(vector, [piece.offset], [piece.num_elements])


def encoded(
    compressor: Compressor,
    value: tf.Tensor,
    piece: Piece,
    step: tf.Tensor,
    *,
    seed: int,
    kept: tf.Variable | None,
) -> tf.Tensor:
    """The packet of a piece; once per step, as what it misses goes into `kept`."""
    packet, new_kept = graph.encode(
        compressor,
        value,
        seed=seed,
        step=step,
        tensor_id=piece.tensor,
        offset=piece.offset,
        kept=None if kept is None else kept.read_value(),
    )
    if kept is not None:
        kept.assign(new_kept, read_value=False)
    return packet


def _made(topology: str) -> Topology:
    """A topology for the ranks of this job.

    Raises:
        ValueError: there is no such topology, or it does not take so many ranks.
    """
    num_ranks = primitives.size()
    if topology in HOPS:
        return Hops(HOPS[topology](num_ranks))
    match topology:
        case plan.PS:
            return Owners(num_ranks)
        case plan.ALLGATHER:
            return Gather()
        case plan.HIERARCHICAL:
            return Hierarchy(primitives.nodes())
        case plan.HIERARCHICAL_FP16:
            return Hierarchy(primitives.nodes(), tf.float16)
    raise ValueError(
        f"`topology` must be one of {', '.join(plan.COMPRESSED)}. Received: topology={topology!r}"
    )
