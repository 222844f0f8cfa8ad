# SPDX-License-Identifier: Apache-2.0
"""When replicas are made equal, and which variables that concerns.

In the party    as often as something new is trained: the model's weights and random states, and the
                optimizer's variables; in a custom loop, where no model is known, the variables of
                the gradients and all that was created in the strategy's scope.
Over parties    once, when the weights that are trained exist. What appears later is made equal in
                the party only, so it must begin equal everywhere, as the slots of an optimizer do.

Whether ranks meet here is decided by what they do alike (the first step, the first reduction of a
list of gradients), not by what a rank happens to have: a variable that only one of them made, or
has not collected yet, is an error on all of them and no wait without end.

Before a step     an eager one: when it begins. One in a graph: while it is traced, where it reduces
                  gradients, or else when its trace ends; nothing of it has run by then.
Changed by steps  what is not trained (gradients that are accumulated, counters) and came when steps
                  were under way already is left to each worker, once a step has changed it on any.

Invariants: nothing is trained over parties that was not made equal over parties. What a step has
written is never another worker's, but in weights that are trained for the first time.
"""

import functools
import gc
import hashlib
import inspect
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips.callbacks.optimizers import optimizers_of
from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.strategies.adapted import Adapted, adapted, as_bytes, check_bytes, check_equal
from tf_hips.strategies.changes import Changes, is_ready
from tf_hips.strategies.replicas import FirstSync, check_equal_shapes, synchronise, value_of

STEP = "a step"
_ADVICE = ". Variables of one rank alone belong outside of `strategy.scope()`."


class Beginning:
    """Remembers the variables of one strategy and which of them are equal on all replicas."""

    def __init__(self) -> None:
        """Knows no variable."""
        self.first_sync: FirstSync | None = None
        self._known: dict[int, weakref.ref[tf.Variable]] = {}
        self._equal: dict[int, weakref.ref[tf.Variable]] = {}
        # Made equal, or left to each worker because steps had changed it.
        self._settled: dict[int, weakref.ref[tf.Variable]] = {}
        self._shared: dict[int, weakref.ref[tf.Variable]] = {}
        self._has_met = False
        self._occasions: set[Hashable] = set()
        self._num_trainable = 0
        self.num_meetings = 0  # of custom loops
        self._num_trainable_met = -1  # at the last of them
        self._traced: set[Hashable] = set()  # the code of steps
        self._changes = Changes()
        self._made_in_a_trace: list[weakref.ref[tf.Variable]] = []

    def record(
        self, variable: tf.Variable, *, in_step: bool = False, in_trace: bool = False
    ) -> None:
        """Remembers a variable that was created in the strategy's scope.

        Args:
            variable: the variable.
            in_step: whether a step has made it, which may change it at once.
            in_trace: whether that step is being traced.
        """
        self._known.pop(id(variable), None)  # of one that is gone: the order is that of creation
        _add(self._known, [variable])
        self._num_trainable += bool(variable.trainable)
        self._changes.add(variable, in_step=in_step)
        if in_trace:
            self._made_in_a_trace.append(weakref.ref(variable))

    def record_local(self, variable: tf.Variable, *, in_step: bool) -> None:
        """Remembers one that is each worker's (`ON_READ`); a model's steps may still change it."""
        self._changes.add(variable, in_step=in_step)

    def look_at_new(self) -> None:
        """To be called before a step that may change new variables."""
        self._changes.look_at_new(self._is_settled)

    def knows(self, variable: Any) -> bool:
        """Whether `variable` was created in the strategy's scope."""
        [raw] = _unique([variable])
        return _holds(self._known, raw)

    def is_equal(self, variables: Iterable[Any]) -> bool:
        """Whether all of `variables` have been made equal."""
        return all(_holds(self._equal, variable) for variable in _unique(variables))

    def make_equal_in_party(self, variables: Iterable[Any]) -> None:
        """Makes `variables` equal now; they will be again when they are trained. On all ranks."""
        ready = [variable for variable in _unique(variables) if is_ready(variable)]
        check_equal_shapes(ready)
        synchronise(ready)

    def of_model(
        self,
        model: keras.Model,
        trained: Sequence[tf.Variable] | None = None,
        optimizer: Any = None,
    ) -> None:
        """Makes equal what is new in a Keras model.

        Args:
            model: the model whose step this is.
            trained: the variables whose gradients are being reduced; None before the step.
            optimizer: the optimizer that reduces them; None before the step.

        Raises:
            ProtocolError: ranks or parties differ, also in what layers have learned by `adapt`; or
                something is trained over parties that came after these had been made equal.
        """
        if not _are_ready(trained):
            return
        # All of the model's, also those that step later: what a backup then gives each worker for
        # itself must not be made equal any more.
        optimizers = [*optimizers_of(model), *([] if optimizer is None else [optimizer])]
        slots = [slot for one in optimizers for slot in one.variables]
        owned = [*model.variables, *slots, *(trained or [])]
        variables = [variable for variable in _unique(owned) if is_ready(variable)]
        if trained is None and all(layer.built for layer in model._flatten_layers()):
            trained = _unique(model.trainable_variables)
        self._make_equal(
            variables, trained, optimizers, advice="", is_collective=False, model=model
        )

    def of_loop(
        self,
        occasion: Hashable,
        trained: Sequence[tf.Variable] | None = None,
        optimizer: Any = None,
        *,
        is_computed: bool = False,
    ) -> None:
        """Makes equal what a custom loop uses; once for each `occasion`, equal on all ranks.

        Args:
            occasion: what tells this call from others.
            trained: the variables whose gradients are being reduced, if any are.
            optimizer: the optimizer that reduces them.
            is_computed: whether the gradients have their values, as in an eager step.

        Raises:
            ProtocolError: as in `of_model`; or gradients were computed with other weights.
        """
        is_step = occasion == STEP
        if is_step:
            occasion = (occasion, self._num_trainable)  # again when there is another model
        if occasion in self._occasions or not _are_ready(trained):
            return
        self._occasions.add(occasion)
        self._meet_in_loop(trained, optimizer, is_step=is_step, is_computed=is_computed)

    def of_trace(
        self, step: Callable[..., Any], model: keras.Model | None, *, has_met: bool
    ) -> None:
        """Makes equal what a step uses that has been traced, before it runs.

        A step that is traced again, as for a last batch of another size, concerns its rank only.

        Args:
            step: what was traced.
            model: whose method it is; None: of a custom loop.
            has_met: whether ranks have met while it was, as where it reduces gradients.

        Raises:
            ProtocolError: as in `of_model`.
        """
        with tf.init_scope():
            if not tf.executing_eagerly():
                return  # in a graph of TensorFlow 1; whoever reduces is told
            if model is None:
                self._of_traced(_code_of(step), has_met=has_met)
            elif step.__name__ != "train_step":  # which must reduce
                self.of_model(model)
            self.look_at_new()

    def _of_traced(self, code: Hashable, *, has_met: bool) -> None:
        is_other = code not in self._traced and self._num_trainable > self._num_trainable_met
        self._traced.add(code)
        # Behind a reduction come slots, which begin equal.
        references = [] if has_met else self._made_in_a_trace
        made = [one for one in (reference() for reference in references) if one is not None]
        new = [variable for variable in made if not self._is_settled(variable)]
        # Those that are not ready are after the second trace of their function.
        self._made_in_a_trace = [weakref.ref(one) for one in new if not is_ready(one)]
        if is_other or len(self._made_in_a_trace) < len(new):
            self._occasions.add((STEP, self._num_trainable))
            self._meet_in_loop(None, None, is_step=True, is_computed=False)

    def _meet_in_loop(
        self,
        trained: Sequence[tf.Variable] | None,
        optimizer: Any,
        *,
        is_step: bool,
        is_computed: bool,
    ) -> None:
        self.num_meetings += 1
        self._num_trainable_met = self._num_trainable
        gc.collect()  # what is gone on one rank must be gone on all
        known = [reference() for reference in self._known.values()]
        alive = [variable for variable in known if variable is not None]
        certainly = trained or []
        if is_step and self.first_sync is not None and not self._has_met:
            # It is going to compute gradients with some of these; a lazy model has none yet.
            maybe = [one for one in alive if one.trainable and one.dtype.is_floating]
            trained = _unique(one for one in maybe if is_ready(one)) or None
        if is_computed and not self.is_equal(trained or []):
            self._check_computed(trained or [])
        optimizers = [] if optimizer is None else [optimizer]
        slots = [slot for one in optimizers for slot in one.variables]
        owned = [*(trained or []), *slots, *alive]
        variables = [variable for variable in _unique(owned) if is_ready(variable)]
        self._make_equal(
            variables, trained, optimizers, advice=_ADVICE, is_collective=True, certainly=certainly
        )

    def _check_computed(self, trained: Sequence[tf.Variable]) -> None:
        """Raises if gradients that exist already were computed with weights that differ."""
        own = hashlib.sha256(b"".join(value_of(one).tobytes() for one in trained)).hexdigest()
        digests = primitives.gather_objects(own, "weights of a first eager step")
        if len(set(digests)) > 1 or self.first_sync is not None:
            raise ProtocolError(
                "Weights must exist before the first eager step computes gradients with them. "
                f"Received: {trained[0].name} and others, made inside of the step, which other "
                "workers may begin with other values. Build the model before the loop "
                "(`model.build(shape)`), or put the step into a `tf.function`."
            )

    def _make_equal(
        self,
        variables: list[tf.Variable],
        trained: Sequence[tf.Variable] | None,
        optimizers: Sequence[Any],
        *,
        advice: str,
        is_collective: bool,
        model: keras.Model | None = None,
        certainly: Sequence[tf.Variable] | None = None,
    ) -> None:
        meets = self.first_sync is not None and not self._has_met and trained is not None
        if self.first_sync is not None and self._has_met:
            for variable in trained or []:
                if not _holds(self._shared, variable):
                    raise ProtocolError(
                        "A run with an uplink trains one model with one optimizer, all of which "
                        f"was there when the parties were made equal. Received: {variable.name}, "
                        "which came later"
                    )
        exempt = {id(one) for one in (trained if certainly is None else certainly) or []}
        chosen = variables
        if not meets:
            chosen = [
                variable
                for variable in variables
                if not _holds(self._equal if id(variable) in exempt else self._settled, variable)
            ]
        # Nothing to do, nothing to say: a step of a model may be traced again on one rank only (a
        # last batch of another size).
        if not chosen and not is_collective:
            return
        check_equal_shapes(chosen, advice)
        learned = [] if model is None else adapted(model)
        if learned:
            everyone = primitives.gather_objects(learned, "what layers have learned")
            check_equal([(f"rank {rank}", one) for rank, one in enumerate(everyone)])
        left = self._changed(chosen, exempt) if chosen else set()
        if meets:
            self._has_met = True
            self._meet(chosen, optimizers, learned, left)
            _add(self._shared, chosen)
        else:
            synchronise(chosen, left=left)
        _add(self._equal, [one for place, one in enumerate(chosen) if place not in left])
        _add(self._settled, chosen)
        self._forget(chosen, left)

    def _changed(self, variables: Sequence[tf.Variable], exempt: Collection[int]) -> set[int]:
        """Places of those that a step has changed on any rank; not of ids that are `exempt`."""
        own = [
            place
            for place, variable in enumerate(variables)
            if id(variable) not in exempt and self._changes.has(variable)
        ]
        everyone = primitives.gather_objects(own, "which variables steps have changed")
        return {place for places in everyone for place in places}

    def _forget(self, variables: Sequence[tf.Variable], left: Collection[int]) -> None:
        """What has been made equal needs no look any more, unless parties are to meet yet."""
        meets_later = self.first_sync is not None and not self._has_met
        for place, variable in enumerate(variables):
            if not meets_later:
                self._changes.forget(variable)
            elif place not in left:
                self._changes.look(variable)

    def _is_settled(self, variable: tf.Variable) -> bool:
        return _holds(self._settled, variable)

    def _meet(
        self,
        variables: list[tf.Variable],
        optimizers: Sequence[Any],
        learned: Adapted,
        left: Collection[int],
    ) -> None:
        """Makes `variables` equal over the parties; called once, on all ranks.

        What layers have `learned` travels behind them, to be compared. What is `left` to each
        worker travels, too: parties need not have changed the same.
        """
        slots: set[int] = set()
        for optimizer in optimizers:
            if int(optimizer.iterations.numpy()):
                continue
            # Slots that no step has touched are of one number each, nearly all: that crosses the
            # slow tier, not the slot. (ScheduleFreeAdamW has one that begins as the weight.) A
            # party that has made steps already sends more, and the server says so.
            slots |= {id(slot) for slot in _unique(optimizer.variables) if slot.shape.rank}
        first_sync = self.first_sync

        def exchange(values: list[np.ndarray]) -> list[np.ndarray]:
            is_short = [
                id(variable) in slots and value.size > 0 and bool(np.all(value == value.flat[0]))
                for variable, value in zip(variables, values, strict=True)
            ]
            sent = [
                value.reshape(-1)[:1] if short else value
                for value, short in zip(values, is_short, strict=True)
            ]
            told = [as_bytes(learned)] if learned else []
            synced = first_sync([*sent, *told]) if first_sync else sent
            if len(synced) > len(sent):
                check_bytes(learned, synced.pop())
            return [
                np.broadcast_to(one, value.shape) if short else one
                for one, value, short in zip(synced, values, is_short, strict=True)
            ]

        synchronise(variables, exchange, left)


def _unique(owned: Iterable[Any]) -> list[tf.Variable]:
    """The TensorFlow variables behind `owned`, each once."""
    raw = [one.value if isinstance(one, keras.Variable) else one for one in owned]
    return list({id(one): one for one in raw}.values())


def _code_of(step: Callable[..., Any]) -> Hashable:
    """The code of a step: the same in each trace, also where a script makes it anew."""
    while isinstance(step, functools.partial):
        step = step.func
    step = getattr(step, "python_function", step)  # of a tf.function
    step = getattr(inspect.unwrap(step), "__func__", inspect.unwrap(step))
    return getattr(step, "__code__", None) or type(step).__call__


def _are_ready(trained: Sequence[tf.Variable] | None) -> bool:
    # A tf.function that creates variables is traced twice, and runs the second trace only: then
    # they have their values.
    return all(is_ready(variable) for variable in trained or [])


def _add(references: dict[int, "weakref.ref[tf.Variable]"], new: Iterable[tf.Variable]) -> None:
    for variable in new:
        references[id(variable)] = weakref.ref(variable)


def _holds(references: dict[int, "weakref.ref[tf.Variable]"], variable: tf.Variable) -> bool:
    # An id is used again when its owner is gone.
    reference = references.get(id(variable))
    return reference is not None and reference() is variable
