# SPDX-License-Identifier: Apache-2.0
"""The gradients of a graph of TensorFlow 1, summed over the ranks.

The reducers of `comm` rely on a function's automatic order of side effects (a residual is read,
then written), which a graph of TensorFlow 1 does not have. So the sum is one `tf.function`, called
in that graph; what it keeps are resource variables of the graph, made outside of the function.

They are LOCAL variables: upstream initialises these on every rank by itself, and neither broadcasts
them nor saves them, which would give all ranks the residuals of rank 0. `saved` saves them.

The number of a step is upstream's global step, which it saves, restores and broadcasts.

Invariant: NaN and infinities pass (nonfinite="propagate"): all ranks decode the same bytes, so they
stay equal, and what is kept stays finite.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tf_hips import config
from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.reducers import make_reducer
from tf_hips.comm.staged import Reducer
from tf_hips.errors import ProtocolError
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import derive_seed
from tf_hips.tf_cnn_benchmarks.options import Options

_LABEL = "cnn"


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Eager execution, in a program that has switched it off; for what ranks tell each other."""
    with context.eager_mode():
        yield


class GraphSum:
    """The sum of one list of gradients in the present graph.

    Attributes:
        variables: what encoding keeps from step to step, by name.
        num_compressed: how many of the gradients are encoded.
    """

    def __init__(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], options: Options
    ) -> None:
        """Makes sure that all ranks have the same gradients, and makes what encoding keeps.

        Args:
            names: of the variables, for messages.
            shapes: of the gradients, in the order of the variables.
            options: how they are summed.

        Raises:
            ProtocolError: on all ranks, if they have different gradients or flags.
        """
        self.variables: dict[str, Any] = {}
        self._sizes = [math.prod(shape) for shape in shapes]
        self._seed = config.current().seed
        _check_same(
            {
                "--comp_alg": options.description,
                "seed": self._seed,
                "gradients": [
                    [name, list(shape)] for name, shape in zip(names, shapes, strict=True)
                ],
            }
        )
        self._encoded = {
            place
            for place, size in enumerate(self._sizes)
            if options.compressor is not None and size >= max(1, options.threshold)
        }
        self.num_compressed = len(self._encoded)
        # A reducer gets an empty vector in place of what it must not see, so tensors keep their
        # numbers, and with them their noise, whatever the threshold is.
        self._reducer: Reducer = lambda vectors, step: list(vectors)
        if options.compressor is not None:
            self._reducer = self._make_reducer(shapes, options.compressor)
        self._function = tf.function(self._sums, autograph=False)

    def __call__(self, gradients: Sequence[Any], step: Any) -> list[Any]:
        """Sums `gradients` over the ranks.

        Args:
            gradients: tensors of the shapes that were given, of floating types.
            step: integer scalar, the same on all ranks.

        Returns:
            Tensors like `gradients`, equal on all ranks.
        """
        vectors = [tf.reshape(tf.cast(one, tf.float32), [-1]) for one in gradients]
        sums = self._function(vectors, tf.cast(step, tf.int64))
        return [
            tf.cast(tf.reshape(total, one.shape), one.dtype)
            for total, one in zip(sums, gradients, strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        """What must be equal where `variables` are restored."""
        return {
            "seed": self._seed,
            "rank": primitives.rank(),
            "number of ranks": primitives.size(),
            **{
                f"elements of `{name}`": int(variable.shape.num_elements())
                for name, variable in sorted(self.variables.items())
            },
        }

    def _make_reducer(self, shapes: Sequence[Sequence[int]], compressor: Compressor) -> Reducer:
        rank = primitives.rank()
        return make_reducer(
            [shape if place in self._encoded else [0] for place, shape in enumerate(shapes)],
            compressor,
            label=_LABEL,
            worker_seed=derive_seed(self._seed, f"worker/{rank}"),
            owner_seed=derive_seed(self._seed, f"owner/{rank}"),
            common_seed=derive_seed(self._seed, "everyone"),
            make_variable=self._make_variable,
        )

    def _sums(self, vectors: Sequence[Any], step: Any) -> list[Any]:
        vectors = [tf.ensure_shape(one, [n]) for one, n in zip(vectors, self._sizes, strict=True)]
        encoded = [
            one if place in self._encoded else tf.zeros([0]) for place, one in enumerate(vectors)
        ]
        sums = list(self._reducer(encoded, step))
        exact = [place for place in range(len(vectors)) if place not in self._encoded]
        totals = plain([vectors[place] for place in exact], f"{_LABEL}.exact")
        for place, total in zip(exact, totals, strict=True):
            sums[place] = total
        return [tf.identity(total) for total in sums]

    def _make_variable(self, value: Any, name: str) -> Any:
        if name in self.variables:
            raise ValueError(f"`name` must be new in its list of gradients. Received: {name!r}")
        # An absolute name, and no scope of upstream's, whose getters change types.
        with tf.compat.v1.name_scope("tf_hips/"):
            variable = tf.compat.v1.Variable(
                value,
                trainable=False,
                use_resource=True,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
                name=name,
            )
        self.variables[name] = variable
        return variable


def _check_same(facts: dict[str, Any]) -> None:
    """Compares what all ranks are about to sum.

    Raises:
        ProtocolError: on all ranks, naming the first difference.
    """
    with eager():
        told = primitives.gather_objects(facts, "the gradients of tf_cnn_benchmarks")
    for rank, other in enumerate(told):
        if other == told[0]:
            continue
        what, mine, theirs = _difference(told[0], other)
        raise ProtocolError(
            f"All ranks must have the same {what}. Received: {mine} on rank 0, {theirs} on rank "
            f"{rank}"
        )


def _difference(first: dict[str, Any], other: dict[str, Any]) -> tuple[str, Any, Any]:
    for name in ("--comp_alg", "seed"):
        if first[name] != other[name]:
            return name, first[name], other[name]
    pairs = [first["gradients"], other["gradients"]]
    for place, (mine, theirs) in enumerate(zip(*pairs, strict=False)):
        if mine != theirs:
            return f"gradient {place}", mine, theirs
    return "number of gradients", len(pairs[0]), len(pairs[1])
