# SPDX-License-Identifier: Apache-2.0
"""Rounds of a robust rule that close without some: whoever says that it has no row ends no run."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.ps.quorums import MODEL, SHAPES, Floats, Run, decoded, gradient
from tf_hips import robust
from tf_hips.ps.terms.quorum import DROP, Quorum
from tf_hips.ps.transport.wire import REFUSED_WEIGHT

SITES = tuple("abcd")
QUORUM = Quorum(3, 1.0, late=DROP, below_s=30.0)
RULES = ["median(f=1)", "median", "nnm(f=1) >> trimmed_mean(f=1)"]
A, B, C, D = range(4)


def begun(rule: str) -> Run:
    """A run whose first round is over."""
    run = Run(QUORUM, rule=rule, sites=SITES).begin()
    for child in range(4):
        run.deliver(child, 0)
    return run


def made_of(run: Run, number: int, children: Sequence[int]) -> Floats:
    """What the rule makes of the rows of some children."""
    assert run.rule is not None
    chunks = range(len(MODEL.chunks))
    rows = [np.concatenate([gradient(child, number, one) for one in chunks]) for child in children]
    return robust.parse(run.rule)(rows)


def got(run: Run, child: int, number: int) -> Floats:
    """What a child gets of a round."""
    results = run.results(child, number)
    assert results is not None
    return np.concatenate(decoded("fp32", results))


@pytest.mark.parametrize("rule", RULES)
def test_a_round_stays_open_for_rows_that_one_says_it_does_not_have(rule: str) -> None:
    with begun(rule) as run:
        for number in (1, 2):
            for child in (A, B):
                run.deliver(child, number)
            run.deliver(D, number, weight=0.0)
            run.clock.advance(2.0)  # its quorum has come, and its deadline is over
            assert run.results(A, number) is None
            assert not run.session.is_over
            run.deliver(C, number)
            expected = made_of(run, number, (A, B, C))
            for child in range(4):
                np.testing.assert_array_equal(got(run, child, number), expected)
        assert not run.told("below_quorum")
        # With rows of three it is closed without the fourth, as ever.
        for child in (A, B, C):
            run.deliver(child, 3)
        run.clock.advance(2.0)
        np.testing.assert_array_equal(got(run, A, 3), made_of(run, 3, (A, B, C)))


def without_c() -> Run:
    """A round that waits: A and B have come, D says that it has no row, and C is lost."""
    run = begun("median(f=1)")
    for child in (A, B):
        run.deliver(child, 1)
    run.deliver(D, 1, weight=0.0)
    with run.session.changed:
        run.session._lose(C)
    return run


def test_whoever_refuses_its_own_update_is_one_of_f() -> None:
    with begun("median(f=1)") as run:
        for child in (A, B):
            run.deliver(child, 1)
        run.deliver(D, 1, weight=REFUSED_WEIGHT)
        run.clock.advance(2.0)
        assert run.results(A, 1) is not None
        assert not run.session.is_over


def test_a_lost_child_has_time_to_come_back_while_another_says_it_has_no_row() -> None:
    with without_c() as run:
        run.clock.advance(29.0)
        assert run.results(A, 1) is None
        assert [one["sites"] for one in run.told("below_quorum")] == [["a", "b"]]
        run.processes[C] = "another"
        assert run.join(C)["is_back"]
        run.session.agree_model(run.caller(C), SHAPES)
        run.deliver(C, 1)
        np.testing.assert_array_equal(got(run, A, 1), made_of(run, 1, (A, B, C)))
        run.clock.advance(100.0)
        assert not run.session.is_over


def test_who_is_there_again_is_awaited_whoever_says_that_it_has_no_row() -> None:
    """Nothing is known of its row yet, so that nobody's is missing for good."""
    quorum = Quorum(4, 1.0, late=DROP, below_s=30.0)
    with Run(quorum, rule="median(f=1)", sites=tuple("abcdef")).begin() as run:
        run.rounds(0, 0, range(6))
        for child, weight in ((0, None), (1, None), (2, 0.0), (3, 0.0)):
            run.deliver(child, 1, weight=weight)
        for child in (4, 5):
            with run.session.changed:
                run.session._lose(child)
        run.clock.advance(1.0)
        assert run.told("below_quorum")
        run.processes[4] = "another"
        assert run.join(4)["is_back"]
        run.clock.advance(100.0)
        assert not run.session.is_over


def test_who_says_it_has_no_row_is_not_there_and_is_named_when_the_run_ends() -> None:
    with without_c() as run:
        run.clock.advance(31.0)
        assert run.session.is_below_quorum
        assert "2 of 4 sites are there, 3 are needed. Site `c` was lost" in str(run.session.ended)
        assert "Site `d` says that it has no row (weight 0)." in str(run.session.ended)


def test_too_few_rows_of_all_end_the_run() -> None:
    with begun("median(f=1)") as run:
        for child in (A, B):
            run.deliver(child, 1)
            run.deliver(child + 2, 1, weight=0.0)
        run.session.begin_round(run.caller(A), 1)
        assert "needs n >= 2 f + 1 rows. Received: n=2" in str(run.session.ended)


def test_without_any_row_a_round_is_closed_as_ever() -> None:
    with begun("median(f=1)") as run:
        for child in (A, B, D):
            run.deliver(child, 1, weight=0.0)
        assert run.results(A, 1) is None
        run.clock.advance(2.0)
        assert not got(run, A, 1).any()


def test_whoever_has_no_row_and_hangs_up_is_counted_once() -> None:
    """It chooses when: just after another was lost, so that its return would not be enough."""
    with begun("median(f=1)") as run:
        for child in (A, B):
            run.deliver(child, 1)
        run.deliver(D, 1, weight=0.0)
        for child in (C, D):
            with run.session.changed:
                run.session._lose(child)
            run.clock.advance(1.0)
        assert run.told("below_quorum")
        run.processes[C] = "another"
        assert run.join(C)["is_back"]  # and needs longer than the time for its first packet
        run.clock.advance(100.0)
        assert not run.session.is_over


def test_a_round_without_any_row_waits_for_no_other() -> None:
    """One says that it has none; the others refuse their own updates, which are none either."""
    with begun("median(f=1)") as run:
        for child in (A, B):
            run.deliver(child, 1, weight=REFUSED_WEIGHT)
        run.deliver(D, 1, weight=0.0)
        closing = run.session._closing
        assert closing is not None
        assert closing._store is not None
        assert closing._store.without_row(1, (A, B, D), 3) == []
