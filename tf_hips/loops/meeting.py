# SPDX-License-Identifier: Apache-2.0
"""What workers say when they meet, and what they stand for in a mean. Plain values.

A worker whose update is refused, or that has nothing to say, stands for nothing. Shares of one
meeting add up to 1, or are all 0.
"""

import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tf_hips.errors import ProtocolError
from tf_hips.loops.bearing import Bearing
from tf_hips.ps.transport.wire import MAX_WEIGHT
from tf_hips.robust.rows import lesser_median

SAMPLES, UNIFORM, WORKERS = "samples", "uniform", "workers"
WEIGHTINGS = (SAMPLES, UNIFORM, WORKERS)
_MOST = 1 << 53  # of most numbers that loops add
_MOST_STEPS = (1 << 31) - 1
_SHOWN = 80  # characters of what somebody has sent


@dataclasses.dataclass(frozen=True)
class Word:
    """What a loop's members may say under one name beside `Told`: a number in a range, or a text.

    Attributes:
        kind: float, which takes whole numbers too, int or str.
        least: of a number.
        most: of a number.
        is_optional: whether it may be None.
    """

    kind: type = float
    least: float = 0.0
    most: float = float(_MOST)
    is_optional: bool = False

    def takes(self, value: Any) -> bool:
        """Whether JSON has made `value` of such a word."""
        if value is None:
            return self.is_optional
        if self.kind is str:
            return isinstance(value, str)
        is_number = type(value) is int or (self.kind is float and type(value) is float)
        # Comparing takes whole numbers of any length, and NaN is in no range.
        return is_number and bool(self.least <= value <= self.most)

    def __str__(self) -> str:
        if self.kind is str:
            return "a text"
        what = "a whole number" if self.kind is int else "a number"
        told = f"{what} from {self.least:g} to {self.most:g}"
        return f"{told}, or null" if self.is_optional else told


ANY_NUMBER = Word(least=-sys.float_info.max, most=sys.float_info.max, is_optional=True)
"""Any finite number, or None."""


@dataclasses.dataclass(frozen=True)
class Told:
    """What one worker says.

    Attributes:
        steps: local steps since the last meeting.
        samples: rows in their batches.
        before: rows that went into means of the party since the last exchange of parties.
        is_finite: whether its weights are numbers.
        takes_part: whether it sends in this round.
        ends: whether it has no data left to train on.
        stops: whether it wants all to stop.
        statistics: digests of its floating variables that no optimizer trains.
        words: what the loop adds, JSON values by name.
        is_absent: whether the server's quorum has gone on without it; then nothing else is known.
    """

    steps: int
    samples: int
    before: int = 0
    is_finite: bool = True
    takes_part: bool = True
    ends: bool = False
    stops: bool = False
    statistics: tuple[int, ...] = ()
    words: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_absent: bool = False

    @classmethod
    def read(
        cls,
        fields: Any,
        who: str = "a worker",
        vocabulary: Mapping[str, Word] | None = None,
        num_statistics: int | None = None,
    ) -> "Told":
        """The value that `fields` were made of; None: of one that is absent.

        Args:
            fields: what has come.
            who: from whom, for messages.
            vocabulary: the words that the loop adds, all of them; None: it is not looked at them.
            num_statistics: how many digests of statistics there are; None: any number.

        Raises:
            ProtocolError: `who` has sent something else.
        """
        if fields is None:
            return cls(0, 0, takes_part=False, ends=True, is_absent=True)
        known = {field.name: field for field in dataclasses.fields(cls)}
        is_right = isinstance(fields, dict) and fields.keys() == known.keys()
        is_right = is_right and all(_is_a(known[one].type, fields[one]) for one in known)
        is_right = is_right and fields["steps"] <= _MOST_STEPS
        # A server takes no greater weight. Said here, all hear it and not only who would send it.
        is_right = is_right and max(fields["samples"], fields["before"]) <= MAX_WEIGHT
        if not is_right:
            raise ProtocolError(
                f"What {who} says in a meeting must have {', '.join(known)}, with rows from 0 to "
                f"{MAX_WEIGHT:g}, steps below 2^31. Received: {shown(fields, 200)}"
            )
        if vocabulary is not None:
            check_words(fields["words"], who, vocabulary)
        if num_statistics is not None and len(fields["statistics"]) != num_statistics:
            raise ProtocolError(
                f"What {who} says in a meeting must have a digest for each of {num_statistics} "
                f"statistics of layers. Received: {len(fields['statistics'])}"
            )
        return cls(**{**fields, "statistics": tuple(fields["statistics"])})

    @property
    def fields(self) -> dict[str, Any]:
        """JSON values by name."""
        return dataclasses.asdict(self)

    @property
    def counts(self) -> bool:
        """Whether what it has done goes into the mean."""
        return self.is_finite and self.takes_part and self.steps > 0


@dataclasses.dataclass(frozen=True)
class Meeting:
    """All that is said at one meeting.

    Attributes:
        parties: what the workers of each party say.
        weighting: what parties, and workers in them, stand for: "samples"; "uniform", each party
            the same, as each worker in it; "workers", each worker the same.
        is_equal: whether the workers of a party have the same weights, so that one that is refused
            means all.
        bearing: the rules of the servers above; None: nobody has to be borne.
        drawn: of each party, whether somebody of it is drawn for the next round; None: all are.
    """

    parties: tuple[tuple[Told, ...], ...]
    weighting: str
    is_equal: bool
    bearing: Bearing | None = None
    drawn: tuple[bool, ...] | None = None

    @property
    def everyone(self) -> list[Told]:
        """All workers, in their order."""
        return [one for party in self.parties for one in party]

    @property
    def is_last(self) -> bool:
        """Whether it is the last one: nobody has data left, or somebody wants to stop.

        Below robust rules too few may have data left for one of them, and more than may lie must
        want to stop.
        """
        everyone = self.everyone
        if self.bearing is None or all(one.ends for one in everyone):
            return any(one.stops for one in everyone) or all(one.ends for one in everyone)
        wants = [any(one.stops for one in told) for told in self.parties]
        if self.bearing.stops(wants) or (self.is_short and self._has_ended_idle):
            return True
        drawn = self.drawn if self.drawn is not None else [True] * len(self.parties)
        # A quorum may close a round with all who have ended in it, and without some of the others;
        # who is absent is one of these.
        left = [
            is_drawn and not all(one.ends and not one.is_absent for one in told)
            for told, is_drawn in zip(self.parties, drawn, strict=True)
        ]
        return not self.bearing.is_enough(left, may_miss=True)

    @property
    def is_short(self) -> bool:
        """Whether a robust rule has rows in this round, and fewer than it needs."""
        if self.bearing is None:
            return False
        numbers = range(len(self.parties))
        rows = [self.weight(party) > 0 or self.is_refused(party) for party in numbers]
        return not self.bearing.is_enough(rows)

    @property
    def is_void(self) -> bool:
        """Whether nothing is exchanged: nobody has a row, or too few have one in the last round.

        An error there would be that of a training that went well; in other rounds it is the
        server's, which names who has no row.
        """
        return not sum(self.party_shares()) or (self.is_short and self.is_last)

    @property
    def is_idle(self) -> bool:
        """Whether it is the last one, and nobody has made a step that it could exchange."""
        return (
            self.is_void
            and self.is_last
            # Rows of meetings of a party alone are to be exchanged, too.
            and not any(
                one.steps or one.before or one.is_absent or not one.is_finite
                for one in self.everyone
            )
        )

    @property
    def _has_ended_idle(self) -> bool:
        """Whether somebody has no row because its data have ended."""
        return any(
            not self.weight(party) and all(one.ends and not one.is_absent for one in told)
            for party, told in enumerate(self.parties)
        )

    @property
    def members(self) -> list[tuple[float, Told]]:
        """Shares in the last mean, and what one worker of each member says."""
        if self.is_equal or len(self.parties) > 1:
            return [(s, told[0]) for s, told in zip(self.party_shares(), self.parties, strict=True)]
        return list(zip(self.worker_shares(0), self.parties[0], strict=True))

    @functools.cached_property
    def void(self) -> frozenset[int]:
        """Parties that count for nothing, as their server has fewer rows than its rule needs."""
        if self.bearing is None:
            return frozenset()
        numbers = range(len(self.parties))
        return self.bearing.void([self._claim(n) > 0 or self._is_no_number(n) for n in numbers])

    def middle(self, values: Sequence[float | None]) -> float | None:
        """The lesser median of `values`, one of each of `members`, of which some may lie.

        None: it says none, or of the median: nobody does.
        """
        if self.bearing is not None and len(self.parties) > 1:
            return self.bearing.middle(values)
        known = [one for one in values if one is not None]
        return lesser_median(known) if known else None

    def counts(self, party: int, worker: int) -> bool:
        """Whether what a worker has done goes into the mean."""
        return party not in self.void and self._would_count(party, worker)

    def _would_count(self, party: int, worker: int) -> bool:
        told = self.parties[party]
        is_refused = self.is_equal and not all(one.is_finite for one in told)
        return not is_refused and told[worker].counts

    def weights(self, party: int) -> list[float]:
        """What the workers of a party stand for, one beside the other."""
        return [
            (float(one.samples) if self.weighting == SAMPLES else 1.0) * self.counts(party, worker)
            for worker, one in enumerate(self.parties[party])
        ]

    def weight(self, party: int) -> float:
        """What a party stands for."""
        return 0.0 if party in self.void else self._claim(party)

    def _claim(self, party: int) -> float:
        told = self.parties[party]
        counted = [self._would_count(party, worker) for worker in range(len(told))]
        if self.weighting == SAMPLES:
            rows = [one.before + one.samples * c for one, c in zip(told, counted, strict=True)]
            return min(float(sum(rows)), MAX_WEIGHT)
        number = sum(c or one.before > 0 for one, c in zip(told, counted, strict=True))
        return float(number > 0) if self.weighting == UNIFORM else float(number)

    def is_refused(self, party: int) -> bool:
        """Whether a party stands for nothing because what it has done is no number."""
        return party not in self.void and self._is_no_number(party)

    def _is_no_number(self, party: int) -> bool:
        told = self.parties[party]
        return not self._claim(party) and any(one.takes_part and not one.is_finite for one in told)

    def party_shares(self) -> list[float]:
        """The shares of the parties in their mean."""
        return _shares([self.weight(party) for party in range(len(self.parties))])

    def worker_shares(self, party: int) -> list[float]:
        """The shares of the workers in the mean of their party."""
        return _shares(self.weights(party))


def own_words(loop: Any) -> dict[str, Any]:
    """What this worker's loop adds, before others hear it: they would take it for another's fault.

    Raises:
        ValueError: it is not what the loop's vocabulary declares.
    """
    words: dict[str, Any] = loop.words()
    try:
        check_words(json.loads(json.dumps(words)), "this worker", loop.vocabulary())
    except ProtocolError as error:
        raise ValueError(
            f"`{type(loop).__name__}.words` must say what its `vocabulary` declares. {error}"
        ) from error
    return words


def shown(value: Any, length: int) -> str:
    """So many characters of what somebody has sent."""
    try:
        return str(value)[:length]
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a number that is too long"


def split(everyone: Sequence[Told], sizes: Sequence[int]) -> tuple[tuple[Told, ...], ...]:
    """`everyone`, by party."""
    parties, begin = [], 0
    for size in sizes:
        parties.append(tuple(everyone[begin : begin + size]))
        begin += size
    return tuple(parties)


def met(
    everyone: Sequence[Told],
    sizes: Sequence[int],
    weighting: str,
    is_equal: bool,
    bearing: Bearing | None,
    drawn: tuple[frozenset[int], frozenset[int]] | None = None,
) -> Meeting:
    """A meeting of `everyone`.

    Args:
        everyone: what all workers say.
        sizes: how many each party has.
        weighting: as of `Meeting`.
        is_equal: as of `Meeting`; then members are parties, else workers.
        bearing: as of `Meeting`.
        drawn: members that send in this round and in the next one, whatever they say; None: all.
    """
    if drawn is None:
        return Meeting(split(everyone, sizes), weighting, is_equal, bearing)
    parties = itertools.chain(*([party] * size for party, size in enumerate(sizes)))
    members = list(parties) if is_equal else list(range(len(everyone)))
    now, then = drawn
    kept = [
        one if member in now else dataclasses.replace(one, takes_part=False)
        for member, one in zip(members, everyone, strict=True)
    ]
    flags, begin = [member in then for member in members], 0
    next_parties = []
    for size in sizes:
        next_parties.append(any(flags[begin : begin + size]))
        begin += size
    return Meeting(split(kept, sizes), weighting, is_equal, bearing, tuple(next_parties))


def _is_a(kind: Any, value: Any) -> bool:
    """Whether JSON has made `value` of a field of `Told`."""
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return type(value) is int and 0 <= value <= _MOST
    if kind == dict[str, Any]:
        if not isinstance(value, dict):
            return False
        return all(math.isfinite(one) for one in value.values() if isinstance(one, float))
    return isinstance(value, list | tuple) and all(type(one) is int for one in value)


def check_words(words: dict[str, Any], who: str, vocabulary: Mapping[str, Word]) -> None:
    """Raises ProtocolError unless `words` of `who` are all of `vocabulary`, and nothing else."""
    for name in sorted({*words, *vocabulary}):
        if name not in vocabulary:
            raise ProtocolError(
                f"What {who} says in a meeting must have {', '.join(vocabulary) or 'no words'} of "
                f"its loop; all members must run one. Received: `{name[:_SHOWN]}`"
            )
        if name not in words or not vocabulary[name].takes(words[name]):
            said = shown(words[name], _SHOWN) if name in words else "nothing"
            raise ProtocolError(
                f"What {who} says in a meeting must have a `{name}` that is {vocabulary[name]}. "
                f"Received: {said}"
            )


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]
