# SPDX-License-Identifier: Apache-2.0
"""Callbacks that a strategy puts into a `fit`: the last one, and stand-ins for some of Keras'."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks import optimizers
from tf_hips.callbacks.resuming import first_step
from tf_hips.data import Feed
from tf_hips.errors import ProtocolError
from tf_hips.strategies import agreeing
from tf_hips.strategies.adapted import adapted, check_equal, is_adapted
from tf_hips.strategies.logs import digests
from tf_hips.strategies.replicated import difference, frozen, replicated
from tf_hips.strategies.rounding import Told, are_digests, settle
from tf_hips.strategies.same_script import Facts, check_same, facts_of, is_facts
from tf_hips.strategies.settings import check_settings, comparable

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy


class Closing(keras.callbacks.Callback):
    """The last callback: what ranks must agree on at the ends of an epoch."""

    def __init__(
        self, strategy: "PartyStrategy", arguments: dict[str, Any], steps_per_execution: int
    ) -> None:
        super().__init__()
        self._strategy = strategy
        last, most = arguments.get("epochs", 1), keras.config.max_epochs()
        self._epochs = (arguments.get("initial_epoch", 0), min(last, most or last))
        self._steps_per_epoch = arguments.get("steps_per_epoch")
        self._steps_per_execution = int(steps_per_execution)
        self._feed: Feed | None = None
        self._is_inside = False  # an epoch
        self._next: int | None = None  # the epoch that would follow; None: the first one
        self._facts: Facts = {}

    def set_model(self, model: keras.Model) -> None:
        """Notes how it is trained, before a callback changes that or takes up a backup."""
        super().set_model(model)
        self._facts = facts_of(model)

    @property
    def is_over(self) -> bool:
        """Whether `fit` makes no further epoch; asked when no callback is at work.

        Not before Keras asks: callbacks behind this one may set an epoch to begin with, or stop.
        """
        first = self.model._initial_epoch or self._epochs[0]
        following = first if self._next is None else self._next
        is_last = following >= self._epochs[1] or bool(self.model.stop_training)
        return is_last and not self._is_inside

    def feed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """What is iterated for `dataset`, such that each epoch is its own pass."""
        self._feed = Feed(
            dataset,
            self._strategy.make_variable,
            initial_epoch=self._epochs[0],
            steps_per_epoch=self._steps_per_epoch,
            steps_per_execution=self._steps_per_execution,
        )
        return self._feed.dataset

    def on_train_begin(self, logs: Any = None) -> None:
        """Compares how long this `fit` is going to be, and what it begins with.

        Raises:
            ValueError, ProtocolError: workers differ, or a server would not hear of weights that
                were set; see `untold`.
        """
        if self._strategy.loan is not None:
            self._strategy.loan.closing = self
        if self._strategy._is_alone():
            return
        steps = (self.params or {}).get("steps")
        first, last = self._epochs
        own = [None if steps is None else int(steps), self.model._initial_epoch or first, last]
        facts = {**self._facts, "number of steps in an epoch": own[0]}
        values = self._digests_if_equal()
        mine = [own, values, adapted(self.model), facts]
        what, parties = "the length of `fit`", agreeing.doubted(self._strategy)
        told_by_all = self._strategy.gather_objects(mine, what)
        told_by_all = agreeing.sound(parties, told_by_all, _is_beginning, what)
        welcome = self._strategy._together()
        if welcome is not None and welcome.is_back:
            facts_by_all = [None if one is None else one[3] for one in told_by_all]
            check_same(self._strategy.global_rank, facts, facts_by_all)

        def compared(place: int, what: str) -> agreeing.Named:
            return agreeing.compared(parties, told_by_all, mine, lambda one: one[place], what)

        steps_by_all = agreeing.compared(
            parties,
            told_by_all,
            mine,
            lambda one: one[0][0],
            "the steps of `fit`",
            may_be_unknown=True,
        )
        epochs_by_all = agreeing.compared(
            parties, told_by_all, mine, lambda one: one[0][1:], "the epochs of `fit`"
        )
        if len({steps for _, steps in steps_by_all} - {None}) > 1:
            told = "; ".join(
                f"{who}: {'unknown' if steps is None else steps} steps in each epoch"
                for who, steps in steps_by_all
            )
            raise ValueError(
                "All workers must take the same number of steps in `fit`: give each a shard of "
                f"equal length (`tf_hips.shard`), or `steps_per_epoch`. Received: {told}"
            )
        if len({tuple(epochs) for _, epochs in epochs_by_all}) > 1:
            told = "; ".join(f"{who}: epochs {one} to {end}" for who, (one, end) in epochs_by_all)
            raise ValueError(f"All workers must train the same epochs in `fit`. Received: {told}")
        check_equal(compared(2, "what layers have learned"))
        # Members of a loop may train by optimizers of their own; of one that comes back the server
        # keeps what the process before it has said.
        if self._strategy.loan is None and (welcome is None or not welcome.is_back):
            what = "the optimizers of `fit`"
            check_settings(
                agreeing.compared(parties, told_by_all, mine, lambda one: comparable(one[3]), what)
            )
        begun_with = [None if one is None else one[1] or [] for one in told_by_all]
        self._begin_equal(begun_with, values or [])
        self._strategy._fitting.untold.check(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tells sharded data which epoch begins, and at which step.

        Raises:
            ConfigError: the optimizer, or what a callback has made of it, does not go with the rule
                of a server.
            ProtocolError: a callback has set weights, and a server would not hear of it.
        """
        if self._next is not None:  # the first one may go on from a backup
            self._strategy._fitting.untold.check(self.model)
        self._is_inside = True
        self._check_optimizer()
        if self._feed is not None:
            self._feed.begin(epoch, first_step(self.model, epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Looks at the optimizer again: a callback may set the rate of each step.

        Raises:
            ConfigError: it does not go with the rule of a server any more.
        """
        self._check_optimizer()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops on all ranks where a callback of one wants to stop; replicas must still be equal.

        Raises:
            ProtocolError: something was done on one worker that all had to do.
        """
        self._is_inside, self._next = False, epoch + 1
        if self._strategy._is_alone():
            return
        variables = replicated(self.model)
        values = digests(variables)
        mine = [bool(self.model.stop_training), values]
        what, parties = "whether to stop after an epoch", agreeing.doubted(self._strategy)
        told_by_all = self._strategy.gather_objects(mine, what)
        told_by_all = agreeing.sound(parties, told_by_all, _is_end, what)
        self.model.stop_training = any(wish for wish, _ in filter(None, told_by_all))
        digests_by_all = [None if one is None else one[1] for one in told_by_all]
        what = f"the model after epoch {epoch + 1}"
        different = settle(self._strategy, variables, digests_by_all, values, what)
        if different:
            raise ProtocolError(
                f"All workers must do the same to the model. Received: after epoch {epoch + 1} "
                f"{different}; a callback that sets weights or the learning rate belongs on all "
                "workers, with the same decisions."
            )
        self._strategy._fitting.untold.follow(variables, values)

    def _check_optimizer(self) -> None:
        for optimizer in optimizers.parts(self.model.optimizer):
            self._strategy._check_optimizer(optimizer)

    def _begun_with(self) -> list[Any]:
        """What all must have alike before a `fit`."""
        return [*replicated(self.model), *frozen(self.model)]

    def _digests_if_equal(self) -> list[int | None] | None:
        """What this worker begins with; None of what gets the first worker's value anyway.

        Each by itself: after another `compile` only slots are new.
        """
        beginning, variables = self._strategy.beginning, self._begun_with()
        equal = [variable for variable in variables if beginning.meetings.is_equal([variable])]
        if not equal:
            return None
        told = {id(one): digest for one, digest in zip(equal, digests(equal), strict=True)}
        return [told.get(id(variable)) for variable in variables]

    def _begin_equal(self, told_by_all: Sequence[Told], mine: Told) -> None:
        """Takes the first rank's weights where another one has loaded its own.

        Then also those that layers move: who loads a model loads them with it.
        """
        variables, what = self._begun_with(), "the weights before `fit`"
        is_over_parties = self._strategy.beginning.meetings.first_sync is not None
        if is_over_parties:
            different = settle(self._strategy, variables, told_by_all, mine, what)
        else:
            parties = agreeing.doubted(self._strategy)
            everyone = agreeing.compared(parties, told_by_all, mine, lambda one: one, what)
            different = difference(variables, everyone)
        if not different:
            return
        if is_over_parties:
            raise ProtocolError(
                f"All workers must begin with the same weights. Received: {different}; load them "
                "on all workers."
            )
        log.warning("Before this `fit` %s. Those of rank 0 are taken.", different)
        self._strategy.beginning.meetings.make_equal_in_party([*variables, *self.model.weights])


class _Passing(keras.callbacks.Callback):
    """Stands for a callback of Keras, and passes on some of its calls."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self._callback = callback

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._callback.set_model(model)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._callback.set_params(params)


class Restoring(_Passing):
    """Keras' BackupAndRestore on a rank that writes nothing: it restores."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores."""
        self._callback.on_train_begin(logs)


# When AtEpochEnds acts itself.
_OF_BATCHES = ("on_batch_end", "on_train_batch_end", "on_epoch_end")


class AtEpochEnds(_Passing):
    """Keras' TerminateOnNaN: in a batch one rank may see NaN alone; in an epoch's loss all do.

    Of a class derived from it, all else that it does at other times is done.
    """

    def __init__(self, callback: keras.callbacks.TerminateOnNaN) -> None:
        super().__init__(callback)
        self._batch = 0
        own, derived = keras.callbacks.TerminateOnNaN, type(callback)
        for name in (one for one in dir(own) if one.startswith("on_") and one not in _OF_BATCHES):
            if getattr(derived, name) is not getattr(own, name):
                setattr(self, name, getattr(callback, name))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Remembers the batch."""
        self._batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Looks at the epoch's loss."""
        self._callback.on_batch_end(self._batch, logs)
        self._callback.on_epoch_end(epoch, logs)


def _is_end(told: Any) -> bool:
    """Whether a worker may say so at the end of an epoch."""
    is_pair = isinstance(told, list) and len(told) == 2
    return is_pair and isinstance(told[0], bool) and are_digests(told[1])


def _is_beginning(told: Any) -> bool:
    """Whether a worker may say so at the beginning of a `fit`."""
    if not isinstance(told, list) or len(told) != 4:
        return False
    length, values, learned, facts = told
    return (
        isinstance(length, list)
        and len(length) == 3
        and all(one is None or isinstance(one, int) for one in length)
        and (values is None or are_digests(values, may_lack=True))
        and is_adapted(learned)
        and is_facts(facts)
    )
