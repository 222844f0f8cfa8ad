# SPDX-License-Identifier: Apache-2.0
"""`FedAvg`: local steps or epochs, then a mean of how far they have led.

McMahan et al., 2017, with what others have added to either side of it (see `methods`, and
docs/loops.md for the table).
"""

import itertools
import math
import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks.optimizers import inner
from tf_hips.comm.compressed import MakeVariable
from tf_hips.errors import ConfigError, ToleranceError
from tf_hips.loops import checked, methods, quorums
from tf_hips.loops.engine import Loop
from tf_hips.loops.meeting import SAMPLES, UNIFORM, WORKERS, Meeting, Word
from tf_hips.ps.rules import UpdateRule
from tf_hips.strategies.gradients import Gradient
from tf_hips.strategies.loan import WORKER
from tf_hips.strategies.party import PartyStrategy

# In the text of a `functools.partial`, or of an object with `__call__`.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class FedAvg(Loop):
    """Local training, then a mean of how far it has led, and a step of the server.

        strategy = tf_hips.HierarchicalPS("error_feedback(onebit)")
        with strategy.scope():
            model = ...; model.compile(...)
        loop = tf_hips.FedAvg(model, strategy, local_steps=50, server_optimizer="diloco")
        loop.fit(dataset, epochs=10)

    Members are the parties where the strategy has a server: the workers of one stay equal, step by
    step. Without a server they are the workers. What is exchanged is encoded as gradients are, with
    error feedback. Slots of the optimizer stay with their worker.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: PartyStrategy,
        *,
        local_steps: int | Callable[[int], int] | None = None,
        local_epochs: int | None = None,
        server_optimizer: UpdateRule | str | None = None,
        weighting: str | None = None,
        prox_mu: float = 0.0,
        scaffold: bool = False,
        normalise: bool = False,
        participation: float = 1.0,
        reset_optimizer: bool = False,
        compat: bool = False,
    ) -> None:
        """Takes the uplink of the strategy; before the first step of the model.

        Args:
            model: built and compiled in the scope of `strategy`.
            strategy: `HierarchicalPS` or `CompressedRing`.
            local_steps: steps between two meetings, a number or a function of the round such as
                `tf_hips.loops.PostLocal(steps=8, after=100)`.
            local_epochs: instead of it, epochs of local data.
            server_optimizer: rule of the step that is made of the mean, such as "fedadam" or
                "diloco(learning_rate=0.7)"; see docs/rules.md. None: the server's, else "fedavg".
            weighting: what counts in the mean: "samples" of the round, the default; "uniform", each
                member the same, the default of SCAFFOLD; "workers", each worker the same. Not with
                an asynchronous rule of the server, which weighs by staleness if at all.
            prox_mu: strength of FedProx' proximal term.
            scaffold: whether local steps are corrected by SCAFFOLD's control variates.
            normalise: whether movements are normalised by local steps, as in FedNova.
            participation: the share of members, or as an int their number, that send in a round;
                all where the server's rule is asynchronous, since there is no common round then.
                Below a robust rule rows of the topmost server are drawn, each with all below it.
            reset_optimizer: whether slots of the optimizer begin anew in each round.
            compat: HiPS' FedAvg: each worker trains on its own, each counts the same, and
                statistics of layers are not sent.

        Raises:
            ValueError, TypeError: an argument is out of range, or two exclude each other.
            ConfigError: the server's rule, or the model's optimizer, does not go with the method.
            ProtocolError: the strategy has trained already, or serves another loop.
        """
        if (local_steps is None) == (local_epochs is None):
            raise ValueError(
                "One of `local_steps` and `local_epochs` must be given. Received: "
                f"local_steps={local_steps}, local_epochs={local_epochs}"
            )
        if local_steps is not None and not callable(local_steps):
            local_steps = checked.whole("local_steps", local_steps)
        if local_epochs is not None:
            local_epochs = checked.whole("local_epochs", local_epochs)
        prox_mu = checked.real("prox_mu", prox_mu, math.inf)
        participation = _checked_participation(participation)
        if compat and (weighting is not None or scaffold or normalise):
            raise ValueError(
                "`compat` is HiPS' own mean, and excludes `weighting`, `scaffold` and `normalise`. "
                f"Received: weighting={weighting!r}, scaffold={scaffold}, normalise={normalise}"
            )
        default = WORKERS if compat else UNIFORM if scaffold else SAMPLES
        self._local_steps = local_steps
        self._local_epochs = local_epochs
        self._normalises = normalise
        self._participation = participation
        self._is_compat = compat
        self._proximal = methods.Proximal(prox_mu) if prox_mu else None
        self._controls = methods.ControlVariates(model) if scaffold else None
        self._is_odd = False  # whether c still holds a c_i of this member that is lost
        if scaffold and weighting not in (None, UNIFORM):
            raise ValueError(
                f'SCAFFOLD must have `weighting="uniform"`. Received: weighting={weighting!r}'
            )
        super().__init__(
            model,
            strategy,
            level=WORKER if compat else None,
            server_optimizer=server_optimizer,
            weighting=weighting or default,
            reset_optimizer=reset_optimizer,
            average_statistics=not compat,
        )
        self._check_rule(strategy, weighting)
        if self._proximal is not None or self._controls is not None:
            self.correction = self._correct

    def _check_rule(self, strategy: PartyStrategy, weighting: str | None = None) -> None:
        """Looks whether the method, with the `weighting` asked for, goes with the server's rule."""
        rule = strategy.rule
        if rule is None:
            return
        if (self._controls is not None or self._normalises) and rule.is_asynchronous:
            raise ConfigError(
                "SCAFFOLD and FedNova are for rounds in which all wait for each other. Received: "
                f"the server's rule {rule}"
            )
        if rule.is_asynchronous and (weighting is not None or not self._all_take_part()):
            raise ConfigError(
                "`participation` and `weighting` must be left out where the server's rule waits "
                "for nobody: each member sends when its own phase is over, and there is no common "
                "round to be drawn for or to count in. Received: "
                f"participation={self._participation}, weighting={weighting!r}, rule {rule}"
            )
        if self._controls is not None:
            quorums.check_controls(strategy.welcome)
        bearing = self._bearing
        if self._normalises and bearing is not None and bearing.bears_liars:
            raise ConfigError(
                "FedNova's factors come from what members say of their steps, which a robust rule "
                "does not look at: one number would make all rows longer or shorter. Received: "
                f"normalise=True; the topmost rule is {rule}"
            )
        if bearing is not None:
            rows, wanted = len(bearing.children), self._participation
            if bearing.bears_liars and wanted > rows:  # not a share
                log.warning(
                    "Below a robust rule `participation` is a number of the %d rows of the topmost "
                    "server, so that all take part. Received: participation=%d",
                    rows,
                    wanted,
                )
            try:
                bearing.check_drawn(methods.number_chosen(self._participation, rows))
            except ToleranceError as error:
                raise ConfigError(
                    "`participation` must leave a robust rule of a server as many parties as it "
                    f"needs. Received: participation={self._participation}, rule {rule}, and "
                    f"{error}"
                ) from error
        is_multiple = rule.is_plain or (rule.name == "fedavg" and not rule.is_robust)
        if self._controls is not None and not is_multiple:  # of a mean
            raise ConfigError(
                "With SCAFFOLD the rule of the server must be `sum`, `mean` or `fedavg`, since "
                f"control variates are exchanged, too. Received: {rule}"
            )

    def _all_take_part(self) -> bool:
        count = len(self._drawn_together())
        return methods.number_chosen(self._participation, count) >= count

    def _drawn_together(self) -> list[list[int]]:
        """Members that are drawn for a round or not, each by itself.

        Where some may lie, all below one child of the topmost server: a liar may say any number of
        members, and honest ones would hardly be drawn.
        """
        _, members = self.member
        bearing = self._bearing
        welcome = None if bearing is None else self._strategy.welcome
        if bearing is None or welcome is None or not bearing.bears_liars:
            return [[one] for one in range(members)]
        is_apart = self._loan.level == WORKER
        sizes = [count if is_apart else 1 for count in welcome.workers]
        begins = list(itertools.accumulate(sizes, initial=0))
        return [
            [one for place in child for one in range(begins[place], begins[place + 1])]
            for child in bearing.children
        ]

    # When.

    def plan(self, round_number: int) -> int | None:
        """The steps that were asked for."""
        if not callable(self._local_steps):
            return self._local_steps
        return checked.whole(f"local_steps({round_number})", self._local_steps(round_number))

    def steps_of_round(self) -> int | None:
        """The steps that were asked for, if their number is always the same."""
        return None if callable(self._local_steps) else self._local_steps

    def has_equal_steps(self) -> bool:
        """Whether steps were asked for, and not epochs."""
        return self._local_steps is not None

    def why_not_voted(self) -> str | None:
        """What is sent that depends on more than weights and batches; None: nothing."""
        if self._controls is not None:
            return "SCAFFOLD's control variates are of one member's history. Received: scaffold"
        if self._normalises:
            return (
                "FedNova's factors come from what members say of their steps, which nobody votes "
                "on. Received: normalise=True"
            )
        if not self._all_take_part():
            return (
                "all members of a group must take part. Received: participation="
                f"{self._participation}"
            )
        if self._is_compat:
            return "each worker trains on its own there. Received: compat=True"
        return None

    def is_enough_at_epoch_end(self) -> bool:
        """Whether the epochs that were asked for are over."""
        return self._local_epochs is not None and self.epochs >= self._local_epochs

    def note_steps(self) -> None:
        """Counts the learning rates of the optimizer's steps, for SCAFFOLD."""
        if self._controls is not None:
            self._controls.count(self.applied.of(inner(self.model.optimizer)))

    def next_round(self) -> None:
        """Begins the next local phase."""
        super().next_round()
        if self._controls is not None:
            self._controls.begin_round()

    def place(self) -> dict[str, Any]:
        """Where a backup finds the loop: also what SCAFFOLD has counted."""
        rates = {} if self._controls is None else {"rates": self._controls.rates}
        return {**super().place(), **rates, "odd": self._is_odd}

    def go_on(self, place: dict[str, Any]) -> None:
        """Takes up the place that a backup has."""
        super().go_on(place)
        if self._controls is not None:
            counted, total = place.get("rates", (0, 0.0))
            self._controls.rates = (counted, total)
        self._is_odd = bool(place.get("odd", False))

    def drawn(self, round_number: int) -> frozenset[int] | None:
        """The members drawn for a round, so many as `participation` says; None: all.

        Below a robust rule it says how many rows of the topmost server.
        """
        together = self._drawn_together()
        chosen = methods.number_chosen(self._participation, len(together))
        if chosen >= len(together):
            return None
        found = methods.sampled(self.seed, round_number, len(together), chosen)
        return frozenset(itertools.chain(*(together[one] for one in found)))

    def facts(self) -> dict[str, Any]:
        """What must be equal where a backup is taken up."""
        return {
            **super().facts(),
            "`local_steps`": _text_of(self._local_steps),
            "`local_epochs`": self._local_epochs,
            "`prox_mu`": self._proximal.mu if self._proximal is not None else 0.0,
            "`scaffold`": self._controls is not None,
            "`normalise`": self._normalises,
            "`participation`": self._participation,
            "`compat`": self._is_compat,
        }

    # What.

    def words(self) -> dict[str, Any]:
        """FedNova's a_i, where movements are normalised; of SCAFFOLD whether a c_i is lost."""
        found: dict[str, Any] = {}
        if self._controls is not None:
            found["odd"] = int(self._is_odd)
        if self._normalises:
            mu = 0.0 if self._proximal is None else self._proximal.mu
            found["effective"] = methods.weighed(self.model, self.steps, self.applied.of, mu)
        return found

    def vocabulary(self) -> dict[str, Word]:
        """FedNova's a_i, and SCAFFOLD's word."""
        found = {} if self._controls is None else {"odd": Word(int, most=1)}
        return {**found, "effective": Word()} if self._normalises else found

    def more(self, trained: Sequence[Gradient]) -> list[Gradient]:
        """SCAFFOLD's second tensor for each that is trained."""
        if self._controls is None:
            return []
        return [Gradient(f"{one.name} (control)", one.shape, tf.float32) for one in trained]

    def outgoing(
        self, moved: list[tf.Tensor], meeting: Meeting, place: tuple[int, int]
    ) -> list[tf.Tensor]:
        """Movements, normalised if need be, and changes of control variates."""
        party, worker = place
        own = meeting.parties[party][worker]
        sent = list(moved)
        if self._normalises and own.counts:
            told = [(share, one.words.get("effective", 0.0)) for share, one in meeting.members]
            factor = methods.gain(own.words["effective"], told)
            sent = [one * tf.cast(factor, one.dtype) for one in sent]
        if self._controls is not None:
            is_anew = self._is_anew(meeting)
            if is_anew:  # c holds what was sent of them, and that with what was dropped
                self._exchange.forget_dropped(range(len(moved), 2 * len(moved)))
            sent += self._controls.sent(moved, counts=own.counts, is_anew=is_anew)
        return sent

    def _is_anew(self, meeting: Meeting) -> bool:
        """Whether c is made anew of the c_i of all members, one of whom has lost its own.

        What c holds of the one that is lost would stay there for ever. It waits for a meeting in
        which all count.
        """
        members = meeting.members
        is_odd = any(one.words.get("odd") for one in meeting.everyone)
        return is_odd and all(share > 0 for share, _ in members)

    def incoming(
        self, received: list[tf.Tensor], meeting: Meeting, place: tuple[int, int]
    ) -> list[tf.Tensor]:
        """Steps; what has come down for control variates goes into these."""
        if self._controls is None:
            return received
        count = len(received) // 2
        party, worker = place
        members = meeting.members
        took_part = sum(share > 0 for share, _ in members) / len(members)
        self._controls.take(
            received[count:],
            took_part / self.server_rate,
            is_sent=meeting.counts(party, worker),
        )
        self._is_odd &= not self._is_anew(meeting)
        return received[:count]

    def make_state(self, make: MakeVariable) -> None:
        """Makes the control variates."""
        if self._controls is not None:
            self._controls.make([one.shape for one in self.trained], make)

    def check_taking(self) -> None:
        """Looks whether c can be made anew: servers keep what they have dropped of it so far."""
        if self._controls is not None:
            methods.check_renewal(self._strategy.welcome, self._loan.downlink)

    def forget_own(self) -> None:
        """Another party's c_i says nothing of the data here, nor do its steps."""
        if self._controls is not None:
            self._controls.forget_own()
            self._controls.begin_round()
            self._is_odd = True

    def _correct(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
    ) -> list[tf.Tensor]:
        """Gradients of a local step, with what the method adds to them."""
        places = {id(variable): place for place, variable in enumerate(self.trained)}
        corrected = []
        for gradient, variable in zip(gradients, variables, strict=True):
            place = places[id(variable)]
            if self._proximal is not None:
                gradient += self._proximal.of(variable, self.reference[place])
            if self._controls is not None:
                gradient += self._controls.of(place, gradient.dtype)
            corrected.append(gradient)
        return corrected


def _checked_participation(value: Any) -> int | float:
    """An int or a share; of NumPy's numbers those of Python, which a backup can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`participation` must be a number. Received: participation={value!r}")
    found = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not (found >= 1 if isinstance(found, int) else 0.0 < found <= 1.0):
        raise ValueError(
            "`participation` must be a share above 0 and at most 1, or as an int a number of "
            f"members. Received: participation={value!r}"
        )
    return found


def _text_of(local_steps: Any) -> str:
    """What `local_steps` are, the same in each process: how many, or which function."""
    text = getattr(local_steps, "__qualname__", str(local_steps))
    return _ADDRESS.sub("", text)
