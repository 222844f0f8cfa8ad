# SPDX-License-Identifier: Apache-2.0
"""Exact reductions over parties: of what all ranks of this party hold alike.

    rank 0       sends the party's bytes to the server, gets those of all parties, and reduces them
                 in the order of the parties
    broadcast    the other ranks of the party get the bytes of the result

The server passes bytes on (see `ps.gather`), so every party computes the same from the same bytes:
the results are equal bit for bit. Sums are in the tensors' own type; half types are added as
float32 and rounded once.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.errors import ProtocolError
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.from_rank_0 import from_rank_0

# A label and this party's bytes in, the bytes of all parties out. On rank 0 only.
Gather = Callable[[str, bytes], list[bytes]]

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
_HALVES = (tf.float16, tf.bfloat16)
_TITLE_CHARACTERS = 200


class ExactReduction:
    """Reduces tensors over parties; called in turns, in the same order on all ranks."""

    def __init__(self, gather: Gather, failures: Failures) -> None:
        """Prepares nothing.

        Args:
            gather: brings the bytes of all parties.
            failures: where exceptions raised in a step are kept.
        """
        self._gather = gather
        self._failures = failures

    def __call__(self, tensors: Sequence[tf.Tensor], label: str, operation: str) -> list[tf.Tensor]:
        """Reduces each tensor elementwise.

        Args:
            tensors: numeric tensors of known shape, equal on all ranks of the party.
            label: what they are, for messages; part of a collective's name.
            operation: "sum", "min" or "max".

        Returns:
            Tensors like `tensors`, equal on all ranks of all parties.
        """
        if operation not in _OPERATIONS:
            raise ValueError(
                f"`operation` must be one of {', '.join(_OPERATIONS)}. Received: {operation!r}"
            )
        sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
        if not sum(sizes):
            return list(tensors)
        packed = tf.concat([_to_bytes(tensor) for tensor in tensors], 0)
        combine = functools.partial(
            self._combine, _title(tensors, label, operation), operation, _kinds(tensors)
        )
        total = from_rank_0(combine, [packed], sum(sizes), f"{label}.parties", self._failures)
        return [
            tf.reshape(_from_bytes(part, tensor.dtype), tensor.shape)
            for part, tensor in zip(tf.split(total, sizes), tensors, strict=True)
        ]

    def _combine(
        self,
        title: str,
        operation: str,
        kinds: Sequence[tuple[np.dtype[Any], bool, int]],
        packed: np.ndarray,
    ) -> np.ndarray:
        payloads = self._gather(title, packed.tobytes())
        if any(len(payload) != packed.size for payload in payloads):
            told = ", ".join(str(len(payload)) for payload in payloads)
            raise ProtocolError(
                f"All parties must reduce values of the same shapes and types. Received: `{title}` "
                f"of {told} bytes, by party"
            )
        reduce = _OPERATIONS[operation]
        results = []
        begin = 0
        for dtype, is_half, count in kinds:
            end = begin + count * dtype.itemsize
            parts = [np.frombuffer(payload[begin:end], dtype) for payload in payloads]
            begin = end
            if is_half and operation == "sum":
                parts = [part.astype(np.float32) for part in parts]
            with np.errstate(all="ignore"):  # an infinity is a result, and no surprise here
                total = functools.reduce(reduce, parts).astype(dtype, copy=False)
            results.append(np.frombuffer(total.tobytes(), np.uint8))
        return np.concatenate(results)


def _kinds(tensors: Sequence[tf.Tensor]) -> list[tuple[np.dtype[Any], bool, int]]:
    return [
        (
            np.dtype(tensor.dtype.as_numpy_dtype),
            tensor.dtype in _HALVES,
            int(tensor.shape.num_elements()),
        )
        for tensor in tensors
    ]


def _title(tensors: Sequence[tf.Tensor], label: str, operation: str) -> str:
    """What the parties compare before they reduce; long ones end in a digest."""
    kinds = ", ".join(f"{tensor.dtype.name}{tensor.shape.as_list()}" for tensor in tensors)
    title = f"{label.partition('.')[0]}, {operation} of {kinds}"
    if len(title) <= _TITLE_CHARACTERS:
        return title
    digest = hashlib.sha256(title.encode()).hexdigest()[:8]
    return f"{title[:_TITLE_CHARACTERS]}... {digest}"


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(tf.reshape(tensor, [-1]), tf.uint8), [-1])


def _from_bytes(data: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(tf.reshape(data, [-1, dtype.size] if dtype.size > 1 else [-1]), dtype)
