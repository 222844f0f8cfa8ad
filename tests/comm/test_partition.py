# SPDX-License-Identifier: Apache-2.0
"""`partition`: cover, order, balance; no TensorFlow."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import shapes
from tf_hips.comm.partition import buckets, piece_buckets, pieces, spread

SIZES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 60)), max_size=12)


@given(SIZES, st.integers(1, 10))
def test_pieces_cover_each_tensor_once_the_last_first(sizes, chunk):
    found = pieces(sizes, chunk)
    assert [piece.tensor for piece in found] == sorted(
        (piece.tensor for piece in found), reverse=True
    )
    for tensor, size in enumerate(sizes):
        own = [piece for piece in found if piece.tensor == tensor]
        assert [piece.index for piece in own] == list(range(len(own)))
        assert [piece.offset for piece in own] == [chunk * place for place in range(len(own))]
        assert sum(piece.num_elements for piece in own) == size
        assert all(0 < piece.num_elements <= chunk for piece in own)
        assert all(piece.is_whole == (len(own) == 1) for piece in own)
    assert len({piece.name for piece in found}) == len(found)


@given(st.lists(st.integers(0, 2**20), max_size=40), st.integers(1, 9), st.data())
def test_every_run_of_pieces_is_spread_evenly(weights, num_segments, data):
    found = spread(weights, num_segments)
    assert len(found) == len(weights)
    begin = data.draw(st.integers(0, len(weights)))
    end = data.draw(st.integers(begin, len(weights)))
    loads = [0] * num_segments
    for weight, segment in zip(weights[begin:end], found[begin:end], strict=True):
        loads[segment] += weight
    assert max(loads) - min(loads) <= 2 * max(weights, default=0)


def test_pieces_without_a_place_are_refused():
    assert spread([5] * 4, 2) == [0, 1, 0, 1]
    assert spread([], 3) == []
    with pytest.raises(ValueError, match="Received: 0"):
        spread([1], 0)
    with pytest.raises(ValueError, match="negative"):
        spread([1, -1], 2)


@given(SIZES, st.integers(1, 10), st.integers(1, 40), st.data())
def test_buckets_of_pieces_keep_their_order(sizes, chunk, limit, data):
    found = pieces(sizes, chunk)
    apart = data.draw(
        st.dictionaries(st.integers(0, max(0, len(sizes) - 1)), st.integers(1, 5), max_size=3)
    )
    groups = piece_buckets(found, limit, apart)
    assert list(itertools.chain(*groups)) == list(range(len(found)))
    assert all(groups)
    for tensor, count in apart.items():
        own = [group for group in groups if any(found[place].tensor == tensor for place in group)]
        chunks = sum(piece.tensor == tensor for piece in found)
        assert len(own) == min(count, chunks)
        assert all(found[place].tensor == tensor for group in own for place in group)
    for group in groups:
        if not any(found[place].tensor in apart for place in group):
            filled = sum(found[place].num_elements for place in group)
            assert len(group) == 1 or filled <= limit * 4 / 3


def test_the_first_buckets_are_small():
    found = pieces([100], 1)
    assert [len(group) for group in piece_buckets(found, 16, {})] == [4, 8, 16, 16, 16, 16, 16, 8]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("model", "chunk"), [("resnet50", 2**20), ("vgg19", 2**20), ("resnet50", 2**17)]
)
def test_buckets_end_where_shares_are_even(model, chunk, num_ranks):
    """A bucket travels as long as its largest share: that costs little beside equal shares."""
    found = pieces([math.prod(shape) for shape in shapes.MODELS[model](1)], chunk)
    weights = [piece.num_elements for piece in found]
    segments = spread(weights, num_ranks)
    largest = 0
    for group in piece_buckets(found, 2**24, {}, segments):
        shares = [0] * num_ranks
        for place in group:
            shares[segments[place]] += weights[place]
        largest += max(shares)
    assert largest * num_ranks <= 1.06 * sum(weights)


def test_buckets_of_pieces_refuse_what_is_not_positive():
    found = pieces([4, 4], 2)
    assert piece_buckets(found, 4, {}) == [[0], [1], [2, 3]]
    assert piece_buckets([], 4, {}) == []
    assert piece_buckets(found, 16, {0: 2}) == [[0, 1], [2], [3]]
    with pytest.raises(ValueError, match="limit=0"):
        piece_buckets(found, 0, {})
    with pytest.raises(ValueError, match="partitions"):
        piece_buckets(found, 4, {0: 0})


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
