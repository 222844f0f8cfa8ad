# SPDX-License-Identifier: Apache-2.0
"""Rows of workers that vote in groups that stay: those of a group are the same, all are used."""

import numpy as np
import pytest

from tf_hips.data import sets
from tf_hips.errors import ConfigError
from tf_hips.trainer import sources
from tf_hips.trainer.settings import Training

pytestmark = pytest.mark.tf

R, PARTIES = 3, 6


class Strategy:
    """What `sources` asks of a strategy: a party of one worker, in groups of three."""

    num_replicas_in_sync = PARTIES

    seats = None

    class welcome:
        workers = (1,) * PARTIES

    def __init__(self, child):
        self.child = child

    def sample_group(self):
        return self.child // R, PARTIES // R

    def replica(self):
        return self.child

    @staticmethod
    def make_variable(value, name):
        from tf_hips.data.position import make_plain_variable

        return make_plain_variable(value, name)


@pytest.mark.parametrize("split", ["iid", "class"])
def test_groups_that_stay_divide_all_rows_among_them(split):
    data = sets.load("digits")
    settings = Training("lenet", "digits", batch_size=32, split=split)
    made = [sources.make(settings, data, Strategy(child), 5) for child in range(PARTIES)]
    firsts = [next(iter(one.train.take(1)))[0].numpy() for one in made]
    for child in range(PARTIES):
        assert np.array_equal(firsts[child], firsts[child // R * R])
    assert not np.array_equal(firsts[0], firsts[R])
    assert made[0].num_rows + made[R].num_rows == len(data.train)


def test_workers_are_counted_and_not_their_groups():
    assert sources.num_workers(Strategy(4)) == PARTIES
    assert Strategy(4).sample_group() == (1, 2)


@pytest.mark.parametrize("split", ["class", "quantity(1)"])
def test_one_party_has_no_split_over_parties(split):
    class Alone(Strategy):
        welcome = None

    data = sets.load("digits")
    settings = Training("lenet", "digits", batch_size=32, split=split, split_over="party")
    with pytest.raises(ConfigError, match=r"several parties: .* over one party; take --split-over"):
        sources.make(settings, data, Alone(0), 5)
    assert sources.make(settings, data, Strategy(0), 5).num_rows  # of two groups of parties
