# SPDX-License-Identifier: Apache-2.0
"""The one door to Horovod: start, ranks, and collectives with a name.

In a graph Horovod pairs the ranks' operations by name, and Keras' automatic names differ between
ranks, so every collective here takes an explicit name and ignores the scope it is built in. Horovod
keeps what follows the last "/", so the names are `hips.<what>` without one. Eagerly it pairs them
by order: eager collectives belong on one thread.

Everything works without a launcher, as one rank; collectives of one rank are identities and start
nothing.

Invariant: Horovod's own fusion is off. It joins what happens to be ready, so the order of float
additions, and with it the result on three or more ranks, would depend on timing.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.errors import ProtocolError

_OPERATIONS = {"sum": hvd.Sum, "min": hvd.Min}

# Milliseconds between two looks of Horovod's thread at its queue; the default of 1 ms is most of a
# small collective.
_CYCLE_TIME_MS = "0.5"


_has_stopped = False


def init() -> None:
    """Starts Horovod once; later calls do nothing.

    Raises:
        ProtocolError: it was stopped before.
    """
    if _has_stopped:
        # Horovod 0.28.1 dies of a segmentation fault here.
        raise ProtocolError(
            "Horovod cannot be started again in a process that has stopped it. Start a new process."
        )
    if not is_running():
        fusion = os.environ.get("HOROVOD_FUSION_THRESHOLD", "0")
        if fusion != "0":
            log.warning(
                "HOROVOD_FUSION_THRESHOLD=%s is not used: sums must not depend on timing.", fusion
            )
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_TIME_MS)
        hvd.init()


def shutdown() -> None:
    """Stops Horovod for good; the other ranks' pending collectives fail."""
    global _has_stopped
    if is_running():
        hvd.shutdown()
        _has_stopped = True


def is_running() -> bool:
    """Whether Horovod has been started and not stopped."""
    return bool(hvd.is_initialized())


def rank() -> int:
    """This process among the ranks of its party."""
    return int(hvd.rank())


def size() -> int:
    """Number of ranks of this party."""
    return int(hvd.size())


def local_rank() -> int:
    """This process among the ranks of its machine."""
    return int(hvd.local_rank())


def allreduce(tensor: tf.Tensor, name: str, operation: str = "sum") -> tf.Tensor:
    """Sums (or takes the minimum of) `tensor` over all ranks, elementwise.

    Args:
        tensor: same shape and type on all ranks.
        name: what it carries, unique among the collectives that may run at the same time.
        operation: "sum" or "min".

    Returns:
        A tensor like `tensor`, equal on all ranks.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f'`operation` must be "sum" or "min". Received: operation={operation!r}')
    if size() == 1:
        return tf.identity(tensor)
    return hvd.allreduce(
        tensor, op=_OPERATIONS[operation], name=_full_name(name), ignore_name_scope=True
    )


def allgather(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Concatenates the ranks' tensors along axis 0, in rank order; their lengths may differ."""
    if size() == 1:
        return tf.identity(tensor)
    return hvd.allgather(tensor, name=_full_name(name), ignore_name_scope=True)


def alltoall(tensor: tf.Tensor, splits: Sequence[int], name: str) -> tf.Tensor:
    """Sends `splits[r]` rows of `tensor` to each rank r; returns what came, in rank order."""
    if size() == 1:
        return tf.identity(tensor)
    received, _ = hvd.alltoall(
        tensor, splits=tf.constant(splits, tf.int32), name=_full_name(name), ignore_name_scope=True
    )
    return received


def broadcast(tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
    """Returns rank `root`'s tensor on all ranks; shapes and types must agree beforehand."""
    if size() == 1:
        return tf.identity(tensor)
    return hvd.broadcast(tensor, root, name=_full_name(name), ignore_name_scope=True)


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Returns rank `root`'s JSON value on all ranks. Eager."""
    if size() == 1:
        return value
    data = np.frombuffer(json.dumps(value).encode() if rank() == root else b"", np.uint8)
    length = int(broadcast(tf.constant(data.size, tf.int64), "object_size", root))
    if rank() != root:
        data = np.zeros(length, np.uint8)
    return json.loads(broadcast(tf.constant(data), "object", root).numpy().tobytes())


def gather_objects(value: Any) -> list[Any]:
    """Returns the JSON values of all ranks, in rank order, on all ranks. Eager."""
    if size() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = allgather(tf.constant([data.size], tf.int64), "object_sizes").numpy()
    joined = allgather(tf.constant(data), "objects").numpy()
    return [json.loads(part.tobytes()) for part in np.split(joined, np.cumsum(lengths)[:-1])]


def barrier() -> None:
    """Returns when all ranks have called it. Eager."""
    allreduce(tf.zeros([1]), "barrier")


def _full_name(name: str) -> str:
    if "/" in name:
        raise ValueError(
            f"`name` must not contain '/': Horovod drops what precedes it. Received: name={name!r}"
        )
    return f"hips.{name}"
