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
                  Parties meet behind the trace of one that reduces no list of gradients.
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
from collections.abc import Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_hips.callbacks.optimizers import optimizers_of
from tf_hips.comm import primitives
from tf_hips.strategies.born import Born, functions_being_traced
from tf_hips.strategies.changes import Changes, is_ready
from tf_hips.strategies.computed import Handed, are_fed, read
from tf_hips.strategies.meetings import Meetings
from tf_hips.strategies.references import References, add, holds, may_be_trained, unique
from tf_hips.strategies.replicas import in_one_order

STEP = "a step"
_NOTHING = Handed()
_ADVICE = ". Variables of one rank alone belong outside of `strategy.scope()`."


class Beginning:
    """Remembers the variables of one strategy, and lets replicas meet over them.

    Attributes:
        meetings: which of them are equal on all replicas, and how they become so.
    """

    def __init__(self) -> None:
        """Knows no variable."""
        self._known: References = {}
        self._born = Born()
        # Read by steps that ranks met in already, before they had values or by some ranks alone.
        self._unseen: References = {}
        self._occasions: set[Hashable] = set()
        # With the function whose second trace is going to follow the first one at once.
        self._awaiting_slots: dict[Hashable, weakref.ref[tf.Graph]] = {}
        self._num_trainable = 0
        self._changes = Changes()
        self.meetings = Meetings(self._changes)

    def begin_step(self, inputs: Any = ()) -> None:
        """To be called when a step begins that is in no other one, with what it is called with."""
        self.meetings.moved.begin_step(inputs)

    def end_step(self) -> None:
        """To be called when such a step is over."""
        self.meetings.moved.end_step()

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
        new = [one for one in alive if may_be_trained(one) and not self.meetings.is_settled(one)]
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
                self._changes.look_at_new(self.meetings.is_settled)

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
            self.meetings.moved.check(trained, handed.computed)
            if not self.meetings.is_equal(trained):
                self.meetings.check_alike(trained, is_computed=True)
        # All of the model's, also those that step later: what a backup then gives each worker for
        # itself must not be made equal any more.
        optimizers = [*optimizers_of(model), *([] if optimizer is None else [optimizer])]
        slots = [slot for one in optimizers for slot in one.variables]
        if trained and not self.meetings.is_equal(trained):  # on all ranks
            handed = dataclasses.replace(handed, read=self._read_by_all(handed.read))
        owned = [*model.variables, *slots, *(trained or []), *handed.read]
        variables = [variable for variable in unique(owned) if is_ready(variable)]
        if trained is None and self._may_meet_before(model):
            trained = unique(model.trainable_variables)
        certainly, early = trained, []
        if trained and handed.read and self.meetings.over_parties() is not None:
            trained = [*trained, *handed.read]
            early = list(handed.read) if self.meetings.has_met else []
        self.meetings.make_equal(
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
        self.meetings.note_early(early)

    def _read_by_all(self, found: Sequence[tf.Variable]) -> list[tf.Variable]:
        """What all ranks have read; what some have looked at alone is no reason to meet later."""
        gc.collect()  # what is gone on one rank must be gone on all
        alive = in_one_order(self._alive(), of_model=True)
        places = {id(one): (place, one.name) for place, one in enumerate(alive)}
        found = sorted(found, key=lambda one: places[id(one)])
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
            if primitives.size() > 1 or self.meetings.first_sync is not None:
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

    def of_sums(self) -> None:
        """Lets parties meet behind the trace of a step that reduced, but no list of gradients.

        Nothing of it has run by then, and it may train any weights that there are.

        Raises:
            ProtocolError: as in `of_model`.
        """
        meetings = self.meetings
        if meetings.first_sync is None or meetings.has_met:
            return
        if any(may_be_trained(one) and is_ready(one) for one in self._alive()):
            self._meet_in_loop(None, None, is_step=True, computed=None)

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
        self.meetings.make_slots_equal(unique(optimizer.variables))

    def _meet_in_loop(
        self,
        trained: Sequence[tf.Variable] | None,
        optimizer: Any,
        *,
        is_step: bool,
        computed: Sequence[Any] | None,
    ) -> None:
        gc.collect()  # what is gone on one rank must be gone on all
        certainly, early = trained or [], []
        optimizers = [] if optimizer is None else [optimizer]
        slots = [slot for one in optimizers for slot in one.variables]
        # What is trained, and its slots, have an order in which they are handed over.
        known = {id(one) for one in [*certainly, *slots]}
        others = in_one_order([one for one in self._alive() if id(one) not in known])
        if (is_step or self.meetings.has_met) and self.meetings.over_parties() is not None:
            # Steps may compute gradients with any of these; a lazy model has none yet.
            maybe = [one for one in others if may_be_trained(one)]
            trained = unique(one for one in [*certainly, *maybe] if is_ready(one)) or None
            if not is_step:  # before which they are as they were made
                own = {id(one) for one in certainly}
                new = (one for one in trained or [] if not self.meetings.is_met(one))
                early = [one for one in new if id(one) not in own]
        self.meetings.check_shared(certainly)
        if computed is not None:
            self.meetings.moved.check(certainly, computed)
        self.meetings.check_alike(certainly, is_computed=computed is not None)
        owned = [*(trained or []), *slots, *others]
        variables = [variable for variable in unique(owned) if is_ready(variable)]
        self.meetings.make_equal(
            variables,
            trained,
            optimizers,
            advice=_ADVICE,
            is_collective=True,
            is_used=computed is not None,
            is_computed=computed is not None,
            certainly=certainly,
        )
        self.meetings.note_early(early)

    def _may_meet_before(self, model: keras.Model) -> bool:
        """Whether parties may meet before a step: over all weights, or they can once more."""
        if all(layer.built for layer in model._flatten_layers()):
            return True
        weights = unique(model.trainable_variables)
        next_sync = self.meetings.next_sync
        may_meet_again = next_sync is not None and next_sync() is not None
        return may_meet_again and bool(weights) and _are_ready(weights)

    def _alive(self) -> list[tf.Variable]:
        """What was created in the scope and is not gone, in that order."""
        known = [reference() for reference in self._known.values()]
        return [variable for variable in known if variable is not None]


def _are_ready(trained: Sequence[tf.Variable] | None) -> bool:
    # A tf.function that creates variables is traced twice, and runs the second trace only: then
    # they have their values.
    return all(is_ready(variable) for variable in trained or [])
