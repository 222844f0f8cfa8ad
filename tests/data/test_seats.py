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
