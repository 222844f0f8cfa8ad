# SPDX-License-Identifier: Apache-2.0
"""What goes up at a meeting and what comes down, and what both are measured from.

    reference    the weights that the members of a party had after their last meeting
    milestone    those that the parties had after their last exchange; mostly the same

    x = reference - w            averaged in the party, where its workers differ
    x = milestone - w            goes up, and a step s comes down
    w, reference, milestone      become milestone - s

What another party has moved does not count, where a backup of it was taken up (`forget_movement`).

Invariant: w is computed from what all have received and from what all had, so it is equal on all,
bit for bit.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips.comm.compressed import MakeVariable
from tf_hips.errors import ProtocolError
from tf_hips.loops.bearing import Bearing
from tf_hips.loops.between import Between
from tf_hips.loops.meeting import Meeting
from tf_hips.loops.outer import Outer
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.strategies import lying
from tf_hips.strategies.gradients import Gradient
from tf_hips.strategies.loan import WORKER, Loan, LoopSum
from tf_hips.strategies.logs import digests
from tf_hips.strategies.party import PartyStrategy
from tf_hips.strategies.statistics import (
    factor_for,
    floating_statistics,
    moved_by,
    movement,
    moving_statistics,
)

_WIDE_BYTES = 4  # of the smallest type that sums are made in


class Exchange:
    """The sums of one loop, and the variables that they are of."""

    def __init__(
        self,
        loop: Any,
        strategy: PartyStrategy,
        loan: Loan,
        outer: Outer,
        *,
        has_milestone: bool,
        averages_statistics: bool,
    ) -> None:
        """Has nothing yet: see `make`.

        Args:
            loop: what decides about what is sent, a `Loop`.
            strategy: its strategy.
            loan: its hold on the strategy.
            outer: makes steps of what comes down.
            has_milestone: whether parties exchange more rarely than their workers meet.
            averages_statistics: whether floating variables that are not trained are averaged.
        """
        self._loop = loop
        self._strategy = strategy
        self._loan = loan
        self._outer = outer
        self._has_milestone = has_milestone
        self._averages_statistics = averages_statistics
        self._rule = strategy.rule
        self._in_party: LoopSum | None = None
        self._over_parties: LoopSum | None = None
        self.trained: list[tf.Variable] = []
        self._found: frozenset[int] = frozenset()  # ids of all that the model had then
        self.reference: list[tf.Variable] = []
        self._milestone: list[tf.Variable] = []
        self._statistics: list[tf.Variable] = []
        # Where nobody waits for anybody, statistics go up as tensors of their own.
        self._moving: list[tf.Variable] = []
        self._measured: list[tf.Variable] = []  # what statistics were after the last meeting
        # What others have sent of the open round: reference - w, and milestone - reference.
        self._of_others: list[tf.Tensor] = []
        self._of_others_in_party: list[tf.Tensor] = []

    def find(self, model: keras.Model) -> None:
        """Looks which variables there are.

        Raises:
            ValueError: they do not exist yet, or nothing is trained.
        """
        self.trained = [_raw(one) for one in model.trainable_variables]
        # Who waits for nobody sends them; frozen weights need not travel.
        chosen = floating_statistics if self._loan.keeps_step else moving_statistics
        self._statistics = chosen(model) if self._averages_statistics else []
        self._found = frozenset(id(_raw(one)) for one in model.variables)
        if not self.trained or not self._strategy.beginning.meetings.is_equal(self.trained):
            raise ValueError(
                f"The model `{model.name}` must be built before `fit`, and have something to "
                "train: call it on a batch, or give its first layer a shape. Received: a model "
                "whose weights do not exist yet"
            )

    def check(self, model: keras.Model) -> None:
        """Looks whether nothing is trained by now that is not exchanged.

        Raises:
            ValueError: layers were frozen when the loop began to train, and are not any more; or
                have got more weights since.
        """
        known = {id(one) for one in self.trained}
        more = [one for one in model.trainable_variables if id(_raw(one)) not in known]
        came_later = [one for one in more if id(_raw(one)) not in self._found]
        why = "a model whose layers are not frozen any more"
        if came_later:
            more = came_later
            why = "weights that came after the loop's first `fit`, or call `enable_lora` before it"
        if more:
            raise ValueError(
                "What a loop trains must be trainable when it first trains: make another strategy "
                f"and loop for {why}. Received: `{more[0].path}`"
                + (f" and {len(more) - 1} more" if len(more) > 1 else "")
            )

    def check_step(self, variables: Sequence[tf.Variable]) -> None:
        """Looks whether what a training step has gradients of is exchanged.

        Args:
            variables: what an optimizer trains in the step.

        Raises:
            ValueError: a variable is not, so that members would keep their own of it.
        """
        exchanged = self.trained if self._loan.corrects() else [*self.trained, *self._statistics]
        known = {id(one) for one in exchanged}
        new = [one for one in variables if id(one) not in known]
        if new:
            raise ValueError(
                "What a loop trains must be among the model's trainable variables when it first "
                "trains, which are exchanged: a `keras.Variable` among the model's attributes is "
                "one of them, and a `tf.Variable` is not. "
                f"Received: a gradient of `{new[0].name.removesuffix(':0')}`, "
                f"{new[0].dtype.name}{new[0].shape.as_list()}"
                + (f", and of {len(new) - 1} more" if len(new) > 1 else "")
            )

    def make(self, make: MakeVariable) -> None:
        """Makes what is kept from round to round."""
        self.reference = _copies(self.trained, make, "reference")
        self._milestone = self.reference
        if self._has_milestone:
            self._milestone = _copies(self.trained, make, "milestone")
        if factor_for(self._strategy) is not None:
            self._moving = self._statistics
        self._measured = _copies(self._statistics, make, "statistic")
        self._outer.make([variable.shape for variable in self.trained], make)

    def open(self) -> None:
        """Makes the sums, whose tensors all parties agree on."""
        trained = [_described(one) for one in self.trained]
        moving = [_described(one) for one in self._moving]
        exchanged = [*trained, *self._loop.more(trained), *moving]
        if self._loan.level == WORKER:
            first = trained if self._loan.has_server else exchanged
            self._in_party = self._loan.make_sum(first, self.trained, over_parties=False)
        if self._loan.has_server:
            self._over_parties = self._loan.make_sum(exchanged, self.trained, over_parties=True)

    @property
    def server_rate(self) -> float:
        """By how much the server multiplies a mean that it sends down, for rules that do."""
        return 1.0 if self._rule is None else float(self._rule.get("learning_rate", 1.0))

    def is_finite(self) -> bool:
        """Whether all that would be sent are numbers.

        What no step changes may be infinite: the mask of a layer, or the least value it has seen.
        """
        return self.is_trained_finite() and all(
            bool(tf.reduce_all(tf.math.is_finite(one) | (one == measured)))
            for one, measured in zip(self._statistics, self._measured, strict=True)
        )

    def is_trained_finite(self) -> bool:
        """The same of what is trained, which is equal wherever workers keep step."""
        return all(bool(tf.reduce_all(tf.math.is_finite(one))) for one in self.trained)

    def statistics(self) -> tuple[int, ...]:
        """Digests of what layers have measured."""
        return tuple(digests(self._statistics))

    def moved(self) -> list[tf.Tensor]:
        """How far this worker has moved since its last meeting: reference - w."""
        moved = _differences(self.reference, self.trained)
        return _without(moved, self._of_others)

    def forget_movement(self) -> None:
        """What has moved so far in this round is another party's, who sends it: it does not count.

        Weights stay: this one goes on from there.
        """
        self._of_others = _differences(self.reference, self.trained)
        if self._has_milestone:
            self._of_others_in_party = _differences(self._milestone, self.reference)

    def forget_dropped(self, places: Iterable[int]) -> None:
        """Encoding has dropped nothing of these tensors so far: what it kept does not go up."""
        if self._over_parties is not None:
            self._over_parties.forget_dropped(places)

    def __call__(self, meeting: Meeting, place: tuple[int, int], *, is_whole: bool) -> None:
        """Sends, receives, and sets the model.

        Args:
            meeting: what those who meet have said.
            place: party and number of this worker among them.
            is_whole: whether all parties meet; else the workers of this one.
        """
        if is_whole and meeting.is_idle:
            return  # what something else has set since the last meeting stays: see `agree`
        self._exchange(meeting, place, is_whole=is_whole)
        self.average(meeting, place, is_whole=is_whole)

    def average(self, meeting: Meeting, place: tuple[int, int], *, is_whole: bool) -> None:
        """Averages statistics, where those who meet wait for each other; as a call."""
        if self._statistics and not self._moving:
            with self._loan.whole() if is_whole else self._loan.in_party():
                self._average_statistics(meeting, place)
            for measured, variable in zip(self._measured, self._statistics, strict=True):
                measured.assign(variable.read_value(), read_value=False)

    def agree(self, bearing: Bearing | None, *, has_ended: bool) -> None:
        """What was set since the last meeting, and not by a step, becomes what all have.

        Weights that were loaded between two `fit`s, or that EarlyStopping has restored. All call
        it, at the same moment.

        Where some may lie it is what most parties have set, or nothing.

        Args:
            bearing: how many of the parties may lie.
            has_ended: whether nothing was done here since the end of a `fit`.

        Raises:
            ProtocolError: some may lie, and most parties have set something else.
        """
        if not self._loan.keeps_step:
            return  # what a member has changed goes up with what it moves next
        between = Between(
            self._strategy,
            [*self.trained, *self._statistics],
            self.go_back,
            bearing,
            bears_liars=self._bears_liars(),
        )
        with self._loan.whole():
            names = itertools.chain(*self._loan.names())
            if not between.agree(names, has_ended=has_ended):
                return
        for kept, values in (
            (self._measured, self._statistics),
            (self.reference, self.trained),
            (self._milestone, self.trained),
        ):
            for before, variable in zip(kept, values, strict=True):
                before.assign(variable.read_value(), read_value=False)

    def average_trained(self) -> None:
        """Sets what is trained to its mean over all workers, where these keep step.

        Not where some may lie: a mean is anybody's.
        """
        if self._bears_liars() or not self._loan.keeps_step:
            return
        with self._loan.whole():
            means = self._strategy.reduce_exactly(
                [one.read_value() for one in self.trained], is_mean=True
            )
        for variable, mean in zip(self.trained, means, strict=True):
            variable.assign(mean, read_value=False)

    def _bears_liars(self) -> bool:
        welcome = self._strategy.welcome
        if self._rule is not None and welcome is not None and welcome.bears_liars:
            return True  # any server of the tree: all of it decide alike
        is_robust = self._rule is not None and self._rule.is_robust
        return is_robust or self._strategy.is_robust

    def go_back(self) -> None:
        """Sets the model to what it was after the last meeting."""
        for variable, before in zip(
            [*self.trained, *self._statistics], [*self.reference, *self._measured], strict=True
        ):
            variable.assign(before.read_value(), read_value=False)

    def _exchange(self, meeting: Meeting, place: tuple[int, int], *, is_whole: bool) -> None:
        party, worker = place
        if self._is_alone() and meeting.everyone[0].counts:
            # The mean of one is itself: one worker trains as under plain Keras, bit for bit.
            for variable, reference in zip(self.trained, self.reference, strict=True):
                _set([reference], variable.read_value())
            return
        moved = lying.movement(self._strategy, self._loan, self.moved(), self._loop.round)
        if not meeting.counts(party, worker):  # it may hold NaN
            moved = [tf.zeros_like(one) for one in moved]
        share = meeting.worker_shares(party)[worker]
        if self._in_party is None or self._over_parties is None:
            received = self._final(meeting, moved, place)
        else:
            moved = self._in_party(_scaled(moved, share))
            if not is_whole:
                self._lose(moved, self.reference)
                return
            if self._has_milestone:
                moved = [
                    milestone.read_value() - (reference.read_value() - one)
                    for milestone, reference, one in zip(
                        self._milestone, self.reference, moved, strict=True
                    )
                ]
                moved = _without(moved, self._of_others_in_party)
            received = self._final(meeting, moved, place)
        if received is None:
            self._lose(None, self._milestone)
            for number, variable in enumerate(self._moving):
                variable.assign(self._measured[number].read_value(), read_value=False)
            return
        count = len(received) - len(self._moving)
        self._lose(
            self._outer.steps(self._loop.incoming(received[:count], meeting, place)),
            self._milestone,
        )
        for number, (variable, one) in enumerate(zip(self._moving, received[count:], strict=True)):
            measured = self._measured[number]
            _set([variable, measured], moved_by(variable, measured.read_value(), one))

    def _is_alone(self) -> bool:
        """Whether there is nobody to exchange with, and nothing else to make of a movement."""
        rule = self._outer.rule
        is_mean = rule is not None and rule.name == "fedavg" and rule["learning_rate"] == 1.0
        has_more = bool(self._loop.more([]))
        return (
            not self._loan.has_server and self._loan.member()[1] == 1 and is_mean and not has_more
        )

    def _final(
        self, meeting: Meeting, moved: list[tf.Tensor], place: tuple[int, int]
    ) -> list[tf.Tensor] | None:
        """What comes down for what this member sends; None: nobody has sent anything."""
        party, worker = place
        rule = self._rule
        if self._over_parties is None or rule is None:
            shares = meeting.worker_shares(party)
            if not sum(shares) or self._in_party is None:
                return None
            sent = self._loop.outgoing(moved, meeting, place)
            return self._in_party(_scaled(sent, shares[worker]))
        if meeting.is_void:
            return None
        shares = meeting.party_shares()
        sent = [*self._loop.outgoing(moved, meeting, place), *self._moves(meeting, place)]
        if rule.is_asynchronous:
            return self._over_parties(sent)
        if rule.is_mean:
            weight = REFUSED_WEIGHT if meeting.is_refused(party) else meeting.weight(party)
            return self._over_parties(sent, weight, is_sent=weight > 0)
        if any(one.is_absent for one in meeting.everyone):
            # It multiplies what is there as if those who are absent had sent a share, too.
            raise ProtocolError(
                "Where a server's quorum may go on without a party of a loop, its rule must take a "
                f"mean: `--rule mean`. Received: {rule}"
            )
        return self._over_parties(_scaled(sent, shares[party]))

    def _moves(self, meeting: Meeting, place: tuple[int, int]) -> list[tf.Tensor]:
        """How far the party's statistics have moved, such that the server's rule averages them."""
        factor = factor_for(self._strategy)
        if not self._moving or factor is None:
            return []
        with self._loan.in_party():
            self._average_statistics(meeting, place)
        return _scaled(
            [
                tf.where(
                    measured == variable,
                    tf.zeros_like(measured),
                    movement(variable, measured.read_value(), variable.read_value()),
                )
                for measured, variable in zip(self._measured, self._moving, strict=True)
            ],
            factor,
        )

    def _lose(self, steps: Sequence[tf.Tensor] | None, base: Sequence[tf.Variable]) -> None:
        """Sets what is trained to `base` minus `steps`; None: to `base`."""
        self._of_others = []
        if base is self._milestone:
            self._of_others_in_party = []
        for place, variable in enumerate(self.trained):
            value = base[place].read_value()
            if steps is not None:
                wide = tf.cast(value, tf.float32) if value.dtype.size < _WIDE_BYTES else value
                value = tf.cast(wide - tf.cast(steps[place], wide.dtype), value.dtype)
            kept = {id(one): one for one in (self.reference[place], base[place])}
            _set([variable, *kept.values()], value)

    def _average_statistics(self, meeting: Meeting, place: tuple[int, int]) -> None:
        """Averages what layers have measured, where workers have different values.

        Weights that are equal everywhere (frozen layers) stay as they are, bit for bit.
        """
        party, worker = place
        everyone = meeting.everyone
        told = [one for one in everyone if not one.is_absent]
        chosen = [
            variable
            for number, variable in enumerate(self._statistics)
            if len(told) < len(everyone) or len({one.statistics[number] for one in told}) > 1
        ]
        shares, of_workers = meeting.party_shares(), meeting.worker_shares(party)
        # Of a party that counts for its earlier meetings alone they are what the last one has made.
        counts_before = not sum(of_workers)
        share = shares[party] * (1 / len(of_workers) if counts_before else of_workers[worker])
        if not sum(shares) or meeting.is_void:
            self._measure_again()
            return
        if not chosen:
            return
        measured = {
            id(one): kept for one, kept in zip(self._statistics, self._measured, strict=True)
        }
        own = [measured[id(one)] for one in chosen] if counts_before else chosen
        values = [
            tf.cast(one.read_value(), tf.float64) * share
            if share
            else tf.zeros(one.shape, tf.float64)  # it may hold NaN
            for one in own
        ]
        # Where a quorum goes on without some, shares of those present are less than 1.
        shares_too = [*values, tf.constant([share], tf.float64)]
        *totals, whole = self._strategy.reduce_exactly(shares_too, is_mean=False)
        if not float(whole[0]):
            self._measure_again()  # a quorum has gone on without all that have a share
            return
        for variable, total in zip(chosen, totals, strict=True):
            # A member that has NaN says so, and has no share; one that lies may send it.
            mean, before = tf.cast(total / whole[0], variable.dtype), measured[id(variable)]
            mean = tf.where(tf.math.is_finite(mean), mean, before.read_value())
            variable.assign(mean, read_value=False)

    def _measure_again(self) -> None:
        """Sets statistics to what they were after the last meeting, equal on all."""
        for variable, measured in zip(self._statistics, self._measured, strict=True):
            variable.assign(measured.read_value(), read_value=False)


def _raw(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _described(variable: tf.Variable) -> Gradient:
    return Gradient(variable.name.removesuffix(":0"), tuple(variable.shape), variable.dtype)


def _copies(variables: Sequence[tf.Variable], make: MakeVariable, name: str) -> list[tf.Variable]:
    return [
        make(tf.identity(variable.read_value()), f"{name}_{place}")
        for place, variable in enumerate(variables)
    ]


def _scaled(values: Sequence[tf.Tensor], factor: float) -> list[tf.Tensor]:
    return [value * tf.cast(np.float32(factor), value.dtype) for value in values]


def _differences(before: Sequence[tf.Variable], after: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [one.read_value() - other.read_value() for one, other in zip(before, after, strict=True)]


def _without(values: list[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`values` less `others`, if there are any."""
    if not others:
        return values
    return [one - other for one, other in zip(values, others, strict=True)]


def _set(variables: Sequence[tf.Variable], value: tf.Tensor) -> None:
    for variable in variables:
        variable.assign(value, read_value=False)
