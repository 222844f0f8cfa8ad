# SPDX-License-Identifier: Apache-2.0
"""The strategy that all of tf_hips builds on, and the one door to private TensorFlow.

One process is one replica on one device. Keras 3 hands an optimizer's gradients to the strategy
once per trace, as `_batch_reduce_to(SUM, gradients)`, already divided by the number of replicas;
here they meet those of the other workers. What else is reduced (synchronised batch normalisation,
`strategy.reduce`) is summed exactly, in the party.

    scope()   variables are recorded as they are created
    run()     before the first step the replicas are compared and made equal
    reduce    an optimizer's gradients go through `GradientSum`, everything else through `plain`

Invariant: all ranks build the same collectives in the same order; nothing here depends on names
that Keras makes up.

The two places that look at the caller's frames do so because Keras passes neither the model nor the
variables to the strategy: `_optimizer_call` tells gradients from other reductions,
`_keras_model_in` finds the model in `compile`, `fit`.
"""

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy

from tf_hips import config as configuration
from tf_hips import log
from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.errors import ProtocolError
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.gradients import (
    Gradient,
    GradientSum,
    Reducer,
    Turns,
    check_nonfinite,
    opaque,
)
from tf_hips.strategies.replicas import check_equal_shapes, synchronise

# Steps of Keras that only read weights: they must not wait for ranks that do not evaluate.
_INFERENCE_STEPS = ("test_step", "one_step_on_data")
_RANDOM_STATE = "seed_generator_state"
_MAX_FRAMES = 80
_NOT_CONVERTED = {"do_not_convert": True}  # the mark that AutoGraph looks for


class PartyStrategy(tf.distribute.Strategy):
    """One replica per process, gradients summed over a party; base of the public strategies."""

    def __init__(self, nonfinite: str, run: configuration.Run | None) -> None:
        """Starts Horovod.

        Args:
            nonfinite: what to do about NaN and infinities in gradients: "raise", "zero" or
                "propagate".
            run: what this process is told about its run; None reads `TF_HIPS_CONFIG`.
        """
        check_nonfinite(nonfinite)
        primitives.init()
        self._run = run if run is not None else configuration.current()
        self._nonfinite = nonfinite
        self._failures = Failures()
        self._events = log.EventLog(
            self._run.log_dir,
            run=self._run.run,
            role=configuration.role(),
            site=self._run.uplink.site if self._run.uplink else "local",
            rank=primitives.rank(),
        )
        self._known: dict[int, weakref.ref[tf.Variable]] = {}
        self._synchronised: dict[int, weakref.ref[tf.Variable]] = {}
        self._watched_models: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._sums: dict[tuple[str, ...], GradientSum] = {}
        self._num_reductions = 0
        self._is_making_own = False
        self._model: keras.Model | None = None
        self._is_running = False
        self._has_run = False
        super().__init__(_Extended(self, _device()))
        self._turns = Turns(self._make_variable)

    # What a strategy decides.

    def _num_workers(self) -> int:
        """Workers over which gradients are summed."""
        return primitives.size()

    def _make_reducer(self, gradients: Sequence[Gradient], label: str) -> tuple[Reducer, bool, int]:
        """How one list of gradients is summed; called once per list, eagerly, on all ranks.

        Returns:
            The reducer, whether it takes float32 only, and the number of the first step.
        """
        del gradients
        return lambda vectors, step: plain(vectors, label), False, 0

    def _is_alone(self) -> bool:
        """Whether gradients of this worker are the sum already."""
        return primitives.size() == 1

    def _synchronise(self, variables: list[tf.Variable], *, has_trained: bool) -> None:
        """Gives `variables` the values that all replicas begin with.

        Args:
            variables: what is new.
            has_trained: whether the variables that are trained are among these or those before.
        """
        del has_trained
        synchronise(variables)

    # What Keras and users call.

    @property
    def global_rank(self) -> int:
        """Number of this worker among all, from 0."""
        return primitives.rank()

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Runs `fn` on this replica; before the first step, replicas are compared and made equal.

        Raises:
            ProtocolError: the ranks have different models, or `fn` is a training step of Keras that
                reduces nothing.
            ValueError: the model was compiled with `jit_compile=True`.
        """
        owner = getattr(fn, "__self__", None)
        model = owner if isinstance(owner, keras.Model) else None
        if getattr(fn, "__name__", "") in _INFERENCE_STEPS:
            return super().run(fn, args, kwargs, options)
        if model is not None and model.jit_compile is True:
            raise ValueError(
                "`jit_compile` must be False under a strategy of tf_hips: collectives have no XLA "
                "kernel. Received: jit_compile=True"
            )
        outer = self._model, self._is_running
        self._model, self._is_running = model, True
        before = self._num_reductions
        try:
            if tf.executing_eagerly() and (model is not None or not self._has_run):
                self._has_run = True
                self._synchronise_new()
            result = super().run(fn, args, kwargs, options)
        finally:
            self._model, self._is_running = outer
        is_step = model is not None and fn.__name__ == "train_step" and model.trainable_weights
        if is_step and not tf.executing_eagerly():
            # A trace passes through all branches; a step that runs eagerly may rightly reduce
            # nothing, while it accumulates gradients or skips one that overflowed.
            self._check_reduced(model, self._num_reductions - before)
        return result

    # `run` calls the user's function under the conversion status it finds, so it must not be
    # converted itself, and must not switch conversion off for what it calls, as
    # tf.autograph.experimental.do_not_convert would.
    run.autograph_info__ = _NOT_CONVERTED  # type: ignore[attr-defined]

    def write_event(self, event: str, **values: Any) -> None:
        """Writes one event to the log of this process (`log_dir` of the configuration)."""
        self._events.write(event, **values)

    # Reductions.

    def _reduce_exactly(self, values: Sequence[Any], is_mean: bool) -> list[tf.Tensor]:
        tensors = [tf.convert_to_tensor(value) for value in values]
        self._num_reductions += 1
        if primitives.size() == 1:
            return [tf.identity(tensor) for tensor in tensors]
        if self._is_running and self._model is not None:
            self._synchronise_new()
        for tensor in tensors:
            if not tensor.shape.is_fully_defined() or tensor.dtype in (tf.bool, tf.string):
                raise ValueError(
                    "A value that is reduced must be numeric and of known shape. "
                    f"Received: shape={tensor.shape}, dtype={tensor.dtype.name}"
                )
        kinds = [f"{tensor.dtype.name}_{'x'.join(map(str, tensor.shape))}" for tensor in tensors]
        label = f"exact.{'.'.join(kinds)}"[:200]
        with tf.device("/cpu:0"):
            sums = self._turns(
                lambda turn: plain([opaque(tensor, turn) for tensor in tensors], label)
            )
            if is_mean:
                sums = [total / tf.cast(primitives.size(), total.dtype) for total in sums]
            return [
                tf.reshape(total, tensor.shape) for total, tensor in zip(sums, tensors, strict=True)
            ]

    def _reduce_gradients(
        self, values: Sequence[Any], variables: Sequence[tf.Variable]
    ) -> list[tf.Tensor]:
        self._num_reductions += 1
        key = tuple(variable._unique_id for variable in variables)
        # A tf.function that creates variables is traced twice; they have values the second time.
        is_synchronised = all(_holds(self._synchronised, variable) for variable in variables)
        if not is_synchronised or self._model is not None:
            self._synchronise_new(variables)
        if key not in self._sums:
            with tf.init_scope():
                self._sums[key] = self._make_sum(variables)
        with tf.device("/cpu:0"):
            return self._turns(lambda turn: self._sums[key](values))

    def _make_sum(self, variables: Sequence[tf.Variable]) -> GradientSum:
        gradients = [
            Gradient(variable.name.removesuffix(":0"), tuple(variable.shape), variable.dtype)
            for variable in variables
        ]
        if self._is_alone():
            reducer, only_float32, first_step = (lambda vectors, step: list(vectors)), False, 0
        else:
            reducer, only_float32, first_step = self._make_reducer(
                gradients, f"gradients{len(self._sums)}"
            )
        return GradientSum(
            gradients,
            reducer,
            only_float32=only_float32,
            nonfinite=self._nonfinite,
            first_step=first_step,
            make_variable=self._make_variable,
            failures=self._failures,
            rank=primitives.rank(),
        )

    def _reduce_finite(self, is_finite: Any) -> tf.Tensor:
        # Keras' LossScaleOptimizer asks each rank about its own gradients; a rank that skips a step
        # alone would leave the others waiting in the sum.
        if primitives.size() == 1:
            return is_finite
        with tf.device("/cpu:0"):
            flag = tf.cast(is_finite, tf.int32)
            [least] = self._turns(
                lambda turn: [primitives.allreduce(opaque(flag, turn), "is_finite", "min")]
            )
        return tf.cast(tf.reshape(least, []), tf.bool)

    # Variables.

    def _make_variable(self, value: tf.Tensor, name: str) -> tf.Variable:
        """A variable of the strategy itself: not trained, not synchronised."""
        self._is_making_own = True
        try:
            with tf.init_scope(), tf.device("/cpu:0"):
                return tf.Variable(value, trainable=False, name=f"tf_hips_{name}")
        finally:
            self._is_making_own = False

    def _record(self, variable: tf.Variable, is_local: bool) -> None:
        model = _keras_model_in("compile")
        if model is not None and model._distribute_strategy is not self:
            raise ValueError(
                f"The model `{model.name}` must be built inside `strategy.scope()`. Received: a "
                "model built outside and compiled inside, which would train without any reduction, "
                "each worker on its own."
            )
        if not (self._is_making_own or is_local or _RANDOM_STATE in variable.name):
            self._known[id(variable)] = weakref.ref(variable)

    def _synchronise_new(self, trained: Sequence[tf.Variable] = ()) -> None:
        """Synchronises what is new in the current step's model, or in all that is known.

        Called where all ranks come by: at a step of a Keras model, and, where no model is known, at
        the first step and when gradients of variables are reduced that were not synchronised.

        Args:
            trained: the variables whose gradients are about to be reduced, if any are.
        """
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise ProtocolError(
                    "Strategies of tf_hips need TensorFlow 2 behaviour: eager outside tf.function."
                )
            variables = [
                variable
                for variable in self._replicated(trained)
                if not _holds(self._synchronised, variable) and _is_ready(variable)
            ]
            # Nothing to do, nothing to say: a step may be traced again on one rank only (a last
            # batch of another size).
            if variables:
                check_equal_shapes(variables)
            if variables:
                if self._model is not None:
                    trained = [weight.value for weight in self._model.trainable_weights]
                has_trained = bool(trained) and all(_is_ready(variable) for variable in trained)
                self._synchronise(variables, has_trained=has_trained)
            for variable in variables:
                self._synchronised[id(variable)] = weakref.ref(variable)

    def _replicated(self, trained: Sequence[tf.Variable]) -> list[tf.Variable]:
        if self._model is None:
            gc.collect()  # what is dropped must be gone on all ranks, or their lists differ
            alive = [reference() for reference in self._known.values()]
            owned = [*[variable for variable in alive if variable is not None], *trained]
        else:
            weights = [*self._model.weights, *getattr(self._model.optimizer, "variables", [])]
            owned = [weight.value for weight in weights if _RANDOM_STATE not in weight.name]
        return list({id(variable): variable for variable in owned}.values())

    # Checks.

    def _check_reduced(self, model: keras.Model, num_reductions: int) -> None:
        if num_reductions == 0:
            raise ProtocolError(
                f"The training step of `{model.name}` must reduce its gradients. Received: a step "
                "that passed none to the strategy; build and compile the model inside "
                "`strategy.scope()`, and apply gradients with its optimizer."
            )

    def _check_equal_steps(self, dataset: tf.data.Dataset) -> None:
        """Compares the steps of an epoch of `fit` over the ranks of the party, before the first."""
        frame = _frame_of_model("fit")
        # Keras has its training iterator by the time it asks for that of the validation data, which
        # takes no part in collectives and may differ.
        is_training = frame is not None and "epoch_iterator" not in frame.f_locals
        if primitives.size() == 1 or not is_training or _frame_of_model("evaluate") is not None:
            return
        given = frame.f_locals.get("steps_per_epoch") if frame is not None else None
        steps = int(dataset.cardinality()) if given is None else int(given)
        everyone = primitives.gather_objects(steps)
        if len(set(everyone)) > 1:
            named = ", ".join(
                f"rank {rank}: {'unknown' if one == tf.data.UNKNOWN_CARDINALITY else one}"
                for rank, one in enumerate(everyone)
            )
            raise ValueError(
                "All workers must take the same number of steps in an epoch: give each a shard of "
                f"equal length, or `steps_per_epoch`. Received: steps of {named}"
            )

    def _watch(self) -> None:
        """Lets the model whose `fit` is running raise our errors as they are, not TensorFlow's."""
        model = _keras_model_in("fit")
        if model is None or model in self._watched_models:
            return
        self._watched_models.add(model)
        make = model.make_train_function

        def make_train_function(force: bool = False) -> None:
            made_before = model.train_function
            make(force=force)
            if model.train_function is not made_before:
                model.train_function = self._failures.translated(model.train_function)

        model.make_train_function = make_train_function


class _Extended(one_device_strategy.OneDeviceExtended):
    """The part of a strategy that TensorFlow calls; forwards to `PartyStrategy`."""

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._container_strategy()._num_workers()

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        is_local = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        variable = super()._create_variable(next_creator, **kwargs)
        self._container_strategy()._record(variable, is_local)
        return variable

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        strategy = self._container_strategy()
        flat = tf.nest.flatten(value)
        return tf.nest.pack_sequence_as(value, strategy._reduce_exactly(flat, _is_mean(reduce_op)))

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
        variables = _optimizer_call(len(values))
        if variables is not None and not _is_mean(reduce_op):
            return strategy._reduce_gradients(values, variables)
        return strategy._reduce_exactly(values, _is_mean(reduce_op))

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = super()._call_for_each_replica(fn, args, kwargs)
        if getattr(fn, "__name__", "") == "check_finite":
            return self._container_strategy()._reduce_finite(result)
        return result

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        self._container_strategy()._watch()
        self._container_strategy()._check_equal_steps(dataset)
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


def _device() -> str:
    gpus = tf.config.list_logical_devices("GPU")
    return f"/gpu:{primitives.local_rank() % len(gpus)}" if gpus else "/cpu:0"


def _is_mean(reduce_op: Any) -> bool:
    return distribute_lib.reduce_util.ReduceOp(reduce_op) == tf.distribute.ReduceOp.MEAN


def _is_ready(variable: tf.Variable) -> bool:
    # Variables of other types hold no numbers; those created by a plain tf.function are initialised
    # after its trace.
    is_numeric = variable.dtype not in (tf.string, tf.resource, tf.variant)
    return is_numeric and bool(variable.is_initialized())


def _holds(references: dict[int, "weakref.ref[tf.Variable]"], variable: tf.Variable) -> bool:
    reference = references.get(id(variable))
    return reference is not None and reference() is variable


def _optimizer_call(num_values: int) -> list[tf.Variable] | None:
    """The variables whose gradients a Keras optimizer is reducing right now, or None."""
    for frame in _frames():
        if frame.f_code.co_name == "_all_reduce_sum_gradients":
            pairs = frame.f_locals.get("filtered_grads_and_vars", [])
            return [variable for _, variable in pairs] if len(pairs) == num_values else None
    return None


def _keras_model_in(method: str) -> keras.Model | None:
    """The Keras model whose `method` is on the call stack, or None."""
    frame = _frame_of_model(method)
    return frame.f_locals["self"] if frame is not None else None


def _frame_of_model(method: str) -> types.FrameType | None:
    """The frame of a Keras model's `method` on the call stack, or None."""
    for frame in _frames():
        if frame.f_code.co_name == method and isinstance(frame.f_locals.get("self"), keras.Model):
            return frame
    return None


def _frames() -> Iterator[types.FrameType]:
    """The frames of the callers, nearest first."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
