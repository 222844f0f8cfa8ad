# SPDX-License-Identifier: Apache-2.0
"""What one `fit` iterates: a dataset, sharded by tf_hips or not, that can begin at any step.

Where a run is taken up again, the steps before are computed and thrown away; a pipeline with random
state goes on as if it had never been interrupted.

Keras asks the dataset that the user gave for its length, and iterates this one. Who begins in the
middle of an epoch must also see to it that Keras takes only the steps that are left: were it to
find the data at their end, it could take these for the length of all epochs.
"""

import tensorflow as tf

from tf_hips.data.position import (
    MakeVariable,
    ancestry,
    known_length,
    make_plain_variable,
    positions_of,
)


class Feed:
    """Says to a dataset which epoch, and which step of it, comes next.

    Epochs of a sharded dataset go on from one `fit` to the next: two calls of `fit(epochs=1)` see
    two orders. After `fit(epochs=5)`, `fit(epochs=9, initial_epoch=5)` begins with epoch 5.

    Attributes:
        dataset: what to iterate.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        make_variable: MakeVariable = make_plain_variable,
        *,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        steps_per_execution: int = 1,
    ) -> None:
        """Wraps `dataset`; made when a `fit` begins, before the first batch is taken.

        Args:
            dataset: one batch per step.
            make_variable: makes a variable of a value and a name.
            initial_epoch: as it was given to `fit`.
            steps_per_epoch: as it was given to `fit`.
            steps_per_execution: as it was given to `compile`.

        Raises:
            ValueError: a cache keeps the order of one epoch for all.
        """
        _check_caches(dataset)
        self._positions = positions_of(dataset)
        for position in self._positions:
            position.offset_of_resumed = None  # what a `fit` that failed may have left
        self._initial_epoch = initial_epoch
        self._length = known_length(dataset)
        self._length_of_pass = _length_of_pass(dataset)
        if steps_per_epoch is not None and self._length and steps_per_epoch >= self._length:
            steps_per_epoch = None  # Keras makes a new iterator in every epoch, as without it
        elif steps_per_epoch is not None:
            # Of data that go on, Keras always takes whole executions.
            steps_per_epoch = -(-steps_per_epoch // steps_per_execution) * steps_per_execution
        self._steps_per_epoch = steps_per_epoch
        self._first = max([initial_epoch, *(position.next_of_fit for position in self._positions)])
        self._has_begun = False
        # Steps that the next pass leaves out.
        self._skipped = make_variable(tf.constant(0, tf.int64), "skipped")

        @tf.autograph.experimental.do_not_convert
        def begin(_: tf.Tensor) -> tf.Tensor:
            steps = self._skipped.read_value()
            with tf.control_dependencies([steps]):
                self._skipped.assign(tf.zeros_like(steps))
            return steps

        beginning = tf.data.Dataset.from_tensors(0).map(begin)
        # Options of a dataset that comes in through a function would be lost.
        self.dataset = beginning.flat_map(dataset.skip).with_options(dataset.options())

    def begin(self, epoch: int, first_step: int = 0) -> None:
        """Says what comes next; called when an epoch begins, before its first batch is taken.

        Args:
            epoch: Keras' number of the epoch; the first one may be later than `initial_epoch`,
                where a run is taken up again.
            first_step: steps of that epoch that were made before.

        Raises:
            ValueError: the data cannot begin there.
        """
        if not self._has_begun:
            self._take_up()
        number = self._first + epoch - self._initial_epoch
        if self._steps_per_epoch is None:
            self._begin_pass(number, first_step)
        elif not self._has_begun:
            self._begin_anywhere(epoch, number, first_step, self._steps_per_epoch)
        # Otherwise Keras goes on with the iterator of the epoch before.
        self._has_begun = True
        for position in self._positions:
            position.next_of_fit = number + 1

    def _take_up(self) -> None:
        """Counts on as the `fit` did that is taken up again, if one is."""
        offsets = [one.offset_of_resumed for one in self._positions]
        told = [offset for offset in offsets if offset is not None]
        if told:
            self._first = max(told) + self._initial_epoch
        for position in self._positions:
            position.offset_of_resumed = None

    def _begin_pass(self, number: int, skipped: int) -> None:
        for position in self._positions:
            position.set(number, skipped)
        self._skipped.assign(skipped)

    def _begin_anywhere(self, epoch: int, number: int, first_step: int, steps: int) -> None:
        """Begins where an epoch, of so many steps, is not a pass through the data."""
        done = (epoch - self._initial_epoch) * steps + first_step
        if self._length is not None and done:
            raise ValueError(
                "A run that is taken up again needs data that do not end: use "
                "`dataset.repeat()` with `steps_per_epoch`, or no `steps_per_epoch`. Received: "
                f"steps_per_epoch={steps}, a dataset of {self._length} batches"
            )
        if self._length is None and self._positions and self._length_of_pass:
            self._begin_pass(*divmod(number * steps + first_step, self._length_of_pass))
        else:
            self._begin_pass(self._first, done)


def _check_caches(dataset: tf.data.Dataset) -> None:
    for one in ancestry(dataset):
        is_cache = type(one).__name__.lstrip("_") == "CacheDataset"
        if is_cache and any(position.is_shuffled for position in positions_of(one)):
            raise ValueError(
                "A dataset must not be cached behind a shuffle, for every epoch would have the "
                "order of the first: cache before `tf_hips.shard`. Received: `.cache()` behind a "
                "shard that is shuffled"
            )


def _length_of_pass(dataset: tf.data.Dataset) -> int | None:
    """Batches after which a dataset that never ends begins again; None when that is unknown."""
    for one in ancestry(dataset):
        below = one._inputs()
        if len(below) != 1 or int(one.cardinality()) != tf.data.INFINITE_CARDINALITY:
            return None
        if known_length(below[0]) is not None:  # so `one` repeats it
            return known_length(below[0])
    return None
