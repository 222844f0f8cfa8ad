# SPDX-License-Identifier: Apache-2.0
"""How replicas are made equal when they meet, and what they have met over.

In the party    all get rank 0's values, but of what steps have written
Over parties    rank 0 of each party gets the first party's, and gives them to its own

A meeting compares before it sets anything: shapes, what layers have learned, what steps have kept
or computed with weights that are about to become others. Every difference is an error on all ranks.

When replicas meet is `beginning`'s.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.ps.terms.weights import equal_bytes
from tf_hips.strategies.adapted import Adapted, adapted, as_bytes, check_bytes, check_equal
from tf_hips.strategies.changes import Changes, digest_of, is_ready
from tf_hips.strategies.computed import Moved, computed_before
from tf_hips.strategies.gradients import check_order
from tf_hips.strategies.kept import check_kept, computed_with_others, suspected
from tf_hips.strategies.references import References, add, holds, may_be_trained, unique
from tf_hips.strategies.replicas import (
    FirstSync,
    check_equal_shapes,
    check_order_over_parties,
    names_as_bytes,
    synchronise,
)
from tf_hips.strategies.settings import check_settings, settings_of


class Meetings:
    """What the replicas of one strategy have met over, and how they do.

    Attributes:
        first_sync: what makes weights equal over parties first; None: there is one party.
        next_sync: says what makes equal over parties what came later; None, or what it returns:
            nothing does.
        has_met: whether the parties have met.
        have_own_optimizers: whether each rank makes steps of its own, as members of a loop do.
        moved: the weights that meetings have made others.
    """

    def __init__(self, changes: Changes) -> None:
        """There was no meeting.

        Args:
            changes: what steps have changed.
        """
        self.first_sync: FirstSync | None = None
        self.next_sync: Callable[[], FirstSync | None] | None = None
        self.has_met = False
        self.have_own_optimizers = False
        self.moved = Moved()
        self._changes = changes
        self._equal: References = {}
        # Made equal, or left to each worker because steps had changed it.
        self._settled: References = {}
        # Those over which parties have met, and of them those that were made equal. The first ones
        # are the same in all parties; what steps had changed by then may be others in each.
        self._met: References = {}
        self._shared: References = {}
        # Of those, what came later and was not trained yet: where steps had changed it in one party
        # nobody else knows, so parties meet once more when it is.
        self._early: References = {}
        self._refused: str | None = None

    def is_equal(self, variables: Iterable[Any]) -> bool:
        """Whether all of `variables` have been made equal."""
        return all(holds(self._equal, variable) for variable in unique(variables))

    def is_settled(self, variable: tf.Variable) -> bool:
        """Whether replicas need not meet over a variable, but where it is trained."""
        return holds(self._settled, variable)

    def is_met(self, variable: tf.Variable) -> bool:
        """Whether parties have met over a variable."""
        return holds(self._met, variable)

    def note_early(self, variables: Iterable[tf.Variable]) -> None:
        """Of `variables`, which came later, it is not certain that they are trained."""
        add(self._early, variables)

    def over_parties(self) -> FirstSync | None:
        """What makes equal over parties what has not been; None: nothing does, or need to."""
        if not self.has_met:
            return self.first_sync
        return None if self.next_sync is None else self.next_sync()

    def make_slots_equal(self, slots: Sequence[tf.Variable]) -> None:
        """Compares what begins equal, nearly all, and makes it equal where it differs."""
        slots = [one for one in slots if not holds(self._settled, one)]
        check_equal_shapes(slots)
        everyone = primitives.gather_objects([digest_of(one) for one in slots], "slots")
        if any(one != everyone[0] for one in everyone):
            synchronise(slots)
        add(self._equal, slots)
        add(self._settled, slots)
        for slot in slots:
            self._changes.forget(slot)

    def make_equal_in_party(self, variables: Iterable[Any]) -> None:
        """Makes `variables` equal now; they will be again when they are trained. On all ranks."""
        ready = [variable for variable in unique(variables) if is_ready(variable)]
        check_equal_shapes(ready)
        synchronise(ready)

    def check_shared(self, trained: Sequence[tf.Variable]) -> None:
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

    def check_alike(self, trained: Sequence[tf.Variable], *, is_computed: bool) -> None:
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
        own = [
            [f"{one.dtype.name}{one.shape.as_list()}", one.name.removesuffix(":0"), digest_of(one)]
            for one in chosen
        ]
        everyone = primitives.gather_objects(own, "weights that are trained first")
        kinds = [[kind for kind, *_ in told] for told in everyone]
        for rank, told in enumerate(kinds):
            if told != kinds[0]:
                raise ProtocolError(
                    "All ranks must hand over gradients of the same variables, in one order. "
                    f"Received: those of {_some(kinds[0])} on rank 0 and of {_some(told)} on rank "
                    f"{rank}"
                )
        check_order([[name for _, name, _ in told] for told in everyone])
        digests = [[digest for *_, digest in told] for told in everyone]
        for variable, *told in zip(chosen, *digests, strict=True):
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

    def make_equal(
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
        self.check_shared(certainly)
        meets = trained is not None and not self._have_met(trained)
        if meets and self.over_parties() is None:
            name = next(one.name for one in trained or [] if not holds(self._met, one))
            raise ProtocolError(
                "This run trains one model with one optimizer, all of which was there when the "
                f"parties were made equal. Received: {name}, which came later"
            )
        chosen = variables
        if not meets or self.has_met:
            wanted = {id(one) for one in trained or []} if meets else set()
            chosen = [variable for variable in variables if self._is_due(variable, wanted, exempt)]
        # Nothing to do, nothing to say: a step of a model may be traced again on one rank only (a
        # last batch of another size).
        if not chosen and not is_collective:
            return
        if optimizers and not self.have_own_optimizers:
            _check_settings(optimizers)
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
            if place not in left and may_be_trained(one) and id(one) not in exempt
        ]
        others = others if is_collective or is_computed else []
        before = [digest_of(one) for one in others]
        if meets:
            if self.has_met and primitives.rank() == 0:  # a party that is alone here says why
                names = ", ".join(one.name.removesuffix(":0") for one in chosen[:5])
                more = f" and {len(chosen) - 5} more" if len(chosen) > 5 else ""
                log.info("Parties make equal what came later: %s%s.", names, more)
            computed = [place for place, one in enumerate(chosen) if id(one) in exempt]
            sync = self._met_over_parties(
                chosen,
                optimizers,
                learned,
                suspects,
                used,
                computed if is_computed else [],
                is_loop=model is None,
            )
            synchronise(chosen, sync, left)
            self.has_met = True
            add(self._met, chosen)
            add(self._shared, [one for place, one in enumerate(chosen) if place not in left])
        else:
            synchronise(chosen, left=left)
        add(self._equal, [one for place, one in enumerate(chosen) if place not in left])
        add(self._settled, chosen)
        self._forget(chosen, left)
        if others:
            self.moved.note(others, before, in_step=is_computed)

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
        meets_later = self.first_sync is not None and not self.has_met
        for place, variable in enumerate(variables):
            if not meets_later:
                self._changes.forget(variable)
            elif place not in left:
                self._changes.look(variable)

    def _have_met(self, trained: Sequence[tf.Variable]) -> bool:
        """Whether parties have met over all of `trained`, or there are none; alike in each."""
        return self.first_sync is None or (
            self.has_met and all(holds(self._met, one) for one in trained)
        )

    def _is_due(
        self, variable: tf.Variable, wanted: Collection[int], exempt: Collection[int]
    ) -> bool:
        """Whether a variable is to be made equal: over parties if it is `wanted` there."""
        if id(variable) in wanted and not holds(self._met, variable):
            return True
        return not holds(self._equal if id(variable) in exempt else self._settled, variable)

    def _met_over_parties(
        self,
        variables: list[tf.Variable],
        optimizers: Sequence[Any],
        learned: Adapted,
        suspects: Sequence[int],
        used: Collection[int],
        computed: Collection[int],
        *,
        is_loop: bool,
    ) -> FirstSync:
        """How `variables` are made equal over the parties.

        What layers have `learned` travels behind them, and of a loop's variables the names where
        two are alike but for these, to be compared. What is left to each worker travels, too:
        parties need not have changed the same. Where steps have computed `suspects` of it with
        others of the weights that they `used` than those that come, that is an error; so it is
        where there are gradients of weights that were `computed` with others.
        """
        slots: set[int] = set()
        for optimizer in optimizers:
            if int(optimizer.iterations.numpy()):
                continue
            # Slots that no step has touched are of one number each, nearly all: that crosses the
            # slow tier, not the slot. (ScheduleFreeAdamW has one that begins as the weight.) A
            # party that has made steps already sends more, and the server says so.
            slots |= {id(slot) for slot in unique(optimizer.variables) if slot.shape.rank}
        sync = self.over_parties()
        kinds = {(one.dtype.name, *one.shape) for one in variables}
        is_told = is_loop and len(kinds) < len(variables)

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
            told += [names_as_bytes(variables)] if is_told else []
            if self._refused is not None:  # whoever tries again; parties meet once
                raise ProtocolError(self._refused)
            synced = sync([*sent, *told]) if sync else sent
            if is_told and sync:
                check_order_over_parties(variables, synced.pop())
            if len(synced) > len(sent):
                check_bytes(learned, synced.pop())
            found = [
                np.broadcast_to(one, value.shape) if short else one
                for one, value, short in zip(synced, values, is_short, strict=True)
            ]
            moved = {
                place
                for place in {*used, *computed}
                if not equal_bytes(found[place], values[place])
            }
            if moved & {*computed}:
                self._refused = computed_before(variables[min(moved & {*computed})].name)
            elif moved:
                self._refused = computed_with_others(variables[suspects[0]].name)
            if self._refused is not None:
                raise ProtocolError(self._refused)
            return found

        return exchange


def _some(kinds: Sequence[str]) -> str:
    more = f" and {len(kinds) - 5} more" if len(kinds) > 5 else ""
    return ", ".join(kinds[:5]) + more


def _check_settings(optimizers: Sequence[Any]) -> None:
    """Compares how the ranks' optimizers make steps; all of it travels only where it differs."""
    own = settings_of(optimizers)
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]
    if len({*primitives.gather_objects(digest, "optimizers")}) > 1:
        everyone = primitives.gather_objects(own, "settings of optimizers")
        check_settings([(f"rank {rank}", one) for rank, one in enumerate(everyone)])
