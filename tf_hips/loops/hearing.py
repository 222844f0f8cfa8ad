# SPDX-License-Identifier: Apache-2.0
"""What has come from all workers that meet, read: whom an error names, and who is not heard.

Where all are believed, what no worker says is an error on all. Below a robust rule one liar could
end the run so, with one message: there such a party is taken for absent, and named, and the round
of the meeting is that of most parties (`strategies.agreeing`).

Invariant: all workers read the same bytes, so that all hear the same.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tf_hips.errors import ProtocolError
from tf_hips.loops.meeting import Meeting, Told, Word, shown
from tf_hips.strategies import agreeing
from tf_hips.strategies.agreeing import Doubted

_SHOWN = 200  # characters of what somebody has sent
_MEETING, _ROUND, _SAMPLES = "a meeting of a loop", "the round of a loop", "the rows of a loop"


def read_all(
    gathered: Iterable[Any],
    names: Iterable[str],
    vocabulary: Mapping[str, Word],
    num_statistics: int,
    parties: Doubted | None,
    own_round: int,
) -> list[Told]:
    """What all workers say, each of which has sent the number of its round and `Told.fields`.

    Args:
        gathered: of each worker what has come; None: it is absent.
        names: of the workers.
        vocabulary: as for `Told.read`.
        num_statistics: as for `Told.read`.
        parties: of which some may lie: one that has sent something else, or is in another round
            than most, is absent. None: all are believed.
        own_round: of this worker.

    Raises:
        ProtocolError: a worker that is believed has sent something else, or is in another round;
            where some may lie, this one, or there is no round of most parties.
    """
    told_by_all = list(gathered)

    def read(told: Any, who: str) -> Told:
        if told is None:
            return Told.read(None)
        if not (is_pair(told) and type(told[0]) is int and told[1] is not None):
            raise ProtocolError(
                f"What {who} says in a meeting must be the number of a round, and more. "
                f"Received: {shown(told, _SHOWN)}"
            )
        return Told.read(told[1], who, vocabulary, num_statistics)

    if parties is not None:
        told_by_all = agreeing.sound(
            parties, told_by_all, lambda one: _is_read(read, one), _MEETING
        )
        told_by_all = _in_round(told_by_all, own_round, parties)
    everyone = [read(told, who) for who, told in zip(names, told_by_all, strict=True)]
    rounds = [told[0] for told in told_by_all if told is not None]
    if len(set(rounds)) > 1:
        raise ProtocolError(
            "All workers must be in the same round; take up backups of one. Received: rounds "
            f"{shown(rounds, _SHOWN)}, by worker"
        )
    return everyone


def _in_round(told_by_all: Sequence[Any], own_round: int, parties: Doubted) -> list[Any]:
    """`told_by_all` without parties that are in another round than most, this worker among them."""
    mine = [own_round, None]
    named = agreeing.compared(parties, told_by_all, mine, lambda one: one[0], _ROUND)
    if any(number != own_round for _, number in named):
        told = "; ".join(f"{who}: {shown(number, _SHOWN)}" for who, number in named)
        raise ProtocolError(
            f"All workers must be in the same round; take up backups of one. Received: {told}"
        )
    kept: list[Any] = []
    for values in parties.by_party(told_by_all):
        is_there = all(one is not None and one[0] == own_round for one in values)
        kept += values if is_there else [None] * len(values)
    return kept


def check_samples(
    meeting: Meeting, names: Sequence[Sequence[str]], party: int, parties: Doubted | None
) -> None:
    """Looks whether a worker has ended in the first meeting without any rows.

    Args:
        meeting: the first one.
        names: of the workers of each party.
        party: number of this worker's own one.
        parties: of which some may lie: then it is an error if it is of this party, or of most.

    Raises:
        ValueError: one has; who they are.
    """
    idle = [
        [
            who
            for who, one in zip(workers, told, strict=True)
            if one.ends and not one.samples and not one.stops and not one.is_absent
        ]
        for workers, told in zip(names, meeting.parties, strict=True)
    ]
    if parties is not None and not idle[party]:
        odd = [bool(who) for who in idle]
        votes = [
            None if all(one.is_absent for one in told) else is_odd
            for told, is_odd in zip(meeting.parties, odd, strict=True)
        ]
        if parties.most(votes) is not True:
            parties.name(odd, _SAMPLES, "it has ended without any")
            return
    found = list(itertools.chain(*idle))
    if found:
        raise ValueError(
            f"A worker must have samples to train on. Received: none of {', '.join(found)}"
        )


def _is_read(read: Any, told: Any) -> bool:
    try:
        read(told, "a worker")
    except ProtocolError:
        return False
    return True


def is_pair(told: Any) -> bool:
    """Whether JSON has made `told` of two values."""
    return isinstance(told, list | tuple) and len(told) == 2
