# SPDX-License-Identifier: Apache-2.0
"""One vector's way over the parties, begun at one step and ended at a later one.

Rank 0 encodes and lets a thread exchange packets with the server while all ranks train on; at the
end every rank gets the bytes and decodes them. The thread has the connection to itself: nothing
else goes up in between.

Vectors of several kinds take turns, each with a residual of its own, which is committed at the end:
who begins again after a restart sends the same bytes.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ConfigError
from tf_hips.ops import graph, stages
from tf_hips.strategies.connected import waiting_for_round
from tf_hips.strategies.from_rank_0 import from_rank_0
from tf_hips.strategies.gradients import Gradient
from tf_hips.strategies.loan import Loan
from tf_hips.strategies.uplink import kept_name, seed_at


@dataclasses.dataclass(frozen=True)
class _Sum:
    """What the parties agree on."""

    gradients: list[Gradient]
    step: tf.Variable


class OverlappedSum:
    """Made eagerly, once, on all ranks of all parties."""

    def __init__(
        self,
        strategy: Any,
        loan: Loan,
        size: int,
        num_kinds: int,
        variables: Sequence[tf.Variable],
    ) -> None:
        """Agrees with the other parties on the vector.

        Args:
            strategy: a `HierarchicalPS` with an uplink.
            loan: its uplink in the hands of a loop.
            size: elements of a vector.
            num_kinds: how many kinds take turns.
            variables: those of the model; their life is that of what is kept here.

        Raises:
            ConfigError: a codec keeps something of all kinds together.
        """
        self._strategy = strategy
        self._loan = loan
        self._size = size
        self._label = f"overlapped{strategy._num_sums}"
        strategy._num_sums += 1
        vector = Gradient("a fragment of the model", (size,), tf.float32)
        up, down = strategy._for_model([vector])
        if down.has_state or len(stages.joint(up, down)) > 1:
            raise ConfigError(
                "Fragments take turns, so the way down must keep nothing from one to the next, and "
                "no codec may warm up: give the strategy `downlink=None`, or a codec without "
                f"error feedback. Received: compression={up.text}, downlink={down.text}"
            )
        self._up, self._down = up.of_size(size), down.of_size(size)
        with loan.whole():
            with strategy.state.new_list(variables):
                self._step = strategy.make_variable(tf.constant(0, tf.int64), "step")
                keeps = self._up.has_state and primitives.rank() == 0
                self._kept = [
                    strategy.make_variable(
                        tf.zeros(up.state_shape([size])), kept_name(self._up, kind)
                    )
                    for kind in range(num_kinds if keeps else 0)
                ]
            self._step.assign(strategy.welcome.round)
            strategy._begin_sum(_Sum([vector], self._step))
        loan.round_step = self._step
        self._thread: threading.Thread | None = None
        self._result: tuple[np.ndarray, float] | BaseException | None = None
        self._next: tuple[int, tf.Tensor] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a vector is on its way."""
        return self._thread is not None or self._next is not None

    def begin(self, vector: tf.Tensor, kind: int, weight: float | None) -> None:
        """Sends `vector` on its way.

        Args:
            vector: float32 [size]; equal on all ranks of the party.
            kind: which of those that take turns it is.
            weight: what this party stands for, where the server takes a mean.
        """
        self._next = (kind, tf.zeros([0]))
        if primitives.rank() != 0:
            return
        strategy, step = self._strategy, self._step.read_value()
        packet, news = graph.encode(
            self._up,
            vector,
            seed=seed_at(strategy._codec_seed(self._up), step),
            step=step,
            tensor_id=0,
            kept=self._kept[kind].read_value() if self._kept else None,
        )
        self._next = (kind, news)
        number, packets = int(step.numpy()), packet.numpy()
        self._loan.weight = weight
        said = strategy._weight()

        def exchange() -> None:
            try:
                self._result = strategy._send(number, packets, said)
            except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
                self._result = error

        self._result = None
        self._loan.is_busy = True
        self._thread = threading.Thread(target=exchange, name="tf_hips-overlapped", daemon=True)
        self._thread.start()

    def end(self, *, is_sent: bool = True) -> tf.Tensor:
        """Waits for what comes down.

        Args:
            is_sent: False where the server drops what was sent: what the encoder keeps stays.

        Returns:
            float32 [size], equal on all ranks of all parties.

        Raises:
            TfHipsError: the exchange has failed; on all ranks.
        """
        strategy = self._strategy
        number = int(self._step.numpy())

        def wait() -> np.ndarray:
            if self._thread is not None:
                with waiting_for_round():
                    self._thread.join()
            self._loan.is_busy = False
            if self._result is None:
                raise RuntimeError("What is waited for must have begun. Received: no exchange")
            if isinstance(self._result, BaseException):
                raise self._result
            merged, seconds = self._result
            strategy._note_round(number, seconds)
            return merged

        num_bytes = self._down.wire_bytes(self._size)
        try:
            with self._loan.whole(), tf.device("/cpu:0"):
                [reply] = strategy.failures.translated(strategy._turns)(
                    lambda: [from_rank_0(wait, [], num_bytes, self._label, strategy.failures)],
                    self._label,
                )
        finally:
            self._thread = None
        if self._next is not None and self._kept and is_sent:
            kind, news = self._next
            self._kept[kind].assign(news, read_value=False)
        self._next = None
        self._step.assign_add(1, read_value=False)
        return graph.decode(self._down, reply, self._size)
