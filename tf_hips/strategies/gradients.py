# SPDX-License-Identifier: Apache-2.0
"""One list of gradients on its way through a sum: checked, flattened, summed, shaped again.

Gradients are known by their position in the list that the optimizer hands over: Keras' names differ
between ranks.

Sparse gradients (`tf.IndexedSlices`) stay sparse where the sum is exact and they are cheaper so, or
where the optimizer looks at their rows one by one (see `slices`); otherwise they become dense.

Invariant: every sum takes its turn (see `turns`), so one has ended on this rank before the next
begins.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_hips.comm import looks, primitives, watchdog
from tf_hips.comm.allreduce import HALVES, plain
from tf_hips.comm.compressed import MakeVariable
from tf_hips.comm.plan import LARGE_TABLE_ROWS
from tf_hips.comm.sparse import is_small, sparse_sum
from tf_hips.comm.staged import Reducer
from tf_hips.comm.verdicts import AS_ROWS
from tf_hips.errors import NonFiniteError, ProtocolError
from tf_hips.ops.flow import all_finite, finite, on_gpu, opaque
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.slices import depends_on_data, is_additive
from tf_hips.strategies.turns import Turns

NONFINITE_MODES = ("raise", "zero", "propagate")

Summable: TypeAlias = tf.Tensor | tf.IndexedSlices


def check_nonfinite(mode: str) -> None:
    """Raises `ValueError` unless `mode` is one that a strategy knows."""
    if mode not in NONFINITE_MODES:
        known = ", ".join(repr(one) for one in NONFINITE_MODES)
        raise ValueError(f"`nonfinite` must be one of {known}. Received: nonfinite={mode!r}")


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What is known of one gradient before it has a value.

    Attributes:
        name: name of its variable, for messages only.
        shape: its shape.
        dtype: its type.
        is_statistic: whether it is how far a statistic of a layer has moved (see `statistics`): no
            plan has it, and no codec of a party encodes it.
        is_sparse: whether it comes as rows, and what is done with it differs for that.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    is_statistic: bool = False
    is_sparse: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True)
class Summing:
    """How one list of gradients is summed.

    Attributes:
        reducer: sums vectors; gets the number of the step.
        only_float32: whether it takes nothing but float32; otherwise float64 stays as it is.
        first_step: number of the first step.
        complains: whether it raises by itself, on all workers, where a gradient of one of them is
            not finite and would not be seen in the sum.
    """

    reducer: Reducer
    only_float32: bool = False
    first_step: int = 0
    complains: bool = False


class GradientSum:
    """The sum of one optimizer's gradients over all workers, with the number of its step."""

    def __init__(
        self,
        gradients: Sequence[Gradient],
        summing: Summing,
        *,
        label: str,
        is_alone: bool,
        sparse: Collection[int],
        apart: Collection[int],
        nonfinite: str,
        make_variable: MakeVariable,
        failures: Failures,
        rank: int,
    ) -> None:
        """Prepares a sum.

        Args:
            gradients: what comes, in order.
            summing: how they are summed.
            label: part of the names of collectives that are not the reducer's.
            is_alone: whether there is one worker, whose gradients are the sum.
            sparse: positions of gradients that may stay sparse.
            apart: positions of gradients that the reducer never sees: it gets an empty vector in
                their place, and they are summed exactly, sparse or dense.
            nonfinite: what to do about NaN and infinities: "raise", "zero" or "propagate".
            make_variable: makes a non-trainable variable.
            failures: where exceptions raised in a step are kept.
            rank: rank of this worker, for messages.

        Raises:
            TypeError: a gradient is of no floating type.
        """
        for position, gradient in enumerate(gradients):
            if not gradient.dtype.is_floating:
                raise TypeError(
                    f"Gradient {position} ({gradient.name}) must be of a floating type. "
                    f"Received: dtype={gradient.dtype.name}"
                )
        self.gradients = list(gradients)
        self.step = make_variable(tf.constant(summing.first_step, tf.int64), "step")
        self._reducer = summing.reducer
        self._label = label
        self._is_alone = is_alone
        self._sparse = frozenset(sparse)
        self._apart = frozenset(apart)
        self._agreed: list[list[int]] = []  # which ones stayed sparse, in any step so far
        self._only_float32 = summing.only_float32
        self._sees_late = summing.complains or not summing.only_float32
        self._nonfinite = nonfinite
        self._complain = failures.kept(functools.partial(self._raise_nonfinite, "of rank"))
        self._complain_sum = failures.kept(
            functools.partial(self._raise_nonfinite, "summed over all workers, on rank")
        )
        self._rank = rank
        more = f" and {len(gradients) - 1} more" if len(gradients) > 1 else ""
        first = gradients[0].name if gradients else "nothing"
        self.description = f"the sum of the gradients of {first}{more}"
        self._as_rows = ""  # how this rank hands over those that may be sparse, for a reader

    def __call__(self, values: Sequence[Summable], optimizer: Any) -> list[Summable]:
        """Sums `values` over the workers and counts the step.

        Args:
            values: gradients; the same ones are sparse on all workers (see `check_sparse`).
            optimizer: the one that gets the sums.

        Returns:
            Gradients of the given shapes and types, equal on all workers; sparse or dense.
        """
        step = self.step.read_value()
        if self._is_alone:
            return self._own(values, step)
        own = [self._prepared(value, position, optimizer) for position, value in enumerate(values)]
        # What is not finite stays so in an exact sum, where all workers see it at once; a codec
        # would hide it, unless its reducer complains. Whoever looks first holds all sums back until
        # the backward pass has ended.
        is_late = self._nonfinite == "raise" and self._sees_late
        if not is_late:
            own = self._checked(own, step, self._complain)
        sums = self._summed(own, optimizer, step)
        if self._nonfinite == "raise":
            # Finite gradients can overflow when they are added, to each other or to a residual, and
            # a sum where a half type takes it.
            sums = _with_all_values(
                sums,
                [
                    _rounded(_values(total), gradient.dtype)
                    for total, gradient in zip(sums, self.gradients, strict=True)
                ],
            )
            sums = self._checked(sums, step, self._complain_sum, own if is_late else [])
        with tf.control_dependencies([_values(total) for total in sums]):
            counted = self.step.assign_add(1, read_value=True)
        with tf.control_dependencies([counted]):
            return [
                self._finished(total, gradient)
                for total, gradient in zip(sums, self.gradients, strict=True)
            ]

    def check_sparse(self, values: Sequence[Summable], optimizer: Any) -> None:
        """Compares which gradients stay sparse, where they are not those of a step before. Eager.

        Those of the first step have been compared before the list was made.

        Args:
            values: gradients of a step that begins, or is being traced.
            optimizer: the one that gets the sums.

        Raises:
            ProtocolError: they are others on another rank.
        """
        if self._is_alone:
            return
        found = sparse_places(values, self.gradients, self._sparse, optimizer)
        # Where one rank alone goes from one kind to another that all know, it compares nothing: by
        # these words what waits for it is told apart from what it waits for.
        names = [f"{place} ({self.gradients[place].name})" for place in found[:5]]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        self._as_rows = f", {', '.join(names)}{more}{AS_ROWS}" if names else ""
        if self._agreed and found not in self._agreed:
            place = min(set(found) ^ set(self._agreed[-1]))
            now, before = ("as rows", "dense") if place in found else ("dense", "as rows")
            # What all ranks read where only some come here.
            with watchdog.named(
                f"a comparison of which gradients are sparse, as gradient {place} "
                f"({self.gradients[place].name}) came {before} before and comes {now}"
            ):
                everyone = primitives.gather_objects(found, "which gradients are sparse")
            check_sparse([one.name for one in self.gradients], everyone)
        if found not in self._agreed:
            self._agreed.append(found)

    def _own(self, values: Sequence[Summable], step: tf.Tensor) -> list[Summable]:
        """What one worker alone gets: its gradients, none of which waits for another.

        So a layer is updated while the gradients of those below it are being computed.
        """
        own = [
            value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
            for value in values
        ]
        if self._nonfinite == "raise" and not on_gpu():
            checked = [
                finite(_values(one), step, self._nonfinite_text([place], "of rank"))
                for place, one in enumerate(own)
            ]
            own = _with_all_values(own, checked)
        else:
            own = self._checked(own, step, self._complain)
        self.step.assign_add(1)
        return own

    def in_turn(self, turns: Turns, values: Sequence[Summable], optimizer: Any) -> list[Summable]:
        """What a call returns, in a turn of its own."""
        if self._is_alone:
            return self(values, optimizer)  # without collectives there is nothing to wait for
        sums: list[Summable] = []

        def compute() -> list[tf.Tensor]:
            sums.extend(self(values, optimizer))
            return [part for total in sums for part in _parts(total)]

        parts = iter(turns(compute, label=f"{self.description}{self._as_rows}"))
        return [
            tf.IndexedSlices(next(parts), next(parts), total.dense_shape)
            if isinstance(total, tf.IndexedSlices)
            else next(parts)
            for total in sums
        ]

    def _prepared(self, value: Summable, position: int, optimizer: Any) -> Summable:
        """One gradient, sparse if it stays so, otherwise as a vector; half types are widened."""
        gradient = self.gradients[position]
        if (
            isinstance(value, tf.IndexedSlices)
            and position in self._sparse
            and _stays_sparse(value, gradient, optimizer)
        ):
            rows = tf.reshape(value.values, [-1, *gradient.shape[1:]])
            return tf.IndexedSlices(
                rows if gradient.dtype == tf.float64 else tf.cast(rows, tf.float32),
                value.indices,
                tf.constant(gradient.shape, tf.int64),
            )
        dense = tf.convert_to_tensor(value)
        if dense.shape != gradient.shape:
            dense = tf.ensure_shape(dense, gradient.shape)
        # Half types are widened for exactness; Horovod's Gloo sums them one rounding per rank.
        keep = gradient.dtype == tf.float64 and (position in self._apart or not self._only_float32)
        return tf.reshape(dense if keep else tf.cast(dense, tf.float32), [-1])

    def _summed(self, own: Sequence[Summable], optimizer: Any, step: tf.Tensor) -> list[Summable]:
        sparse = [place for place, one in enumerate(own) if isinstance(one, tf.IndexedSlices)]
        apart = sorted(self._apart - set(sparse))
        aside = {*sparse, *apart}
        vectors = [tf.zeros([0]) if place in aside else one for place, one in enumerate(own)]
        with looks.together() as waiting:
            sums: list[Summable] = list(self._reducer(vectors, step))
            rows = sparse_sum(
                [own[place] for place in sparse],
                [self.gradients[place].shape for place in sparse],
                f"{self._label}.sparse",
                is_additive=is_additive(optimizer),
            )
            exact = plain([own[place] for place in apart], f"{self._label}.exact")
        for place, total in zip([*sparse, *apart], [*rows, *exact], strict=True):
            sums[place] = total
        if not waiting:
            return sums
        with tf.control_dependencies([part for total in sums for part in _parts(total)]):
            passed = [one for look in waiting for one in look()]
        with tf.control_dependencies(passed):
            return _with_all_values(sums, opaque([_values(total) for total in sums]))

    def _finished(self, total: Summable, gradient: Gradient) -> Summable:
        if not isinstance(total, tf.IndexedSlices):
            return tf.cast(tf.reshape(total, gradient.shape), gradient.dtype)
        return tf.IndexedSlices(
            tf.cast(total.values, gradient.dtype), tf.identity(total.indices), total.dense_shape
        )

    def _checked(
        self,
        gradients: list[Summable],
        step: tf.Tensor,
        complain: Callable[..., np.int64],
        own: Sequence[Summable] = (),
    ) -> list[Summable]:
        """`gradients`, after a look at them; `own` are to blame before them, where they are bad."""
        if self._nonfinite == "propagate" or not gradients:
            return gradients
        values = [_values(one) for one in gradients]
        if self._nonfinite == "zero":
            clean = [
                tf.where(tf.math.is_finite(value), value, tf.zeros_like(value)) for value in values
            ]
        else:

            def look_closely() -> tf.Tensor:
                blamed = []
                if own:
                    blamed = [
                        tf.numpy_function(
                            self._complain, [step, *(_values(one) for one in own)], tf.int64
                        )
                    ]
                with tf.control_dependencies(blamed):
                    return tf.numpy_function(complain, [step, *values], tf.int64)

            passed = tf.cond(all_finite(values), lambda: tf.constant(0, tf.int64), look_closely)
            with tf.control_dependencies([passed]):
                clean = opaque(values)
        return _with_all_values(gradients, clean)

    def _raise_nonfinite(self, whose: str, step: np.int64, *values: np.ndarray) -> np.int64:
        bad = [place for place, value in enumerate(values) if not np.isfinite(value).all()]
        if not bad:
            return np.int64(0)  # they are finite, only their sum is not
        raise NonFiniteError(f"{self._nonfinite_text(bad, whose)}{int(step)}")

    def _nonfinite_text(self, bad: Sequence[int], whose: str) -> str:
        """The message of a NonFiniteError up to the number of the step."""
        return nonfinite_text(self.gradients, bad, whose, self._rank)


def check_order(names: Sequence[Sequence[str]]) -> None:
    """Raises ProtocolError where a rank hands over the variables of rank 0 in another order.

    Of one shape they would be added crosswise. Names may well differ between ranks; but the same
    ones, each of one variable, in another order, are a mistake.

    Args:
        names: of the variables, by rank.
    """
    first = names[0]
    for rank, other in enumerate(names):
        if other != first and sorted(other) == sorted(first) and len(set(first)) == len(first):
            place = next(at for at, name in enumerate(other) if name != first[at])
            raise ProtocolError(
                "All ranks must hand over gradients of the same variables, in one order. Received: "
                f"number {place} of {len(first)} is {first[place]} on rank 0 and {other[place]} on "
                f"rank {rank}. Layers that ranks make in another order need names of their own"
            )


def check_sparse(names: Sequence[str], places: Sequence[Sequence[int]]) -> None:
    """Raises ProtocolError where a gradient comes as rows on some ranks and dense on others.

    Args:
        names: of the variables.
        places: by rank, positions of those that come as rows.
    """
    differing = [
        place for place in range(len(names)) if len({place in sparse for sparse in places}) > 1
    ]
    if differing:
        place = differing[0]
        rows = [rank for rank, sparse in enumerate(places) if place in sparse]
        dense = [rank for rank, sparse in enumerate(places) if place not in sparse]
        raise ProtocolError(
            "All ranks must hand over the gradient of a variable alike: as rows "
            f"(`tf.IndexedSlices`) or dense. Received: gradient {place} ({names[place]}) comes as "
            f"rows on {_ranks(rows)} and dense on {_ranks(dense)}. Make it dense on all of them "
            "(`tf.convert_to_tensor`), or a `tf.IndexedSlices`: a rank that looked nothing up has "
            "one of no rows"
        )


def nonfinite_text(gradients: Sequence[Gradient], bad: Sequence[int], whose: str, rank: int) -> str:
    """The message of a NonFiniteError up to the number of the step.

    Args:
        gradients: of the list.
        bad: positions of those that are not finite.
        whose: what they are, up to the number of a rank.
        rank: that number.
    """
    gradient = gradients[bad[0]]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return (
        f"Gradient {bad[0]} ({gradient.name}, shape {list(gradient.shape)}){more} {whose} "
        f'{rank} must be finite; `nonfinite="zero"` drops what is not, "propagate" lets '
        "it pass. Received: NaN or infinity in step "
    )


def sparse_places(
    values: Sequence[Any], gradients: Sequence[Gradient], sparse: Collection[int], optimizer: Any
) -> list[int]:
    """Which of `values` are summed as rows.

    Args:
        values: of the gradients.
        gradients: what is known of them.
        sparse: positions of those that may stay sparse.
        optimizer: the one that gets the sums.
    """
    return [
        place
        for place, (value, gradient) in enumerate(zip(values, gradients, strict=True))
        if isinstance(value, tf.IndexedSlices)
        and place in sparse
        and _stays_sparse(value, gradient, optimizer)
    ]


def large_tables(values: Sequence[Any], gradients: Sequence[Gradient]) -> list[int]:
    """Positions of sparse gradients whose tables are too large for a codec."""
    return [
        place
        for place, (value, gradient) in enumerate(zip(values, gradients, strict=True))
        if isinstance(value, tf.IndexedSlices) and gradient.shape[0] >= LARGE_TABLE_ROWS
    ]


def without(gradients: Sequence[Gradient], apart: Collection[int]) -> list[Gradient]:
    """`gradients`, those at the positions `apart` empty."""
    return [
        dataclasses.replace(gradient, shape=(0,)) if place in apart else gradient
        for place, gradient in enumerate(gradients)
    ]


def _stays_sparse(value: tf.IndexedSlices, gradient: Gradient, optimizer: Any) -> bool:
    if is_additive(optimizer):
        return not is_small(gradient.shape, gradient.dtype)
    return depends_on_data(value.indices)


def _ranks(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    named = ", ".join(str(number) for number in numbers[:5])
    return f"rank {named}" if len(numbers) == 1 else f"the ranks {named}{more}"


def _parts(gradient: Summable) -> list[tf.Tensor]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def _values(gradient: Summable) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _rounded(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Values as a gradient of `dtype` will have them, in their own type."""
    return tf.cast(tf.cast(values, dtype), values.dtype) if dtype in HALVES else values


def _with_all_values(gradients: Sequence[Summable], values: Sequence[tf.Tensor]) -> list[Summable]:
    return [
        tf.IndexedSlices(value, one.indices, one.dense_shape)
        if isinstance(one, tf.IndexedSlices)
        else value
        for one, value in zip(gradients, values, strict=True)
    ]
