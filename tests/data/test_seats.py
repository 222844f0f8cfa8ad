# SPDX-License-Identifier: Apache-2.0
"""Batches of groups that change from step to step: the rows of a group, and who waits for what."""

import threading

import numpy as np
import pytest

pytestmark = pytest.mark.tf

FIRST = 5
STEPS = 4


def group_of(number):
    return number * 7 % 3


def sources():
    import tensorflow as tf

    x = np.arange(26)  # two rows are left out
    rows = tf.data.Dataset.from_tensor_slices((x, x))
    return {
        "arrays": x,
        "dataset": rows,
        "of unknown length": rows.filter(lambda one, two: one >= 0),
    }


def values(element):
    return (element[0] if isinstance(element, tuple) else element).numpy()


def shard(source, seats=None, group=0, **options):
    from tf_hips import data

    return data.shard(source, 2, group=group, groups=3, seed=1, seats=seats, **options)


@pytest.mark.parametrize(
    "name", ["arrays", pytest.param("dataset", marks=pytest.mark.slow), "of unknown length"]
)
def test_a_step_has_the_rows_of_the_group_of_its_round(name):
    from tf_hips.data.seats import Seats

    source = sources()[name]
    seats = Seats(3, group_of, FIRST)
    found = shard(source, seats, shuffle=True)
    others = [shard(source, group=group, shuffle=True) for group in range(3)]
    of_groups = [[values(one) for one in list(other)] for other in others]
    more = [[values(one) for one in list(other)] for other in others]
    if found.cardinality() >= 0:
        assert int(found.cardinality()) == STEPS
    number = FIRST
    # Two epochs by one iterator that reads ahead, over the end of the first.
    for step, element in enumerate(found.repeat(2).prefetch(3)):
        wanted = (of_groups, more)[step // STEPS][group_of(number)][step % STEPS]
        np.testing.assert_array_equal(values(element), wanted)
        number += 1
        seats.open(number)
    assert number == FIRST + 2 * STEPS
    # One that is given up in its middle; the next one begins with the round that comes.
    for _ in found.prefetch(2):
        number += 1
        seats.open(number)
        break
    from tf_hips.data import positions_of

    [position] = positions_of(found)
    position.set(1, first_step=2)
    for step, element in enumerate(found.skip(2)):
        np.testing.assert_array_equal(values(element), more[group_of(number)][2 + step])
        number += 1
        seats.open(number)


def test_local_steps_of_a_round_have_batches_of_one_group():
    from tf_hips.data.seats import Seats

    local_steps, done = 3, [0]
    seats = Seats(3, group_of, FIRST)
    seats.follow(local_steps, lambda: done[0])
    found = shard(np.arange(26), seats, shuffle=True)
    others = [shard(np.arange(26), group=group, shuffle=True) for group in range(3)]
    epochs = [[[values(one) for one in list(other)] for other in others] for _ in range(3)]
    number = FIRST  # the open round

    def check(element, epoch, place):
        np.testing.assert_array_equal(values(element), epochs[epoch][group_of(number)][place])

    def advance(*, is_sent=True):
        nonlocal number
        done[0] = (done[0] + 1) % local_steps
        if done[0] == 0 and is_sent:
            number += 1
            seats.open(number)
        elif done[0] == 0:
            seats.skip()

    # Two epochs of four steps, in rounds of three; nobody has anything to send of the second.
    for step, element in enumerate(found.repeat(2).prefetch(3)):
        check(element, *divmod(step, STEPS))
        advance(is_sent=step // local_steps != 1)
    assert (number, done[0]) == (FIRST + 1, 2)
    # One that is taken up in the middle of a round, and given up in that of the next.
    for step, element in enumerate(found.prefetch(2)):
        check(element, 2, step)
        if step == 2:
            break
        advance()
    assert (number, done[0]) == (FIRST + 2, 1)


def test_a_pass_may_begin_while_a_round_is_being_closed():
    from tf_hips.data.seats import Position, Seats

    steps, done = 3, [0]
    seats = Seats(3, group_of, FIRST)
    seats.follow(steps, lambda: done[0])
    done[0] = steps  # of round FIRST, and the loop has not begun to count those of the next
    seats.open(FIRST + 1)
    ahead = (FIRST + 1) * steps + 1  # what was read ahead, the last elements of a pass
    position = Position()
    position.next_number, position.is_whole = ahead, True
    assert seats._begin(position) == ahead
    done[0] = 0
    seats.begin()
    done[0] = 2
    position.next_number, position.is_whole = 0, False
    assert seats._begin(position) == (FIRST + 1) * steps + 2
    # What was read to its end long ago, or by another run, says nothing of where this one is.
    for number in (0, (FIRST + 1) * steps + 1, 1 << 20):
        position.next_number, position.is_whole = number, True
        assert seats._begin(position) == (FIRST + 1) * steps + 2
    done[0] = steps
    seats.skip()
    assert seats._begin(Position()) == (FIRST + 2) * steps


def test_who_reads_ahead_waits_for_the_round_and_is_let_go():
    from tf_hips.data.seats import Seats

    asked = []

    def ask(number):
        asked.append(number)
        return group_of(number)

    seats = Seats(3, ask, FIRST)
    found = iter(shard(np.arange(24), seats, shuffle=False).repeat().prefetch(4))
    first, second = [], threading.Event()

    def read():
        first.append(next(found))
        first.append(next(found))
        second.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert not second.wait(0.2)  # it may not know yet
    assert set(asked) == {FIRST}
    seats.open(FIRST + 1)
    assert second.wait(10.0)
    reader.join(10.0)
    assert set(asked) == {FIRST, FIRST + 1}
    ended = threading.Event()

    def give_up():
        nonlocal found
        del found
        ended.set()

    threading.Thread(target=give_up, daemon=True).start()
    assert ended.wait(10.0)


def test_evaluation_is_not_of_groups_that_change():
    from tf_hips.data import check_whole
    from tf_hips.data.seats import Seats

    with pytest.raises(ValueError, match="follows groups that change"):
        check_whole(shard(np.arange(24), Seats(3, group_of)), "evaluate")
