# SPDX-License-Identifier: Apache-2.0
"""Rounds of a shard whose rule looks at whole rows: complete here, then ruled on by shard 0.

    all children have delivered all chunks that are here    the round is complete
    report     measures of these chunks, of all children
    judge      at shard 0, of the reports of all shards that have chunks: the verdict
    rule       at each shard: the verdict is recorded, and the chunks are merged by it

Who moves reports and verdicts between the shards is `calls.joint`'s.

Invariants:
- There is one verdict on a round, of shard 0, and it is final: a round that is refused ends the
  run. So all chunks of the model are of the same children, whatever these say to other shards.
- Whose rows take part is what children have said to shard 0; the others do not look at weights.
- A verdict is an input, as a packet is: it is recorded before anything that it makes is told, and
  before another shard hears of it. A shard that is restored merges by it again, and shard 0 can
  say it again, of the newest round and the one before.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tf_hips.errors import NonFiniteError, ProtocolError, ToleranceError
from tf_hips.ps.rounds.round import TooFewRowsError
from tf_hips.ps.rounds.store import Job, Store
from tf_hips.ps.rounds.whole import tell_of
from tf_hips.ps.rules.joint import Report, Verdict, of_rows
from tf_hips.ps.rules.robust import OWN_REFUSAL, is_refused
from tf_hips.ps.rules.whole import Distances
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.recorder import Entry, Kind
from tf_hips.robust.aggregator import Measures

LEAD = 0
"""The shard that rules on rounds."""


class JointStore(Store):
    """The rounds of one shard, and of shard 0 also what others have measured. Thread-safe."""

    def __init__(self, *terms: Any, joint: Distances, shard: Shard, **options: Any) -> None:
        """A store in which nothing has come.

        Args:
            terms: as for `Store`.
            joint: the rule of `options["updates"]`.
            shard: which of the model's chunks are here.
            options: as for `Store`; rounds never close without some children.
        """
        super().__init__(*terms, shard=shard, **options)
        model, sites, uplink, downlink, seed = terms
        self.shard = shard
        self._joint = joint
        self._refuse, self._choose = options.get("refuse"), options.get("choose")
        # A shard without chunks has nothing to measure, and nothing to merge.
        self._measuring = [
            index for index in range(shard.count) if Shard(index, shard.count).chunks(model)
        ]
        self._complete: Sequence[Job] = ()  # of a round, until it is ruled on
        self._reports: dict[int, dict[int, Measures]] = {}  # by round and shard
        self._verdicts: dict[int, tuple[int, Verdict]] = {}  # by round; with a record's position
        facts = [tuple(sites), uplink.text, downlink.text, seed, self._rule.text]
        whole = json.dumps([*facts, model.shapes, self.first_round, shard.count])
        self.agreed = hashlib.sha256(whole.encode()).hexdigest()

    @property
    def num_children(self) -> int:
        """How many children there are."""
        return len(self._sites)

    @property
    def unruled(self) -> int | None:
        """The round that is complete here and not ruled on; None: there is none."""
        with self.changed:
            return self._complete[0][0].number if self._complete else None

    def lacks(self, number: int) -> list[int]:
        """The shards whose measures of round `number` have not come to this one, shard 0."""
        with self.changed:
            here = self._reports.get(number, {})
            return [index for index in self._measuring if index not in here]

    def awaited(self) -> str:
        """For whom a round waits that is complete, for messages."""
        number = self.unruled
        if number is None:
            return ""
        if self.shard.index != LEAD:
            return f"shard {LEAD} has not ruled on it"
        names = [str(Shard(index, self.shard.count)) for index in self.lacks(number)]
        if not names:
            return f"shard {LEAD} is about to rule on it"
        return f"the measures of {', '.join(names)} have not come"

    def report(self) -> Report:
        """Measures the round that is complete; the lock must be free.

        Raises:
            ProtocolError: none is.
        """
        with self.changed:
            jobs = self._complete
        if not jobs:
            raise ProtocolError("A round must be complete before it is measured.")
        packets = {chunk: held for _, chunk, held in jobs}
        whole = self._combining.whole_round(
            jobs[0][0].number, packets, range(self.num_children), {}
        )
        return Report(self.shard, self.agreed, self._joint.measure(whole)[0])

    def take(self, number: int, report: Report) -> None:
        """Takes what a shard has measured of a round; the first one counts.

        Raises:
            ProtocolError: it is of another run, or of a round that is not due.
        """
        if report.shard.count != self.shard.count or report.agreed != self.agreed:
            raise ProtocolError(
                "All shards must be of one run, with the same parties, compressions, rule, seed "
                f"and model. Received: {report.shard}, which differs from {self.shard}"
            )
        with self.changed:
            if number in self._verdicts:
                return
            newest = self.round
            if number not in (newest, newest + 1):
                raise ProtocolError(
                    f"The round to rule on must be {newest} or {newest + 1}. Received: {number} "
                    f"from {report.shard}"
                )
            self._reports.setdefault(number, {}).setdefault(report.shard.index, report.measures)
            self.changed.notify_all()

    def judge(self) -> Verdict:
        """Decides about the round that is complete, of the measures of all shards.

        Raises:
            ProtocolError: one of them is missing, or they do not go together.
        """
        with self.changed:
            current = self._complete[0][0] if self._complete else None
            if current is None or self.lacks(current.number):
                raise ProtocolError("A round must be measured by all shards before it is judged.")
            parts = [one for _, one in sorted(self._reports[current.number].items())]
            weights = dict(current.weights)
        children = range(self.num_children)
        present = [child for child in children if weights.get(child, 1.0) > 0]
        missing = {child: OWN_REFUSAL for child in children if is_refused(weights.get(child, 1.0))}
        if not present and missing:
            named = "; ".join(
                f"site `{self._sites[child]}`: {why}" for child, why in missing.items()
            )
            refusal = f"Round {current.number}: the rule needs a row. Received: none ({named})"
            return Verdict(missing=missing, refusal=refusal)
        if not present:
            return Verdict()
        widths = {(one.squares.shape[1], one.pairs.shape[1]) for one in parts}
        if len(widths) != 1:
            raise ProtocolError(
                "All shards must measure the same rows. Received: "
                f"{sorted(widths)} rows and pairs of round {current.number}"
            )
        [(width, _)] = widths
        rows = [*present, *range(self.num_children, width)]
        measures = Measures(
            np.concatenate([one.squares for one in parts]),
            np.concatenate([one.pairs for one in parts]),
        )
        try:
            decision = self._joint.judge(
                current.number,
                of_rows(measures, rows),
                present,
                missing,
                with_reference=width > self.num_children,
            )
        except (ToleranceError, NonFiniteError) as error:
            # Who says that it has no row is why there are too few, as one server says it, too.
            absent = self._combining.absent(children, weights)
            has_too_few = isinstance(error, ToleranceError)
            return Verdict(
                missing=missing,
                refusal=f"Round {current.number}: {error}{absent if has_too_few else ''}",
                has_too_few=has_too_few,
            )
        return Verdict(tuple(present), missing, decision)

    def rule(self, number: int, verdict: Verdict) -> None:
        """Takes the verdict on a round, and merges it; the first one stands.

        The round is complete here, or over, as where a server is restored. The lock must be free.
        """
        with self.changed:
            if number in self._verdicts:
                return
            position = 0
            if self._recorder.is_keeping:
                position = self._recorder.add(Kind.RULED, verdict.to_bytes(), round=number)
            self._verdicts[number] = position, verdict
            for kept in (self._verdicts, self._reports):
                for old in [one for one in kept if one < number - 1]:
                    del kept[old]
            self._reports.pop(number, None)
            jobs = self._complete if self.unruled == number else ()
            if jobs:
                self._complete = ()
                current = jobs[0][0]
                current.positions = [position] * len(current.positions)
                current.counted = tuple(range(self.num_children))
                if verdict.refusal is not None:
                    kind = TooFewRowsError if verdict.has_too_few else NonFiniteError
                    current.refusals.append((position, kind(verdict.refusal)))
            self.changed.notify_all()
        if jobs and verdict.refusal is None:
            self._merge_by(verdict, jobs)

    def verdict(self, number: int) -> Verdict | None:
        """The verdict on a round, when it may be told; None: there is none."""
        with self.changed:
            position, found = self._verdicts.get(number, (0, None))
            return found if position <= self._recorder.durable else None

    def entries(self) -> Iterator[Entry]:
        """What a snapshot keeps of verdicts: those that another shard may still ask for."""
        for number, (_, verdict) in sorted(self._verdicts.items()):
            yield Kind.RULED, {"round": number}, verdict.to_bytes()

    def _merge_by(self, verdict: Verdict, jobs: Sequence[Job]) -> None:
        current = jobs[0][0]
        if verdict.decision is not None:
            packets = {chunk: held for _, chunk, held in jobs}
            whole = self._combining.whole_round(
                current.number, packets, verdict.children, verdict.missing
            )
            current.ruling = self._joint.ruling(verdict.decision, whole)
            tell_of(current.number, current.ruling, self._refuse, self._choose)
        with contextlib.suppress(NonFiniteError):  # who waits is told of it
            self._merge_each(jobs)
        with self.changed:
            self.changed.notify_all()

    def _merge_all(self, jobs: Sequence[Job]) -> None:
        """All of a round has come, and waits for the verdict."""
        if jobs:
            with self.changed:
                self._complete = tuple(jobs)
                self.changed.notify_all()
