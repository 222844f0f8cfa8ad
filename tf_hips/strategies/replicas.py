# SPDX-License-Identifier: Apache-2.0
"""Making replicas equal at the start, and showing that they are equal at the end.

Keras does not synchronise initial weights: with different seeds every rank begins elsewhere. Before
the first step all ranks compare what they have, and take rank 0's values. Values travel as raw
bytes, so any type arrives as it was.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives, watchdog
from tf_hips.errors import ProtocolError
from tf_hips.ops.native import Bytes
from tf_hips.ps.terms.weights import Refill, bytes_of, cut_weights

# What is spread at a time: so little that on a slow link no rank waits long for the one that passes
# it on, and so much that on a fast one it takes no longer than a large block.
SPREAD_BYTES = 4 * 2**20

_NAME_BYTES = 8  # of a digest: of some thousand names none is taken for another

_OUTCOME = "the outcome of what rank 0 does"

# Rank 0's values in, the values that all parties begin with out.
FirstSync = Callable[[list[np.ndarray]], list[np.ndarray]]


def fingerprint(model: Any) -> str:
    """A digest of all weights of a Keras model: equal on two replicas if they are, bit for bit.

    Dropout's random states and metrics are no weights, and are left out. Under a strategy of
    tf_hips the digest is also written to the event log.

    Args:
        model: a built Keras model.

    Returns:
        64 hexadecimal digits (SHA-256 of the weights' bytes, in order).
    """
    digest = hashlib.sha256()
    for weight in model.weights:
        digest.update(bytes_of(weight.numpy()))
    text = digest.hexdigest()
    write_event = getattr(model.distribute_strategy, "write_event", None)
    if write_event is not None:
        write_event("fingerprint", value=text, weights=len(model.weights))
    return text


def in_one_order(variables: Sequence[tf.Variable], *, of_model: bool = False) -> list[tf.Variable]:
    """`variables` in the order of rank 0, where ranks have made the same ones in another. Eager.

    They are the same where their names are, each of one variable. Other names, which Keras may have
    numbered differently, tell nothing: then the order stays, and counts. Where names and order are
    at odds by numbers of layers alone, either may be right; but a model has an order of its own.

    Args:
        variables: this rank's variables, in the order in which it has made them.
        of_model: whether this is for the step of a model.

    Raises:
        ProtocolError: on every rank, if that is so.
    """
    names = [variable.name for variable in variables]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    if len(set(primitives.gather_objects(digest, "the order of variables"))) == 1:
        return list(variables)
    everyone = primitives.gather_objects(names, "the names of variables in order")
    first = everyone[0]
    if len(set(first)) < len(first) or any(sorted(one) != sorted(first) for one in everyone):
        return list(variables)
    for rank, other in enumerate(everyone):
        if other != first and _without_numbers(other) == _without_numbers(first):
            if of_model:
                return list(variables)
            place = next(at for at, name in enumerate(other) if name != first[at])
            raise ProtocolError(
                "All ranks must make the same variables in one order, or by names of their own. "
                f"Received: number {place} of {len(first)} is {first[place].removesuffix(':0')} on "
                f"rank 0 and {other[place].removesuffix(':0')} on rank {rank}. Layers that ranks "
                "make in another order need names of their own"
            )
    places = {name: place for place, name in enumerate(names)}
    return [variables[places[name]] for name in first]


def _without_numbers(names: Sequence[str]) -> list[str]:
    """Names without the numbers that Keras gives to layers, and to models, of one name."""
    return [re.sub(r"_\d+(?=/)", "", name) for name in names]


def names_as_bytes(variables: Sequence[tf.Variable]) -> Bytes:
    """What `check_order_over_parties` of another party compares: uint8, 8 for each variable."""
    names = (one.name.removesuffix(":0").encode() for one in variables)
    told = b"".join(hashlib.sha256(name).digest()[:_NAME_BYTES] for name in names)
    return np.frombuffer(told, np.uint8)


def check_order_over_parties(variables: Sequence[tf.Variable], first: Bytes) -> None:
    """Raises where this party has the variables of the first one in another order.

    Of one shape they would get each other's values. They are the same as for `in_one_order`.

    Args:
        variables: of this party, in order.
        first: what `names_as_bytes` says of the first one; as long as this party's own.

    Raises:
        ProtocolError: names the first of them.
    """
    cuts = range(0, len(first), _NAME_BYTES)
    theirs, own = (
        [told[cut : cut + _NAME_BYTES] for cut in cuts]
        for told in (first.tobytes(), names_as_bytes(variables).tobytes())
    )
    if own == theirs or sorted(own) != sorted(theirs) or len(set(own)) < len(own):
        return
    place = next(at for at, name in enumerate(own) if name != theirs[at])
    here, there = (variables[own.index(told[place])].name for told in (own, theirs))
    raise ProtocolError(
        "All parties must make, and train, the same variables in one order. Received: number "
        f"{place} of {len(own)} is {there.removesuffix(':0')} in the first party and "
        f"{here.removesuffix(':0')} here. Layers that parties make in another order need names of "
        "their own"
    )


def check_equal_shapes(variables: Sequence[tf.Variable], advice: str = "") -> None:
    """Compares types and shapes of `variables` on all ranks.

    Args:
        variables: this rank's variables, in order.
        advice: what the error ends with.

    Raises:
        ProtocolError: on every rank, if any rank differs from rank 0; names the first difference.
    """
    described = [f"{variable.dtype.name}{list(variable.shape)}" for variable in variables]
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    digests = primitives.gather_objects(digest, "the shapes of variables")
    if len(set(digests)) == 1:
        return
    # Names are only for the reader: Keras numbers them differently on ranks that built other models
    # before.
    rows = [[variable.name, kind] for variable, kind in zip(variables, described, strict=True)]
    everyone = primitives.gather_objects(rows, "the names of variables")
    raise ProtocolError(_first_difference(everyone) + advice)


def synchronise(
    variables: Sequence[tf.Variable],
    first_sync: FirstSync | None = None,
    left: Collection[int] = (),
) -> int:
    """Gives all ranks rank 0's values. Eager.

    They travel and are taken one after the other, so that no rank holds all of them beside its own.

    Args:
        variables: initialised variables, the same list on all ranks (see `check_equal_shapes`).
        first_sync: what rank 0 does with its values before they are spread.
        left: places of those that travel, and stay as they are.

    Returns:
        Number of bytes synchronised.
    """
    total = sum(variable.shape.num_elements() * variable.dtype.size for variable in variables)
    is_first = primitives.rank() == 0
    values: Iterable[np.ndarray] = (value_of(variable) for variable in variables)
    if first_sync is not None:
        own = list(values) if is_first else []
        values = on_rank_0(lambda: first_sync(own)) or ()
    if primitives.size() > 1:
        if is_first:
            for message in cut_weights(values, 0, SPREAD_BYTES):
                spread(message)
        else:
            _take(variables, total, left)
    if is_first and first_sync is not None:  # else it keeps what it has
        for place, (variable, value) in enumerate(zip(variables, values, strict=True)):
            if place not in left:
                variable.assign(value, read_value=False)
    return total


def _take(variables: Sequence[tf.Variable], total: int, left: Collection[int]) -> None:
    """Takes rank 0's values as they come: `total` bytes."""
    places = iter(enumerate(variables))

    def give(value: np.ndarray) -> None:
        place, variable = next(places)
        if place not in left:
            variable.assign(value, read_value=False)

    kinds = ((variable.dtype.as_numpy_dtype, variable.shape) for variable in variables)
    refill = Refill(kinds, give)
    while refill.held < total:
        refill.take(spread(bytes(min(SPREAD_BYTES, total - refill.held))))


def spread(message: bytes) -> memoryview:
    """Rank 0's bytes, on all ranks; of the others the length counts. Eager."""
    sent = tf.constant(np.frombuffer(message, np.uint8))
    return memoryview(primitives.broadcast(sent, "weights").numpy())


def on_rank_0(action: Callable[[], Any]) -> Any:
    """Runs `action` on rank 0; returns its value there and None elsewhere. Eager.

    Raises:
        Exception: on rank 0 what `action` raised, on the others a `ProtocolError` with its text, so
            that no rank waits for one that has given up.
    """
    if primitives.rank() == 0:
        try:
            # What only one rank does is to ask a server, which has deadlines of its own.
            with watchdog.doing("what rank 0 does for its party", has_deadline=True):
                value = action()
        except Exception as error:
            primitives.broadcast_object(f"{type(error).__name__}: {error}", what=_OUTCOME)
            raise
        primitives.broadcast_object(None, what=_OUTCOME)
        return value
    failure = primitives.broadcast_object(None, what=_OUTCOME)
    if failure is not None:
        raise ProtocolError(f"Rank 0 of this party failed. {failure}")
    return None


def value_of(variable: tf.Variable) -> np.ndarray:
    """The value of a variable, which no tape sees being read."""
    # Not `variable.numpy()`: that tells the tapes that are recording, which then ask for a
    # gradient. This happens in the middle of a step, where the optimizer hands over its gradients.
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype).numpy()
    return np.asarray(value, order="C")


def _first_difference(everyone: list[list[list[str]]]) -> str:
    first = everyone[0]
    for rank, rows in enumerate(everyone):
        for position in range(max(len(first), len(rows))):
            there = first[position] if position < len(first) else None
            here = rows[position] if position < len(rows) else None
            if there is None or here is None or there[1] != here[1]:
                return (
                    "All ranks must have the same model. Received: variable "
                    f"{position} is {_text(there)} on rank 0 and {_text(here)} on rank {rank}"
                )
    return "All ranks must have the same model. Received: the digests of their shapes differ"


def _text(row: list[str] | None) -> str:
    return "missing" if row is None else f"{row[0]} {row[1]}"
