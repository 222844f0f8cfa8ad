# SPDX-License-Identifier: Apache-2.0
"""Sets of numbers as spans, and rounds that are missed for long."""

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest

from tests.ps.quorums import Run
from tf_hips.ps.rounds.partial import Partial
from tf_hips.ps.terms.quorum import NEXT, Quorum
from tf_hips.ps.terms.spans import Spans


def numbers(spans: Spans) -> list[int]:
    return [number for first, end in spans for number in range(first, end)]


@pytest.mark.parametrize("seed", range(5))
def test_spans_are_a_set(seed: int) -> None:
    draws = random.Random(seed)
    spans, wanted = Spans(), set[int]()
    for _ in range(300):
        number = draws.randrange(40)
        match draws.choice(["add", "add", "discard", "drop"]):
            case "add":
                spans.add(number)
                wanted.add(number)
            case "discard":
                spans.discard(number)
                wanted.discard(number)
            case "drop":
                spans.drop_before(number // 4)
                wanted = {one for one in wanted if one >= number // 4}
        assert numbers(spans) == sorted(wanted)
        assert [one in spans for one in range(40)] == [one in wanted for one in range(40)]
        found = list(spans)
        assert all(end < first for (_, end), (first, _) in itertools.pairwise(found))
        assert list(Spans(json.loads(json.dumps(found)))) == found


def test_a_child_that_is_away_for_long_is_told_in_a_word() -> None:
    """A snapshot takes it with the session's lock held."""
    partial = Partial([1, 1, 1], [0], carries=True)
    for number in range(20_000):
        partial.miss(number, {2: {}}, {})
    partial.take(7, 2, 0, np.zeros(1, np.uint8))  # whole, so it is missed no more
    missed, _ = partial.kept()
    assert missed == [(2, [(0, 7), (8, 20_000)])]
    again = Partial([1, 1, 1], [0], carries=True)
    for child, spans in json.loads(json.dumps(missed)):
        again.restore_missed(child, spans)
    again.forget_before(5)
    assert again.kept()[0] == [(2, [(5, 7), (8, 20_000)])]
    assert [again.has_missed(number, 2) for number in (4, 5, 6, 7, 8)] == [0, 1, 1, 0, 1]
    assert not again.has_missed(6, 1)


def test_late_updates_of_rounds_that_are_kept_no_more_are_forgotten() -> None:
    partial = Partial([1, 1], [0, 1], carries=True)
    for number in range(3):
        partial.miss(number, {1: {0: np.zeros(1, np.uint8)}}, {})
    partial.take(1, 1, 1, np.zeros(1, np.uint8))  # whole: it counts in the next round
    partial.forget_before(2)
    assert [key for key, _ in partial.kept()[1]] == [(1, 1), (1, 2)]
    partial.forget_before(9)
    assert partial.pending == [(1, 1)]
    assert set(partial.claim([(1, 1)])) == {(1, 1)}
    for number in range(10, 14):
        partial.miss(number, {1: {}}, {})
        partial.take(number, 1, 0, np.zeros(1, np.uint8), position=number)
    assert partial.was_dropped(10, 1)
    partial.forget_before(14)
    assert not partial.was_dropped(10, 1)
    assert not partial._positions and not partial._late


def test_late_updates_of_rounds_that_are_past_take_no_memory() -> None:
    """Where they are never finished, and nobody asks for those rounds any more."""
    with Run(Quorum(2, 1.0, late=NEXT), past_bytes=0).begin() as run:
        run.rounds(0, 0)
        for number in range(1, 8):
            run.rounds(number, number, (0, 1))
            if number == 1:
                run.deliver(2, 1, chunks=[0])
            run.clock.advance(1.0)
        run.deliver(0, 8)
        store: Any = run.session.store
        missed, late = store.partial.kept()
        assert store.oldest > 1
        assert late == []
        assert min(begin for _, spans in missed for begin, _ in spans) >= store.oldest
