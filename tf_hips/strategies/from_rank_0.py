# SPDX-License-Identifier: Apache-2.0
"""What rank 0 does for all ranks of its party in the middle of a step, such as asking a server.

    rank 0      runs the action; what travels is a header and the result
    broadcast
    all ranks   raise what the header says, or go on with the result

An error of rank 0 is one of all ranks, at the same place: no rank waits for one that has given up,
and all of them can go on together.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.parts import cut
from tf_hips.errors import (
    NonFiniteError,
    PacketError,
    PeerError,
    ProtocolError,
    TfHipsError,
    ToleranceError,
)
from tf_hips.strategies.failures import Failures

HEADER_BYTES = 1024
# What travels at a time; Gloo's limit is for each. Parts of 4 MiB take up to twice as long in all.
_PART_BYTES = 64 * 2**20

Action = Callable[..., np.ndarray]

_KINDS: dict[str, type[TfHipsError]] = {
    kind.__name__: kind
    for kind in (NonFiniteError, PacketError, PeerError, ProtocolError, ToleranceError)
}


def from_rank_0(
    action: Action,
    inputs: Sequence[tf.Tensor],
    num_bytes: int,
    name: str,
    failures: Failures,
) -> tf.Tensor:
    """Runs `action` on rank 0, eagerly or in a graph, and gives its result to all ranks.

    Args:
        action: gets arrays; returns uint8 [num_bytes].
        inputs: what `action` gets; the other ranks' are not looked at.
        num_bytes: length of the result.
        name: name of the collective.
        failures: where exceptions raised in a step are kept.

    Returns:
        uint8 [num_bytes], equal on all ranks.

    Raises:
        Exception: on rank 0 what `action` raised; on the others an error of the same kind, a
            `PeerError` for those that are none of tf_hips', with its text.
    """
    relay = _Relay(action, num_bytes)
    if primitives.rank() == 0:
        reply = _call(relay.run, inputs, tf.uint8)
        reply = tf.ensure_shape(reply, [HEADER_BYTES + num_bytes])
    else:
        reply = tf.zeros([HEADER_BYTES + num_bytes], tf.uint8)  # its value is replaced
    told = primitives.broadcast(reply, name, part=_PART_BYTES)
    header, result = cut(told, [HEADER_BYTES, num_bytes])
    if tf.executing_eagerly():
        failures.kept(relay.check)(header.numpy())
        return result
    passed = tf.cond(
        tf.equal(header[0], 0),
        lambda: tf.constant(0, tf.int64),
        lambda: _call(failures.kept(relay.check), [header], tf.int64),
    )
    with tf.control_dependencies([passed]):
        return tf.identity(result)


def _call(
    function: Callable[..., np.ndarray], inputs: Sequence[tf.Tensor], dtype: tf.DType
) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(function(*(value.numpy() for value in inputs)), dtype)
    return tf.numpy_function(function, list(inputs), dtype)


class _Relay:
    """One action; remembers how it ended last."""

    def __init__(self, action: Action, num_bytes: int) -> None:
        self._action = action
        self._num_bytes = num_bytes
        self._error: Exception | None = None

    def run(self, *inputs: np.ndarray) -> np.ndarray:
        """Header and result."""
        reply = np.zeros(HEADER_BYTES + self._num_bytes, np.uint8)
        self._error = None
        try:
            reply[HEADER_BYTES:] = self._action(*inputs)
        except Exception as error:  # noqa: BLE001 - raised by `check`, on all ranks
            self._error = error
            text = f"{type(error).__name__}: {error}".encode()[: HEADER_BYTES - 1]
            reply[0] = 1
            reply[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
        return reply

    def check(self, header: np.ndarray) -> np.int64:
        """Raises what the header says."""
        if header[0] == 0:
            return np.int64(0)
        if self._error is not None:
            raise self._error
        text = header[1:].tobytes().rstrip(b"\0").decode("utf-8", "ignore")
        kind, _, rest = text.partition(": ")
        if kind in _KINDS:
            text = rest
        raise _KINDS.get(kind, PeerError)(f"Rank 0 of this party failed. {text}")
