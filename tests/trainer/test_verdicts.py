# SPDX-License-Identifier: Apache-2.0
"""Who is named where one process plays all workers: the outvoted, dropped groups, refused rows."""

import numpy as np
import pytest

from tf_hips import robust
from tf_hips.report import peers
from tf_hips.robust.detox import Detox, Result, groups
from tf_hips.robust.rows import Rejected
from tf_hips.trainer.verdicts import NO_MAJORITY, Verdicts, by_worker

SEED, STEP, D = 5, 3, 9


def rows_of(detox: Detox, workers: int) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """What honest workers send: members of a group the same; and who sits with whom."""
    seats = groups(workers, detox.r, SEED, STEP)
    rows = np.empty((workers, D), np.float32)
    for number, members in enumerate(seats):
        rows[list(members)] = np.random.default_rng(number).standard_normal(D)
    return rows, seats


def told_of(result: Result, workers: int) -> list[dict]:
    """The events that a result comes to."""
    events: list[dict] = []
    verdicts = Verdicts(workers, lambda event, **values: events.append({"event": event, **values}))
    verdicts.voted(STEP, result.votes)
    verdicts.refused(STEP, result.aggregation.rejected, result.votes)
    return events


def names(workers) -> list[str]:
    return [f"worker {one}" for one in workers]


@pytest.mark.parametrize("buckets", [0, 5])
def test_a_row_behind_votes_is_that_of_all_who_agreed(buckets: int) -> None:
    """Also behind buckets, and where a dropped group moves the numbers of the rows."""
    detox = Detox(3, robust.median(), buckets=buckets)
    rows, seats = rows_of(detox, 30)
    rows[seats[0][0]] += 1  # nobody in group 0 agrees with another
    rows[seats[0][1]] += 2
    rows[seats[4][2]] += 1  # outvoted
    rows[list(seats[2])] = np.nan
    events = told_of(detox.run(rows, seed=SEED, step=STEP), 30)
    outvoted, dropped, *refused = events
    assert outvoted == {"event": "outvoted", "round": STEP, "sites": names([seats[4][2]])}
    assert dropped == {
        "event": "dropped",
        "round": STEP,
        "sites": names(seats[0]),
        "reason": NO_MAJORITY,
    }
    assert [one["child_site"] for one in refused] == names(seats[2])
    assert [one["child"] for one in refused] == list(seats[2])
    assert {one["event"] for one in refused} == {"row_refused"}
    assert {one["reason"] for one in refused} == {"NaN at element 0, in the vote of its group"}


def test_who_was_outvoted_in_a_refused_vote_is_not_refused_for_it() -> None:
    detox = Detox(3, robust.median())
    rows, seats = rows_of(detox, 15)
    rows[list(seats[1][:2])] = np.inf
    result = detox.run(rows, seed=SEED, step=STEP)
    assert sorted(by_worker(result.aggregation.rejected, result.votes)) == list(seats[1][:2])
    assert result.outvoted == seats[1][2:]


def test_the_report_reads_it_with_the_reason() -> None:
    detox = Detox(3, robust.median())
    rows, seats = rows_of(detox, 15)
    rows[seats[0][0]] += 1
    rows[seats[0][1]] += 2
    events = told_of(detox.run(rows, seed=SEED, step=STEP), 15)
    lines = peers.lines(peers.marks({"role": "worker", **one} for one in events))
    assert [one.peer for one in lines] == sorted(names(seats[0]))
    assert {(one.kind, one.by, one.reason, one.rounds) for one in lines} == {
        ("group dropped", "the vote of its group (worker)", NO_MAJORITY, (STEP,))
    }


def test_without_groups_a_row_is_a_worker() -> None:
    assert by_worker([Rejected(2, "NaN at element 1")]) == {2: "NaN at element 1"}


def test_a_step_that_is_refused_says_who_each_row_is() -> None:
    detox = Detox(3, robust.mean())
    rows, seats = rows_of(detox, 12)
    rows[seats[0][0]] += 1
    rows[seats[0][1]] += 2
    rows[list(seats[2])] = np.nan
    result = detox.run(rows, seed=SEED, step=STEP)
    events: list[dict] = []
    verdicts = Verdicts(12, lambda event, **values: events.append({"event": event, **values}))
    told = verdicts.stopped(STEP, result.aggregation.rejected, result.votes)
    assert told == (
        f"row 1 is the vote of {' and '.join(names(seats[2]))}; "
        f"the group of {' and '.join(names(seats[0]))} has {NO_MAJORITY}"
    )
    assert [one["child_site"] for one in events] == names(seats[2])


def test_whose_rows_were_chosen_is_told_by_worker() -> None:
    detox = Detox(3, robust.krum(f=1))
    rows, seats = rows_of(detox, 15)
    rows[seats[0][0]] += 1  # nobody in group 0 agrees with another
    rows[seats[0][1]] += 2
    rows[seats[3][2]] += 1  # outvoted
    events: list[dict] = []
    verdicts = Verdicts(15, lambda event, **values: events.append({"event": event, **values}))
    result = detox.run(rows, seed=SEED, step=STEP)
    verdicts.chosen(STEP, result.aggregation, result.votes)
    [row] = result.aggregation.selected
    won = [vote.agreed for vote in result.votes if vote.is_won]
    [told] = events
    assert (told["event"], told["round"]) == ("rows_chosen", STEP)
    assert told["sites"] == names(won[row])
    assert {*told["among"]} == {*names(range(15))} - {*names(seats[0])} - {*names([seats[3][2]])}

    # Without votes a row is a worker; a rule that chooses none tells nothing.
    for rule in (robust.cge(f=1), robust.median()):
        verdicts.chosen(STEP, rule.run(rows[:4]))
    [_, told] = events
    assert told["sites"] == names(robust.cge(f=1).run(rows[:4]).selected)
    assert told["among"] == names(range(4))
