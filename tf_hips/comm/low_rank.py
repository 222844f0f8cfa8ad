# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: sums of gradients over the ranks of a party, as matrices of low rank.

Each gradient is a matrix M_w (its gradient on rank w, plus its residual there), and the sum of all
M_w is wanted. With Q, a basis of some of its rows, equal on all ranks:

    left       P = sum of M_w Q           one allreduce for all gradients; what is no matrix that
                                          pays goes with it and is summed exactly
    basis      P becomes orthonormal      on each rank, the same bits
    right      R = sum of M_w^T P         one allreduce for all gradients
    result     P R^T                      on each rank, the same bits: P P^T times the sum

R, made orthonormal, is the Q of the next step, so the steps together are a power iteration. With
error feedback a rank keeps M_w - P P^T M_w, the part of its own matrix that was not sent; together
the ranks keep what the sum lacks. (The paper keeps M_w less the mean of what was decoded. In sum
both are the same; ours is the smallest that a rank can keep, so that what the ranks disagree about
does not pile up: decision 0018.)

Two collectives whatever the number of gradients. Both are plain sums: no packets, so it works where
ranks meet, and not on the way to a server.

Invariant: what a rank computes from sums alone (bases, results) has one order of operations (see
cc/tf/low_rank.h), so the sums are equal bit for bit on all ranks, whatever their processors.

Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization (NeurIPS 2019), algorithms 1 and 2.
"""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_hips.comm import looks, primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.compressed import Complain, MakeVariable
from tf_hips.ops import library
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.flow import first_nonfinite, opaque
from tf_hips.ops.low_rank import matrix_of

Shape = Sequence[int]


class LowRankSum:
    """The sum of one list of gradients by PowerSGD, with the bases and residuals that belong to it.

    Make it once per list of gradients, outside of graphs, on every rank alike.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        compressor: Compressor,
        *,
        label: str,
        seed: int,
        make_variable: MakeVariable,
        complain: Complain | None = None,
    ) -> None:
        """Finds the matrices, and makes their bases and residuals.

        Args:
            shapes: of each gradient.
            compressor: `powersgd(...)`, with or without error feedback.
            label: part of the collectives' names.
            seed: of the first bases and of noise, the same on all ranks.
            make_variable: makes a non-trainable variable from an initial value and a name.
            complain: called on all ranks where a gradient of one of them is not finite, which a
                basis would hide; None lets it pass.
        """
        self._complain = complain
        self._sizes = [math.prod(shape) for shape in shapes]
        self._label = label
        # An attribute of an operation is signed.
        self._seed = seed - (seed >> 63 << 64)
        params = dict(compressor.codec.params)
        rank, rate = int(params["rank"]), float(params["min_compression_rate"])
        found = {place: matrix_of(shape, rank, rate) for place, shape in enumerate(shapes)}
        self.matrices = {place: one for place, one in found.items() if one is not None}
        self.bases: dict[int, tf.Variable] = {}
        self.residuals: dict[int, tf.Variable] = {}
        if primitives.size() == 1:
            return
        first = tf.constant(0, tf.int64)
        for place, one in self.matrices.items():
            nothing = tf.zeros([one.columns, one.rank])
            self.bases[place] = make_variable(
                self._orthonormal(nothing, first, 2 * place + 1), f"basis_{place}"
            )
            if compressor.has_residual:
                self.residuals[place] = make_variable(
                    tf.zeros([one.rows, one.columns]), f"residual_{place}"
                )

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Sums `vectors` over the ranks.

        Args:
            vectors: float32, the elements of each gradient.
            step: int64 scalar, the same on all ranks; with the seed it determines noise.

        Returns:
            Vectors like `vectors`, equal on all ranks; exactly `vectors` where there is one rank.
        """
        if primitives.size() == 1 or not any(self._sizes):
            return [tf.identity(vector) for vector in vectors]
        ops = library.ops(tf)
        places = list(self.matrices)
        own = [self._own(place, vectors[place]) for place in places]
        lefts = [
            ops.tf_hips_low_rank_left(matrix=matrix, right=self.bases[place].read_value())
            for place, matrix in zip(places, own, strict=True)
        ]
        others = [place for place in range(len(vectors)) if place not in self.matrices]
        # First in the list, so it travels last: nothing else waits until all gradients are there.
        notes = [] if self._complain is None else [_note(vectors)]
        both = [*notes, *lefts, *(vectors[place] for place in others)]
        sums = plain(both, f"{self._label}.left")
        notes, sums = sums[: len(notes)], sums[len(notes) :]
        bases = [
            self._orthonormal(total, step, 2 * place)
            for place, total in zip(places, sums, strict=False)
        ]
        rights = [
            ops.tf_hips_low_rank_right(matrix=matrix, left=basis)
            for matrix, basis in zip(own, bases, strict=True)
        ]
        results = dict(zip(others, sums[len(places) :], strict=True))
        totals = plain(rights, f"{self._label}.right")
        for place, matrix, basis, right, total in zip(
            places, own, bases, rights, totals, strict=True
        ):
            if place in self.residuals:
                # It does not need the sum, so it is computed while that is under way.
                rest = ops.tf_hips_low_rank_rest(matrix=matrix, left=basis, right=right)
                self.residuals[place].assign(rest)
            self.bases[place].assign(self._orthonormal(total, step + 1, 2 * place + 1))
            product = ops.tf_hips_low_rank_product(left=basis, right=total)
            results[place] = tf.reshape(product, [-1])
        found = [results[place] for place in range(len(vectors))]
        if not notes:
            return found

        # Not before the second sum has come: a rank that stopped here would leave others waiting.
        def look() -> list[tf.Tensor]:
            with tf.control_dependencies(totals):
                return self._look(notes[0], step)

        if looks.later(look):
            return found
        with tf.control_dependencies(look()):
            return list(opaque(found))

    def _look(self, notes: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
        def complain() -> tf.Tensor:
            return tf.numpy_function(self._raise, [step, notes], tf.int64)

        is_clean = tf.reduce_all(notes == 0)
        return [tf.cond(is_clean, lambda: tf.constant(0, tf.int64), complain)]

    def _raise(self, step: np.int64, notes: np.ndarray) -> np.int64:
        if self._complain is None:
            return np.int64(0)
        position, rank = min((int(note), rank) for rank, note in enumerate(notes) if note)
        return self._complain(step, position - 1, rank)

    def _own(self, place: int, vector: tf.Tensor) -> tf.Tensor:
        """This rank's matrix: its gradient and what waits for being sent."""
        one = self.matrices[place]
        matrix = tf.reshape(vector, [one.rows, one.columns])
        residual = self.residuals.get(place)
        return matrix if residual is None else matrix + residual.read_value()

    def _orthonormal(self, matrix: tf.Tensor, step: tf.Tensor, tensor_id: int) -> tf.Tensor:
        return library.ops(tf).tf_hips_orthonormal(
            matrix=matrix, step=step, seed=self._seed, tensor_id=tensor_id
        )


def _note(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Float32 [ranks]: at this rank's place 1 + the position of what is not finite first, or 0."""
    first = first_nonfinite(vectors)
    said = tf.where(first < len(vectors), first + 1, tf.zeros_like(first))
    return tf.one_hot(primitives.rank(), primitives.size()) * tf.cast(said, tf.float32)
