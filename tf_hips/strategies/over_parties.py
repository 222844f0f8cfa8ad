# SPDX-License-Identifier: Apache-2.0
"""Exact reductions over parties: of what all ranks of this party hold alike.

    rank 0       sends the party's bytes to the server, gets those of all parties, and reduces them
                 in the order of the parties
    broadcast    the other ranks of the party get the bytes of the result

The server passes bytes on (see `ps.rounds.gather`), so every party computes the same from the same
bytes: the results are equal bit for bit. Sums are in the tensors' own type; half types are added
as float32 and rounded once.

A server with a quorum may have gone on without some parties, perhaps without this one. All parties
hear of the same ones, so results are equal here, too: those of the parties that are present.

    sum, min, max   of those present
    mean            the sum of what adds up to a mean over all workers: scaled, so that it is that
                    over the workers of those present
    first           of the first party that is present
    whole           a sum in which each party must be: an error, the same at all parties
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.comm.allreduce import HALVES
from tf_hips.comm.parts import cut
from tf_hips.errors import ProtocolError
from tf_hips.strategies.agreeing import Doubted
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.from_rank_0 import from_rank_0

# A label and this party's bytes in, the bytes of all parties out, None where one is absent. On rank
# 0 only.
Gather = Callable[[str, bytes], Sequence[bytes | None]]

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "mean": np.add,
    "first": lambda first, other: first,
    "whole": np.add,
}
_SUMS = ("sum", "mean", "whole")
_TITLE_CHARACTERS = 200


class ExactReduction:
    """Reduces tensors over parties; called in turns, in the same order on all ranks."""

    def __init__(
        self,
        gather: Gather,
        failures: Failures,
        workers: Callable[[], Sequence[int]] = tuple,
        parties: Callable[[], Doubted | None] = lambda: None,
    ) -> None:
        """Prepares nothing.

        Args:
            gather: brings the bytes of all parties.
            failures: where exceptions raised in a step are kept.
            workers: tells the number of workers of each party.
            parties: tells of which parties some may lie; None: all are believed.
        """
        self._gather = gather
        self._failures = failures
        self._workers = workers
        self._parties = parties

    def __call__(
        self, tensors: Sequence[tf.Tensor], label: str, operation: str | Sequence[str]
    ) -> list[tf.Tensor]:
        """Reduces each tensor elementwise.

        Args:
            tensors: numeric tensors of known shape, equal on all ranks of the party.
            label: what they are, for messages; part of a collective's name.
            operation: as above; one of all tensors, or one for each.

        Returns:
            Tensors like `tensors`, equal on all ranks of all parties.
        """
        operations = [operation] * len(tensors) if isinstance(operation, str) else list(operation)
        if len(operations) != len(tensors) or not set(operations) <= set(_OPERATIONS):
            raise ValueError(
                f"`operation` must be one of {', '.join(_OPERATIONS)}, or one for each tensor. "
                f"Received: {operation!r}"
            )
        sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
        if not sum(sizes):
            return list(tensors)
        packed = tf.concat([_to_bytes(tensor) for tensor in tensors], 0)
        combine = functools.partial(
            self._combine, _title(tensors, label, operations), operations, _kinds(tensors)
        )
        total = from_rank_0(combine, [packed], sum(sizes), f"{label}.parties", self._failures)
        return [
            tf.reshape(_from_bytes(part, tensor.dtype), tensor.shape)
            for part, tensor in zip(cut(total, sizes), tensors, strict=True)
        ]

    def _combine(
        self,
        title: str,
        operations: Sequence[str],
        kinds: Sequence[tuple[np.dtype[Any], bool, int]],
        packed: np.ndarray,
    ) -> np.ndarray:
        told_by_all = self._believed(title, self._gather(title, packed.tobytes()), packed.size)
        payloads = [payload for payload in told_by_all if payload is not None]
        share = self._share(told_by_all)
        if share is not None and "whole" in operations:
            raise ProtocolError(
                f"`{title}` needs the values of all parties, and the server's quorum has gone on "
                f"without {len(told_by_all) - len(payloads)} of {len(told_by_all)}."
            )
        if any(len(payload) != packed.size for payload in payloads):
            told = ", ".join(str(len(payload)) for payload in payloads)
            raise ProtocolError(
                f"All parties must reduce values of the same shapes and types. Received: `{title}` "
                f"of {told} bytes, by party"
            )
        results = []
        begin = 0
        for operation, (dtype, is_half, count) in zip(operations, kinds, strict=True):
            end = begin + count * dtype.itemsize
            parts = [np.frombuffer(payload[begin:end], dtype) for payload in payloads]
            begin = end
            if is_half and operation in _SUMS:
                parts = [part.astype(np.float32) for part in parts]
            with np.errstate(all="ignore"):  # an infinity is a result, and no surprise here
                total = functools.reduce(_OPERATIONS[operation], parts)
                if share is not None and operation == "mean":
                    total = total * share
                total = total.astype(dtype, copy=False)
            results.append(np.frombuffer(total.tobytes(), np.uint8))
        return np.concatenate(results)

    def _believed(
        self, title: str, told_by_all: Sequence[bytes | None], size: int
    ) -> Sequence[bytes | None]:
        """Without payloads of another length, where their senders may lie and most are like ours.

        The title says what is reduced, so an honest party has as many bytes as this one.
        """
        parties = self._parties()
        sizes = [None if payload is None else len(payload) for payload in told_by_all]
        if parties is None or parties.most(sizes) != size:
            return told_by_all
        odd = [one not in (None, size) for one in sizes]
        parties.name(odd, title, f"it has not the {size} bytes of all others")
        return [None if is_odd else one for one, is_odd in zip(told_by_all, odd, strict=True)]

    def _share(self, told_by_all: Sequence[bytes | None]) -> float | None:
        """Workers of all parties by those of the parties present; None: all are."""
        if all(payload is not None for payload in told_by_all):
            return None
        workers = self._workers()
        pairs = zip(workers, told_by_all, strict=True)
        return sum(workers) / sum(count for count, payload in pairs if payload is not None)


def _kinds(tensors: Sequence[tf.Tensor]) -> list[tuple[np.dtype[Any], bool, int]]:
    return [
        (
            np.dtype(tensor.dtype.as_numpy_dtype),
            tensor.dtype in HALVES,
            int(tensor.shape.num_elements()),
        )
        for tensor in tensors
    ]


def _title(tensors: Sequence[tf.Tensor], label: str, operations: Sequence[str]) -> str:
    """What the parties compare before they reduce; long ones end in a digest."""
    operation = operations[0] if set(operations) & {"min", "max"} else "sum"
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
