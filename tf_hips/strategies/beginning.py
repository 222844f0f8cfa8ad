# SPDX-License-Identifier: Apache-2.0
"""When replicas are made equal, and which variables that concerns.

In the party    as often as something new is trained: the model's weights and random states, and the
                optimizer's variables; in a custom loop, where no model is known, the variables of
                the gradients and all that was created in the strategy's scope.
Over parties    when the weights that are trained exist; again where parties keep step, when others
                are trained that came later, and in a custom loop whenever ranks meet behind that.
                What else appears later is made equal in the party only, so it must begin equal
                everywhere, as the slots of an optimizer do.

Whether ranks meet here is decided by what they do alike (the first step, the first reduction of a
list of gradients), not by what a rank happens to have: a variable that only one of them made, or
has not collected yet, is an error on all of them and no wait without end.

Before a step     an eager one: when it begins. One in a graph: while it is traced, where it
                  reduces; nothing of it has run by then. A trace that reduces nothing is no
                  occasion: one rank may make it alone. So a later one is, where it has read weights
                  by then that are new: those of a model that it computes with, and may not train.
Changed by steps  what is not trained (gradients that are accumulated, counters) is left to each
                  worker, once a step has changed it on any before ranks met.
Computed before   gradients that steps have kept, or that exist when they are handed over (`kept`,
                  `computed`), are refused where their weights were not the same on all workers.

Invariants: nothing is trained over parties that was not made equal over parties, nor by gradients
of weights that were others on another worker. What a step has written is never another worker's,
but in weights that are trained for the first time.
"""

import dataclasses
import gc
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
from tf_hips.strategies.computed import Handed, Moved, are_fed, computed_before, read
from tf_hips.strategies.kept import check_kept, computed_with_others, suspected
from tf_hips.strategies.references import add, holds, unique
from tf_hips.strategies.replicas import FirstSync, check_equal_shapes, synchronise

STEP = "a step"
_NOTHING = Handed()
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
        # Of those, what came later and was not trained yet: where steps had changed it in one party
        # nobody else knows, so parties meet once more when it is.
        self._early: dict[int, weakref.ref[tf.Variable]] = {}
        self._has_met = False
        self._refused: str | None = None
        self._born = Born()
        # Read by steps that ranks met in already, before they had values or by some ranks alone.
        self._unseen: dict[int, weakref.ref[tf.Variable]] = {}
        self._occasions: set[Hashable] = set()
        # With the function whose second trace is going to follow the first one at once.
        self._awaiting_slots: dict[Hashable, weakref.ref[tf.Graph]] = {}
        self._num_trainable = 0
        self._changes = Changes()
        self._moved = Moved()

    def begin_step(self, inputs: Any = ()) -> None:
        """To be called when a step begins that is in no other one, with what it is called with."""
        self._moved.begin_step(inputs)

    def end_step(self) -> None:
        """To be called when such a step is over."""
        self._moved.end_step()

    def handed(
        self, gradients: Sequence[Any] | None = None, trained: Sequence[tf.Variable] = ()
    ) -> Handed:
        """What is seen of a step that hands over `gradients` of `trained`, or other sums.

        Called where it does, in the graph that is being traced.
        """
        if tf.executing_eagerly():
            return Handed(gradients)
        own, alive = {id(one) for one in trained}, self._alive()
        if gradients is not None and not are_fed(gradients, trained, alive):
            gradients = None
        new = [one for one in alive if _may_be_trained(one) and not self._is_settled(one)]
        found = read(one for one in new if id(one) not in own and not holds(self._unseen, one))
        graphs = functions_being_traced()[:1]
        with tf.init_scope():
            ready = [one for one in found if is_ready(one)]
            # A trace that shows their values is one of another size, maybe: one rank's alone.
            add(
                self._unseen,
                (
                    one
                    for one in found
                    if not is_ready(one) and not any(self._born.is_made_in(one, g) for g in graphs)
                ),
            )
            return Handed(gradients, ready)

    def record(self, variable: tf.Variable, *, in_step: bool = False) -> None:
        """Remembers a variable that was created in the strategy's scope.

        Args:
            variable: the variable.
            in_step: whether a step has made it, which may change it at once.
        """
        self._known.pop(id(variable), None)  # of one that is gone: the order is that of creation
        add(self._known, [variable])
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
        [raw] = unique([variable])
        return holds(self._known, raw)

    def is_equal(self, variables: Iterable[Any]) -> bool:
        """Whether all of `variables` have been made equal."""
        return all(holds(self._equal, variable) for variable in unique(variables))

    def make_equal_in_party(self, variables: Iterable[Any]) -> None:
        """Makes `variables` equal now; they will be again when they are trained. On all ranks."""
        ready = [variable for variable in unique(variables) if is_ready(variable)]
        check_equal_shapes(ready)
        synchronise(ready)

    def of_model(
        self,
        model: keras.Model,
        trained: Sequence[tf.Variable] | None = None,
        optimizer: Any = None,
        handed: Handed = _NOTHING,
    ) -> None:
        """Makes equal what is new in a Keras model.

        Args:
            model: the model whose step this is.
            trained: the variables whose gradients are being reduced; None before the step.
            optimizer: the optimizer that reduces them; None before the step.
            handed: what is seen of the step where it hands over gradients.

        Raises:
            ProtocolError: ranks or parties differ, also in what layers have learned by `adapt`; or
                something is trained over parties that came after these had been made equal; or
                gradients were computed with other weights.
        """
        if not _are_ready(trained):
            return
        if trained and handed.computed is not None:
            self._moved.check(trained, handed.computed)
            if not self.is_equal(trained):
                self._check_alike(trained, is_computed=True)
        # All of the model's, also those that step later: what a backup then gives each worker for
        # itself must not be made equal any more.
        optimizers = [*optimizers_of(model), *([] if optimizer is None else [optimizer])]
        slots = [slot for one in optimizers for slot in one.variables]
        if trained and not self.is_equal(trained):  # on all ranks
            handed = dataclasses.replace(handed, read=self._read_by_all(handed.read))
        owned = [*model.variables, *slots, *(trained or []), *handed.read]
        variables = [variable for variable in unique(owned) if is_ready(variable)]
        if trained is None and self._may_meet_before(model):
            trained = unique(model.trainable_variables)
        certainly, early = trained, []
        if trained and handed.read and self._meeting() is not None:
            trained = [*trained, *handed.read]
            early = list(handed.read) if self._has_met else []
        self._make_equal(
            variables,
            trained,
            optimizers,
            advice="",
            is_collective=False,
            is_used=True,
            is_computed=handed.computed is not None,
            model=model,
            certainly=certainly,
        )
        add(self._early, early)

    def _read_by_all(self, found: Sequence[tf.Variable]) -> list[tf.Variable]:
        """What all ranks have read; what some have looked at alone is no reason to meet later."""
        gc.collect()  # what is gone on one rank must be gone on all
        places = {id(one): (place, one.name) for place, one in enumerate(self._alive())}
        own = [places[id(one)] for one in found]
        everyone = primitives.gather_objects(own, "weights that a step has read")
        by_all = set(own).intersection(*(map(tuple, told) for told in everyone))
        add(self._unseen, (one for one in found if places[id(one)] not in by_all))
        return [one for one in found if places[id(one)] in by_all]

    def of_loop(
        self,
        occasion: Hashable,
        trained: Sequence[tf.Variable] | None = None,
        optimizer: Any = None,
        *,
        graphs: Sequence[tf.Graph] = (),
        handed: Handed = _NOTHING,
    ) -> None:
        """Makes equal what a custom loop uses; once for each `occasion`, equal on all ranks.

        And once more where a step reads weights that ranks have not met over.

        Args:
            occasion: what tells this call from others.
            trained: the variables whose gradients are being reduced, if any are.
            optimizer: the optimizer that reduces them.
            graphs: the functions that are being traced.
            handed: what is seen of the step where it hands over gradients.

        Raises:
            ProtocolError: as in `of_model`; or gradients were computed with other weights.
        """
        is_step = occasion == STEP
        if is_step:
            occasion = (occasion, self._num_trainable)  # again when there is another model
        is_known = occasion in self._occasions
        if is_known and not handed.read:
            self._take_slots(occasion, optimizer, graphs)
            return
        if not _are_ready(trained):
            if primitives.size() > 1 or self.first_sync is not None:
                self._born.check(unique(trained or []), graphs, occasion)
            return
        self._meet_in_loop(trained, optimizer, is_step=is_step, computed=handed.computed)
        if is_known:
            self._take_slots(occasion, optimizer, graphs)
            return
        self._born.note_met(occasion)
        self._occasions.add(occasion)  # not where they differ: they may be mended, and try again
        slots = [] if optimizer is None else unique(optimizer.variables)
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
        if not _are_ready(unique(optimizer.variables)):
            return
        slots = [one for one in unique(optimizer.variables) if not holds(self._settled, one)]
        check_equal_shapes(slots)
        everyone = primitives.gather_objects([digest_of(one) for one in slots], "slots")
        if any(one != everyone[0] for one in everyone):
            synchronise(slots)
        add(self._equal, slots)
        add(self._settled, slots)
        for slot in slots:
            self._changes.forget(slot)

    def _meet_in_loop(
        self,
        trained: Sequence[tf.Variable] | None,
        optimizer: Any,
        *,
        is_step: bool,
        computed: Sequence[Any] | None,
    ) -> None:
        gc.collect()  # what is gone on one rank must be gone on all
        alive = self._alive()
        certainly, early = trained or [], []
        if (is_step or self._has_met) and self._meeting() is not None:
            # Steps may compute gradients with any of these; a lazy model has none yet.
            maybe = [one for one in alive if _may_be_trained(one)]
            trained = unique(one for one in [*certainly, *maybe] if is_ready(one)) or None
            if not is_step:  # before which they are as they were made
                own = {id(one) for one in certainly}
                new = (one for one in trained or [] if not holds(self._met, one))
                early = [one for one in new if id(one) not in own]
        self._check_shared(certainly)
        if computed is not None:
            self._moved.check(certainly, computed)
        self._check_alike(certainly, is_computed=computed is not None)
        optimizers = [] if optimizer is None else [optimizer]
        slots = [slot for one in optimizers for slot in one.variables]
        owned = [*(trained or []), *slots, *alive]
        variables = [variable for variable in unique(owned) if is_ready(variable)]
        self._make_equal(
            variables,
            trained,
            optimizers,
            advice=_ADVICE,
            is_collective=True,
            is_used=computed is not None,
            is_computed=computed is not None,
            certainly=certainly,
        )
        add(self._early, early)

    def _may_meet_before(self, model: keras.Model) -> bool:
        """Whether parties may meet before a step: over all weights, or they can once more."""
        if all(layer.built for layer in model._flatten_layers()):
            return True
        weights = unique(model.trainable_variables)
        may_meet_again = self.next_sync is not None and self.next_sync() is not None
        return may_meet_again and bool(weights) and _are_ready(weights)

    def _alive(self) -> list[tf.Variable]:
        """What was created in the scope and is not gone, in that order."""
        known = [reference() for reference in self._known.values()]
        return [variable for variable in known if variable is not None]

    def _check_shared(self, trained: Sequence[tf.Variable]) -> None:
        """Raises if something is trained that was left to each worker when the parties met."""
        for one in trained:
            if holds(self._early, one):
                for made in (self._early, self._met, self._shared):
                    made.pop(id(one), None)
        for one in trained:
            if holds(self._met, one) and not holds(self._shared, one):
                raise ProtocolError(
                    "What is trained must be as it was made, or trained, when the parties are made "
                    f"equal. Received: {one.name}, which steps had changed before"
                )

    def _check_alike(self, trained: Sequence[tf.Variable], *, is_computed: bool) -> None:
        """Raises where ranks train weights that differ, and nothing can make them equal in time.

        Because there are gradients of them; or because that is over, and one rank has loaded others
        since, or a step has set them by the rows of each. Of other parties, their meeting knows.

        Args:
            trained: the weights.
            is_computed: whether there are gradients of them.
        """
        met = [one for one in trained if holds(self._equal, one)]
        chosen = trained if is_computed else met
        if not chosen:
            return
        digests = [digest_of(one) for one in chosen]
        everyone = primitives.gather_objects(digests, "weights that are trained first")
        for variable, *told in zip(chosen, *everyone, strict=True):
            if len(set(told)) == 1:
                continue
            if not holds(self._equal, variable):
                raise ProtocolError(computed_before(variable.name))
            rank = next(rank for rank, one in enumerate(told) if one != told[0])
            raise ProtocolError(
                "Weights that were made equal must be equal when they are trained. Received: "
                f"{variable.name}, which something else has set since, and differs between the "
                f"ranks 0 and {rank}. Load weights on all workers, or on the first one before "
                "anything runs by `strategy.run`; and what a step sets by its own rows must be "
                "reduced (`all_reduce`)."
            )

    def _make_equal(
        self,
        variables: list[tf.Variable],
        trained: Sequence[tf.Variable] | None,
        optimizers: Sequence[Any],
        *,
        advice: str,
        is_collective: bool,
        is_used: bool,
        is_computed: bool,
        model: keras.Model | None = None,
        certainly: Sequence[tf.Variable] | None = None,
    ) -> None:
        """Makes due ones of `variables` equal, over the parties if `trained` has not met.

        Args:
            variables: all that may be due.
            trained: what is trained now, or may be.
            optimizers: whose slots are in `variables`.
            advice: what an error about shapes ends with.
            is_collective: whether all ranks call this, whatever is due.
            is_used: whether steps may have used all of it.
            is_computed: whether gradients of what is trained have their values.
            model: the model, if one is known.
            certainly: what is trained now; None: all of `trained`.
        """
        certainly = (trained if certainly is None else certainly) or []
        exempt = {id(one) for one in certainly}
        self._check_shared(certainly)
        meets = trained is not None and not self._have_met(trained)
        if meets and self._meeting() is None:
            name = next(one.name for one in trained or [] if not holds(self._met, one))
            raise ProtocolError(
                "This run trains one model with one optimizer, all of which was there when the "
                f"parties were made equal. Received: {name}, which came later"
            )
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
            chosen, left, suspects, lambda one: is_used or not self._changes.is_unused(one)
        )
        # Gradients of these may exist already; of what is trained now that has been looked at.
        others = [
            one
            for place, one in enumerate(chosen)
            if place not in left and _may_be_trained(one) and id(one) not in exempt
        ]
        others = others if is_collective or is_computed else []
        before = [digest_of(one) for one in others]
        if meets:
            if self._has_met and primitives.rank() == 0:  # a party that is alone here says why
                names = ", ".join(one.name.removesuffix(":0") for one in chosen[:5])
                more = f" and {len(chosen) - 5} more" if len(chosen) > 5 else ""
                log.info("Parties make equal what came later: %s%s.", names, more)
            computed = [place for place, one in enumerate(chosen) if id(one) in exempt]
            sync = self._met_over_parties(
                chosen, optimizers, learned, suspects, used, computed if is_computed else []
            )
            synchronise(chosen, sync, left)
            self._has_met = True
            add(self._met, chosen)
            add(self._shared, [one for place, one in enumerate(chosen) if place not in left])
        else:
            synchronise(chosen, left=left)
        add(self._equal, [one for place, one in enumerate(chosen) if place not in left])
        add(self._settled, chosen)
        self._forget(chosen, left)
        if others:
            self._moved.note(others, before, in_step=is_computed)

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
            self._has_met and all(holds(self._met, one) for one in trained)
        )

    def _is_due(
        self, variable: tf.Variable, wanted: Collection[int], exempt: Collection[int]
    ) -> bool:
        """Whether a variable is to be made equal: over parties if it is `wanted` there."""
        if id(variable) in wanted and not holds(self._met, variable):
            return True
        return not holds(self._equal if id(variable) in exempt else self._settled, variable)

    def _is_settled(self, variable: tf.Variable) -> bool:
        return holds(self._settled, variable)

    def _met_over_parties(
        self,
        variables: list[tf.Variable],
        optimizers: Sequence[Any],
        learned: Adapted,
        suspects: Sequence[int],
        used: Collection[int],
        computed: Collection[int],
    ) -> FirstSync:
        """How `variables` are made equal over the parties.

        What layers have `learned` travels behind them, to be compared. What is left to each worker
        travels, too: parties need not have changed the same. Where steps have computed `suspects`
        of it with others of the weights that they `used` than those that come, that is an error;
        so it is where there are gradients of weights that were `computed` with others.
        """
        slots: set[int] = set()
        for optimizer in optimizers:
            if int(optimizer.iterations.numpy()):
                continue
            # Slots that no step has touched are of one number each, nearly all: that crosses the
            # slow tier, not the slot. (ScheduleFreeAdamW has one that begins as the weight.) A
            # party that has made steps already sends more, and the server says so.
            slots |= {id(slot) for slot in unique(optimizer.variables) if slot.shape.rank}
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
            moved = {
                place
                for place in {*used, *computed}
                if found[place].tobytes() != values[place].tobytes()
            }
            if moved & {*computed}:
                self._refused = computed_before(variables[min(moved & {*computed})].name)
            elif moved:
                self._refused = computed_with_others(variables[suspects[0]].name)
            if self._refused is not None:
                raise ProtocolError(self._refused)
            return found

        return exchange


def _may_be_trained(variable: tf.Variable) -> bool:
    return bool(variable.trainable) and variable.dtype.is_floating


def _are_ready(trained: Sequence[tf.Variable] | None) -> bool:
    # A tf.function that creates variables is traced twice, and runs the second trace only: then
    # they have their values.
    return all(is_ready(variable) for variable in trained or [])
