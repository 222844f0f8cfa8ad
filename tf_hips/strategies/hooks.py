# SPDX-License-Identifier: Apache-2.0
"""Where Keras meets our strategies: wrappers on its public classes, put there once per process.

Keras tells a strategy little: not which model runs, nor which optimizer reduces, nor when an epoch
ends. Each wrapper here passes what Keras knows to the strategy that is at work, and is Keras' own
method, unchanged, for models and optimizers that have nothing to do with ours.

    keras.Model               compile, fit, evaluate, predict, *_on_batch: see `fitting`
                              save, save_weights, export: one rank writes; so do the functions
                              of `keras.saving`
    keras.optimizers          gradients are reduced with their variables and their optimizer, and
                              clipped afterwards; rows of equal index are added in one order; a
                              loss scale overflows on all ranks or on none; slots that begin anew
                              count their steps anew
    keras.losses              divided by the number of replicas once (`losses`); so is what a
                              `keras.distillation.Distiller` makes of its losses
    keras.random              groups of workers draw different noise from equal states
    keras.callbacks           one rank makes the folders of ModelCheckpoint, and saves what
                              OrbaxCheckpoint does
    gradients                 lies, where a study wants a worker that lies (`lying`)
    tf_keras                  refused: it is Keras 2 (`legacy`)
    training steps            padded, where the launcher wants a slow worker (`slowdown`)
"""

import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from tf_hips import log
from tf_hips.errors import ProtocolError
from tf_hips.strategies import legacy, losses, lying, slowdown
from tf_hips.strategies.slices import orderly

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

_METHODS = (
    "compile",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "_get_metrics_result_or_logs",
)
_WRITERS = ("save", "save_weights", "export")
# The same as functions of a model, and what they call: a script that imported one of them by its
# name before there was a strategy has Keras' own.
_WRITING_MODULES = (keras.saving, keras.models, saving_lib, legacy_h5_format)
_WRITING_FUNCTIONS = ("save_model", "save_weights", "save_weights_only", "save_model_to_hdf5")


_strategies: "weakref.WeakSet[PartyStrategy]" = weakref.WeakSet()
_is_local: contextvars.ContextVar[bool] = contextvars.ContextVar("tf_hips_local", default=False)
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_applied: contextvars.ContextVar[Any] = contextvars.ContextVar("tf_hips_applied", default=None)
_begun: weakref.WeakKeyDictionary[Any, tf.Variable] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def local() -> Iterator[None]:
    """What Keras does inside is this worker's own, and waits for no other.

    `evaluate`, `test_on_batch` and the logs of `train_on_batch` tell of this worker's rows only,
    `save` writes from any rank, and a model that was made without a strategy may train. Gradients
    of models of a strategy are reduced all the same.

        if strategy.global_rank == 0:
            with tf_hips.local():
                model.evaluate(x, y)
    """
    token = _is_local.set(True)
    try:
        yield
    finally:
        _is_local.reset(token)


def is_local() -> bool:
    """Whether `local()` holds."""
    return _is_local.get()


def only_reads(fn: Callable[..., Any], model: keras.Model | None) -> bool:
    """Whether `fn` is a step of Keras' `evaluate` or `predict`: these meet before, or never.

    They must not wait for ranks that do not evaluate. A function of a script may be named alike.

    Args:
        fn: what a strategy is to run.
        model: whose method it is; None: of none.
    """
    name = getattr(fn, "__name__", "")
    if model is not None:
        return name == "test_step"
    is_of_keras = (getattr(fn, "__module__", None) or "").startswith("keras.")
    return is_of_keras and name == "one_step_on_data"


def begun(optimizer: keras.optimizers.Optimizer) -> tf.Variable:
    """The step at which an optimizer's slots began anew, 0 at first; int64, to be assigned to.

    Inside the update of an optimizer that was asked for here, `iterations` counts from it: that is
    what corrects the bias of moments that were 0 then. Its learning rate and everybody else go on
    with all steps. To be asked for before the first step is traced.
    """
    if optimizer not in _begun:
        with tf.init_scope():
            _begun[optimizer] = tf.Variable(0, dtype=tf.int64, trainable=False, name="begun")
    return _begun[optimizer]


def register(strategy: "PartyStrategy") -> None:
    """Makes a strategy known to Keras; the first one puts the wrappers in place."""
    if not _originals:
        _install()
    _strategies.add(strategy)


def live() -> "list[PartyStrategy]":
    """The strategies of this process."""
    return list(_strategies)


def original(owner: type, name: str) -> Callable[..., Any]:
    """Keras' own method behind a wrapper."""
    return _originals[owner, name]


def _install() -> None:
    for name in _METHODS:
        _wrap(keras.Model, name, functools.partial(_method, name))
    for name in _WRITERS:
        _wrap(keras.Model, name, _writer)
    for module, name in itertools.product(_WRITING_MODULES, _WRITING_FUNCTIONS):
        if hasattr(module, name):
            keras_function = getattr(module, name)
            wrapped = functools.partial(_writer, keras_function)
            setattr(module, name, functools.wraps(keras_function)(wrapped))
    _wrap(keras.Model, "_maybe_symbolic_build", _building)
    _wrap(keras.optimizers.Optimizer, "_all_reduce_sum_gradients", _reduction)
    _wrap(keras.optimizers.Optimizer, "add_variable_from_reference", _slot)
    _wrap(keras.optimizers.Optimizer, "_clip_gradients", _clipping)
    _wrap(keras.optimizers.Optimizer, "_overwrite_variables_directly_with_gradients", _overwriting)
    _wrap(keras.optimizers.Optimizer, "finalize_variable_values", _finalising)
    _wrap(keras.optimizers.Optimizer, "_backend_apply_gradients", _application)
    _count_anew()
    _wrap(keras.optimizers.Optimizer, "assign_add", _addition)
    _wrap(keras.optimizers.Optimizer, "assign_sub", _addition)
    _wrap(keras.optimizers.LossScaleOptimizer, "check_finite", _finiteness)
    losses.install()
    _wrap(keras.losses.Loss, "__call__", _loss)
    _wrap(keras.distillation.Distiller, "compute_loss", _distilling)
    _wrap(keras.random.SeedGenerator, "next", _noise)
    _wrap(keras.callbacks.ModelCheckpoint, "_save_model", _checkpoint)
    _wrap(keras.callbacks.OrbaxCheckpoint, "_save_checkpoint", _orbax_checkpoint)
    legacy.watch(_trains_with_others)
    slower = slowdown.asked_for()
    if slower is not None:
        _wrap(keras.Model, "_make_function", functools.partial(slowdown.making, slower))


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    keras_method = getattr(owner, name)
    _originals[owner, name] = keras_method

    @functools.wraps(keras_method)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(keras_method, self, *args, **kwargs)

    # A step that Keras keeps from AutoGraph must stay so, and must not keep what it calls.
    method.autograph_info__ = {"do_not_convert": True}  # type: ignore[attr-defined]
    # On the class that has the method: loading takes a `compile` of a subclass for the user's own,
    # and then does not call it.
    [holder, *_] = [cls for cls in owner.__mro__ if name in vars(cls)]
    setattr(holder, name, method)


def ours(strategy: Any) -> "PartyStrategy | None":
    """`strategy`, if it is one of tf_hips."""
    return strategy if strategy in _strategies else None


def _of(model: Any) -> "PartyStrategy | None":
    return ours(getattr(model, "distribute_strategy", None))  # layers have none


def _at_work() -> "PartyStrategy | None":
    """The strategy of ours in whose replica context this runs, or None."""
    is_cross = tf.distribute.in_cross_replica_context()
    return None if is_cross else ours(tf.distribute.get_strategy())


def _method(
    name: str, keras_method: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    strategy = _of(model)
    if strategy is None:
        _check_private(name, model)
        return keras_method(model, *args, **kwargs)
    own = getattr(strategy._fitting, name.removeprefix("_"))
    return own(functools.partial(keras_method, model), model, args, kwargs)


def _check_private(name: str, model: keras.Model) -> None:
    if name not in ("fit", "train_on_batch") or is_local():
        return
    if _has_others():
        raise ProtocolError(
            f"The model `{model.name}` must be built inside `strategy.scope()`. Received: a model "
            "without the strategy of this process: each worker would train it on its own. If that "
            "is meant, put the call inside `with tf_hips.local():`."
        )


def _has_others() -> bool:
    # A strategy that has left its run has no step that others wait for.
    return any(not one._is_closed and one.num_replicas_in_sync > 1 for one in _strategies)


def _trains_with_others(name: str) -> bool:
    """Whether what Keras 2 does would be for all workers; where there is one, in a scope."""
    if is_local():
        return False
    is_inside = ours(tf.distribute.get_strategy()) is not None
    return is_inside or (name != "compile" and _has_others())


def _check_replicated(variables: list[Any]) -> None:
    if is_local():
        return
    for strategy in _strategies:
        if strategy._is_closed or strategy._is_alone():
            continue
        known = next((one for one in variables if strategy.beginning.knows(one)), None)
        if known is not None:
            raise ProtocolError(
                "Variables made inside `strategy.scope()` must be trained inside "
                "`strategy.run(step, ...)`, where gradients of all workers are summed. Received: "
                f"gradients of {known.name} applied outside of it, by which each worker would "
                "train on its own. If that is meant, put it inside `with tf_hips.local():`."
            )


def _writer(keras_method: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    strategy = _of(model)
    if strategy is None or is_local() or strategy.may_write():
        return keras_method(model, *args, **kwargs)
    log.debug("`%s` of model %s is left to rank 0", keras_method.__name__, model.name)
    return None


def _checkpoint(keras_method: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = _of(callback.model)
    if strategy is None or is_local() or strategy.may_write():
        return keras_method(callback, *args, **kwargs)
    # This rank decides as the others do, and its model writes nothing; but Keras makes the folder
    # where it is missing, and of two ranks that do so at once one fails. Nor does it say that it
    # has saved a file, which is not there.
    filepath, callback.filepath = callback.filepath, Path(callback.filepath).name
    verbose, callback.verbose = callback.verbose, 0
    try:
        return keras_method(callback, *args, **kwargs)
    finally:
        callback.filepath, callback.verbose = filepath, verbose


def _orbax_checkpoint(
    keras_method: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any
) -> Any:
    # Ranks that write a step into one directory spoil it for each other.
    strategy = _of(callback.model)
    if strategy is None or is_local() or strategy.may_write():
        return keras_method(callback, *args, **kwargs)
    return None


def _building(
    keras_method: Callable[..., Any],
    model: keras.Model,
    iterator: Any = None,
    data_batch: Any = None,
) -> None:
    # Under a strategy Keras looks at a first batch before training. What a PyDataset with workers
    # has read ahead by then comes first in the epoch, and its batches are in another order.
    strategy = _of(model)
    adapter: Any = getattr(iterator, "data_adapter", None)
    if strategy is not None and getattr(adapter, "enqueuer", None) is not None:
        iterator, data_batch = None, adapter._standardize_batch(adapter.py_dataset[0])
    if strategy is None:
        keras_method(model, iterator=iterator, data_batch=data_batch)
        return
    try:
        keras_method(model, iterator=iterator, data_batch=data_batch)
    except StopIteration:
        raise ValueError(
            "A worker must have samples, at least one batch of them. Received: data without any"
        ) from None
    strategy._fitting.built(model)


def _reduction(keras_method: Callable[..., Any], optimizer: Any, grads_and_vars: Any) -> Any:
    strategy = _at_work()
    pairs = list(grads_and_vars)
    if strategy is None:
        _check_replicated([variable for _, variable in pairs])
        return keras_method(optimizer, pairs)
    variables = [variable for gradient, variable in pairs if gradient is not None]
    pairs = lying.told(strategy, optimizer, pairs)
    with strategy._reducing(variables, optimizer):
        return lying.heard(strategy, keras_method(optimizer, pairs))


def _slot(keras_method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    # `fit` looks at the optimizer that was compiled; a step of one's own may have others, as a GAN.
    # TensorFlow would say that two strategies are mixed, and not in what.
    strategy, made_in = _at_work(), optimizer._distribution_strategy
    if strategy is not None and made_in is not strategy:
        raise ValueError(
            "An optimizer must be made inside the scope of the strategy whose variables it trains. "
            f"Received: `{optimizer.name}`, an optimizer made under {type(made_in).__name__}"
        )
    return keras_method(optimizer, *args, **kwargs)


def _clipping(keras_method: Callable[..., Any], optimizer: Any, gradients: Any) -> Any:
    # Keras clips before the reduction, each replica its own gradient by its own norm; and a norm
    # over all gradients spreads the NaN of one of them over all, so that nobody could say whose it
    # was.
    return gradients if _at_work() is not None else keras_method(optimizer, gradients)


def _application(
    keras_method: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any
) -> None:
    token = _applied.set(optimizer)
    try:
        keras_method(optimizer, grads, trainable_variables)
    finally:
        _applied.reset(token)


def _count_anew() -> None:
    """Lets `iterations` of an optimizer that is being applied count from `begun`."""
    [holder, *_] = [cls for cls in keras.optimizers.Optimizer.__mro__ if "iterations" in vars(cls)]
    kept = vars(holder)["iterations"]

    def iterations(self: Any) -> Any:
        count = kept.fget(self)
        if _applied.get() is not self or self not in _begun:
            return count
        return count - _begun[self] // (self.gradient_accumulation_steps or 1)

    holder.iterations = property(iterations, kept.fset, doc=kept.__doc__)


def _overwriting(keras_method: Callable[..., Any], optimizer: Any, grads: Any, vars: Any) -> Any:
    # What layers in float8 have seen of this worker's rows: it passes by the sum.
    strategy = _at_work()
    own = [one for one in vars if getattr(one, "overwrite_with_gradient", False)]
    if strategy is not None and own and not strategy._is_alone():
        raise ValueError(
            "Variables must be trained by gradients that are summed over all workers; the scales "
            "of float8 are set by each worker's own rows, and would differ. Received: "
            f"{own[0].path}, overwrite_with_gradient=True"
        )
    return keras_method(optimizer, grads, vars)


def _finalising(keras_method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    # Keras calls it at the end of `fit`, before its callbacks. What it sets is no movement. A
    # callback may call it, too, as to save the means: that ends nothing.
    strategy = ours(optimizer._distribution_strategy)
    loan = None if strategy is None else strategy.loan
    if loan is None or not loan.is_at_end or not getattr(optimizer, "use_ema", False):
        return keras_method(optimizer, *args, **kwargs)
    loan.owner.end_training()
    result = keras_method(optimizer, *args, **kwargs)
    loan.owner.end_average()
    return result


def _addition(keras_method: Callable[..., Any], optimizer: Any, variable: Any, value: Any) -> Any:
    strategy = ours(optimizer._distribution_strategy)
    if strategy is not None and not strategy._is_alone():
        value = orderly(optimizer, value)
    return keras_method(optimizer, variable, value)


def _finiteness(keras_method: Callable[..., Any], optimizer: Any, gradients: Any) -> Any:
    # Keras asks each rank about its own gradients; a rank that skips a step alone would leave the
    # others waiting in the sum.
    is_finite = keras_method(optimizer, gradients)
    strategy = _at_work()
    return is_finite if strategy is None else strategy._reduce_finite(is_finite)


def _loss(keras_method: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
    is_ours = ours(tf.distribute.get_strategy()) is not None
    if not is_ours or loss.reduction not in losses.MEANS:
        return keras_method(loss, *args, **kwargs)
    return losses.divided(keras_method, loss, *args, **kwargs)


def _distilling(keras_method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    # It calls losses itself: objects, which Keras divides, and functions (those given as strings),
    # which it does not; and tells its trackers what they return.
    if ours(tf.distribute.get_strategy()) is None:
        return keras_method(model, *args, **kwargs)
    return losses.divided(keras_method, model, *args, **kwargs)


def _noise(keras_method: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
    seed = keras_method(generator, *args, **kwargs)
    strategy = _at_work()
    if strategy is None:
        return seed
    # An odd factor makes different groups different modulo 2^31; group 0 draws what Keras would.
    group, _ = strategy.noise_group()
    mark = group * 0x9E3779B1 % (1 << 31)
    return seed if mark == 0 else tf.bitwise.bitwise_xor(seed, tf.constant([mark, 0], seed.dtype))
