# SPDX-License-Identifier: Apache-2.0
"""What is no gradient: summed, averaged or joined exactly, over all replicas of all parties.

Metrics, synchronised batch normalisation, `strategy.reduce`, whether a loss scale has overflowed.
In the party these are collectives of plain values; what goes over parties is `over_parties`'s.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.allreduce import HALVES, plain
from tf_hips.strategies.base import check_not_compiled

if TYPE_CHECKING:
    import keras

    from tf_hips.strategies.beginning import Beginning
    from tf_hips.strategies.turns import Turns


class ExactSums:
    """Reductions of a strategy, each in a turn of its own."""

    beginning: "Beginning"
    _turns: "Turns"
    _model: "keras.Model | None"
    _is_running: bool
    _num_reductions: int  # that were asked for so far, those of gradients, too
    _num_workers: Callable[[], int]  # over which it is summed
    _is_alone: Callable[[], bool]

    def _over_parties(
        self, tensors: Sequence[tf.Tensor], label: str, operation: str | Sequence[str] = "sum"
    ) -> list[tf.Tensor]:
        """Reduces what is reduced over this party already over all parties, exactly.

        Called on all ranks in the same order, eagerly or while a graph is built, inside a turn.

        Args:
            tensors: numeric tensors of known shape, equal on all ranks of the party.
            label: what they are, for messages.
            operation: of `over_parties`, one or one for each tensor.

        Returns:
            Tensors like `tensors`, equal on all ranks of all parties.
        """
        del label, operation
        return list(tensors)

    def reduce_exactly(
        self,
        values: Sequence[Any],
        is_mean: bool,
        operations: str | Sequence[str] | None = None,
    ) -> list[tf.Tensor]:
        """Sums or averages over all replicas.

        Args:
            values: numeric tensors, one list on each replica.
            is_mean: whether to divide by the number of replicas.
            operations: of `over_parties`, one or one for each; None: as `is_mean` says.
        """
        over = operations if operations is not None else "mean" if is_mean else "sum"
        tensors = [tf.convert_to_tensor(value) for value in values]
        self._num_reductions += 1
        is_one_party = self._num_workers() == primitives.size()
        for tensor in tensors:
            has_rank = tensor.shape.rank is not None
            is_known = tensor.shape.is_fully_defined() or (has_rank and is_one_party)
            if not is_known or tensor.dtype in (tf.bool, tf.string):
                raise ValueError(
                    "A value that is reduced must be numeric, and over parties of known shape. "
                    f"Received: shape={tensor.shape}, dtype={tensor.dtype.name}"
                )
            if is_mean and not (tensor.dtype.is_floating or tensor.dtype.is_complex):
                raise ValueError(
                    "A value whose MEAN is taken must be of a floating type; cast it first. "
                    f"Received: dtype={tensor.dtype.name}"
                )
        if self._is_alone():
            return [tf.identity(tensor) for tensor in tensors]
        self._begin_at_reduction()
        kinds = [f"{tensor.dtype.name}_{'x'.join(map(str, tensor.shape))}" for tensor in tensors]
        label = f"exact.{'.'.join(kinds)}"[:200]
        # Rounded once, behind the division: a sum of halves may be beyond what they hold.
        wide = [
            tf.cast(tensor, tf.float32) if tensor.dtype in HALVES else tensor for tensor in tensors
        ]
        with tf.device("/cpu:0"):
            sums = self._turns(
                lambda: self._over_parties(
                    plain([tf.reshape(tensor, [-1]) for tensor in wide], label), label, over
                ),
                label=_sum_of(tensors),
            )
            if is_mean:
                sums = [total / tf.cast(self._num_workers(), total.dtype) for total in sums]
            return [
                tf.cast(
                    tf.reshape(total, tf.shape(tensor) if None in tensor.shape else tensor.shape),
                    tensor.dtype,
                )
                for total, tensor in zip(sums, tensors, strict=True)
            ]

    def _begin_at_reduction(self) -> None:
        check_not_compiled()
        # An eager step has begun already, and may have written since.
        if self._is_running and self._model is None and not tf.executing_eagerly():
            handed = self.beginning.handed()
            with tf.init_scope():
                self.beginning.of_loop("reduce", handed=handed)

    def _gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Joins `rows` of all ranks of the party along axis 0, in rank order."""
        self._num_reductions += 1
        self._begin_at_reduction()
        label = f"gather.{rows.dtype.name}.{rows.shape.rank}"
        with tf.device("/cpu:0"):
            [joined] = self._turns(
                lambda: [primitives.allgather(rows, label)], label="the gathering of values"
            )
        joined.set_shape([None, *rows.shape[1:]])
        return joined

    def _reduce_finite(self, is_finite: Any) -> tf.Tensor:
        """Whether gradients are finite on all replicas."""
        if self._is_alone():
            return is_finite
        with tf.device("/cpu:0"):
            flag = tf.reshape(tf.cast(is_finite, tf.int32), [1])
            [least] = self._turns(
                lambda: self._over_parties(
                    [primitives.allreduce(flag, "is_finite", "min")], "is_finite", "min"
                ),
                label="whether all gradients are finite",
            )
        return tf.cast(tf.reshape(least, []), tf.bool)


def _sum_of(tensors: Sequence[tf.Tensor]) -> str:
    one = tensors[0] if tensors else None
    what = "nothing" if one is None else f"a {one.dtype.name}{one.shape.as_list()}"
    return f"the sum of {what}" + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
