# SPDX-License-Identifier: Apache-2.0
"""Rounds of votes in any order of ballots, packets and losses, beside what must come of them.

What a child does is drawn: it is honest, says and sends something else, says it has no update, says
what others say and sends something else, or nothing. Ballots, packets and the end of a round come
in an order that is drawn, too. A group's outcome depends on what its members do alone.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.quorums import ManualClock
from tf_hips.errors import TfHipsError, ToleranceError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.robust.ballots import digest_of
from tf_hips.ps.robust.tally import Winners
from tf_hips.ps.robust.voted import VotingStore
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.robust import detox

Floats = npt.NDArray[np.float32]

FP32 = compressors.parse("fp32")
SIZES = (5, 3)
MODEL = Model(((5,), (3,)))
CHUNKS = range(len(SIZES))
HONEST, LIES, NAN, REFUSES = "honest", "lies", "nan", "refuses"
DECEIVES, NEVER, SILENT = "deceives", "never", "silent"
OFTEN = (HONEST,) * 6
STEPS = 4000  # of one round; nothing comes of more


@dataclasses.dataclass(frozen=True)
class Child:
    """What a child does.

    Attributes:
        kind: one of the words above.
        says: the row that its digest is of.
        sends: the row that its packets are of.
    """

    kind: str
    says: Floats
    sends: Floats


def packets(row: Floats) -> list[Any]:
    cuts = np.split(row, np.cumsum(SIZES)[:-1])
    return [native.encode(FP32, part, native.Key(0, 0, 0)) for part in cuts]


class Play:
    """One round of one server, drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.n = int(self.draw.integers(2, 10))
        r, buckets = int(self.draw.choice([1, 2, 3, 3, 3, 4])), int(self.draw.integers(4))
        self.is_by_digest, self.gives_up, fixed = self.draw.integers(2, size=3).astype(bool)
        vote = "digest" if self.is_by_digest else "exact"
        then = ("median", "mean", "krum(f=0)", "trimmed_mean(f=1)")[self.draw.integers(4)]
        self.rule = rules.parse(
            f"detox(r={r}, vote={vote}, buckets={buckets}, fixed={bool(fixed)}) >> {then}"
        )
        self.secret = int(self.draw.integers(1, 1000))
        assert self.rule.votes is not None and self.rule.robust is not None
        self.detox = self.rule.votes.with_rule(self.rule.robust)
        self.sites = tuple("abcdefghi"[: self.n])
        self.seats = detox.groups(self.n, r, self.secret, 0, fixed=bool(fixed))
        self.children = self._children()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.store = self._store()

    def _children(self) -> list[Child]:
        kinds = [*OFTEN, LIES, LIES, NAN, REFUSES]
        kinds += [DECEIVES, *(NEVER,) * 6] if self.is_by_digest else []
        kinds += [SILENT] if self.gives_up else []
        # Liars that know each other say the same.
        lie, nan = self._row(), np.full(sum(SIZES), np.nan, np.float32)
        honest = [self._row() for _ in self.seats]
        group_of = {child: place for place, one in enumerate(self.seats) for child in one}
        found = []
        for child in range(self.n):
            kind = kinds[self.draw.integers(len(kinds))]
            own = honest[group_of[child]]
            says = {LIES: lie, NAN: nan}.get(kind, own)
            found.append(Child(kind, says, self._row() if kind == DECEIVES else says))
        return found

    def _row(self) -> Floats:
        return self.draw.standard_normal(sum(SIZES), np.float32)

    def _store(self) -> VotingStore:
        votes, robust = self.rule.votes, self.rule.robust
        assert votes is not None and robust is not None
        winners = Winners(votes, robust, self.sites, self.secret)
        return VotingStore(
            *(MODEL, self.sites, FP32, FP32, 7),
            votes=votes,
            winners=winners,
            secret=self.secret,
            tell=lambda event, **fields: self.events.append((event, fields)),
            clock=ManualClock(),
            gives_up=bool(self.gives_up),
            workers=1,
            why_unlike=lambda child: None,
            updates=Updates(list(SIZES), self.rule, None, winners),
        )

    @property
    def is_over(self) -> bool:
        return self.store.is_merged(0) or self.store.has_refused(0)

    def play(self) -> None:
        """Everything comes, until the round is over or nothing more can come of it."""
        self.store.begin(0)
        ballots, is_closed = self._ballots(), False
        for _ in range(STEPS):
            if self.is_over or self._waits_for_ever():
                return
            asked = [child for child in range(self.n) if self.store.asks(0, child)]
            if asked and self.draw.random() < 0.5:
                self._deliver(int(self.draw.choice(asked)))
            elif next(ballots, None) is None and self.gives_up and not is_closed:
                self.store.merge(self.store.close(0, self.store.whole(0), ()))
                is_closed = True
        raise AssertionError(f"{self.rule} hangs: {self.seats}, {self._kinds(range(self.n))}")

    def _ballots(self) -> Iterator[bool]:
        """Whatever comes of children without their being asked, one after the other."""
        for place in self.draw.permutation(self.n):
            child, one = int(place), self.children[place]
            if one.kind == SILENT:
                continue
            if one.kind == REFUSES:
                self.store.weigh(0, child, REFUSED_WEIGHT)
            if self.is_by_digest:
                yield self.store.vote(0, child, digest_of(part.data for part in packets(one.says)))
                continue
            for chunk in CHUNKS:
                yield self._add(child, chunk)

    def _deliver(self, child: int) -> None:
        """The next packet of a child that was asked, or the end of its call."""
        if self.children[child].kind == NEVER:
            self.store.passes_over(0, child)
        else:
            self._add(child, min({*CHUNKS} - self.store.delivered(0, child)))

    def _add(self, child: int, chunk: int) -> bool:
        part = packets(self.children[child].sends)[chunk]
        try:
            return self.store.add(0, child, [(chunk, part)]) > 0
        except TfHipsError:  # the round is refused, and this packet was the last
            return True

    def _waits_for_ever(self) -> bool:
        """Whether all who agree in some group have hung up, in a run that waits for all."""
        ballots = self.store._of(0)
        return not self.gives_up and any(
            group.asked and ballots.is_complete(group) and not self.store._awaits(0, ballots, group)
            for group in ballots.groups
        )

    def _kinds(self, children: Sequence[int] | range) -> set[str]:
        return {self.children[child].kind for child in children}

    def agreed(self, members: Sequence[int]) -> list[int]:
        """Those of a group who say what more than half of it says."""
        said: dict[Any, list[int]] = collections.defaultdict(list)
        for child in members:
            one = self.children[child]
            if one.kind != SILENT:
                said["refuses" if one.kind == REFUSES else one.says.tobytes()].append(child)
        return next((who for who in said.values() if 2 * len(who) > len(members)), [])

    def check(self) -> None:
        """Looks at what has come of it."""
        winners = self.store._of(0).winners()
        outvoted, rows = set(), []
        for place, members in enumerate(self.seats):
            agreed = self.agreed(members)
            kinds = self._kinds(agreed)
            has_row = bool(kinds & {HONEST, LIES}) and not kinds & {NAN, REFUSES}
            assert (place in winners) == has_row, (self.rule, members, kinds)
            if has_row:
                rows.append(self.children[agreed[0]].says)
                spoke = {child for child in members if self.children[child].kind != SILENT}
                outvoted |= {self.sites[child] for child in spoke - {*agreed}}
        told: dict[str, set[str]] = collections.defaultdict(set)
        for event, fields in self.events:
            told[event] |= {*fields["sites"]}
        assert told["outvoted"] == outvoted
        deceivers = {self.sites[k] for k, one in enumerate(self.children) if one.kind == DECEIVES}
        assert told["proven"] <= deceivers
        self._check_result(rows)

    def _check_result(self, rows: Sequence[Floats]) -> None:
        """The result is that of the rule over these rows, or refused where that is."""
        how: dict[str, Any] = {"seed": self.secret, "step": 0, "of": len(self.seats)}
        wanted = None
        if rows:
            then = self.detox.aggregator(self.n, len(rows))
            try:
                wanted = then.run(rows, missing=len(self.seats) - len(rows), **how).vector
            except ToleranceError:
                wanted = None
        assert self.store.is_merged(0) == (wanted is not None)
        if wanted is not None:
            found = dict(self.store.results(0, 0)[1])
            parts = [native.decode(FP32, found[k], size) for k, size in enumerate(SIZES)]
            np.testing.assert_allclose(np.concatenate(parts), wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("first", [600, 800, 1850])
def test_what_comes_of_a_round_depends_on_what_its_children_do_and_on_no_order(first: int) -> None:
    seen: collections.Counter[str] = collections.Counter()
    for seed in itertools.islice(itertools.count(first), 150):
        one = Play(seed)
        one.play()
        if not one.is_over:
            seen["waits"] += 1
            continue
        seen["merged" if one.store.is_merged(0) else "refused"] += 1
        one.check()
    assert seen["merged"] > 40 and seen["refused"] > 40
