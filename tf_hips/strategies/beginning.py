# SPDX-License-Identifier: Apache-2.0
"""When replicas are made equal, and which variables that concerns.

In the party    as often as something new is trained: the model's weights and random states, and the
                optimizer's variables; in a custom loop, where no model is known, the variables of
                the gradients and all that was created in the strategy's scope.
Over parties    when the weights that are trained exist; again when others are trained that came
                later, where parties keep step. What else appears later is made equal in the party
                only, so it must begin equal everywhere, as the slots of an optimizer do.

Whether ranks meet here is decided by what they do alike (the first step, the first reduction of a
list of gradients), not by what a rank happens to have: a variable that only one of them made, or
has not collected yet, is an error on all of them and no wait without end.

Before a step     an eager one: when it begins. One in a graph: while it is traced, where it
                  reduces; nothing of it has run by then. A trace that reduces nothing is no
                  occasion: one rank may make it alone.
Changed by steps  what is not trained (gradients that are accumulated, counters) is left to each
                  worker, once a step has changed it on any before ranks met; gradients that were
                  computed with weights which differed are refused. (Not where ranks meet for
                  something else between a step that keeps them and weights' first meeting over
                  parties that comes later: what was made equal in the party is not looked at.)

Invariants: nothing is trained over parties that was not made equal over parties. What a step has
written is never another worker's, but in weights that are trained for the first time.
"""

import gc
import hashlib
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks.optimizers import optimizers_of
from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.strategies.adapted import Adapted, adapted, as_bytes, check_bytes, check_equal
from tf_hips.strategies.born import Born, functions_being_traced
from tf_hips.strategies.changes import Changes, digest_of, is_ready
from tf_hips.strategies.kept import check_kept, computed_with_others, suspected
from tf_hips.strategies.replicas import FirstSync, check_equal_shapes, synchronise, value_of

STEP = "a step"
_ADVICE = ". Variables of one rank alone belong outside of `strategy.scope()`."


class Beginning:
    """Remembers the variables of one strategy and which of them are equal on all replicas."""

    def __init__(self) -> None:
        """Knows no variable."""
        self.first_sync: FirstSync | None = None
        # What makes equal over parties what came later; None, or what it returns: nothing does.
        self.next_sync: Callable[[], FirstSync | None] | None = None
        self._known: dict[int, weakref.ref[tf.Variable]] = {}
        self._equal: dict[int, weakref.ref[tf.Variable]] = {}
        # Made equal, or left to each worker because steps had changed it.
        self._settled: dict[int, weakref.ref[tf.Variable]] = {}
        # Those over which parties have met, and of them those that were made equal. The first ones
        # are the same in all parties; what steps had changed by then may be others in each.
        self._met: dict[int, weakref.ref[tf.Variable]] = {}
        self._shared: dict[int, weakref.ref[tf.Variable]] = {}
        self._has_met = False
        self._refused: str | None = None
        self._born = Born()
        self._occasions: set[Hashable] = set()
        # With the function whose second trace is going to follow the first one at once.
        self._awaiting_slots: dict[Hashable, weakref.ref[tf.Graph]] = {}
        self._num_trainable = 0
        self._changes = Changes()

    def record(self, variable: tf.Variable, *, in_step: bool = False) -> None:
        """Remembers a variable that was created in the strategy's scope.

        Args:
            variable: the variable.
            in_step: whether a step has made it, which may change it at once.
        """
        self._known.pop(id(variable), None)  # of one that is gone: the order is that of creation
        _add(self._known, [variable])
        self._num_trainable += bool(variable.trainable)
        self._born.add(variable)
        self._changes.add(variable, in_step=in_step)

    def record_local(self, variable: tf.Variable, *, in_step: bool) -> None:
        """Remembers one that is each worker's (`ON_READ`); a model's steps may still change it."""
        self._changes.add(variable, in_step=in_step)

    def look_at_new(self) -> None:
        """To be called before a step that may change new variables, or when it has been traced."""
        with tf.init_scope():
            if tf.executing_eagerly():  # not in a graph of TensorFlow 1; whoever reduces is told
                self._changes.look_at_new(self._is_settled)

    def check_met(self) -> None:
        """To be called behind a step: raises where weights that it made have not become equal."""
        graphs = functions_being_traced()
        with tf.init_scope():
            self._born.check_met(graphs)

    def note_used(self) -> None:
        """To be called when a step may use all that there is, from now on."""
        self._changes.note_used()

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
        graphs: Sequence[tf.Graph] = (),
        is_computed: bool = False,
    ) -> None:
        """Makes equal what a custom loop uses; once for each `occasion`, equal on all ranks.

        Args:
            occasion: what tells this call from others.
            trained: the variables whose gradients are being reduced, if any are.
            optimizer: the optimizer that reduces them.
            graphs: the functions that are being traced.
            is_computed: whether the gradients have their values, as in an eager step.

        Raises:
            ProtocolError: as in `of_model`; or gradients were computed with other weights.
        """
        is_step = occasion == STEP
        if is_step:
            occasion = (occasion, self._num_trainable)  # again when there is another model
        if occasion in self._occasions:
            self._take_slots(occasion, optimizer, graphs)
            return
        if not _are_ready(trained):
            if primitives.size() > 1 or self.first_sync is not None:
                self._born.check(_unique(trained or []), graphs, occasion)
            return
        self._meet_in_loop(trained, optimizer, is_step=is_step, is_computed=is_computed)
        self._born.note_met(occasion)
        self._occasions.add(occasion)  # not where they differ: they may be mended, and try again
        slots = [] if optimizer is None else _unique(optimizer.variables)
        unready = [slot for slot in slots if not is_ready(slot)]
        if unready and graphs and all(self._born.is_made_in(slot, graphs[0]) for slot in unready):
            self._awaiting_slots[occasion] = weakref.ref(graphs[0])

    def _take_slots(self, occasion: Hashable, optimizer: Any, graphs: Sequence[tf.Graph]) -> None:
        """Slots that a `tf.function` has made have their values when it is traced once more.

        They begin equal, nearly all: so they are compared, and travel where they differ. That is in
        the second trace, which all ranks make, or never: one behind it may be one rank's alone (a
        last batch of another size).
        """
        awaited = self._awaiting_slots.get(occasion)
        if awaited is None or any(awaited() is graph for graph in graphs):
            return
        del self._awaiting_slots[occasion]
        if not _are_ready(_unique(optimizer.variables)):
            return
        slots = [one for one in _unique(optimizer.variables) if not _holds(self._settled, one)]
        check_equal_shapes(slots)
        everyone = primitives.gather_objects([digest_of(one) for one in slots], "slots")
        if any(one != everyone[0] for one in everyone):
            synchronise(slots)
        _add(self._equal, slots)
        _add(self._settled, slots)
        for slot in slots:
            self._changes.forget(slot)

    def _meet_in_loop(
        self,
        trained: Sequence[tf.Variable] | None,
        optimizer: Any,
        *,
        is_step: bool,
        is_computed: bool,
    ) -> None:
        gc.collect()  # what is gone on one rank must be gone on all
        known = [reference() for reference in self._known.values()]
        alive = [variable for variable in known if variable is not None]
        certainly = trained or []
        if is_step and self._meeting() is not None:
            # It is going to compute gradients with some of these; a lazy model has none yet.
            maybe = [one for one in alive if one.trainable and one.dtype.is_floating]
            trained = _unique(one for one in maybe if is_ready(one)) or None
        self._check_shared(certainly)
        is_late = not self._have_met(certainly) and self._meeting() is not None
        if is_computed and (is_late or not self.is_equal(certainly)):
            self._check_computed(certainly)
        optimizers = [] if optimizer is None else [optimizer]
        slots = [slot for one in optimizers for slot in one.variables]
        owned = [*(trained or []), *slots, *alive]
        variables = [variable for variable in _unique(owned) if is_ready(variable)]
        self._make_equal(
            variables,
            trained,
            optimizers,
            advice=_ADVICE,
            is_collective=True,
            is_computed=is_computed,
            certainly=certainly,
        )

    def _check_shared(self, trained: Sequence[tf.Variable]) -> None:
        """Raises if something is trained that was left to each worker when the parties met."""
        for one in trained:
            if _holds(self._met, one) and not _holds(self._shared, one):
                raise ProtocolError(
                    "What is trained must be as it was made, or trained, when the parties are made "
                    f"equal. Received: {one.name}, which steps had changed before"
                )

    def _check_computed(self, trained: Sequence[tf.Variable]) -> None:
        """Raises if gradients that exist already were computed with weights that differ."""
        own = hashlib.sha256(b"".join(value_of(one).tobytes() for one in trained)).hexdigest()
        digests = primitives.gather_objects(own, "weights of a first eager step")
        if len(set(digests)) > 1 or self.first_sync is not None:
            raise ProtocolError(
                "Weights must exist before the first eager step computes gradients with them. "
                f"Received: {trained[0].name} and others, made inside of the step (or it is the "
                "first one, in `tf_hips.local()`), which other workers may begin with other "
                "values. Build the model before the loop (`model.build(shape)`), or put the step "
                "into a `tf.function`."
            )

    def _make_equal(
        self,
        variables: list[tf.Variable],
        trained: Sequence[tf.Variable] | None,
        optimizers: Sequence[Any],
        *,
        advice: str,
        is_collective: bool,
        is_computed: bool = True,
        model: keras.Model | None = None,
        certainly: Sequence[tf.Variable] | None = None,
    ) -> None:
        certainly = (trained if certainly is None else certainly) or []
        exempt = {id(one) for one in certainly}
        meets = trained is not None and not self._have_met(trained)
        if meets and self._meeting() is None:
            name = next(one.name for one in trained or [] if not _holds(self._met, one))
            raise ProtocolError(
                "This run trains one model with one optimizer, all of which was there when the "
                f"parties were made equal. Received: {name}, which came later"
            )
        self._check_shared(certainly)
        chosen = variables
        if not meets or self._has_met:
            wanted = {id(one) for one in trained or []} if meets else set()
            chosen = [variable for variable in variables if self._is_due(variable, wanted, exempt)]
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
        suspects = suspected(chosen, left, exempt)
        used = check_kept(
            chosen, left, suspects, lambda one: is_computed or not self._changes.is_unused(one)
        )
        if meets:
            if self._has_met and primitives.rank() == 0:  # a party that is alone here says why
                names = ", ".join(one.name.removesuffix(":0") for one in chosen[:5])
                more = f" and {len(chosen) - 5} more" if len(chosen) > 5 else ""
                log.info("Parties make equal what came later: %s%s.", names, more)
            self._meet(chosen, optimizers, learned, left, suspects, used)
            self._has_met = True
            _add(self._met, chosen)
            _add(self._shared, [one for place, one in enumerate(chosen) if place not in left])
        else:
            synchronise(chosen, left=left)
        _add(self._equal, [one for place, one in enumerate(chosen) if place not in left])
        _add(self._settled, chosen)
        self._forget(chosen, left)

    def _changed(self, variables: Sequence[tf.Variable], exempt: Collection[int]) -> set[int]:
        """Places of those that a step has changed on any rank; not of ids that are `exempt`.

        Empty where rank 0 alone has: it has loaded a file, or evaluated, and all begin with that.
        """
        own = [
            place
            for place, variable in enumerate(variables)
            if id(variable) not in exempt and self._changes.has(variable)
        ]
        everyone = primitives.gather_objects(own, "which variables steps have changed")
        if len(everyone) > 1 and not any(everyone[1:]):
            return set()
        return {place for places in everyone for place in places}

    def _forget(self, variables: Sequence[tf.Variable], left: Collection[int]) -> None:
        """What has been made equal needs no look any more, unless parties are to meet yet."""
        meets_later = self.first_sync is not None and not self._has_met
        for place, variable in enumerate(variables):
            if not meets_later:
                self._changes.forget(variable)
            elif place not in left:
                self._changes.look(variable)

    def _meeting(self) -> FirstSync | None:
        """What makes equal over parties what has not been; None: nothing does, or need to."""
        if not self._has_met:
            return self.first_sync
        return None if self.next_sync is None else self.next_sync()

    def _have_met(self, trained: Sequence[tf.Variable]) -> bool:
        """Whether parties have met over all of `trained`, or there are none; alike in each."""
        return self.first_sync is None or (
            self._has_met and all(_holds(self._met, one) for one in trained)
        )

    def _is_due(
        self, variable: tf.Variable, wanted: Collection[int], exempt: Collection[int]
    ) -> bool:
        """Whether a variable is to be made equal: over parties if it is `wanted` there."""
        if id(variable) in wanted and not _holds(self._met, variable):
            return True
        return not _holds(self._equal if id(variable) in exempt else self._settled, variable)

    def _is_settled(self, variable: tf.Variable) -> bool:
        return _holds(self._settled, variable)

    def _meet(
        self,
        variables: list[tf.Variable],
        optimizers: Sequence[Any],
        learned: Adapted,
        left: Collection[int],
        suspects: Sequence[int],
        used: Collection[int],
    ) -> None:
        """Makes `variables` equal over the parties, on all ranks.

        What layers have `learned` travels behind them, to be compared. What is `left` to each
        worker travels, too: parties need not have changed the same. Where steps have computed
        `suspects` of it with others of the weights that they `used` than those that come, that is
        an error.
        """
        slots: set[int] = set()
        for optimizer in optimizers:
            if int(optimizer.iterations.numpy()):
                continue
            # Slots that no step has touched are of one number each, nearly all: that crosses the
            # slow tier, not the slot. (ScheduleFreeAdamW has one that begins as the weight.) A
            # party that has made steps already sends more, and the server says so.
            slots |= {id(slot) for slot in _unique(optimizer.variables) if slot.shape.rank}
        sync = self._meeting()

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
            if self._refused is not None:  # whoever tries again; parties meet once
                raise ProtocolError(self._refused)
            synced = sync([*sent, *told]) if sync else sent
            if len(synced) > len(sent):
                check_bytes(learned, synced.pop())
            found = [
                np.broadcast_to(one, value.shape) if short else one
                for one, value, short in zip(synced, values, is_short, strict=True)
            ]
            if any(found[place].tobytes() != values[place].tobytes() for place in used):
                self._refused = computed_with_others(variables[suspects[0]].name)
                raise ProtocolError(self._refused)
            return found

        synchronise(variables, exchange, left)


def _unique(owned: Iterable[Any]) -> list[tf.Variable]:
    """The TensorFlow variables behind `owned`, each once."""
    raw = [one.value if isinstance(one, keras.Variable) else one for one in owned]
    return list({id(one): one for one in raw}.values())


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
