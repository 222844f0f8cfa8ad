# SPDX-License-Identifier: Apache-2.0
"""What a strategy must keep, besides weights and slots, to continue a run bit for bit.

For each list of gradients that an optimizer hands over:

    step              number of the next step; with the seed it determines a codec's noise, and the
                      stage of a warm-up
    rounds            the same where a server counts the steps
    residual_<i>      what this rank's encoding of gradient i dropped so far; where it has several
                      chunks, residual_<i>_<k> of each
    state_<i>         instead of that, what a codec with state keeps of gradient i, a row per vector
    basis_<i>         what powersgd begins its next step of gradient i with, the same on all ranks
    owner_residual_<i> what this rank's encoding of the merged sum dropped, of the chunks it owns
    uplink_residual_<i>, uplink_state_<i>
                      the same of the way up to a server (rank 0 of a party)

    plan              what is done with each gradient, where that was measured; who goes on goes on
                      so, whatever a link has become (see `kept_plans`)

Lists are numbered as they are created, which is in the order of the first steps and so the same on
all ranks. Their variables appear in the first step; what was restored before goes into them then
(TensorFlow's deferred restoration).

Invariant: the residuals of a model go when the model goes; nothing here keeps it.
"""

import contextlib
import json
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_hips.callbacks.changes import changes
from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.strategies.kept_plans import KeptPlans

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

_RESIDUAL = re.compile(r"(owner_|uplink_)?(residual|state)_")


class StrategyState(tf.Module):
    """The state of one worker's strategy, for `tf.train.Checkpoint`; residuals differ per rank.

        checkpoint = tf.train.Checkpoint(
            model=model, optimizer=model.optimizer, strategy=strategy.state
        )
        path = checkpoint.write(f"{folder}/rank-{strategy.global_rank}")
        checkpoint.read(path)

    Restoring works before the first step and after it, and raises a `ProtocolError` where the state
    belongs to another compression, number of workers, rank or seed. Behind a server the number of
    the step is taken up before the first step only, by all parties alike; later the server counts.
    It keeps residuals of its own that are not here.
    """

    def __init__(self, strategy: "PartyStrategy") -> None:
        """Has nothing yet.

        Args:
            strategy: the strategy, a `PartyStrategy`; not kept alive.
        """
        super().__init__(name="tf_hips_state")
        self._books = _Books(weakref.ref(strategy))
        self.about = _Facts(self._facts)
        self.plans = KeptPlans(self._plans)

    @contextlib.contextmanager
    def new_list(self, variables: Sequence[tf.Variable]) -> Iterator["_ListState"]:
        """While what belongs to one list of gradients is made; keeps it until the model goes.

        What is tracked by TensorFlow may be set as an attribute of what this yields.

        Args:
            variables: those whose gradients these are.
        """
        books = self._books
        outer, books.open = (books.open, books.trained), _ListState()
        books.trained = [weakref.ref(variable) for variable in variables]
        try:
            made = books.open
            made.restored_plan = self._restored_plan(variables[0])
            yield made
        finally:
            books.open, books.trained = outer
        number = books.num_lists
        books.num_lists += 1
        name = f"gradients{number}"
        first = weakref.ref(variables[0])
        books.lists[number] = made, first
        # Here a deferred restoration takes place.
        setattr(self, name, made)
        for model, of_model in list(books.models.items()):
            if _belongs(first, model):
                of_model.add(made)
        if books.is_of_others:
            made.drop_residuals()
        weakref.finalize(variables[0], self._forget, number)

    def keep(self, name: str, variable: tf.Variable) -> None:
        """Called with every variable that the strategy makes for itself."""
        books = self._books
        counted_elsewhere = name == "step" and not books.owner()._counts_steps()
        if books.open is None:
            return
        if counted_elsewhere:
            books.open.rounds = _Rounds(variable, books.trained, books.models)
            return
        if hasattr(books.open, name):
            raise ValueError(f"`name` must be new in its list of gradients. Received: {name!r}")
        setattr(books.open, name, variable)

    def kept_plan(self) -> str | None:
        """The plan that was restored for the list of gradients that is being made."""
        return self._books.open.restored_plan if self._books.open is not None else None

    def keep_plan(self, text: str) -> None:
        """Keeps the plan of the list of gradients that is being made."""
        if self._books.open is not None:
            self._books.open.plan = text

    def of_model(self, model: keras.Model) -> "ModelState":
        """The part that belongs to one model: its lists of gradients, numbered from 0.

        What is restored into it reaches lists that are made later, too.
        """
        books = self._books
        if model not in books.models:
            books.models[model] = ModelState()
            for _, (made, first) in sorted(books.lists.items(), key=lambda item: item[0]):
                if _belongs(first, model):
                    books.models[model].add(made)
        return books.models[model]

    def facts(self) -> dict[str, Any]:
        """What must be equal where this state is taken up: JSON values by name."""
        return self._facts()

    def is_complete(self) -> bool:
        """Whether all that a run keeps is here; a server keeps what its own encoding drops.

        And what its rule keeps from round to round.
        """
        strategy = self._books.owner()
        downlink = strategy._codecs().get("downlink")
        if not strategy.has_server:
            return True
        return not strategy._has_kept_rule() and (downlink is None or not downlink.has_state)

    def restored_step(self, step: tf.Variable) -> int:
        """The step that was restored for a list of gradients whose steps a server counts; else 0.

        Args:
            step: the list's variable.
        """
        for made, _ in self._books.lists.values():
            rounds = getattr(made, "rounds", None)
            if rounds is not None and rounds.counts(step):
                return int(rounds.restored)
        return 0

    def take_from_others(self) -> None:
        """What is restored from now on is another party's: what its encoding dropped is its own.

        So residuals and states of codecs begin anew, and all else stays.
        """
        self._books.is_of_others = True

    @property
    def is_of_others(self) -> bool:
        """Whether what is restored is another party's."""
        return self._books.is_of_others

    def make_equal(self, model: keras.Model) -> None:
        """Makes replicas of `model` equal now, as the first step would; called on all ranks.

        What is restored afterwards stays: values that differ per rank are not made equal again.
        """
        self._books.owner().beginning.of_model(model)

    def _facts(self, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        strategy = self._books.owner()
        codecs = strategy._codecs()
        facts: dict[str, Any] = {
            name: None if codec is None else codec.text for name, codec in codecs.items()
        }
        used = [codec for codec in codecs.values() if codec is not None]
        if used:
            facts |= strategy._way_facts()
            facts["seed"] = strategy.config.seed
            facts["number of workers"] = _num_workers(strategy)
        # Of gradients that go in rounds the party's own server encodes what goes further up, and
        # keeps what that drops; of all others (see `further`), where there are any, this worker.
        is_own = any(codec.has_state for codec in used)
        if saved is not None:
            is_own = is_own or "rank" in saved
        elif self._books.num_lists > 1 and strategy.above is not None:
            is_own = is_own or strategy.above.has_state
        if is_own:
            facts["rank"] = strategy.global_rank
            facts["number of ranks"] = primitives.size()
        return facts

    def _restored_plan(self, variable: tf.Variable) -> str | None:
        books, first = self._books, weakref.ref(variable)
        for model, of_model in list(books.models.items()):
            if _belongs(first, model) and of_model.next_plan() is not None:
                return of_model.next_plan()
        return self.plans.restored.get(f"gradients{books.num_lists}")

    def _plans(self) -> dict[str, str]:
        return _plans_of(self)

    def _forget(self, number: int) -> None:
        made, _ = self._books.lists.pop(number)
        delattr(self, f"gradients{number}")
        for of_model in self._books.models.values():
            of_model.drop(made)


class ModelState(tf.Module):
    """Lists of gradients of one model, in the order of their creation."""

    def __init__(self) -> None:
        """Has no list yet."""
        super().__init__(name="tf_hips_model_state")
        self._count = 0
        self.plans = KeptPlans(self._plans)

    def next_plan(self) -> str | None:
        """The plan that was restored for the list that comes next."""
        return self.plans.restored.get(f"gradients{self._count}")

    def add(self, made: "_ListState") -> None:
        """Appends a list; takes what was restored for it."""
        name = f"gradients{self._count}"
        self._count += 1
        setattr(self, name, made)

    def drop(self, made: "_ListState") -> None:
        """Forgets a list."""
        for name in [name for name, value in vars(self).items() if value is made]:
            delattr(self, name)

    def _plans(self) -> dict[str, str]:
        return _plans_of(self)


class _ListState(tf.Module):
    """Variables of one list of gradients, as attributes."""

    def __init__(self) -> None:
        super().__init__(name="tf_hips_list_state")
        self.plan: str | None = None
        self.restored_plan: str | None = None
        self.about = _Facts(self._sizes)

    def drop_residuals(self) -> None:
        """Sets to 0 what encoding has left behind."""
        with tf.init_scope():
            for name, value in vars(self).items():
                if isinstance(value, tf.Variable) and _RESIDUAL.match(name):
                    value.assign(tf.zeros_like(value))

    def _sizes(self, _saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {
            f"elements of `{name}`": int(value.shape.num_elements())
            for name, value in sorted(vars(self).items())
            if isinstance(value, tf.Variable)
        }


class _Rounds(tf.train.experimental.PythonState):
    """The number of the next step where a server counts; where it is restored, a wish.

    A run that has begun goes on counting: server and parties must have the same number.

    With it goes which of a model's variables these are. The list that comes first has the rounds,
    so who comes back and begins with another one would get answers that are about the first.
    """

    def __init__(
        self,
        step: tf.Variable,
        trained: Sequence["weakref.ref[tf.Variable]"],
        models: "weakref.WeakKeyDictionary[keras.Model, ModelState]",
    ) -> None:
        self._step = step
        self._trained = trained
        self._models = models
        self.restored = 0

    def counts(self, step: tf.Variable) -> bool:
        """Whether this is the number in `step`."""
        return self._step is step

    def serialize(self) -> str:
        """The number, and places of the variables in the model, if one is known."""
        _, places = self._in_model()
        return json.dumps({"step": int(self._step.numpy()), "places": places})

    def deserialize(self, string_value: str) -> None:
        """Takes the number of the run that saved it.

        Raises:
            ProtocolError: it is that of other variables.
        """
        told = json.loads(string_value)
        told = told if isinstance(told, dict) else {"step": told}  # of an older version
        saved = told.get("places")
        model, places = self._in_model()
        if model is not None and saved and places and saved != places:
            names = [one.path for one in model.variables]
            was = [names[place] if place < len(names) else "another" for place in saved]
            raise ProtocolError(
                "Who comes back must reduce gradients in the order in which the run began: its "
                f"first list has the server's rounds. Received: {names[places[0]]} "
                f"({len(places)} variables) in the place of {was[0]} ({len(was)} variables). "
                "Train them in the order of the first process, or all of them in each step."
            )
        self.restored = int(told["step"])

    def _in_model(self) -> tuple[keras.Model | None, list[int] | None]:
        """The model that has all of the variables, and their places in it."""
        trained = [reference() for reference in self._trained]
        for model in list(self._models):
            order = {id(one.value): place for place, one in enumerate(model.variables)}
            places = [order.get(id(one)) for one in trained]
            found = [place for place in places if place is not None]
            if len(found) == len(trained):
                return model, found
        return None, None


class _Books:
    """What `StrategyState` remembers besides state; no trackable, so nothing here is saved."""

    def __init__(self, strategy: weakref.ref[Any]) -> None:
        self._strategy = strategy
        self.num_lists = 0
        self.open: _ListState | None = None
        self.trained: list[weakref.ref[tf.Variable]] = []  # by the list that is open
        self.is_of_others = False
        self.lists: dict[int, tuple[_ListState, weakref.ref[tf.Variable]]] = {}
        self.models: weakref.WeakKeyDictionary[keras.Model, ModelState] = (
            weakref.WeakKeyDictionary()
        )

    def owner(self) -> Any:
        """The strategy."""
        strategy = self._strategy()
        if strategy is None:
            raise ProtocolError("The strategy of this state is gone; make a new one.")
        return strategy


class _Facts(tf.train.experimental.PythonState):
    """Facts that are saved, and compared where they are restored."""

    def __init__(self, facts: Any) -> None:
        # A weak reference: the owner has this as an attribute.
        self._current = weakref.WeakMethod(facts)

    def serialize(self) -> str:
        """The facts, as JSON."""
        return json.dumps(self._facts(), sort_keys=True)

    def deserialize(self, string_value: str) -> None:
        """Compares what was saved with what is.

        Raises:
            ProtocolError: they differ.
        """
        saved = json.loads(string_value)
        current = self._facts(saved)
        told = changes(current, saved, " when the state was saved")
        if told:
            raise ProtocolError(
                "The state of a strategy must be restored where it was saved. Received: "
                + "; ".join(told)
            )

    def _facts(self, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        current = self._current()
        return {} if current is None else current(saved)


def _num_workers(strategy: "PartyStrategy") -> int:
    """Over which it sums; not those of a loop's local phase, in which a callback may save."""
    loan = strategy.loan
    with contextlib.nullcontext() if loan is None else loan.whole():
        return strategy.num_replicas_in_sync


def _plans_of(lists: tf.Module) -> dict[str, str]:
    """The plans of lists of gradients, by the names of these."""
    return {
        name: value.plan
        for name, value in sorted(vars(lists).items())
        if isinstance(value, _ListState) and value.plan is not None
    }


def _belongs(first: weakref.ref[tf.Variable], model: keras.Model) -> bool:
    variable = first()
    return variable is not None and any(variable is one.value for one in model.trainable_variables)
