# SPDX-License-Identifier: Apache-2.0
"""The engine of all loops: local phases of `fit`, each followed by a meeting.

    local phase   Keras' own steps. At level "party" the gradients of a party are summed in each of
                  them, at level "worker" each worker trains on its own. Slots of the optimizer stay
                  where they are
    meeting       1. workers say how many steps and rows they have made, and whether their weights
                     are numbers
                  2. at level "worker": how far weights have moved is averaged in the party
                  3. in the last of `party_rounds` meetings: how far the party has moved since the
                     last exchange, x = w_before - w_now, goes up, and a step s comes down (see
                     docs/rules.md): w <- w_before - s
                  4. statistics of layers are averaged; integers and random states are never sent

A loop derives from `Loop` and says

    plan(round_number)  how many local steps this worker makes; None: `is_enough` says when it ends
    is_enough()         whether the local phase ends here; asked after each execution
    is_enough_at_epoch_end()
                        whether it ends with an epoch
    drawn(round_number) which members send in a round
    words(), hear(m)    what it says in a meeting beside `Told`, and what it makes of a `Meeting`
    vocabulary()        types and ranges of all that `words` says; who says something else is named
    more(), outgoing(), incoming()
                        further tensors that are exchanged; what goes up for x; what w loses for
                        what has come down
    make_state(make)    variables of its own: saved in backups, restored before the first step
    check_taking(), forget_own()
                        whether it bears a backup of another party; what it makes of these then
    why_not_voted()     why groups cannot vote on what members send, and steps_of_round()
    has_equal_steps()   whether all members make equally many steps in a round
    facts()             what must be equal where a backup is taken up
    place(), go_on(p)   where a backup finds it, and how it goes on from there
    correction          of the gradients of a local step, an attribute

Workers may make different numbers of steps in a phase. All meet equally often: who has no data left
takes part with nothing until all have ended, or one wants to stop.

Invariant: after a meeting, what is trained is equal on all that have exchanged, bit for bit.
"""

import copy
import itertools
import time
from typing import Any

import keras
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks import resuming
from tf_hips.loops import bearing, checked, quorums, voted
from tf_hips.loops.answers import Answers
from tf_hips.loops.bearing import Bearing, bearing_of
from tf_hips.loops.between import check_adapted
from tf_hips.loops.exchange import Exchange
from tf_hips.loops.executions import Executions
from tf_hips.loops.hearing import check_samples, read_all
from tf_hips.loops.meeting import WEIGHTINGS, Meeting, Told, met, own_words
from tf_hips.loops.methods import Applied
from tf_hips.loops.outer import Outer, chosen_outer
from tf_hips.loops.position import Position
from tf_hips.loops.slots import FirstSlots
from tf_hips.strategies import agreeing
from tf_hips.strategies.loan import PARTY, WORKER, Loan
from tf_hips.strategies.party import PartyStrategy


class Loop(Answers, keras.callbacks.Callback):
    """A Keras callback, first of all callbacks, that decides when replicas meet."""

    correction: Any = None

    def __init__(
        self,
        model: keras.Model,
        strategy: PartyStrategy,
        *,
        level: str | None = None,
        server_optimizer: Any = None,
        weighting: str = "samples",
        party_rounds: int = 1,
        reset_optimizer: bool = False,
        average_statistics: bool = True,
    ) -> None:
        """Takes the uplink of the strategy.

        Args:
            model: built in the scope of `strategy`, and not trained yet.
            strategy: `HierarchicalPS` or `CompressedRing`.
            level: within what replicas stay equal in a local phase: "party" or "worker"; None:
                the party where there is a server.
            server_optimizer: rule of the step, such as "fedadam" (docs/rules.md); None: that of the
                server, else "fedavg".
            weighting: what counts in the mean: "samples", "uniform" or "workers".
            party_rounds: meetings in the party for each one over the parties.
            reset_optimizer: whether slots begin anew in each round.
            average_statistics: whether floating variables that are not trained are averaged.

        Raises:
            ValueError, TypeError: an argument is no such thing.
            ConfigError: the server has another rule, or a quorum and no mean, or its groups cannot
                vote on what is sent.
            ProtocolError: the strategy has trained already, or serves another loop.
        """
        super().__init__()
        if not isinstance(strategy, PartyStrategy):
            raise TypeError(
                "`strategy` must be one of tf_hips: HierarchicalPS or CompressedRing. Received: "
                f"{type(strategy).__name__}"
            )
        if model.distribute_strategy is not strategy:
            raise ValueError(
                f"The model `{model.name}` must be built inside `strategy.scope()` of the loop's "
                "strategy. Received: a model built outside"
            )
        if weighting not in WEIGHTINGS:
            raise ValueError(
                f"`weighting` must be one of {', '.join(WEIGHTINGS)}. Received: {weighting!r}"
            )
        party_rounds = checked.whole("party_rounds", party_rounds)
        rule = chosen_outer(server_optimizer, strategy)
        self._model = model
        self._strategy = strategy
        self._loan = Loan(strategy, self, level or (PARTY if strategy.has_server else WORKER))
        self._bearing = bearing_of(strategy)  # asked by what follows
        quorums.check_rule(strategy.welcome, strategy.rule)
        voted.check(self, strategy)
        voted.check_optimizer(strategy, model, resets=reset_optimizer)
        strategy.loan = self._loan
        self._weighting = weighting
        self._party_rounds = party_rounds
        self._outer = Outer(rule)
        self._was_void = False
        self._slots = FirstSlots(model, resets=reset_optimizer)
        self.applied = Applied(model)
        self._resets_slots = reset_optimizer
        self._exchange = Exchange(
            self,
            strategy,
            self._loan,
            self._outer,
            has_milestone=party_rounds > 1,
            averages_statistics=average_statistics,
        )
        self._executions = Executions(model, self._ran, self._left, self.applied.follow)
        self._position = Position(self)
        self.round = 0
        self._epochs = 0  # ended since the last meeting
        self._total_steps = 0
        self._before = 0  # rows that went into means of the party since its last exchange
        self._steps = 0
        self._steps_of_others = 0  # of the open round, where a backup was another party's
        self._planned: int | None = None
        self._meetings_s = 0.0
        self._is_new = self._is_over = False
        self._has_ended = False  # whether nothing was done since the end of a `fit`
        self._counter: Any = None  # rows and steps since the last meeting

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains as `model.fit` does, with the same arguments.

        An epoch is one of local data. Returns the History of this worker, or of its party.
        """
        callbacks = kwargs.pop("callbacks", None)
        if len(args) > _CALLBACKS:
            callbacks = args[_CALLBACKS]
            args = (*args[:_CALLBACKS], None, *args[_CALLBACKS + 1 :])
        if isinstance(callbacks, keras.callbacks.CallbackList):
            others = [one for one in callbacks.callbacks if one is not self]
            callbacks = copy.copy(callbacks)  # the user's own stays as it is
            callbacks.callbacks = [self, *others]
            self.set_params(callbacks.params)
        else:
            flat = tf.nest.flatten(callbacks) if callbacks else []
            callbacks = [self, *(one for one in flat if one is not self)]
        if len(args) > _CALLBACKS:
            args = (*args[:_CALLBACKS], callbacks, *args[_CALLBACKS + 1 :])
            return self._model.fit(*args, **kwargs)
        return self._model.fit(*args, callbacks=callbacks, **kwargs)

    def __repr__(self) -> str:
        told = (f"{name.strip('`')}={value}" for name, value in self.facts().items())
        return f"<{type(self).__name__}: {', '.join(told)}>"

    # What a loop decides, beside `Answers`.

    def is_enough(self) -> bool:
        """Whether the local phase ends here; asked after each execution."""
        return self._planned is not None and self.steps >= self._planned

    def facts(self) -> dict[str, Any]:
        """What must be equal where a backup is taken up: JSON values by name."""
        return {
            "weighting": self._weighting,
            "party rounds": self._party_rounds,
            "`server_optimizer`": self._outer.text,
            "`reset_optimizer`": self._resets_slots,
        }

    @property
    def steps(self) -> int:
        """Local steps since the last meeting."""
        return self._steps

    @property
    def steps_left(self) -> int | None:
        """Local steps that this phase still has; None: not known before it ends."""
        return self._left()

    @property
    def seconds_in_meetings(self) -> float:
        """Seconds that this worker has spent in meetings so far, waiting for others included."""
        return self._meetings_s

    def place(self) -> dict[str, Any]:
        """Where a backup finds this loop: JSON values by name."""
        return {
            "round": self.round,
            "epochs": self._epochs,
            "total": self._total_steps,
            "before": self._before,
            "applied": self.applied.place(),
            "forgotten": self._slots.place(),
            "over": self._is_over,
        }

    def go_on(self, place: dict[str, Any]) -> None:
        """Takes up the place that a backup has."""
        self.round, self._epochs = place["round"], place["epochs"]
        self._total_steps, self._before = place["total"], place["before"]
        self.applied.go_on(place.get("applied", ()))
        self._slots.go_on(place.get("forgotten", ()))
        # A party comes back behind its last meeting; in a run that goes on, training does, too.
        self._is_over = bool(self._model.stop_training) and place.get("over", False)
        self._has_ended = self._is_over

    def forgotten_steps(self, optimizer: Any) -> int:
        """Steps that an optimizer of the model made before its slots began anew, if it forgot them.

        Its own count began anew with them, unless a schedule of the learning rate goes by it.
        """
        return self._slots.forgotten(optimizer)

    @property
    def epochs(self) -> int:
        """Epochs that have ended since the last meeting."""
        return self._epochs

    @property
    def is_over(self) -> bool:
        """Whether all have met for the last time in this `fit`."""
        return self._is_over

    @property
    def member(self) -> tuple[int, int]:
        """Which member of the last mean this worker belongs to, and how many there are."""
        return self._loan.member()

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self._strategy.config.seed

    @property
    def trained(self) -> list[tf.Variable]:
        """What is trained; there from the first step on."""
        return self._exchange.trained

    @property
    def reference(self) -> list[tf.Variable]:
        """What is trained, as it was after the last meeting."""
        return self._exchange.reference

    @property
    def server_rate(self) -> float:
        """By how much the server multiplies a mean that it sends down, for rules that do."""
        return self._exchange.server_rate

    # What Keras calls.

    def set_model(self, model: keras.Model) -> None:
        """Comes before the other callbacks from now on: they see what a meeting has made.

        Raises:
            ValueError: it is another model.
        """
        if model is not self._model:
            raise ValueError(
                f"A loop trains the model that it was made with, `{self._model.name}`. Received: "
                f"`{model.name}`"
            )
        resuming.put_first(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins a `fit`.

        Raises:
            ValueError: there are no data.
        """
        if (self.params or {}).get("steps") == 0:
            raise ValueError(
                "A worker must have samples to train on. Received: data without a batch"
            )
        voted.check_optimizer(self._strategy, self._model, resets=self._resets_slots)
        self._is_new = True
        self._is_over = False
        self._executions.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Takes up a backup's place before the first step."""
        if self._is_new:
            self._is_new = False
            self._begin()
        self._executions.begin_epoch(epoch)

    def close_epoch(self) -> None:
        """Called when the steps of an epoch are over, before its validation."""
        self._epochs += 1
        if self.steps and not self._is_over and self.is_enough_at_epoch_end():
            self._meet()

    def on_train_end(self, logs: Any = None) -> None:
        """Meets until all have ended, so that all end with the same weights."""
        self.end_training()
        self._executions.end()
        self._loan.closing = None

    def end_training(self) -> None:
        """Meets until all have ended."""
        if self._is_new:  # a backup of a run that was stopped in its last meeting: no epoch is left
            self._is_new = False
            self._begin()
        while not self._is_over:
            self._meet(ends=True)

    def end_average(self) -> None:
        """Keras has made the trained tensors what the optimizer's `use_ema` has averaged.

        Each worker its own: this makes them the mean of all.
        """
        self._exchange.average_trained()

    def agree(self) -> None:
        """Makes weights equal on all that something else has set since a `fit` ended."""
        if self._counter is not None:
            self._exchange.agree(self._bearing, has_ended=self._has_ended)

    # The local phase.

    def _begin(self) -> None:
        strategy, model = self._strategy, self._model
        strategy.state.make_equal(model)
        is_first = self._counter is None
        if is_first:
            self._make()
        self._exchange.check(model)
        self._slots.count()
        self._steps = int(self._counter.numpy()[1])
        self.applied.begin(self._steps)
        if not is_first:
            with self._loan.whole():
                check_adapted(strategy, model)
            self.agree()
        self._planned = self.plan(self.round)
        if self._planned is not None:
            self._planned = max(1, self._planned - self._steps_of_others)
        self._steps_of_others = 0

    def _make(self) -> None:
        """Makes what is kept; what a backup has of it goes into it here."""
        strategy, exchange = self._strategy, self._exchange
        exchange.find(self._model)
        with strategy.state.new_list(exchange.trained) as kept:
            kept.position = self._position
            self._counter = strategy.make_variable(tf.zeros([2], tf.int64), "counter")
            exchange.make(strategy.make_variable)
            self.make_state(strategy.make_variable)
            self._slots.make(strategy.make_variable)
        if strategy.state.is_of_others:
            self.forget_own()
            self.forget_movement()
        self.open_sums()
        self._loan.counter = self._counter
        self._loan.correction = self.correction
        self._loan.check_step = exchange.check_step

    def forget_movement(self) -> None:
        """The steps of the open round were another party's: what follows is what this one sends."""
        self._exchange.forget_movement()
        self._steps_of_others = int(self._counter.numpy()[1])
        self._before = 0
        self._counter.assign(tf.zeros([2], tf.int64), read_value=False)

    def open_sums(self) -> None:
        """Makes the sums of the loop, whose tensors all parties agree on."""
        self._exchange.open()

    def _ran(self) -> None:
        self._has_ended = False
        if self._model.steps_per_execution == 1:
            self._steps += 1
        else:  # data may have ended in an execution
            self._steps = int(self._counter.numpy()[1])
        self.note_steps()
        if self.is_enough():
            self._meet()

    def _left(self) -> int | None:
        return None if self._planned is None else self._planned - self._steps

    # The meeting.

    def _meet(self, *, ends: bool = False) -> None:
        began = time.monotonic()
        self.meet(ends=ends)
        self._meetings_s += time.monotonic() - began

    def meet(self, *, ends: bool = False) -> None:
        """Ends the local phase; called by all that meet, equally often.

        Args:
            ends: whether this worker has no data left.
        """
        began = time.monotonic()
        is_whole = (self.round + 1) % self._party_rounds == 0
        meeting, place = self.talk(ends=ends, is_whole=is_whole)
        if is_whole and meeting.is_last and not ends:
            bearing.tell_last(self.round, meeting)
            quorums.tell_last(self.round, meeting, place[0])
        is_void = place[0] in meeting.void
        if is_void and not self._was_void:
            bearing.tell_void(self.round)
        self._was_void = is_void
        self._exchange(meeting, place, is_whole=is_whole)
        if is_whole:
            voted.note(self._strategy, meeting)
        party, worker = place
        own = meeting.parties[party][worker]
        self._before += own.samples * meeting.counts(party, worker)
        self._before *= not is_whole
        self._strategy.write_event(
            "meeting",
            number=self.round,
            local_steps=self.steps,
            seconds=time.monotonic() - began,
            shares=meeting.party_shares(),
        )
        # Where workers of a party keep step their slots are equal, and what one holds all may hold.
        alike = meeting.parties[party] if meeting.is_equal else [own]
        is_refused = not all(one.is_finite for one in alike)
        if self._resets_slots or is_refused:
            self._slots.restore(is_refused=is_refused)  # they may hold NaN, too
        if is_whole and meeting.is_last:
            self.end()
        self.next_round()

    def talk(self, *, ends: bool, is_whole: bool = True) -> tuple[Meeting, tuple[int, int]]:
        """Says what this worker has done; returns what all have said, and this worker's place.

        Args:
            ends: whether this worker has no data left.
            is_whole: whether all parties meet; else the workers of this one.

        Raises:
            ValueError: a worker has no samples at all.
            ProtocolError: workers are in different rounds, or one says what no worker says.

        Below a robust rule these are errors where they are this party's, or those of most parties.
        """
        with self._loan.whole() if is_whole else self._loan.in_party():
            parties = agreeing.doubted(self._strategy)
            meeting = self._gather(ends, self._bearing if is_whole else None, parties)
            place = self._loan.place()
            names = self._loan.names()
        # Where `epochs` leaves no epoch to anybody, as after a script's own checkpoint, `fit` does
        # nothing, as in plain Keras.
        if self.round == 0 and (self.epochs or not meeting.is_idle):
            check_samples(meeting, names, place[0], parties)
        self.hear(meeting)
        for name, one in zip(itertools.chain(*names), meeting.everyone, strict=True):
            if not one.is_finite:
                self.tell_refused(name)
        return meeting, place

    def next_round(self) -> None:
        """Begins the next local phase."""
        self._total_steps += self.steps
        self._counter.assign(tf.zeros([2], tf.int64), read_value=False)
        self._steps = self._epochs = 0
        self.applied.begin()
        self.round += 1
        self._planned = self.plan(self.round)
        voted.begin(self._strategy)

    def end(self) -> None:
        """Lets `fit` end here, on all workers."""
        self._is_over = self._has_ended = True
        self._model.stop_training = True

    def _gather(
        self, ends: bool, borne: Bearing | None, parties: agreeing.Doubted | None
    ) -> Meeting:
        strategy = self._strategy
        samples, steps = (int(one) for one in self._counter.numpy())
        drawn = self.drawn(self.round)
        own = Told(
            steps,
            samples,
            self._before,
            self._exchange.is_finite(),
            drawn is None or self.member[0] in drawn,
            ends,
            ends and bool(self._model.stop_training),
            self._exchange.statistics(),
            own_words(self),
        )
        gathered = strategy.gather_objects([self.round, own.fields], "a meeting of a loop")
        names = itertools.chain(*self._loan.names())
        count = len(own.statistics)
        everyone = read_all(gathered, names, self.vocabulary(), count, parties, self.round)
        both = None if drawn is None else (drawn, self.drawn(self.round + 1) or frozenset())
        is_equal = self._loan.level == PARTY
        return met(everyone, self._loan.sizes(), self._weighting, is_equal, borne, both)

    def tell_refused(self, name: str) -> None:
        """Names in log and events whose update does not count in this round."""
        self._strategy.write_event("update_refused", number=self.round, who=name)
        log.warning(
            "Round %d goes on without the update of %s: its weights hold NaN or infinity, "
            "as after a loss that is no number. It goes on with those of the others.",
            self.round, name,
        )  # fmt: skip


_CALLBACKS = 5  # the place of `callbacks` among the arguments of `fit`
