# SPDX-License-Identifier: Apache-2.0
"""Parts of a data set: disjoint, complete, the same every time, and as uneven as asked for."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tf_hips.data import splits
from tf_hips.errors import ConfigError

TEXTS = ["iid", "class", "class(compat)", "dirichlet(0.5)", "dirichlet(5)", "quantity(1)"]
EXACT = ["dirichlet(0.123456789)", "quantity(1234567.5)"]


@given(
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=300),
    text=st.sampled_from(TEXTS),
    parties=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    level=st.sampled_from(splits.LEVELS),
    seed=st.integers(0, 2**63 - 1),
)
def test_parts_are_disjoint_complete_and_the_same_again(labels, text, parties, level, seed):
    split = splits.parse(text)
    y = np.array(labels)
    try:
        found = splits.parts(y, split, parties, seed=seed, level=level)
    except ConfigError as error:
        assert "must have a sample" in str(error)
        assume(False)
    assert len(found) == sum(parties)
    assert all(len(part) for part in found)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(len(y)))
    again = splits.parts(y, split, parties, seed=seed, level=level)
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("text", TEXTS)
def test_labels_may_be_a_list_or_a_column_and_nothing_else(text):
    y = np.arange(40) % 4
    split = splits.parse(text)
    expected = splits.parts(y, split, [2], seed=3)
    for labels in (y.tolist(), y[:, None]):
        for one, other in zip(splits.parts(labels, split, [2], seed=3), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(ConfigError, match=r"argmax.*Received: an array of shape \(40, 4\)"):
        splits.parts(np.eye(4)[y], split, [2], seed=3)


@pytest.mark.parametrize("text", TEXTS + EXACT)
def test_a_text_is_read_back(text):
    assert splits.parse(text).text == text


@pytest.mark.parametrize(
    "text", ["", "random", "iid(3)", "class(3)", "dirichlet", "dirichlet(0)", "quantity(nan)"]
)
def test_what_is_no_split_is_refused(text):
    with pytest.raises(ConfigError, match="`split` must be iid"):
        splits.parse(text)


def test_six_workers_get_one_to_three_classes_each():
    y = np.random.default_rng(0).permutation(np.arange(6000) % 10)
    for text in ("class", "class(compat)"):
        found = splits.parts(y, splits.parse(text), [3, 3], seed=1)
        assert all(1 <= len(np.unique(y[part])) <= 3 for part in found)
        is_ordered = [bool((np.diff(y[part]) >= 0).all()) for part in found]
        assert all(is_ordered) if text == "class(compat)" else not any(is_ordered)


def test_of_two_parties_each_has_half_of_the_classes_and_its_workers_all_of_those():
    y = np.repeat(np.arange(10), 100)
    found = splits.parts(y, splits.parse("class"), [2, 2], seed=3, level="party")
    for worker, part in enumerate(found):
        assert set(y[part]) == (set(range(5)) if worker < 2 else set(range(5, 10)))


def test_alpha_says_how_uneven():
    y = np.random.default_rng(0).permutation(np.arange(10_000) % 10)

    def distance(text):
        parts = splits.parts(y, splits.parse(text), [8], seed=5)
        shares = [np.bincount(y[part], minlength=10) / len(part) for part in parts]
        return np.mean([np.abs(share - 0.1).sum() for share in shares])

    assert distance("iid") < 0.15
    assert distance("iid") < distance("dirichlet(5)") < distance("dirichlet(0.2)")
    sizes = [len(part) for part in splits.parts(y, splits.parse("quantity(0.5)"), [8], seed=5)]
    assert max(sizes) > 4 * min(sizes)
    assert distance("quantity(0.5)") < 0.6


def test_another_seed_is_another_split():
    y = np.arange(1000) % 10
    for text in ("iid", "dirichlet(1)", "quantity(1)"):
        one, other = (splits.parts(y, splits.parse(text), [4], seed=seed)[0] for seed in (0, 1))
        assert not np.array_equal(np.sort(one), np.sort(other))


@pytest.mark.parametrize(
    ("text", "level", "expected"),
    [
        ("iid", "worker", [[2, 1, 11, 0], [7, 8, 10, 4], [9, 6, 3, 5]]),
        ("iid", "party", [[8, 11, 0, 2, 1, 7], [6, 3, 10], [9, 4, 5]]),
        ("class", "worker", [[0, 3, 9, 6], [10, 1, 7, 4], [5, 8, 11, 2]]),
        ("class", "party", [[4, 1, 6, 3, 0, 9], [7, 11, 10], [8, 2, 5]]),
        ("class(compat)", "worker", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        ("class(compat)", "party", [[0, 3, 6, 9, 1, 4], [7, 10, 2], [5, 8, 11]]),
        ("dirichlet(5)", "worker", [[11, 1, 6], [8, 10, 9, 3], [4, 5, 7, 2, 0]]),
        ("dirichlet(5)", "party", [[3, 10, 11, 5, 4, 2, 1], [6, 0, 9], [7, 8]]),
        ("quantity(1)", "worker", [[11, 1, 2, 8, 10, 5, 7, 0, 9], [4, 3], [6]]),
        ("quantity(1)", "party", [[10, 11, 7, 5, 4, 1, 8, 0, 9, 2], [6], [3]]),
    ],
)
def test_parts_stay_what_they_are(text, level, expected):
    """A run that is taken up by a newer version goes on with the same rows."""
    found = splits.parts(np.arange(12) % 3, splits.parse(text), [1, 2], seed=7, level=level)
    assert [part.tolist() for part in found] == expected


def test_a_worker_without_samples_is_named():
    with pytest.raises(
        ConfigError, match=r"none for worker 3 of 4, with 3 rows.*take more rows, or"
    ):
        splits.parts(np.zeros(3, int), splits.parse("iid"), [4], seed=0)
    with pytest.raises(ConfigError, match="take a larger ALPHA"):
        splits.parts(np.arange(20) % 10, splits.parse("dirichlet(0.001)"), [16], seed=0)
