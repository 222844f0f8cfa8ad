# SPDX-License-Identifier: Apache-2.0
"""How many refused calls a peer may make."""

from tf_hips.ps.calls.refusals import Refusals


def test_a_peer_is_turned_away_for_the_rest_of_a_period() -> None:
    now = [100.0]
    refusals = Refusals(limit=3, period_s=60, clock=lambda: now[0])
    assert [refusals.note("a") for _ in range(2)] == [False, False]
    assert refusals.wait_s("a") == 0
    now[0] = 110.0
    assert refusals.note("a")  # the last one that is heard
    assert not refusals.note("a")  # one of a call that had begun before: no second line of log
    assert refusals.wait_s("a") == 50
    assert refusals.wait_s("b") == 0
    now[0] = 159.5
    assert refusals.wait_s("a") == 0.5
    now[0] = 160.0
    assert refusals.wait_s("a") == 0
    assert not refusals.note("a")  # a new period
    assert refusals.wait_s("a") == 0


def test_memory_is_bounded_and_the_newest_stay() -> None:
    refusals = Refusals(limit=1, period_s=60, clock=lambda: 0.0)
    for number in range(4700):
        if number % 600 == 0:
            refusals.note("again")  # others were refused longer ago
        refusals.note(str(number))
    assert refusals.wait_s("4699") == refusals.wait_s("again") == 60
    assert refusals.wait_s("0") == 0
    assert len(refusals._peers) == 1024
