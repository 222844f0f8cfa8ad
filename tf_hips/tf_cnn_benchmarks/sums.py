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
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tf_hips import config
from tf_hips.comm import primitives
from tf_hips.comm.plan import AUTO, PS, Plan
from tf_hips.errors import ConfigError
from tf_hips.strategies.gradients import Gradient
from tf_hips.strategies.in_party import InParty, automatic_plan
from tf_hips.strategies.kept_plans import plan_of, text_of
from tf_hips.strategies.replicas import on_rank_0
from tf_hips.tf_cnn_benchmarks.options import Options

_LABEL = "cnn"
_KEPT_PLAN = "tf_hips/plan-of-{ranks}.json"


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
        self, gradients: Sequence[Gradient], options: Options, train_dir: str | None = None
    ) -> None:
        """Makes sure that all ranks have the same gradients, and makes what encoding keeps.

        Args:
            gradients: what comes, in the order of the variables.
            options: how they are summed.
            train_dir: upstream's `--train_dir`, where a measured plan is kept.

        Raises:
            ProtocolError: on all ranks, if they have different gradients or flags.
            ConfigError: the plan is none, or for another model or number of ranks.
            ValueError: the topology does not go with the compressor or the number of ranks.
        """
        self.variables: dict[str, Any] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._sizes = [gradient.num_elements for gradient in gradients]
        self._seed = config.current().seed
        plan = _plan(gradients, options, train_dir)
        if plan is None:
            self._in_party = InParty(options.compressor, None, options.topology, options.threshold)
            least = max(1, options.threshold)
            is_encoded = [options.compressor is not None and n >= least for n in self._sizes]
        else:
            self._in_party = InParty(None, plan, None, 0)
            is_encoded = [choice.compression is not None for choice in plan.choices]
        self.num_compressed = sum(is_encoded)
        # The ranks compare what they are about to do, eagerly.
        with eager():
            self._reducer = self._in_party.summing(
                gradients,
                _LABEL,
                seed=self._seed,
                worker=primitives.rank(),
                make_variable=self._make_variable,
                complain=None,
            ).reducer
        self._function = tf.function(self._sums, autograph=False)

    def __call__(self, values: Sequence[Any], step: Any) -> list[Any]:
        """Sums gradients over the ranks.

        Args:
            values: tensors of the shapes and types of the gradients.
            step: integer scalar, the same on all ranks.

        Returns:
            Tensors like `values`, equal on all ranks.
        """
        vectors = [tf.reshape(tf.cast(one, tf.float32), [-1]) for one in values]
        sums = self._function(vectors, tf.cast(step, tf.int64))
        return [
            tf.cast(tf.reshape(total, one.shape), one.dtype)
            for total, one in zip(sums, values, strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        """What must be equal where `variables` are restored."""
        codecs = {name: codec and codec.text for name, codec in self._in_party.codecs().items()}
        return {
            **codecs,
            **self._in_party.facts(),
            "seed": self._seed,
            "rank": primitives.rank(),
            "number of ranks": primitives.size(),
            **{
                f"elements of `{name}`": int(variable.shape.num_elements())
                for name, variable in sorted(self.variables.items())
            },
        }

    def _sums(self, vectors: Sequence[Any], step: Any) -> list[Any]:
        vectors = [tf.ensure_shape(one, [n]) for one, n in zip(vectors, self._sizes, strict=True)]
        return [tf.identity(total) for total in self._reducer(vectors, step)]

    def _make_variable(self, value: Any, name: str) -> Any:
        if name in self.variables:
            raise ValueError(f"`name` must be new in its list of gradients. Received: {name!r}")
        first = value.numpy()
        # An absolute name, and no scope of upstream's, whose getters change types.
        with self._graph.as_default(), tf.compat.v1.name_scope("tf_hips/"):
            # Zeros are made in the graph: a constant of every residual would be as large as they
            # are, and a graph must stay below 2 GiB.
            initial = tf.constant(first) if np.any(first) else tf.zeros(first.shape, first.dtype)
            variable = tf.compat.v1.Variable(
                initial,
                trainable=False,
                use_resource=True,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
                name=name,
            )
        self.variables[name] = variable
        return variable


def _plan(gradients: Sequence[Gradient], options: Options, train_dir: str | None) -> Plan | None:
    """The plan of the flags."""
    if options.plan is None:
        return None
    if options.plan == AUTO:
        with eager():
            return _measured(gradients, train_dir)
    if not options.has_columns or options.compressor is None:
        return Plan.read(options.plan)
    return Plan.from_secopa(
        options.plan,
        primitives.size(),
        options.compressor.text,
        options.topology or PS,
        [(gradient.name, gradient.num_elements) for gradient in gradients],
    )


def _measured(gradients: Sequence[Gradient], train_dir: str | None) -> Plan:
    """The plan that this run was begun with, so that what encoding kept fits; else a new one."""
    path = f"{train_dir}/{_KEPT_PLAN.format(ranks=primitives.size())}"

    def read() -> str | None:
        if not train_dir or not tf.io.gfile.exists(path):
            return None
        with tf.io.gfile.GFile(path) as file:
            return str(file.read())

    kept = primitives.broadcast_object(on_rank_0(read), what="the plan that is kept")
    if kept is not None:
        try:
            plan = plan_of(kept)
            known = [(gradient.name, gradient.num_elements) for gradient in gradients]
            plan.check(known, primitives.size())
        except (ConfigError, ValueError) as error:
            raise ConfigError(
                f"{path} must be the plan that this run was begun with; remove it to measure "
                f"anew. Received: {error}"
            ) from error
        return plan
    plan = automatic_plan(gradients)

    def write() -> None:
        tf.io.gfile.makedirs(path.rpartition("/")[0])
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(text_of(plan))

    if train_dir:
        on_rank_0(write)
    return plan
