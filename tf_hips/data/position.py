# SPDX-License-Identifier: Apache-2.0
"""Which epoch a pass through a dataset is.

A dataset of `tf_hips.shard` begins with one tiny element, the number of the epoch, read from a
variable when a pass begins. So the same dataset object gives every epoch its own order, what was
chained to it included, and an epoch can be given again by setting the variable.
"""

import numbers
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

MakeVariable = Callable[[tf.Tensor, str], tf.Variable]

# Where a dataset carries its position. Datasets that are chained to it keep it alive.
_ATTRIBUTE = "_tf_hips_position"


def make_plain_variable(value: tf.Tensor, name: str) -> tf.Variable:
    """A variable on the host; inside a strategy's scope it would become one of the strategy's."""
    with tf.init_scope(), tf.device("/cpu:0"):
        return tf.Variable(value, trainable=False, name=f"tf_hips_{name}")


class Position:
    """The epoch that the next pass through a dataset will be.

    Each pass that begins takes the number of the one before it plus one. A pass begins with its
    first batch, and counts also when it is broken off.

    Attributes:
        next_of_fit: the epoch after the last one that a `fit` began or that was set. Other passes
            do not count here: one rank may have looked at a batch, and the others not.
        offset_of_resumed: how much further a `fit` that is taken up again counts here than Keras
            counts its epochs; None where none is. Set before the first epoch of that `fit`.
        is_shuffled: whether every epoch has another order.
        drops: whether an epoch may leave rows out.
        first_step: the step that the next pass begins with, where it was told; then rounds are
            counted from there. Of this and the next two see `seats`.
        next_number: number of the step of the element after the last one that was read, over all
            rounds; None: none was.
        is_whole: whether the last pass was read to its end.
        is_seated: whether batches are those of groups that change from step to step.
    """

    def __init__(
        self,
        make_variable: MakeVariable = make_plain_variable,
        *,
        is_shuffled: bool = False,
    ) -> None:
        """Starts with epoch 0.

        Args:
            make_variable: makes a variable of a value and a name.
            is_shuffled: whether every epoch has another order.
        """
        self._next = make_variable(tf.constant(0, tf.int64), "epoch")
        self.next_of_fit = 0
        self.offset_of_resumed: int | None = None
        self.is_shuffled = is_shuffled
        self.drops = False
        self.first_step: int | None = None
        self.next_number: int | None = None
        self.is_whole = False
        self.is_seated = False

    def set(self, epoch: Any, first_step: int = 0) -> None:
        """Makes the next pass that begins epoch number `epoch`, from 0.

        An iterator over a repeated dataset with prefetching may be ahead of its reader.

        Args:
            epoch: the number.
            first_step: steps of it that are read and thrown away.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, numbers.Integral) or epoch < 0:
            raise ValueError(f"`epoch` must be an int, not negative. Received: epoch={epoch!r}")
        self._next.assign(int(epoch))
        self.first_step = first_step
        self.next_of_fit = int(epoch)

    def passes(self, make_pass: Callable[[tf.Tensor], tf.data.Dataset]) -> tf.data.Dataset:
        """The dataset whose every pass is `make_pass(epoch)`.

        Args:
            make_pass: gets an int64 scalar, inside a graph.
        """

        @tf.autograph.experimental.do_not_convert
        def begin(_: tf.Tensor) -> tf.Tensor:
            epoch = self._next.read_value()
            with tf.control_dependencies([epoch]):
                self._next.assign_add(1)
            return epoch

        # AutoGraph would read and write anew, for each dataset, code that has nothing for it.
        make_pass = tf.autograph.experimental.do_not_convert(make_pass)
        return tf.data.Dataset.from_tensors(0).map(begin).flat_map(make_pass)

    def mark(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Lets `positions_of` find this position on `dataset` and on what is chained to it."""
        setattr(dataset, _ATTRIBUTE, self)
        return dataset


def positions_of(dataset: tf.data.Dataset) -> list[Position]:
    """Positions of the sharded datasets that `dataset` is made of: usually one, or none.

    What comes in through a function (`flat_map`, `interleave`) is not found.
    """
    found = (getattr(one, _ATTRIBUTE, None) for one in ancestry(dataset))
    return list(dict.fromkeys(position for position in found if position is not None))


def check_whole(dataset: tf.data.Dataset, method: str) -> None:
    """Refuses shards whose results would be those of other rows, or in another order.

    Args:
        dataset: what a method of a model is about to go through.
        method: "predict", which must have all rows in order; or "evaluate", which must have all.

    Raises:
        ValueError: a shard leaves rows out, or is shuffled where the order counts.
    """
    positions = positions_of(dataset)
    told = [
        text
        for text, is_so in (
            ("is shuffled", any(one.is_shuffled for one in positions) and method == "predict"),
            ("leaves out rows", any(one.drops for one in positions)),
            ("follows groups that change", any(one.is_seated for one in positions)),
        )
        if is_so
    ]
    if told:
        raise ValueError(
            f"`{method}` must have all rows, in order: `tf_hips.shard(..., shuffle=False, "
            f"drop_remainder=False)`. Received: a shard that {' and '.join(told)}"
        )


def ancestry(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """`dataset` and the datasets that it is made of, nearest first."""
    waiting = [dataset]
    while waiting:
        one = waiting.pop(0)
        yield one
        waiting += one._inputs()


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Elements of one pass; None when that is unknown or infinite."""
    length = int(dataset.cardinality())
    return length if length >= 0 else None
