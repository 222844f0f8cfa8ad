# SPDX-License-Identifier: Apache-2.0
"""The one door to Horovod: start, ranks, and collectives with a name.

In a graph Horovod pairs the ranks' operations by name, and Keras' automatic names differ between
ranks, so every collective here takes an explicit name and ignores the scope it is built in. Horovod
keeps what follows the last "/", so the names are `hips.<what>` without one. Eagerly it pairs them
by order: eager collectives belong on one thread.

In a graph a collective runs, each time, whatever its input is and whether or not its result is
used: what goes in and what comes out is `opaque` (see `ops.flow`).

Everything works without a launcher, as one rank; collectives of one rank are identities and start
nothing.

Whoever waits here is watched: `watchdog` ends a job that waits for ever, and what raised Horovod's
error then raises the verdict.

Invariant: Horovod's own fusion is off. It joins what happens to be ready, so the order of float
additions, and with it the result on three or more ranks, would depend on timing.
"""

import contextlib
import dataclasses
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tf_hips import config, log
from tf_hips.comm import claims, launchers, schedules, watchdog
from tf_hips.comm.parts import MOST, check_countable, in_parts
from tf_hips.errors import ConfigError, ProtocolError
from tf_hips.ops.flow import opaque

_OPERATIONS = {"sum": hvd.Sum, "min": hvd.Min}

_FUSION = "HOROVOD_FUSION_THRESHOLD"
# Milliseconds between two looks of Horovod's thread at its queue; the default of 1 ms is most of a
# small collective.
_CYCLE_TIME_MS = "0.5"
# A single rank has no collectives of ours, and each look costs it time; its user's own ones may
# wait a little.
_CYCLE_TIME_ALONE_MS = "5"
# Seconds in which Horovod's Gloo must come to the end of a wait: for ranks that start, for a rank
# that stands still, for a transfer. Its own 30 are less than what a healthy job may take.
_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_LEAST_GLOO_S, _MOST_GLOO_S = 30, 10**6
_AFTER_VERDICT_S = 10  # the watchdog speaks first: it can say who is late, and with what
# Gathers whose length was warned of.
_long: set[str] = set()

_has_stopped = False
# Rank, size and local rank: known for good, also when Horovod has been stopped.
_facts: tuple[int, int, int] | None = None
_nodes: list[list[int]] | None = None
_building = threading.local()
_stopping = threading.Lock()


def init() -> None:
    """Starts Horovod and its watchdog once; later calls do nothing.

    Raises:
        ProtocolError: it was stopped before.
        ConfigError: `TF_HIPS_STALL_S` is no positive number; or the script has started Horovod
            itself, with its fusion; or this process is one of several that Horovod does not join,
            or was started by one that is a rank.
    """
    global _facts
    claims.claim(os.environ)
    watchdog.check()
    if _has_stopped:
        # Horovod 0.28.1 dies of a segmentation fault here.
        raise ProtocolError(
            "Horovod cannot be started again in a process that has stopped it. Start a new process."
        )
    stall_s = watchdog.stall_s()
    if not is_running():
        gloo_s = min(max(_LEAST_GLOO_S, math.ceil(stall_s) + _AFTER_VERDICT_S), _MOST_GLOO_S)
        os.environ.setdefault(_GLOO_TIMEOUT, str(gloo_s))
        fusion = os.environ.get(_FUSION, "0")
        if fusion != "0":
            log.warning("%s=%s is not used: sums must not depend on timing.", _FUSION, fusion)
        os.environ[_FUSION] = "0"
        sizes = (launchers.HOROVOD[0], *launchers.SIZES)
        is_alone = all(os.environ.get(name, "1") == "1" for name in sizes)
        cycle_time = _CYCLE_TIME_ALONE_MS if is_alone else _CYCLE_TIME_MS
        os.environ.setdefault("HOROVOD_CYCLE_TIME", cycle_time)
        hvd.init()
    elif _facts is None:
        _check_foreign_start()
    if _facts is None:
        if hvd.size() == 1:
            launchers.check_alone(os.environ)
        _facts = int(hvd.rank()), int(hvd.size()), int(hvd.local_rank())
        watchdog.start(rank(), size(), _stop)


def _check_foreign_start() -> None:
    """Raises where somebody else has started Horovod and left its fusion on."""
    fusion = os.environ.get(_FUSION)
    if hvd.size() > 1 and fusion != "0":
        raise ConfigError(
            "Horovod must be started by the strategy, which turns its fusion off: with it, sums "
            "over ranks depend on timing. Received: `hvd.init()` was called before, with "
            f"{_FUSION}={fusion or 'its default'}. Remove `hvd.init()`, or set {_FUSION}=0 and "
            f"{_GLOO_TIMEOUT} before it."
        )


def shutdown() -> None:
    """Stops Horovod for good; the other ranks' pending collectives fail."""
    if is_running():
        watchdog.stop()
        _stop()


def _stop() -> None:
    global _has_stopped
    with _stopping:
        if is_running():
            _has_stopped = True
            hvd.shutdown()


def is_running() -> bool:
    """Whether Horovod has been started, and not stopped by this process or its watchdog."""
    return not _has_stopped and bool(hvd.is_initialized())


def rank() -> int:
    """This process among the ranks of its party."""
    return _facts[0] if _facts is not None else int(hvd.rank())


def size() -> int:
    """Number of ranks of this party."""
    return _facts[1] if _facts is not None else int(hvd.size())


def local_rank() -> int:
    """This process among the ranks of its machine."""
    return _facts[2] if _facts is not None else int(hvd.local_rank())


def local_worker() -> int:
    """This process among the workers of its machine, of all sites that `tf-hips` started there.

    By it they share the machine's GPUs. Under other launchers it is the local rank.
    """
    return int(os.environ.get(config.LOCAL_WORKER_VARIABLE, local_rank()))


def nodes() -> list[list[int]]:
    """The ranks of each machine, ascending, machines in the order of their first ranks. Eager.

    A machine is known by the name that the launcher gave it (`HOROVOD_HOSTNAME`), else its own.
    """
    global _nodes
    if _nodes is None:
        names = gather_objects(
            os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(), "the names of machines"
        )
        _nodes = [
            [rank for rank, name in enumerate(names) if name == one] for one in dict.fromkeys(names)
        ]
    return [list(node) for node in _nodes]


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

    def run(value: tf.Tensor, name: str) -> tf.Tensor:
        return _collective(
            "allreduce",
            lambda value, name: hvd.allreduce(
                value, op=_OPERATIONS[operation], name=name, ignore_name_scope=True
            ),
            value,
            name,
        )

    return in_parts(run, tensor, name)


def allgather(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Concatenates the ranks' tensors along axis 0, in rank order; their lengths may differ.

    Raises:
        ValueError: this rank's tensor alone is more than Horovod counts. All of them together must
            not be more either, which this rank cannot know.
    """
    if size() == 1:
        return tf.identity(tensor)
    own = tensor.shape.num_elements()
    check_countable(own, "allgather", name)
    if own is not None and own * size() > MOST and name not in _long:
        _long.add(name)
        log.warning(
            "The allgather `%s` ends this job if the other ranks also have %d elements: Horovod "
            "counts to %d.", name, own, MOST,
        )  # fmt: skip
    return _collective(
        "allgather",
        lambda value, name: hvd.allgather(value, name=name, ignore_name_scope=True),
        tensor,
        name,
    )


def alltoall(tensor: tf.Tensor, splits: Sequence[int] | tf.Tensor, name: str) -> tf.Tensor:
    """Sends `splits[r]` rows of `tensor` to each rank r; returns what came, in rank order.

    Args:
        tensor: as many rows as all splits together.
        splits: one for each rank; integers, or an int32 tensor.
        name: see `allreduce`.

    Raises:
        ValueError: `tensor` is more than Horovod counts.
    """
    if size() == 1:
        return tf.identity(tensor)
    check_countable(tensor.shape.num_elements(), "alltoall", name)
    lengths = tf.convert_to_tensor(splits, tf.int32)
    return _collective(
        "alltoall",
        lambda value, name: hvd.alltoall(value, splits=lengths, name=name, ignore_name_scope=True)[
            0
        ],
        tensor,
        name,
    )


def exchange(
    parts: Sequence[tf.Tensor],
    lengths: Sequence[int],
    name: str,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    largest: int | None = None,
) -> tf.Tensor:
    """What `exchange_apart` brings, as one tensor, in the order of ranks."""
    came = exchange_apart(parts, lengths, name, groups=groups, largest=largest)
    return came[0] if len(came) == 1 else tf.concat(came, 0)


def exchange_apart(
    parts: Sequence[tf.Tensor],
    lengths: Sequence[int],
    name: str,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    largest: int | None = None,
) -> list[tf.Tensor]:
    """Sends part i to rank i of this rank's group; large parts in rounds.

    See `schedules.has_rounds`.

    Args:
        parts: one for each rank of the group; rows of the same shape and type, bytes (uint8 [n])
            where there are groups.
        lengths: rows of each part.
        name: see `allreduce`; those of rounds begin so.
        groups: who exchange parts among each other, ascending; as many in each group, each rank in
            one at most. A rank that is in none has no parts. None: all ranks.
        largest: rows of the largest part of all ranks; None: the lengths are the same on all.

    Returns:
        What came from the ranks of the group, this rank's own part among it, in their order: one
        tensor of each, or one of all together.
    """
    groups = groups or [range(size())]
    group = next((list(one) for one in groups if rank() in one), [])
    largest = max(lengths) if largest is None else largest
    nothing = tf.zeros([0], tf.uint8)
    row_bytes = parts[0].dtype.size * parts[0].shape[1:].num_elements() if parts else 1
    count = len(groups[0])
    if not schedules.has_rounds(count, largest * row_bytes):
        sent = tf.concat(parts, 0) if parts else nothing
        return [alltoall(sent, _splits(dict(zip(group, lengths, strict=True))), name)]
    own = group.index(rank()) if group else None
    came = {own: parts[own]} if own is not None else {}
    for number in range(1, count):
        label = f"{name}.round_{number}"
        if own is None:
            alltoall(nothing, _splits({}), label)
            continue
        target, source = (own + number) % count, (own - number) % count
        came[source] = alltoall(parts[target], _splits({group[target]: lengths[target]}), label)
    return [came[one] for one in sorted(came)] or [nothing]


def _splits(rows: Mapping[int, int]) -> list[int]:
    return [rows.get(one, 0) for one in range(size())]


def broadcast(tensor: tf.Tensor, name: str, root: int = 0, *, part: int | None = None) -> tf.Tensor:
    """Returns rank `root`'s tensor on all ranks; shapes and types must agree beforehand.

    Args:
        tensor: same shape and type on all ranks.
        name: see `allreduce`.
        root: the rank whose tensor it is.
        part: elements that travel at a time, so that others can pass them on meanwhile; None: all
            that Horovod counts.
    """
    if size() == 1:
        return tf.identity(tensor)

    def run(value: tf.Tensor, name: str) -> tf.Tensor:
        return _collective(
            "broadcast",
            lambda value, name: hvd.broadcast(value, root, name=name, ignore_name_scope=True),
            value,
            name,
        )

    return in_parts(run, tensor, name, part)


def broadcast_object(value: Any, root: int = 0, what: str = "a value") -> Any:
    """Returns rank `root`'s JSON value on all ranks. Eager.

    Args:
        value: on rank `root`, what to send.
        root: the rank whose value it is.
        what: what it is, the same on all ranks; eagerly Horovod pairs whatever comes.

    Raises:
        ProtocolError: rank `root` sent something else than this rank waits for.
    """
    if size() == 1:
        return value
    with watchdog.waiting(f"{what} of rank {root}"):
        data = _encoded([what, value]) if rank() == root else np.zeros(0, np.uint8)
        length = int(broadcast(tf.constant(data.size, tf.int64), "object_size", root))
        if rank() != root:
            data = np.zeros(length, np.uint8)
        told, value = _decoded(broadcast(tf.constant(data), "object", root).numpy())
    _check_same({root: told, rank(): what})
    return value


def gather_objects(value: Any, what: str = "values") -> list[Any]:
    """Returns the JSON values of all ranks, in rank order, on all ranks. Eager.

    Args:
        value: this rank's.
        what: what they are, the same on all ranks; eagerly Horovod pairs whatever comes.

    Raises:
        ProtocolError: on all ranks, if they gather different things.
    """
    if size() == 1:
        return [value]
    with watchdog.waiting(f"{what} of all ranks"):
        data = _encoded([what, value])
        lengths = allgather(tf.constant([data.size], tf.int64), "object_sizes").numpy()
        check_countable(int(lengths.sum()), "allgather", "objects")
        joined = allgather(tf.constant(data), "objects").numpy()
    parts = [_decoded(part) for part in np.split(joined, np.cumsum(lengths)[:-1])]
    _check_same({rank: told for rank, (told, _) in enumerate(parts)})
    return [value for _, value in parts]


def barrier(what: str = "a barrier") -> None:
    """Returns when all ranks have called it. Eager.

    Args:
        what: what they meet for, for messages.
    """
    if size() > 1:
        with watchdog.waiting(what):
            allreduce(tf.zeros([1]), "barrier")


@dataclasses.dataclass(frozen=True)
class Built:
    """A collective in a graph.

    Attributes:
        name: what Horovod pairs it by.
        input: its tensor.
        output: its result.
    """

    name: str
    input: tf.Tensor
    output: tf.Tensor


@contextlib.contextmanager
def building() -> Iterator[list[Built]]:
    """Collects the collectives that this thread builds into graphs meanwhile."""
    before = getattr(_building, "built", None)
    built: list[Built] = []
    _building.built = built
    try:
        yield built
    finally:
        _building.built = before


def built_in_branches(input: tf.Tensor, build: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns what `build` returns, whose collectives lie in branches of the present graph.

    For `building` they are collectives of this graph: they wait for `input`, and have ended when
    the first result is there.

    Args:
        input: a tensor of this graph that all of them need.
        build: builds one operation with branches, such as `tf.switch_case`.
    """
    outer = getattr(_building, "built", None)
    with building() as built:
        outputs = build()
    if outer is not None and outputs:
        outer += [Built(one.name, input, outputs[0]) for one in built]
    return outputs


def _collective(
    kind: str, run: Callable[[tf.Tensor, str], tf.Tensor], tensor: tf.Tensor, name: str
) -> tf.Tensor:
    full_name = _full_name(name)
    watchdog.check()
    # Also where the rest of a sum is computed on a GPU: what Horovod sends lies on the host.
    with tf.device("/cpu:0"):
        if tf.executing_eagerly():
            with watchdog.waiting(f"the {kind} `{name}`", f"eager {kind} {name}"):
                return run(tensor, full_name)
        [value] = opaque([tensor])
        [result] = opaque([run(value, full_name)])
    if getattr(_building, "built", None) is not None:
        _building.built.append(Built(full_name, value, result))
    return result


def _encoded(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _decoded(data: np.ndarray) -> Any:
    return json.loads(data.tobytes())


def _check_same(told: dict[int, str]) -> None:
    if len(set(told.values())) > 1:
        places = ", ".join(f"rank {rank} at {what}" for rank, what in sorted(told.items()))
        raise ProtocolError(
            f"All ranks must come to the same collectives in the same order. Received: {places}"
        )


def _full_name(name: str) -> str:
    if "/" in name:
        raise ValueError(
            f"`name` must not contain '/': Horovod drops what precedes it. Received: name={name!r}"
        )
    return f"hips.{name}"
