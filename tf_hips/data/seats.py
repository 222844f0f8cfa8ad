# SPDX-License-Identifier: Apache-2.0
"""Batches of groups that change from step to step: whose rows this worker has is asked for each.

    joined batch of a step --> the rows of the group that this worker sits in, in this step

Steps are numbered over the rounds, of h steps each: one, or the local steps of a loop. Element j of
a pass is step b + j, b the step with which the pass began, and belongs to round (b + j) // h; where
an epoch is taken up in its middle, b is so much less. A seat is told when the round before it is
over, so who reads ahead waits. It waits in a queue, which ends when its iterator is given up: a
thread in Python could not be told.

Invariant: which rows are a step's is a function of (seed, epoch, step, group); the seat decides on
the group, and on nothing else.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.data.position import Position

# Rounds whose groups are remembered: those that are asked for again are the newest.
_REMEMBERED = 64
# How far a pass may be ahead of the rounds: batches that are fetched before they are asked for.
_MOST_AHEAD = 1024
_NOT_YET = np.int64(-1)


class Seats:
    """In which group this worker sits, round by round. Thread-safe."""

    def __init__(self, groups: int, ask: Callable[[int], int], first: int = 0) -> None:
        """No round is over.

        Args:
            groups: how many groups there are.
            ask: gets a round that is over or the next one, and says the group; may take a while.
            first: the first round.
        """
        self.groups = groups
        self._ask = ask
        self._open = first
        self._steps = 1  # of a round
        self._done: Callable[[], int] = int
        self._over = 0  # of these, steps of a round that is over: the loop still counts them
        self._skipped = 0  # rounds that steps were counted for, and that have not been
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[int, int] = OrderedDict()
        with tf.init_scope(), tf.device("/cpu:0"):
            self._wakes = tf.queue.FIFOQueue(1 << 30, [tf.bool], shapes=[[]])

    @property
    def round(self) -> int:
        """The newest round whose seat may be asked for."""
        with self._lock:
            return self._open

    def follow(self, steps: int, done: Callable[[], int]) -> None:
        """From now on each round has local steps, all of one group's batches.

        Args:
            steps: how many.
            done: says how many of the open round are over.
        """
        with self._lock:
            self._steps, self._done = steps, done

    def open(self, number: int) -> None:
        """Round `number` is the next one from now on."""
        with self._lock:
            self._open = number
            self._over = self._done()
        self._wake()

    def skip(self) -> None:
        """The steps of the open round are over and came to nothing: it begins anew."""
        with self._lock:
            self._skipped += 1
            self._over = self._done()
        self._wake()

    def begin(self) -> None:
        """From now on the loop counts the steps of the open round."""
        with self._lock:
            self._over = 0

    def group(self, number: int) -> int:
        """The group of a round that may be asked for."""
        with self._lock:
            if number in self._known:
                return self._known[number]
        found = self._ask(number)
        with self._lock:
            self._known[number] = found
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def applied(
        self, blocks: tf.data.Dataset, position: Position, make: Callable[[Any, Any], Any]
    ) -> tf.data.Dataset:
        """The elements of this worker of one pass.

        Args:
            blocks: one element for each step, of all groups.
            position: of the dataset whose pass this is; called when the pass begins.
            make: gets an element of `blocks` and the group, an int64 scalar.
        """
        first = tf.numpy_function(lambda: self._begin(position), [], tf.int64)
        first = tf.ensure_shape(first, [])

        @tf.autograph.experimental.do_not_convert
        def of_step(step: tf.Tensor, block: Any) -> Any:
            return make(block, self._seat(first + step, position))

        found = blocks.enumerate().map(of_step)
        specs = tf.nest.flatten(found.element_spec)
        if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
            raise ValueError(
                f"Rows of groups that change must be dense tensors. Received: {found.element_spec}"
            )
        # What stands behind the last one is dropped, once it has said that the pass is whole.
        end = tf.data.Dataset.from_tensors(
            tf.nest.map_structure(
                lambda spec: tf.zeros([size or 0 for size in spec.shape], spec.dtype),
                found.element_spec,
            )
        )

        @tf.autograph.experimental.do_not_convert
        def ends(*_: Any) -> tf.Tensor:
            done = tf.numpy_function(lambda: self._end(position), [], tf.bool)
            return tf.ensure_shape(done, [])

        return found.concatenate(end.filter(ends))

    def _begin(self, position: Position) -> np.int64:
        with self._lock:
            # A pass may begin while a round is being closed.
            done = max(0, self._done() - self._over)
            now = (self._open + self._skipped) * self._steps + done
            ahead = position.next_number
            if position.first_step is not None:
                first = now - position.first_step
            elif ahead is not None and position.is_whole and 0 <= ahead - now <= _MOST_AHEAD:
                first = ahead  # the pass before this one has been read, and is still being trained
            else:
                first = now
            position.first_step, position.is_whole = None, False
            position.next_number = first
            return np.int64(first)

    def _end(self, position: Position) -> np.bool_:
        position.is_whole = True
        return np.bool_(False)

    def _wake(self) -> None:
        """Lets those who wait look again."""
        with self._lock:
            count, self._num_waiting = self._num_waiting, 0
        with tf.init_scope():
            for _ in range(count):
                self._wakes.enqueue(True)

    def _seat(self, number: tf.Tensor, position: Position) -> tf.Tensor:
        """The group of a step's round, once it may be asked for."""

        def attempt(value: np.int64) -> np.int64:
            return self._try(int(value), position)

        def look() -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(attempt, [number], tf.int64), [])

        def wait(_: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.control_dependencies([self._wakes.dequeue()]):
                return (look(),)

        [found] = tf.while_loop(lambda group: group < 0, wait, (look(),))
        return found

    def _try(self, number: int, position: Position) -> np.int64:
        with self._lock:
            round = number // self._steps - self._skipped
            if round > self._open:
                self._num_waiting += 1
                return _NOT_YET
            position.next_number = number + 1
        return np.int64(self.group(max(round, 0)))  # what is skipped may be of before the first
