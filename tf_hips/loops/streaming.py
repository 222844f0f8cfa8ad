# SPDX-License-Identifier: Apache-2.0
"""`StreamingDiLoCo`: DiLoCo whose model is exchanged in fragments, while training goes on.

The trained tensors, flat and one after the other, are cut into `fragments` equal parts. Every
`local_steps / fragments` steps the next one of them takes its turn:

    launch   x = before - w of the fragment sets out
    land     `overlap` steps later: before <- before - step(mean of x), by an optimizer of its own
             for each fragment; w <- (1 - mixing) before + mixing w

So a round of all fragments sends what DiLoCo sends, a fragment at a time, and computing does not
wait for it. Once in a round, with nothing under way, workers meet: statistics are averaged, and all
hear who ends. At the end all fragments land in full, so all end with the same weights; those in
which nobody has made steps since their last launch as a plain mean, since the outer optimizer's
momentum would move them further though no data have asked for it.

Follows Streaming DiLoCo (Douillard et al., 2025). Each member counts the same, as in DiLoCo, in
fragments since whose last launch it has made steps; another one, whose data have ended, does not.

Invariant: members launch and land in the same order, whatever their data.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_hips.comm.compressed import MakeVariable
from tf_hips.errors import ConfigError
from tf_hips.loops import checked, quorums
from tf_hips.loops.engine import Loop
from tf_hips.loops.meeting import UNIFORM, Meeting, Word
from tf_hips.loops.outer import Outer, chosen_outer
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.strategies.gradients import Gradient
from tf_hips.strategies.loan import LoopSum
from tf_hips.strategies.overlapped import OverlappedSum
from tf_hips.strategies.party import PartyStrategy


class StreamingDiLoCo(Loop):
    """Local steps; the outer optimizer takes one fragment of the model after the other."""

    def __init__(
        self,
        model: keras.Model,
        strategy: PartyStrategy,
        *,
        local_steps: int,
        fragments: int,
        overlap: int = 0,
        mixing: float | None = None,
        server_optimizer: UpdateRule | str = "diloco",
    ) -> None:
        """Takes the uplink of the strategy; before the first step of the model.

        Args:
            model: built and compiled in the scope of `strategy`; its trained tensors are float32.
            strategy: `HierarchicalPS`, with `downlink=None` or a codec that keeps nothing; or
                `CompressedRing`.
            local_steps: steps in which each fragment takes its turn once, H; a multiple of
                `fragments`.
            fragments: parts of the model.
            overlap: steps for which a fragment is under way; fewer than between two launches.
            mixing: what stays of the own weights where a fragment lands, from 0 to below 1; None:
                0.5 with overlap, as in the paper, and 0 without.
            server_optimizer: rule of the outer step, made by the workers; see docs/rules.md.

        Raises:
            ValueError, TypeError: an argument is out of range, or no number.
            ConfigError: the server has a rule with steps of its own, or adds what is late to the
                next round.
            ProtocolError: the strategy has trained already, or serves another loop.
        """
        local_steps = checked.whole("local_steps", local_steps)
        fragments = checked.whole("fragments", fragments)
        overlap = checked.whole("overlap", overlap, 0)
        if local_steps % fragments:
            raise ValueError(
                "`local_steps` must be a multiple of `fragments`. "
                f"Received: local_steps={local_steps}, fragments={fragments}"
            )
        self._interval = local_steps // fragments
        if overlap >= self._interval:
            raise ValueError(
                "`overlap` must be less than `local_steps / fragments`, "
                f"{self._interval}. Received: overlap={overlap}"
            )
        mixing = mixing if mixing is not None else (0.5 if overlap else 0.0)
        self._mixing = checked.real("mixing", mixing, 1.0)
        rule = strategy.rule
        if rule is not None and not rule.is_plain:
            raise ConfigError(
                "With fragments the workers make the outer steps, so the rule of the server must "
                f"be `sum` or `mean`. Received: {rule}"
            )
        quorums.check_fragments(strategy.welcome)
        self._fragments = fragments
        self._overlap = overlap
        self._is_under_way = False
        self._is_refused = False  # whether what is under way counts for nothing
        self._idle = fragments  # launches since this member's last step
        self._idle_of_all: list[int] = []  # the same of each member, in the meeting of this round
        outer = chosen_outer(server_optimizer, strategy)
        self._is_mean = rule is not None and rule.is_mean
        if outer is not None and outer.name == "adam":
            raise ConfigError(
                "Fragments take their steps apart, which a rule that counts steps does not follow: "
                f"take `fedadam`. Received: server_optimizer={outer}"
            )
        self._fragment_outer = Outer(outer)
        self._size = 0
        self._pending: Any = None
        self._in_party: list[LoopSum] = []  # of each fragment
        self._over_parties: OverlappedSum | None = None
        self._flying = 0
        super().__init__(model, strategy, weighting=UNIFORM)

    def facts(self) -> dict[str, Any]:
        """What must be equal where a backup is taken up."""
        return {
            **super().facts(),
            "`server_optimizer`": self._fragment_outer.text,
            "`local_steps`": self._interval * self._fragments,
            "`fragments`": self._fragments,
            "`overlap`": self._overlap,
            "`mixing`": self._mixing,
        }

    def place(self) -> dict[str, Any]:
        """Where a backup finds the loop: also whether a fragment is under way, and who counts."""
        flying = self._flying if self._is_under_way else None
        idle = {"idle": self._idle, "idle of all": self._idle_of_all}
        return {**super().place(), "under way": flying, "refused": self._is_refused, **idle}

    def go_on(self, place: dict[str, Any]) -> None:
        """Takes up the place that a backup has."""
        super().go_on(place)
        self._is_under_way = place["under way"] is not None
        self._flying = place["under way"] or 0
        self._is_refused = place.get("refused", False)
        self._idle, self._idle_of_all = place.get("idle", 0), place.get("idle of all", [])

    def _begin(self) -> None:
        """Takes up a backup's place; what was under way sets out again, with the same bytes."""
        super()._begin()
        over = self._over_parties
        if self._is_under_way and over is not None and not over.is_begun:
            self._send(self._flying)

    # When. A round is the turn of one fragment; steps are those since the last launch.

    def plan(self, round_number: int) -> int | None:
        """Steps up to the next landing or launch."""
        del round_number
        return self._overlap if self._is_under_way else self._interval

    def has_equal_steps(self) -> bool:
        """All make the steps that were asked for."""
        return True

    def words(self) -> dict[str, Any]:
        """Launches since the last step."""
        return {"idle": self._idle}

    def vocabulary(self) -> dict[str, Word]:
        """Launches since the last step."""
        return {"idle": Word(int)}

    def hear(self, meeting: Meeting) -> None:
        """Hears for how long each member has made no steps; one that is absent counts for none."""
        is_one_group = len(meeting.parties) == 1 and not meeting.is_equal
        members = [(one,) for one in meeting.everyone] if is_one_group else meeting.parties
        self._idle_of_all = [
            min(one.words.get("idle", self._fragments) for one in told) for told in members
        ]

    def _counting(self, fragment: int) -> list[bool]:
        """Of each member, whether it has made steps between the last two launches of a fragment.

        All know it: a member that goes on after the meeting of this round has made steps before it.
        """
        if not self._idle_of_all:  # an older backup does not know
            return [True] * self.member[1]
        return [idle + fragment < self._fragments for idle in self._idle_of_all]

    def meet(self, *, ends: bool = False) -> None:
        """Lands what is under way, and launches what is next, as it is due."""
        if self._is_under_way:
            self._land(self._mixing)
            self._planned = self._interval
            if not ends and self.steps < self._interval:
                return
        fragment = self.round % self._fragments
        self._strategy.write_event("launch", number=self.round, local_steps=self.steps)
        if int(self._counter.numpy()[1]):
            self._idle = 0
        if fragment == 0:
            meeting, place = self.talk(ends=ends)
            self._exchange.average(meeting, place, is_whole=True)
            party, worker = place
            # Workers of a party that keep step lose what they have done together.
            alike = meeting.parties[party] if meeting.is_equal else [meeting.parties[party][worker]]
            is_refused = not all(one.is_finite for one in alike)
            if meeting.is_last:
                for one in range(self._fragments):
                    self._launch(one, is_refused=is_refused)
                    self._land(0.0)
                self.end()
                self.round += self._fragments - 1  # all have had their turn; the next one is 0
                self.next_round()
                return
        else:
            is_refused = not self._exchange.is_trained_finite()
            if is_refused:
                self.tell_refused(self._own_name())  # the others do not meet here, and do not know
        self._launch(fragment, is_refused=is_refused)
        self.next_round()
        if not self._overlap or ends:
            self._land(self._mixing)
            self._planned = self._interval

    # What.

    def make_state(self, make: MakeVariable) -> None:
        """Makes what is kept of each fragment."""
        if any(one.dtype != tf.float32 for one in self.trained):
            odd = next(one for one in self.trained if one.dtype != tf.float32)
            raise ValueError(
                f"Fragments are cut from float32 tensors. Received: {odd.name} of {odd.dtype.name}"
            )
        total = sum(int(one.shape.num_elements()) for one in self.trained)
        self._size = -(-total // self._fragments)
        self._pending = make(tf.zeros([self._size]), "pending")
        self._fragment_outer.make([tf.TensorShape([self._size])] * self._fragments, make)

    def forget_movement(self) -> None:
        """Fragments are of different rounds: what another party has moved stays in them."""

    def open_sums(self) -> None:
        """Agrees on vectors, which all fragments travel as; encoding keeps something of each."""
        if self._loan.has_server:
            self._over_parties = OverlappedSum(
                self._strategy, self._loan, self._size, self._fragments, self.trained
            )
            return
        vector = Gradient("a fragment of the model", (self._size,), tf.float32)
        self._in_party = [
            self._loan.make_sum([vector], self.trained, over_parties=False)
            for _ in range(self._fragments)
        ]

    def _own_name(self) -> str:
        with self._loan.whole():
            party, worker = self._loan.place()
            return self._loan.names()[party][worker]

    def _launch(self, fragment: int, *, is_refused: bool) -> None:
        """Lets a fragment set out; one that is refused as zeros, which count where others add."""
        self._flying, self._is_refused = fragment, is_refused
        self._idle += 1
        if not is_refused and not self._takes_part(fragment):  # what mixing has left is no movement
            self._pending.assign(tf.zeros([self._size]), read_value=False)
        elif not is_refused:
            moved = [
                reference.read_value() - variable.read_value()
                for reference, variable in zip(self.reference, self.trained, strict=True)
            ]
            self._pending.assign(self._cut(moved, fragment), read_value=False)
        else:  # what this member has done is lost, and its slots may hold NaN, too
            self._exchange.go_back()
            self._slots.restore(is_refused=True)
            self._pending.assign(tf.zeros([self._size]), read_value=False)
        self._is_under_way = True
        self._send(fragment)

    def _send(self, fragment: int) -> None:
        if self._over_parties is not None:
            # A server that adds gets shares of the mean.
            value = self._pending.read_value()
            if not self._is_mean:
                value *= self._share(fragment)
            weight = REFUSED_WEIGHT if self._is_refused else float(self._takes_part(fragment))
            self._over_parties.begin(value, fragment, weight)

    def _takes_part(self, fragment: int) -> bool:
        """Whether this member counts in a fragment; where nobody has made steps, all do."""
        counting = self._counting(fragment)
        return counting[self.member[0]] or not any(counting)

    def _share(self, fragment: int) -> tf.Tensor:
        """What each member that counts in a fragment stands for."""
        return tf.constant(1.0 / (sum(self._counting(fragment)) or self.member[1]), tf.float32)

    def _land(self, mixing: float) -> None:
        """Takes what has come down for the fragment that is under way."""
        fragment = self._flying
        if self._over_parties is not None:
            counts = self._takes_part(fragment) and not self._is_refused
            is_dropped = self._is_mean and not counts
            merged = self._over_parties.end(is_sent=not is_dropped)
        elif self._in_party:
            value = self._pending.read_value() * self._share(fragment)
            sums = self._in_party
            # As of one sum: no two draw the same noise, and a warm-up counts all of them.
            sums[fragment].step.assign(max(int(one.step.numpy()) for one in sums))
            [merged] = sums[fragment]([value])
        else:
            raise RuntimeError("A loop lands what it has launched. Received: no sums yet")
        is_moved = any(self._counting(fragment))
        step = self._fragment_outer.step(fragment, merged) if is_moved else merged
        for variable, reference, (begin, end), rows in self._places(fragment):
            flat = tf.reshape(reference.read_value(), [-1])
            outer = flat[begin:end] - step[rows[0] : rows[1]]
            after = tf.concat([flat[:begin], outer, flat[end:]], 0)
            reference.assign(tf.reshape(after, reference.shape), read_value=False)
            own = tf.reshape(variable.read_value(), [-1])
            if mixing:
                outer = (1.0 - mixing) * outer + mixing * own[begin:end]
            after = tf.concat([own[:begin], outer, own[end:]], 0)
            variable.assign(tf.reshape(after, variable.shape), read_value=False)
        self._is_under_way = False

    def _cut(self, values: Sequence[tf.Tensor], fragment: int) -> tf.Tensor:
        """A fragment of what is like the trained tensors, padded with zeros."""
        flat = [
            tf.reshape(values[place], [-1])[begin:end]
            for place, (begin, end), _ in self._spans(fragment)
        ]
        vector = tf.concat([*flat, tf.zeros([0])], 0)
        return tf.pad(vector, [[0, self._size - int(vector.shape[0])]])

    def _places(self, fragment: int) -> Iterator[tuple[Any, Any, tuple[int, int], tuple[int, int]]]:
        for place, span, rows in self._spans(fragment):
            yield self.trained[place], self.reference[place], span, rows

    def _spans(self, fragment: int) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Number of each tensor of a fragment, what of it is in there, and where."""
        first, last = fragment * self._size, (fragment + 1) * self._size
        begin = 0
        for place, variable in enumerate(self.trained):
            end = begin + int(variable.shape.num_elements())
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield place, (low - begin, high - begin), (low - first, high - first)
            begin = end
