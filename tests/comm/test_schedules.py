# SPDX-License-Identifier: Apache-2.0
"""`schedules`: every rank's share reaches the owner once, and is sent once; no TensorFlow."""

import pytest

from tf_hips.comm import schedules


def _check(schedule, num_ranks):
    num_segments = len(schedule.owners)
    # Whose shares each rank's partial sum of each segment has; None once it is sent.
    held = [[{rank} for _ in range(num_segments)] for rank in range(num_ranks)]
    for hop in schedule.hops:
        pairs = [(one.source, one.target) for one in hop]
        assert len(set(pairs)) == len(pairs)
        # Who receives has one message at a time (`cost_model` counts on it).
        assert len({one.target for one in hop}) == len(hop)
        arriving = []
        for one in hop:
            assert one.source != one.target
            assert list(one.segments) == sorted(set(one.segments))
            for segment in one.segments:
                assert schedule.owners[segment] != one.source
                arriving.append((one.target, segment, held[one.source][segment]))
                held[one.source][segment] = None
        for target, segment, shares in arriving:
            # Neither was sent before, and no share comes twice.
            assert not shares & held[target][segment]
            held[target][segment] |= shares
    everyone = set(range(num_ranks))
    for segment, owner in enumerate(schedule.owners):
        assert held[owner][segment] == everyone
    for rank in range(num_ranks):
        for segment, owner in enumerate(schedule.owners):
            assert (held[rank][segment] is None) == (rank != owner)


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_every_share_arrives_once(num_ranks):
    _check(schedules.ring(num_ranks), num_ranks)
    _check(schedules.blocks(num_ranks), num_ranks)
    assert len(schedules.ring(num_ranks).hops) == num_ranks - 1
    bits = num_ranks.bit_length() - 1
    if num_ranks == 1 << bits:
        butterfly = schedules.butterfly(num_ranks)
        assert butterfly == schedules.blocks(num_ranks)
        assert len(butterfly.hops) == bits
        # A half, a quarter, ...: in all, everything but the own segment.
        sent = sum(len(one.segments) for hop in butterfly.hops for one in hop if not one.source)
        assert sent == num_ranks - 1
    else:
        with pytest.raises(ValueError, match=f"Received: {num_ranks} ranks"):
            schedules.butterfly(num_ranks)


def test_blocks_hand_on_while_larger_ones_work():
    # 7 = 4 + 2 + 1: two hops inside of the largest, while which the 1 hands on to the 2, and one
    # from the 2 to the 4. 9 = 8 + 1: three hops inside, and one.
    hops = {num_ranks: len(schedules.blocks(num_ranks).hops) for num_ranks in (3, 5, 6, 7, 9, 13)}
    assert hops == {3: 2, 5: 3, 6: 3, 7: 3, 9: 4, 13: 4}
    # In the ring a rank sends one segment in each hop.
    assert {len(one.segments) for hop in schedules.ring(5).hops for one in hop} == {1}


def test_no_ranks_are_refused():
    for schedule in (schedules.ring, schedules.butterfly, schedules.blocks):
        with pytest.raises(ValueError, match="num_ranks=0"):
            schedule(0)
