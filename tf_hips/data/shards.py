# SPDX-License-Identifier: Apache-2.0
"""One group's batches of arrays or of a dataset, in an order that all groups share."""

import numbers
from typing import Any

import tensorflow as tf

from tf_hips import log
from tf_hips.data import arrays, datasets
from tf_hips.data.position import MakeVariable, Position, known_length, make_plain_variable
from tf_hips.data.seats import Seats


def shard(
    data: Any,
    batch_size: int,
    *,
    group: int,
    groups: int,
    seed: int,
    shuffle: bool | int = True,
    drop_remainder: bool = True,
    make_variable: MakeVariable = make_plain_variable,
    seats: Seats | None = None,
) -> tf.data.Dataset:
    """Batches of group `group` of `groups`; see `tf_hips.shard`.

    Group g has the positions g, g + groups, ... of the order, so the k-th batches of all groups
    together are the rows [k n, (k + 1) n) of one order, n = groups * batch_size.

    Args:
        data: arrays, or a dataset of single rows.
        batch_size: rows of a batch of one group.
        group: number of this group, from 0.
        groups: number of groups.
        seed: of the shuffling, the same on all workers.
        shuffle: whether every epoch has another order; for a dataset also the rows of its buffer.
        drop_remainder: whether all groups get equally many batches, all of them full.
        make_variable: makes the variable that holds the epoch.
        seats: instead of `group`, in which group this worker sits in each round; only with
            `drop_remainder`.

    Raises:
        ValueError: an argument is out of range, or the data cannot be sharded.
    """
    _check(batch_size, seed, shuffle, data)
    joined = groups * batch_size
    position = Position(make_variable, is_shuffled=shuffle is True or shuffle > 1)
    common: dict[str, Any] = {
        "group": group,
        "groups": groups,
        "drop_remainder": drop_remainder,
        "seed": seed,
        "position": position,
        "seats": seats,
    }
    position.is_seated = seats is not None
    if isinstance(data, tf.data.Dataset):
        datasets.check_rows(data)
        length = known_length(data)
        _check_length(length, batch_size, groups, drop_remainder)
        buffer = datasets.SHUFFLE_BUFFER if shuffle is True else int(shuffle)
        buffer = buffer if length is None else min(buffer, length)
        result = datasets.batches(data, batch_size, buffer=buffer, **common)
    else:
        tensors = arrays.to_tensors(data)
        length = arrays.num_rows(tensors)
        _check_length(length, batch_size, groups, drop_remainder)
        result = arrays.batches(tensors, batch_size, is_shuffled=bool(shuffle), **common)
    is_endless = length is None and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY
    position.drops = drop_remainder and not is_endless and (length is None or length % joined > 0)
    takers = "1 worker takes" if groups == 1 else f"{groups} workers take"
    if position.drops and length is None and group == 0 and joined > 1:
        log.warning(
            "shard: up to %d rows of each epoch are left out%s, so that %s equal steps of %d rows.",
            joined - 1,
            ", others each time" if shuffle else ", the last ones",
            takers,
            batch_size,
        )
    elif position.drops and length is not None and group == 0:
        log.warning(
            "shard: each epoch leaves out %d of %d rows%s, so that %s %d equal steps of %d rows.",
            length % joined,
            length,
            ", others each time" if shuffle else ", the last ones",
            takers,
            length // joined,
            batch_size,
        )
    return position.mark(result)


def _check(batch_size: Any, seed: Any, shuffle: Any, data: Any) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise ValueError(
                f"`{name}` must be an int, at least {least}. Received: {name}={value!r}"
            )
    if seed >= 1 << 63:
        raise ValueError(f"`seed` must be below 2^63. Received: seed={seed}")
    if not isinstance(shuffle, int) or shuffle < 0:
        raise ValueError(
            "`shuffle` must be True, False or the number of rows of a buffer. Received: "
            f"shuffle={shuffle!r}"
        )
    if not isinstance(shuffle, bool) and not isinstance(data, tf.data.Dataset):
        raise ValueError(
            "`shuffle` must be True or False for arrays, which are shuffled as a whole. Received: "
            f"shuffle={shuffle!r}"
        )


def _check_length(length: int | None, batch_size: int, groups: int, drop_remainder: bool) -> None:
    each = batch_size if drop_remainder else 1
    if length is not None and length < groups * each:
        raise ValueError(
            f"`data` must have at least {groups * each} rows, {each} for each of {groups} workers. "
            f"Received: {length} rows"
        )
