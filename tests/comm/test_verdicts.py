# SPDX-License-Identifier: Apache-2.0
"""What `verdicts` says of the states of ranks."""

import dataclasses
import itertools
import json

import pytest

from tf_hips.comm import verdicts
from tf_hips.comm.verdicts import Notice, State, Verdict, View, Wait, departed, judge

LONG = 1000.0


def waits(key="a", seconds=10.0, **more):
    return State(wait=Wait(f"collective {key}", key, seconds), **more)


def seen(state, silent=0.0, stable=10.0):
    return View(state, silent, stable)


def judged(*views, rank=0, stall_s=600.0):
    return judge(rank, dict(enumerate(views)), stall_s)


# Deadlocks.


def test_two_ranks_in_different_collectives_are_a_deadlock():
    found = judged(seen(waits("a", place="train.py:3")), seen(waits("b", place="train.py:9")))
    assert found == Verdict("protocol", found.text)
    for part in (
        "rank 0 waits in collective a (train.py:3)",
        "rank 1 in collective b (train.py:9)",
        "`steps_per_epoch`",
        "`tf_hips.local()`",
    ):
        assert part in found.text


def test_a_deadlock_of_many_ranks_names_each_collective_once():
    found = judged(*(seen(waits(key)) for key in "aabbc"))
    assert "rank 0 waits in collective a, rank 2 in collective b, rank 4 in collective c" in (
        found.text
    )
    # Two that wait elsewhere never come back, whatever a third one does.
    assert judged(seen(waits("a")), seen(State(doing="`evaluate`")), seen(waits("b"))).kind == (
        "protocol"
    )


@pytest.mark.parametrize(
    "other", ["the sum of a and 1 more, 1 (b) as rows", "the sum of a and 1 more"]
)
def test_ranks_that_hand_over_other_rows_of_one_sum_hear_what_helps(other):
    def handed(what, key="a"):
        return seen(State(wait=Wait(what, key, 10.0)))

    alike = "Hand over the gradient of a variable alike on all ranks"
    one = "the sum of a and 1 more, 0 (a) as rows"
    text = judged(handed(one), handed(other, "b")).text
    assert f"rank 0 waits in {one}, rank 1 in {other}" in text
    assert alike in text
    assert "`steps_per_epoch`" not in text
    lone = handed("the sum of b, 0 (b) as rows", "b")
    for elsewhere in (lone, handed(one, "b"), seen(waits("b"))):
        text = judged(handed(one), elsewhere).text
        assert alike not in text
        assert "`steps_per_epoch`" in text


@pytest.mark.parametrize(
    ("mine", "theirs", "is_deadlock"),
    [
        (10.0, seen(waits("b")), True),
        (3.9, seen(waits("b")), False),
        (4.0, seen(waits("b", 4.0), stable=2.0), True),
        (10.0, seen(waits("b", 3.9)), False),
        (10.0, seen(waits("b"), stable=1.9), False),
        (10.0, seen(waits("b"), silent=10.0), False),
        (10.0, seen(waits("a")), False),
    ],
)
def test_a_deadlock_is_seen_for_long_enough(mine, theirs, is_deadlock):
    found = judged(seen(waits("a", mine)), theirs)
    assert (isinstance(found, Verdict) and found.kind == "protocol") == is_deadlock


@pytest.mark.parametrize(
    ("mine", "theirs", "is_deadlock"),
    [
        (waits("next", 5.0, begun=12), waits("long", 15.0, begun=11), False),
        # The tail of a broadcast whose root is another rank looks at it from behind.
        (waits("long", 15.0, begun=11), waits("next", 5.0, begun=12), False),
        (waits("a", 5.0, begun=11), waits("b", 5.0, begun=11), True),
        # No rank is two ahead: they count other things.
        (waits("a", 5.0, begun=13), waits("b", 5.0, begun=11), True),
        (waits("b", 5.0, begun=11), waits("a", 5.0, begun=13), True),
        # Nor for ever one ahead.
        (waits("a", 600.0, begun=12), waits("b", 700.0, begun=11), True),
        (waits("a", 599.0, begun=12), waits("b", 700.0, begun=11), False),
    ],
)
def test_who_has_ended_a_collective_earlier_is_not_elsewhere(mine, theirs, is_deadlock):
    found = judged(seen(mine), seen(theirs, stable=2.1))
    assert (isinstance(found, Verdict) and found.kind == "protocol") == is_deadlock


# Ranks that have left.


@pytest.mark.parametrize(
    ("theirs", "has_left"),
    [
        (seen(State(failure="ValueError: no", failed_s=8.0)), True),
        (seen(State(failure="ValueError: no", failed_s=7.0)), False),
        (seen(State(failure="ValueError: no", failed_s=7.0), silent=1.0), True),
        (seen(waits("a", failure="ValueError: no", failed_s=8.0)), False),
        (seen(State(failure="ValueError: no", failed_s=8.0, is_freed=True)), False),
        (seen(State(has_ended=True)), True),
        (seen(State(has_ended=True, is_freed=True, failure="PeerError: x")), True),
        (seen(State()), False),
    ],
)
def test_a_rank_has_left(theirs, has_left):
    found = judged(seen(waits("a", 10.0)), theirs)
    assert (isinstance(found, Verdict) and found.kind == "peer") == has_left


def test_who_has_left_is_named_with_the_error_and_the_remedy():
    failure = "ValueError: boom"
    left = State(failure=failure, failed_s=9.0, doing="`fit` of model m")
    found = judged(seen(waits("a")), seen(left))
    assert found.text.startswith(
        "Rank 1 left its step in `fit` of model m with ValueError: boom. "
        "Rank 0 has waited 10 s in collective a."
    )
    assert "catch it on all ranks alike" in found.text
    ended = seen(dataclasses.replace(left, has_ended=True))
    assert "Rank 1 ended in `fit` of model m with ValueError: boom" in (
        judged(seen(waits("a")), ended).text
    )
    quiet = judged(seen(waits("a")), seen(State(has_ended=True))).text
    assert quiet.startswith(
        "Rank 1 ended, without an error. Rank 0 has waited 10 s in collective a. All workers must "
        "call the same methods of Keras"
    )
    assert "`with tf_hips.local():`" in quiet
    assert "catch it" not in quiet


def test_the_cause_is_told_from_its_consequences():
    freed = seen(State(failure="PeerError: gone", is_freed=True, has_ended=True))
    cause = seen(State(failure="ValueError: boom", has_ended=True))
    quiet = seen(State(has_ended=True))
    busy = seen(State())
    for views in ({1: freed, 2: cause, 3: busy}, {1: quiet, 2: cause}):
        who, remedy = departed(views)
        assert who == "Rank 2 ended with ValueError: boom."
        assert "catch it on all ranks alike" in remedy
    who, remedy = departed({1: quiet, 2: freed})
    assert who == "Rank 1 ended, without an error."
    assert "`with tf_hips.local():`" in remedy
    assert departed({1: freed, 2: busy, 3: View(None, 0.0, 0.0)}) is None


# Ranks that are late.


@pytest.mark.parametrize(
    ("seconds", "theirs", "kind"),
    [
        (29.0, seen(State(doing="`evaluate`")), None),
        (30.0, seen(State(doing="`evaluate`")), Notice),
        (599.0, seen(State(doing="`evaluate`")), Notice),
        (600.0, seen(State(doing="`evaluate`")), Verdict),
        (LONG, seen(State(doing="a server", has_deadline=True)), Notice),
        (LONG, seen(State(has_deadline=True), silent=11.0), Verdict),
        (600.0, seen(waits("a"), silent=11.0), Verdict),
        (30.0, View(None, 30.0, 0.0), Notice),
        (600.0, View(None, 600.0, 0.0), Verdict),
        (LONG, seen(waits("a")), None),
        # It has come elsewhere, but not for long.
        (LONG, seen(waits("b", 1.0)), None),
    ],
)
def test_a_late_rank_is_a_notice_and_then_a_verdict(seconds, theirs, kind):
    found = judged(seen(waits("a", seconds)), theirs)
    assert type(found) is (kind or type(None))


def test_the_limit_is_the_users():
    late = seen(State(doing="`evaluate` of model m", place="train.py:7"))
    assert judged(seen(waits("a", 4.9)), late, stall_s=10.0) is None
    assert isinstance(judged(seen(waits("a", 5.0)), late, stall_s=10.0), Notice)
    found = judged(seen(waits("a", 10.0)), late, stall_s=10.0)
    assert found.kind == "peer"
    assert "TF_HIPS_STALL_S=10 s" in found.text
    assert "rank 1 is busy: `evaluate` of model m (train.py:7)" in found.text
    assert "Raise TF_HIPS_STALL_S" in found.text
    notice = judged(seen(waits("a", 5.0)), late, View(State(), 20.0, 0.0), stall_s=10.0)
    assert "Rank 0 has waited 5 s in collective a." in notice.text
    assert "rank 2 gives no sign of life" in notice.text


def test_nothing_else_is_ever_said():
    """All states of two ranks: no verdict against one that computes, and none that contradict."""
    walks = (
        None,
        Wait("x", "a", 1.0),
        Wait("x", "a", 9.0),
        Wait("y", "b", 1.0),
        Wait("y", "b", 9.0),
    )
    states = [
        State(wait=wait, failure=failure, failed_s=9.0, is_freed=freed, has_ended=ended)
        for wait, failure, freed, ended in itertools.product(
            walks, (None, "E: e"), (False, True), (False, True)
        )
    ]
    for mine, theirs, silent in itertools.product(states, states, (0.0, 20.0)):
        found = judged(seen(mine), seen(theirs, silent))
        waited = mine.wait is not None and mine.wait.seconds >= verdicts.DEADLOCK_S
        if not waited:
            assert found is None
            continue
        differ = theirs.wait is not None and theirs.wait.key != mine.wait.key
        deadlock = differ and theirs.wait.seconds >= verdicts.DEADLOCK_S and not silent
        failed = theirs.failure is not None and theirs.wait is None and not theirs.is_freed
        if deadlock:
            assert found.kind == "protocol"
            back = judged(seen(mine), seen(theirs), rank=1)
            assert back is not None
            assert back.kind == "protocol"
        elif theirs.has_ended or failed:
            assert found.kind == "peer"
        else:
            assert found is None


def test_states_travel_as_json():
    state = waits("a", 3.5, doing="x", failure="E: e", failed_s=1.5, begun=7, beat=3)
    assert State.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert State.from_json(State().to_json()) == State()
    for wrong in (None, [], {}, {"wait": {"text": "x"}}, {**State().to_json(), "more": 1}):
        with pytest.raises(ValueError, match="fields of `State`"):
            State.from_json(wrong)
