# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow asks of a strategy, and the one door to its private API.

One process is one replica on one device, so most is what TensorFlow's strategy for one device does.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy
from tensorflow.python.ops import control_flow_util

from tf_hips.comm import primitives
from tf_hips.strategies import gathering

if TYPE_CHECKING:

    class Strategy:
        """What is used of TensorFlow's, so that a name that none of ours has is found."""

        num_replicas_in_sync: int
        extended: Any
        scope: Callable[[], Any]
        reduce: Callable[..., Any]
        gather: Callable[..., Any]

        def __init__(self, extended: Any) -> None: ...

        def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
            """Runs `fn` on this replica."""
else:
    Strategy = tf.distribute.Strategy


class Extended(one_device_strategy.OneDeviceExtended):
    """The part of a strategy that TensorFlow calls; forwards to `PartyStrategy`."""

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._container_strategy()._num_workers()

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        is_local = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        strategy = self._container_strategy()
        if strategy._is_making_own:
            # Where its maker says, and not on the replica's device.
            kwargs.pop("colocate_with", None)
            variable = next_creator(**kwargs)
        else:
            variable = super()._create_variable(next_creator, **kwargs)
        strategy._record(variable, is_local)
        return variable

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        # An optimizer makes its slots beside what it trains. TensorFlow's own message would neither
        # name the variable nor say what to do.
        made_in = getattr(colocate_with_variable, "_distribute_strategy", None)
        if made_in is not self._container_strategy():
            name = getattr(colocate_with_variable, "name", "a variable")
            raise ValueError(
                "What an optimizer trains must be made inside `strategy.scope()`: build the layers "
                "of a model, and call `enable_lora` and its like, there. Received: "
                f"{name.removesuffix(':0')}, made outside of it"
            )

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        strategy = self._container_strategy()
        flat = tf.nest.flatten(value)
        return tf.nest.pack_sequence_as(value, strategy.reduce_exactly(flat, _is_mean(reduce_op)))

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: Any, options: Any
    ) -> tf.Tensor:
        del destinations, options
        return gathering.gather(self._container_strategy(), value, axis)

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> list[Any]:
        del options
        return self._reduce_values(reduce_op, [value for value, _ in value_destination_pairs])

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del options
        flat = self._reduce_values(reduce_op, tf.nest.flatten(value))
        return tf.nest.pack_sequence_as(value, flat)

    def _reduce_values(self, reduce_op: Any, values: list[Any]) -> list[Any]:
        strategy = self._container_strategy()
        if strategy._reduced is not None:
            return strategy._reduce_gradients(values, *strategy._reduced)
        return strategy.reduce_exactly(values, _is_mean(reduce_op))

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        strategy = self._container_strategy()
        with tf.device(self._device), _ReplicaContext(strategy, strategy.replica()):
            return fn(*args, **kwargs)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        strategy = self._container_strategy()
        return value_fn(
            tf.distribute.experimental.ValueContext(
                replica_id_in_sync_group=strategy.replica(),
                num_replicas_in_sync=self._num_replicas_in_sync,
            )
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        group, num_groups = self._container_strategy().sample_group()
        context = tf.distribute.InputContext(
            num_input_pipelines=num_groups,
            input_pipeline_id=group,
            num_replicas_in_sync=self._num_replicas_in_sync,
        )
        return self._experimental_distribute_dataset(dataset_fn(context), options)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        dataset = self._container_strategy()._fitting.fed(dataset)
        if dataset.options().autotune.enabled is None:
            # TensorFlow 2.21 can lose the signal that ends tf.data's tuning thread: it is sent
            # before the flag that it announces is set. Destroying an iterator, as Keras does in
            # every epoch, then takes up to a minute, and all ranks wait for it.
            choice = tf.data.Options()
            choice.autotune.enabled = False
            dataset = dataset.with_options(choice)
        if "CPU" in self._device.upper():
            # One replica on the host: there is nothing to fetch to a device. TensorFlow's iterator
            # for that tunes in a dataset of its own, and doubles the cost of a small step.
            return dataset
        return super()._experimental_distribute_dataset(dataset, options)


class _ReplicaContext(tf.distribute.ReplicaContext):
    """This worker as one of all replicas."""

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """Joins the values of all replicas along `axis`; see `gathering`."""
        del options
        flat = [gathering.with_gradient(self.strategy, one, axis) for one in tf.nest.flatten(value)]
        return tf.nest.pack_sequence_as(value, flat)

    @property
    def devices(self) -> Any:
        return self.strategy.extended.worker_devices


def device() -> str:
    """Where this replica computes: its GPU, if there is one."""
    gpus = tf.config.list_logical_devices("GPU")
    return f"/gpu:{primitives.local_worker() % len(gpus)}" if gpus else "/cpu:0"


def check_not_compiled() -> None:
    """Raises ValueError where XLA is to compile what is being traced; it would name an operation.

    To be called before a reduction is traced.
    """
    graph = tf.compat.v1.get_default_graph()
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            "`jit_compile` must be False around what reduces: collectives have no XLA kernel, "
            'nor has what looks for NaN (`nonfinite="raise"`). '
            "Received: a reduction inside of `tf.function(jit_compile=True)`. In a step, compile "
            "the function that computes the gradients, and apply them outside of it."
        )


def _is_mean(reduce_op: Any) -> bool:
    return distribute_lib.reduce_util.ReduceOp(reduce_op) == tf.distribute.ReduceOp.MEAN
