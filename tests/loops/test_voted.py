# SPDX-License-Identifier: Apache-2.0
"""What groups that vote ask of a loop: steps that are known, no history, rounds that are."""

import types

import pytest

pytestmark = pytest.mark.tf


class _Seats:
    """Notes what it is told."""

    def __init__(self):
        self.steps, self.done, self.num_skipped = 0, int, 0

    def follow(self, steps, done):
        self.steps, self.done = steps, done

    def skip(self):
        self.num_skipped += 1


class _Loop:
    """A loop of 8 local steps, of which some are left."""

    steps_left = None

    def __init__(self, steps=8, why_not=None):
        self._steps, self._why_not = steps, why_not

    def why_not_voted(self):
        return self._why_not

    def steps_of_round(self):
        return self._steps


def _strategy(seats, *, votes=True):
    return types.SimpleNamespace(groups=object() if votes else None, seats=seats)


def test_batches_follow_the_rounds_of_a_loop():
    from tf_hips.loops import voted

    loop, seats = _Loop(), _Seats()
    voted.check(loop, _strategy(seats))
    assert (seats.steps, seats.done()) == (8, 0)
    loop.steps_left = 3
    assert seats.done() == 5
    del loop
    assert seats.done() == 0  # it is not kept alive


def test_what_cannot_be_voted_on_is_refused():
    from tf_hips.errors import ConfigError
    from tf_hips.loops import voted

    odd, uneven = _Loop(why_not="it is odd"), _Loop(steps=None)
    voted.check(odd, _strategy(None, votes=False))
    for seats in (_Seats(), None):
        with pytest.raises(ConfigError, match="must send equal bytes: it is odd"):
            voted.check(odd, _strategy(seats))
    with pytest.raises(ConfigError, match="same number of local steps"):
        voted.check(uneven, _strategy(_Seats()))
    voted.check(uneven, _strategy(None))  # groups stay, and so does what is told apart


def test_where_groups_change_the_inner_optimizer_keeps_nothing():
    import keras

    from tf_hips.errors import ConfigError
    from tf_hips.loops import voted

    drawn, stay = _strategy(_Seats()), _strategy(None)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    for optimizer, kept in (
        (keras.optimizers.SGD(0.1), None),
        (keras.optimizers.SGD(schedule), None),
        (keras.optimizers.SGD(0.1, momentum=0.9), "momentum"),
        (keras.optimizers.SGD(0.1, use_ema=True), "average"),
        (keras.optimizers.Adam(), "momentum"),
    ):
        model = types.SimpleNamespace(optimizer=optimizer)
        voted.check_optimizer(stay, model, resets=False)
        voted.check_optimizer(drawn, model, resets=True)
        if kept is None:
            voted.check_optimizer(drawn, model, resets=False)
            continue
        with pytest.raises(ConfigError, match=f"keep nothing.*which keeps .*{kept}"):
            voted.check_optimizer(drawn, model, resets=False)
    voted.check_optimizer(drawn, types.SimpleNamespace(optimizer=None), resets=False)


def test_a_meeting_at_which_nobody_has_anything_to_send_is_no_round():
    from tf_hips.loops import voted
    from tf_hips.loops.meeting import Meeting, Told

    seats = _Seats()
    nothing, something = Told(0, 0), Told(8, 64)
    for parties, count in (((nothing, something), 0), ((nothing, nothing), 1)):
        meeting = Meeting(tuple((one,) for one in parties), "samples", True)
        voted.note(_strategy(seats), meeting)
        assert seats.num_skipped == count
    voted.note(_strategy(None), meeting)
