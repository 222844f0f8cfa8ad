# SPDX-License-Identifier: Apache-2.0
"""ESync: each worker makes as many local steps as fit until the slowest has made its own.

    round        local steps, n_i of member i; all arrive at about the same time
    meeting      reports go up with what all say; normalised movements are averaged; the steps of
                 the next round come with the model

A member is a party, which keeps step inside, or where there is no server a worker. Below a server
the times are those of its clock (`ps.calls.pacing`), and it tells members to stop; without one all
workers compute the same plan from what all have said of durations. Rules: `tf_hips.esync`,
docs/esync.md.

Averaging, with p_i the shares, a_i what the steps of member i weigh (n_i for plain SGD), and
t = sum p_j a_j:

    bounded      x = sum p_i x_i min(max(t / a_i, 1), b_i)  normalised as far as its loss asks for
    normalised   x = sum p_i x_i t / a_i                    no member's data count for its speed
    uniform      x = sum p_i x_i                            the paper's

b_i is the loss of member i over that of the others, from 1 to 2: where its data are like theirs,
what they learn lowers it as well. Below a robust rule t and the loss that b_i compares with are
lesser medians over all who have a row, each child of a server one, so that members who lie move
neither out of what honest ones say; normalised averaging, which nothing bounds, is refused there.

Invariant: steps differ, rounds do not: all meet equally often and are equal afterwards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_hips import callbacks
from tf_hips.callbacks import resuming
from tf_hips.comm import primitives
from tf_hips.errors import ConfigError
from tf_hips.esync import RULES
from tf_hips.esync.pacer import Report
from tf_hips.esync.rule import Pace
from tf_hips.loops import checked, methods
from tf_hips.loops.engine import Loop
from tf_hips.loops.losses import PhaseLoss
from tf_hips.loops.meeting import ANY_NUMBER, UNIFORM, WORKERS, Meeting, Told, Word
from tf_hips.loops.paced import Asked, Paced
from tf_hips.loops.timing import Stopwatch
from tf_hips.ps.calls.pacing import PaceClient
from tf_hips.ps.rules import UpdateRule
from tf_hips.strategies.loan import WORKER
from tf_hips.strategies.party import PartyStrategy

BOUNDED, NORMALISED, AVERAGED = "bounded", "normalised", "uniform"
AVERAGINGS = (BOUNDED, NORMALISED, AVERAGED)
# One step of a member that is 100 times slower would be made 50 times as long by t / a_i: the step
# of an optimizer whose learning rate nobody has chosen, which diverges. See docs/decisions/0049.
MOST_GAIN = 2.0
GAIN_WITHOUT_LOSS = 1.5


def most_gain(
    members: Sequence[tuple[float, Told]],
    number: int,
    *,
    middle: Callable[[Sequence[float | None]], float | None] | None = None,
) -> float:
    """How much longer the movement of a member may be made.

    That who has the greater loss weighs more is q-FFL (Li et al., Fair Resource Allocation in
    Federated Learning, ICLR 2020), with q = 1.

    Args:
        members: shares in the mean, and what each member says; `loss` is its mean training loss.
        number: which member.
        middle: where some may lie, the median of what members say: then that of losses takes the
            place of the others' mean, and who says none counts as one whose loss is great.

    Returns:
        From 1 to `MOST_GAIN`; `GAIN_WITHOUT_LOSS` where a loss is not known or negative.
    """
    own = members[number][1].words.get("loss")
    if middle is not None:
        if own is None or own < 0:
            return GAIN_WITHOUT_LOSS
        found = middle([_doubted_loss(one) if share > 0 else None for share, one in members])
        return _gain(own, own if found is None else found)
    others = [one for place, one in enumerate(members) if place != number and one[0] > 0]
    told = [(share, one.words.get("loss")) for share, one in others]
    known = [(share, float(loss)) for share, loss in told if loss is not None and loss >= 0]
    if own is None or not known or len(known) < len(told):
        return GAIN_WITHOUT_LOSS
    mean = sum(share * loss for share, loss in known) / sum(share for share, _ in known)
    return _gain(own, mean)


def _doubted_loss(one: Told) -> float:
    loss = one.words.get("loss")
    return math.inf if loss is None or loss < 0 else float(loss)


def _gain(own: float, others: float) -> float:
    if own <= others:
        return 1.0
    return min(own / others, MOST_GAIN) if others > 0 else MOST_GAIN


class ESync(Loop):
    """Rounds whose local steps are chosen so that uneven members arrive together.

        loop = tf_hips.ESync(model, strategy)
        loop.fit(x, y, epochs=10)

    Slots of the optimizer stay with their worker.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: PartyStrategy,
        *,
        rule: str = "default",
        pace: Pace | str | None = None,
        averaging: str | None = None,
        weighting: str | None = None,
        server_optimizer: UpdateRule | str | None = None,
        reset_optimizer: bool = False,
        state_server: str | None = None,
        epsilon: float = 0.5,
    ) -> None:
        """Takes the uplink of the strategy; before the first step of the model.

        Args:
            model: built and compiled in the scope of `strategy`.
            strategy: `HierarchicalPS` or `CompressedRing`.
            rule: "default", or "compat": the paper's, with a state server.
            pace: parameters of the default rule, a `tf_hips.esync.rule.Pace` or its text such as
                "slowest_steps=8,deadline=0"; equal at all members.
            averaging: "bounded", "normalised" or "uniform"; None: bounded, with `compat` uniform.
            weighting: what counts in the mean: "uniform", each member the same, or "workers", each
                worker the same; None: uniform, with `compat` workers, as in the paper.
            server_optimizer: as for `FedAvg`.
            reset_optimizer: whether slots of the optimizer begin anew in each round.
            state_server: with `compat`, where `tf-hips state-server` listens: `host:port`, or
                `https://host:port` with the certificate of the party.
            epsilon: with `compat`, the rule's margin in seconds.

        Raises:
            ValueError, TypeError: an argument is out of range, or does not go with the rule.
            ConfigError: the server's rule does not go with rounds, or a robust one with what is
                asked for; or the state server's address is none.
            ProtocolError: the strategy has trained already, or serves another loop.
        """
        if rule not in RULES:
            raise ValueError(f"`rule` must be one of {', '.join(RULES)}. Received: {rule!r}")
        is_compat = rule == "compat"
        averaging = averaging or (AVERAGED if is_compat else BOUNDED)
        if averaging not in AVERAGINGS:
            raise ValueError(
                f"`averaging` must be one of {', '.join(AVERAGINGS)}. Received: {averaging!r}"
            )
        weighting = weighting or (WORKERS if is_compat else UNIFORM)
        if weighting not in (UNIFORM, WORKERS):
            raise ValueError(
                f"`weighting` must be {UNIFORM} or {WORKERS}: samples of a round would count for "
                f"the speed of a member. Received: {weighting!r}"
            )
        if is_compat != (state_server is not None):
            raise ValueError(
                '`state_server` goes with `rule="compat"`, which needs one. Received: '
                f"rule={rule!r}, state_server={state_server!r}"
            )
        if is_compat and pace is not None:
            raise ValueError(
                f'`pace` is of the default rule, and `rule="compat"` excludes it. Received: {pace}'
            )
        epsilon = checked.real("epsilon", epsilon, math.inf)
        super().__init__(
            model,
            strategy,
            level=WORKER if is_compat else None,
            server_optimizer=server_optimizer,
            weighting=weighting,
            reset_optimizer=reset_optimizer,
        )
        above = strategy.rule
        if above is not None and above.is_asynchronous:
            raise ConfigError(
                "ESync is for rounds in which all wait for each other. Received: the server's "
                f"rule {above}"
            )
        self._averaging = averaging
        self._bears_liars = self._bearing is not None and self._bearing.bears_liars
        if averaging == NORMALISED and self._bears_liars:
            raise ConfigError(
                "Normalised averaging has factors that come from what members say of their steps, "
                "which a robust rule does not look at: one number would make all rows longer or "
                f'shorter; averaging="{BOUNDED}" takes medians of them. Received: '
                f'averaging="{NORMALISED}"; the topmost rule is {above}'
            )
        if is_compat and self._bears_liars:
            raise ConfigError(
                "The paper's rule believes what workers tell the state server: below a robust rule "
                "one that says its steps are long would keep the others from ending a round; "
                f'rule="default" bounds such claims. Received: rule="compat"; the rule is {above}'
            )
        has_others = self._loan.level == WORKER and primitives.size() > 1
        if averaging != AVERAGED and has_others and strategy.has_server:
            raise ConfigError(
                f"{averaging.capitalize()} averaging with the paper's rule is for parties of one "
                f"worker below a server. Received: {primitives.size()} workers in this party"
            )
        self._watch = Stopwatch()
        self._loss = PhaseLoss(model)
        # Workers of a party that keep step may not decide alone when a local phase ends.
        self._is_alone = self._loan.level == WORKER or primitives.size() == 1
        self._asked: Asked | None = None
        self._paced: Paced | None = None
        if state_server is not None:
            uplink = strategy.config.uplink
            identity = None if uplink is None else uplink.tls
            self._asked = Asked(state_server, identity, strategy.global_rank, epsilon)
        else:
            chosen = Pace.parse(pace) if isinstance(pace, str) else pace
            self._paced = Paced(chosen if chosen is not None else Pace())
        self._paused_s = 0.0
        self._begun: int | None = None  # the round of the local phase
        self._told: dict[str, Any] = {}
        self._waits = Stopwatch()
        self._pacing: PaceClient | None = None

    # When.

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins a `fit`; with the paper's rule, a table at the state server.

        Raises:
            ConfigError: workers that make different numbers of steps are to back up together.
        """
        others = resuming.put_first(self)
        has_backups = any(isinstance(one, callbacks.BackupAndRestore) for one in others)
        if has_backups and self._loan.level == WORKER and primitives.size() > 1:
            raise ConfigError(
                "Workers of one party that make different numbers of steps cannot back up "
                "together: let each be a party, or train without `BackupAndRestore`. Received: "
                f"{primitives.size()} workers"
            )
        super().on_train_begin(logs)
        if self._asked is not None:
            # Others ask when they have their first weights, which come from rank 0.
            self._asked.init(self.member[1])

    def on_train_end(self, logs: Any = None) -> None:
        """Meets until all have ended."""
        super().on_train_end(logs)
        if self._asked is not None:
            self._asked.close()
        if self._paced is not None:
            self._paced.close()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Takes up a backup's place before the first step."""
        super().on_epoch_begin(epoch, logs)
        self._loss.begin_epoch()

    def close_epoch(self) -> None:
        """Called when the steps of an epoch are over, before its validation."""
        self._loss.end_epoch()
        super().close_epoch()

    def plan(self, round_number: int) -> int | None:
        """What was assigned; None with the paper's rule, which is asked after each step."""
        steps = None
        if self._asked is not None:
            self._asked.begin(round_number)
        if self._paced is not None:
            steps = self._paced.begin(is_shared=not self._is_alone)
        self._loss.begin()
        if round_number == self._begun:
            # Another `fit`. What lay between the two is no step and makes nobody late; nor is it a
            # transfer, for which rounds would become as long as that.
            self._paused_s += self._watch.go_on()
        else:
            self._watch.begin()
            self._paused_s = 0.0
        self._begun = round_number
        return steps

    def pause(self, seconds: float) -> None:
        """Does not count `seconds` of this local phase, such as those of a test, as late.

        Call it when the test is over and has left the model's metrics as steps are to find them:
        what they hold now is no loss of this phase either.
        """
        self._paused_s += seconds
        self._loss.begin_epoch()

    def is_enough(self) -> bool:
        """Whether the local phase ends here; asked after each execution."""
        self._watch.ran(self.steps)
        if self._asked is not None:
            return self._asked.is_ready(self.steps, self._watch.last_s)
        if self._paced is None or not self._is_alone:
            return super().is_enough()
        elapsed_s = self._watch.elapsed_s - self._paused_s
        if not self._paced.is_over(self.steps, elapsed_s, self._planned or 1):
            return False
        if not self._paced.is_first:
            return True
        if not self._paced.goes_on(self.round, self._report(), self._pace_client()):
            return True
        self._planned = None  # executions need not be cut any more
        return False

    def _report(self) -> Report:
        return Report(self.steps, self._watch.step_s, self._watch.elapsed_s)

    # What.

    def words(self) -> dict[str, Any]:
        """The report of this worker; it has arrived."""
        report = self._report()
        self._told = {
            "step_s": report.step_s,
            "effective": methods.weighed(self.model, self.steps, self.applied.of),
            "local_s": report.busy_s,
            "loss": self._loss.smoothed(),
        }
        if self._paced is not None:
            self._told["pace"] = self._paced.pace.text
            client = self._pace_client()
            self._told["span_s"] = self._paced.arrived(self.round, report, client)
        self._waits.begin()
        return self._told

    def vocabulary(self) -> dict[str, Word]:
        """What reports have: seconds, what steps weigh, and a loss if one is known."""
        known = {"step_s": Word(), "effective": Word(), "local_s": Word(), "loss": ANY_NUMBER}
        return known if self._paced is None else known | {"pace": Word(str), "span_s": Word()}

    def hear(self, meeting: Meeting) -> None:
        """Learns from what all have said."""
        self._strategy.write_event(
            "esync",
            number=self.round,
            member=self.member[0],
            steps=self.steps,
            assigned=self._planned,
            step_s=self._told["step_s"],
            local_s=self._told["local_s"],
            waited_s=self._waits.elapsed_s,
        )
        if self._paced is not None:
            own, _ = self.member
            if self._loan.level == WORKER:
                told = meeting.everyone
            else:
                told = [party[0] for party in meeting.parties]
            self._paced.hear(
                self.round,
                own,
                [(one.steps, one.words) for one in told],
                most=self._bearing.most if self._bearing and self._bears_liars else None,
            )

    def outgoing(
        self, moved: list[tf.Tensor], meeting: Meeting, place: tuple[int, int]
    ) -> list[tf.Tensor]:
        """Movements, each times the gain of its member."""
        party, worker = place
        own = meeting.parties[party][worker]
        if self._averaging == AVERAGED or not own.counts:
            return moved
        members, made = meeting.members, own.words["effective"]
        told = [(share, one.words.get("effective", 0.0)) for share, one in members]
        if not made:  # a loss scale has skipped all steps
            factor = 1.0
        elif self._bears_liars:
            found = meeting.middle([one if share and one else None for share, one in told])
            factor = (found or made) / made
        else:
            factor = methods.gain(made, told)
        if self._averaging == BOUNDED:
            # Workers of a party send the same, so its first one's loss counts.
            number = party if meeting.is_equal or len(meeting.parties) > 1 else worker
            middle = meeting.middle if self._bears_liars else None
            most = most_gain(members, number, middle=middle)
            factor = min(max(factor, 1.0), most)
        return [one * tf.cast(factor, one.dtype) for one in moved]

    def facts(self) -> dict[str, Any]:
        """What must be equal where a backup is taken up."""
        return {
            **super().facts(),
            "`rule`": "default" if self._asked is None else "compat",
            "`averaging`": self._averaging,
            "`pace`": None if self._paced is None else self._paced.pace.text,
        }

    def _pace_client(self) -> PaceClient | None:
        """How rank 0 of a party speaks to the server's clock; made once."""
        if self._paced is None or self._pacing is not None or self._loan.level == WORKER:
            return self._pacing
        client = self._strategy.client
        if client is not None:
            self._pacing = PaceClient(client, self._paced.pace)
        return self._pacing
