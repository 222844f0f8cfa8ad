# SPDX-License-Identifier: Apache-2.0
"""`partition`: cover, order, balance; no TensorFlow."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_hips.comm.partition import buckets, owners


@given(st.lists(st.integers(0, 2**20), max_size=40), st.integers(1, 9))
def test_owners_cover_all_chunks_in_order_and_are_balanced(sizes, size):
    ranges = owners(sizes, size)
    assert len(ranges) == size
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(sizes)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    heaviest = max(sum(sizes[start:stop]) for start, stop in ranges)
    assert heaviest * size <= sum(sizes) + max(sizes, default=0) * size


def test_owners_of_equal_chunks_hold_equal_numbers():
    assert owners([5] * 6, 3) == [(0, 2), (2, 4), (4, 6)]


def test_owners_without_chunks_hold_nothing():
    assert owners([], 3) == [(0, 0)] * 3
    assert owners([7], 2) == [(0, 0), (0, 1)]


def test_owners_refuse_bad_arguments():
    with pytest.raises(ValueError, match="size=0"):
        owners([1], 0)
    with pytest.raises(ValueError, match="negative"):
        owners([1, -1], 2)


def test_buckets_keep_order_and_never_mix_kinds():
    assert buckets([4, 4, 4, 100, 4], ["f", "f", "d", "f", "f"], 10) == [[0, 1], [2], [3], [4]]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("fd")), max_size=30),
    st.integers(1, 100),
)
def test_buckets_hold_every_position_once_within_the_limit(tensors, limit):
    sizes = [size for size, _ in tensors]
    kinds = [kind for _, kind in tensors]
    groups = buckets(sizes, kinds, limit)
    assert sorted(itertools.chain(*groups)) == list(range(len(tensors)))
    for group in groups:
        assert group == sorted(group)
        assert len({kinds[position] for position in group}) == 1
        assert len(group) == 1 or sum(sizes[position] for position in group) <= limit


def test_buckets_refuse_bad_arguments():
    with pytest.raises(ValueError, match="2 sizes, 1 kinds"):
        buckets([1, 2], ["f"], 10)
    with pytest.raises(ValueError, match="limit_bytes=0"):
        buckets([1], ["f"], 0)
