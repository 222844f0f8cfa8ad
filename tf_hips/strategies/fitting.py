# SPDX-License-Identifier: Apache-2.0
"""What a strategy does around `fit`, `evaluate` and the `*_on_batch` methods of its models.

    before     ranks compare what they are about to do; callbacks that write files stay on rank 0
    epoch      the data is told which epoch begins
    its end    statistics of layers are averaged, then loss and metrics are those of all replicas,
               then validation and callbacks see them, and all agree whether to stop
    errors     come out as what they are, and the other ranks hear of them

All workers call these methods, in the same order; `hooks.local()` is for what one does alone.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks.optimizers import inner, parts
from tf_hips.comm import primitives, watchdog
from tf_hips.data import check_whole, positions_of
from tf_hips.errors import ProtocolError
from tf_hips.strategies import agreeing, hooks, logs
from tf_hips.strategies.adapted import adapted, check_equal, is_adapted
from tf_hips.strategies.closing import AtEpochEnds, Closing, Restoring
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.replicated import difference, moving
from tf_hips.strategies.rounding import settle
from tf_hips.strategies.untold import Untold

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

# Callbacks of Keras that only write down what all ranks know alike. Not their subclasses: these may
# do more, which all ranks must do.
_REPORTERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)

Method = Callable[..., Any]


class Fitting:
    """Methods of one strategy's Keras models; each takes Keras' own method and its arguments."""

    def __init__(self, strategy: "PartyStrategy", failures: Failures) -> None:
        """Nothing runs yet.

        Args:
            strategy: the strategy, a `PartyStrategy`.
            failures: where exceptions raised in a step are kept.
        """
        self._strategy = strategy
        self._failures = failures
        self.num_fits = 0  # that have begun
        self.untold = Untold(strategy)
        self._running: list[str] = []
        self._awaiting: Closing | None = None  # a `fit` whose data have not come yet

    def compile(self, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Refuses a model that was built without the strategy."""
        if model._distribute_strategy is not self._strategy:
            raise ValueError(
                f"The model `{model.name}` must be built inside `strategy.scope()`. Received: a "
                "model built outside and compiled inside, which would train without any reduction, "
                "each worker on its own."
            )
        return method(*args, **kwargs)

    def fit(self, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Trains with callbacks that fit many ranks."""
        arguments = _named("fit", method, args, kwargs)
        _check(model, self._strategy)
        if isinstance(arguments.get("x"), tf.data.Dataset):
            arguments["shuffle"] = False  # else Keras warns that it does not shuffle it
        if isinstance(arguments.get("validation_data"), tf.data.Dataset):
            check_whole(arguments["validation_data"], "evaluate")  # now, and not after an epoch
        self.num_fits += 1
        closing = Closing(self._strategy, arguments, model.steps_per_execution)
        self._awaiting = closing
        callbacks = arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            closing.set_model(model)
            closing.set_params(callbacks.params)
            chosen = [*self._for_this_rank(callbacks.callbacks), closing]
            arguments["callbacks"] = copy.copy(callbacks)  # the user's own stays as it is
            arguments["callbacks"].callbacks = chosen
        else:
            arguments["callbacks"] = [*self._for_this_rank(callbacks), closing]
        if self._strategy.global_rank and arguments.get("verbose", "auto") == "auto":
            arguments["verbose"] = 0  # one progress bar, not one for each worker
        loan = self._strategy.loan
        on_loan = (
            contextlib.nullcontext()
            if loan is None
            else loan.training(_flat(arguments["callbacks"]))
        )
        with self._as("fit", model), on_loan:
            history = self._failures.translated(method)(**arguments)
            if loan is not None:  # a callback may have set weights after the last meeting
                loan.owner.agree()
            return history

    def evaluate(self, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Evaluates; the result is that of all workers' rows."""
        arguments = _named("evaluate", method, args, kwargs)
        _check_rows(arguments, "evaluate")
        if not self._running and self._strategy.global_rank:
            arguments["verbose"] = _quiet(arguments)
        with self._as("evaluate", model):
            return self._failures.translated(method)(**arguments)

    def predict(self, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Predicts for this worker's rows; waits for nobody."""
        _check_rows(_named("predict", method, args, kwargs), "predict")
        return method(*args, **kwargs)

    def train_on_batch(self, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """One step; returns loss and metrics of all workers' batches."""
        _check(model, self._strategy)
        if self._strategy.loan is not None:
            raise ProtocolError(
                "A model whose strategy serves a loop is trained by the loop's `fit`, which lets "
                "workers meet. Received: `train_on_batch`"
            )
        with self._as("train_on_batch", model):
            for optimizer in parts(model.optimizer):
                self._strategy._check_optimizer(optimizer)
        return self._on_batch("train_on_batch", method, model, args, kwargs)

    def test_on_batch(self, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Evaluates one batch; returns loss and metrics of all workers' batches."""
        return self._on_batch("test_on_batch", method, model, args, kwargs)

    def get_metrics_result_or_logs(
        self, method: Method, model: keras.Model, args: Any, kwargs: Any
    ) -> Any:
        """What Keras asks for at the end of an epoch and of an evaluation."""
        if not self._running:
            return method(*args, **kwargs)
        loan = self._strategy.loan
        if self._running[-1] == "fit" and loan is not None and loan.is_open:
            loan.owner.close_epoch()
        if self._running[-1] == "fit" and not self._strategy._is_alone():
            self.average_statistics(model)
            self.untold.remember(model)
        return self._over_replicas(
            model, _named("get_metrics_result", method, args, kwargs)["logs"], method
        )

    def built(self, model: keras.Model) -> None:
        """An evaluation is that of one model: of the first rank's where they differ.

        Weights that a layer moves by its worker's own rows (`replicated.moving`) may differ once
        they were trained; they are averaged. In a loop of `test_on_batch` nothing is compared after
        training, as each comparison would cost a gather.

        Raises:
            ProtocolError: the parties have different weights, or workers have layers that have
                learned different things by `adapt`; on all ranks.
        """
        strategy, beginning = self._strategy, self._strategy.beginning
        is_evaluation = self._running in (["evaluate"], ["test_on_batch"])
        if not is_evaluation or hooks.is_local() or strategy._is_alone():
            return
        is_begun = beginning.meetings.is_equal(model.weights)
        if is_begun and (self._running == ["test_on_batch"] or strategy.loan is not None):
            return  # a loop agrees at its next `fit` on what was set since its last meeting
        own: list[Any] = [logs.digests(model.weights), adapted(model)]
        what = "weights to be evaluated"
        told_by_all = strategy.gather_objects(own, what)
        parties = agreeing.doubted(strategy)
        told_by_all = agreeing.sound(parties, told_by_all, _is_weights, what)
        moved = {id(one) for one in moving(model) if beginning.meetings.is_equal([one])}
        places = [place for place, one in enumerate(model.weights) if id(one) not in moved]

        def select(told: Any) -> Any:
            is_like = len(told) == len(model.weights)
            return [told[place] for place in places] if is_like else told

        # Each by itself: weights of an honest party may differ by rounding, and what layers have
        # learned may not.
        check_equal(agreeing.compared(parties, told_by_all, own, lambda one: one[1], what))
        compared, mine = [model.weights[place] for place in places], select(own[0])
        digests_by_all = [None if one is None else select(one[0]) for one in told_by_all]
        if beginning.meetings.first_sync is None:
            everyone = agreeing.compared(parties, digests_by_all, mine, lambda one: one, what)
            different = difference(compared, everyone)
        else:
            different = settle(strategy, compared, digests_by_all, mine, what)
        if not different:
            if moved:
                self._average_told(model, told_by_all, own[0])
            return
        if beginning.meetings.first_sync is None:
            if is_begun:
                log.warning("Before this evaluation %s. Those of rank 0 are taken.", different)
            beginning.meetings.make_equal_in_party(model.weights)
            return
        raise ProtocolError(
            f"All parties must evaluate the same weights of `{model.name}`. Received: {different}. "
            "They are made equal when training begins; before that and after it, load them on all "
            "workers, or call `keras.utils.set_random_seed` with the same seed before the model "
            "is built."
        )

    def fed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """What is iterated for a dataset of Keras': shards in `fit` are told which epoch it is."""
        closing, self._awaiting = self._awaiting, None
        if closing is None or not positions_of(dataset):
            return dataset
        return closing.feed(dataset)

    def average_statistics(self, model: keras.Model) -> int:
        """Averages BatchNormalization's statistics over all workers; see `logs`."""
        strategy = self._strategy

        def gather(own: Any, label: str) -> list[Any]:
            told_by_all = strategy.gather_objects(own, label)
            return agreeing.sound(
                agreeing.doubted(strategy), told_by_all, lambda one: _is_like(one, own), label
            )

        return self._average(model, gather)

    def _average_told(self, model: keras.Model, told_by_all: Sequence[Any], own: list[int]) -> None:
        """Averages statistics where the digests that all have told differ."""
        places = {id(one): place for place, one in enumerate(model.weights)}
        chosen = [places[id(one)] for one in logs.averaged(model)]
        # Of another length, in a run that bears liars: as if it were absent.
        sound = [
            one[0] if one is not None and _is_like(one[0], own) else None for one in told_by_all
        ]

        def gather(mine: Any, label: str) -> list[Any]:
            return [None if one is None else [one[place] for place in chosen] for one in sound]

        self._average(model, gather)

    def _average(self, model: keras.Model, gather: logs.Gather) -> int:
        """Averages statistics where what `gather` gives differs."""
        strategy = self._strategy
        return logs.average_statistics(
            model,
            self._total,
            gather,
            primitives.rank() == 0,
            strategy.num_replicas_in_sync,
            only_finite=strategy.is_robust or agreeing.doubted(strategy) is not None,
        )

    def _on_batch(
        self, name: str, method: Method, model: keras.Model, args: Any, kwargs: Any
    ) -> Any:
        arguments = _named(name, method, args, kwargs)
        if self._strategy._is_alone() or hooks.is_local():
            with self._as(name, model):
                return self._failures.translated(method)(**arguments)
        return_dict = arguments.pop("return_dict", False)
        with self._as(name, model):
            own = self._failures.translated(method)(**arguments, return_dict=True)
            keras_choice = functools.partial(
                hooks.original(keras.Model, "_get_metrics_result_or_logs"), model
            )
            results = self._over_replicas(model, own, keras_choice)
        results = {name: _plain(results[name]) for name in own}
        return results if return_dict else model._flatten_metrics_in_order(results)

    def _over_replicas(self, model: keras.Model, own: Any, choice: Method) -> Any:
        if self._strategy._is_alone() or hooks.is_local():
            return choice(own)
        with watchdog.named("loss and metrics of all replicas"):
            return logs.over_replicas(
                model,
                own,
                choice,
                self._total,
                primitives.rank() == 0,
                self._strategy.num_replicas_in_sync,
            )

    def _total(self, values: Sequence[tf.Tensor], operations: Sequence[str]) -> list[tf.Tensor]:
        total: list[tf.Tensor] = self._strategy.reduce_exactly(
            values, is_mean=False, operations=operations
        )
        return total

    @contextlib.contextmanager
    def _as(self, name: str, model: keras.Model) -> Iterator[None]:
        self._running.append(name)
        try:
            with watchdog.doing(f"`{name}` of model {model.name}"):
                yield
        except BaseException as error:
            # What a callback catches has not ended what the others wait in.
            if len(self._running) == 1 and not hooks.is_local():
                self._strategy._note_failure(error)
            raise
        finally:
            self._running.pop()
            self._awaiting = None

    def _for_this_rank(self, callbacks: Any) -> list[Any]:
        """What of the callbacks runs here: all ranks decide alike, and one rank writes."""
        flat = tf.nest.flatten(callbacks) if callbacks else []
        if self._strategy._is_alone():
            return flat
        kept = []
        for callback in flat:
            if isinstance(callback, keras.callbacks.TerminateOnNaN):
                kept.append(AtEpochEnds(callback))
            elif self._strategy.may_write():
                kept.append(callback)
            elif isinstance(callback, keras.callbacks.BackupAndRestore):
                kept.append(Restoring(callback))
            elif type(callback) not in _REPORTERS:
                kept.append(callback)
        return kept


def _flat(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(tf.nest.flatten(callbacks))


def _check(model: keras.Model, strategy: "PartyStrategy") -> None:
    if not model.compiled:  # Keras says so later, and has no optimizer to look at before
        raise ValueError(
            f"The model `{model.name}` must be compiled inside `strategy.scope()` before it "
            "trains. Received: a model on which `compile` was not called"
        )
    if model.jit_compile is True:
        raise ValueError(
            "`jit_compile` must be False under a strategy of tf_hips: collectives have no XLA "
            "kernel. Received: jit_compile=True"
        )
    for optimizer in (inner(model.optimizer), *parts(model.optimizer)):
        made_in = getattr(optimizer, "_distribution_strategy", strategy)
        if made_in is not strategy and optimizer is not None:
            raise ValueError(
                f"The optimizer of `{model.name}` must be made inside the scope of the model's "
                "strategy; so call `compile` inside `strategy.scope()`, each time. Received: an "
                f"optimizer made under {type(made_in).__name__}"
            )


def _check_rows(arguments: dict[str, Any], name: str) -> None:
    if isinstance(arguments.get("x"), tf.data.Dataset):
        check_whole(arguments["x"], name)


def _named(name: str, method: Method, args: Any, kwargs: Any) -> dict[str, Any]:
    signature = inspect.signature(method)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        # Only what Python itself makes of a call names the function.
        raise TypeError(f"{name}() {error}") from None
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


def _quiet(arguments: dict[str, Any]) -> Any:
    verbose = arguments.get("verbose", "auto")
    return 0 if verbose == "auto" else verbose


def _plain(value: Any) -> Any:
    # What Keras makes of logs before it returns them.
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _is_like(one: Any, own: list[int]) -> bool:
    """Whether it could be digests of the same variables."""
    return isinstance(one, list) and len(one) == len(own) and all(isinstance(x, int) for x in one)


def _is_weights(one: Any) -> bool:
    """Whether it could be digests of weights, and what layers have learned."""
    return (
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], list) and is_adapted(one[1])
    )
