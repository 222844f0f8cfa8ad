# SPDX-License-Identifier: Apache-2.0
"""Feature x strategy x compression, on real Horovod processes; see `features`.

pytest tests/strategies/test_features.py -k "ring"          one configuration's share
TEST_FEATURES=mlp,fit pytest ... -k "full and ring"         some features only
"""

import os
import pickle

import pytest

from tests.strategies import features
from tests.support.ranks import run_parties

pytestmark = pytest.mark.tf


def _launch(configuration, tmp_path, deadline_s, is_full):
    from tests.strategies.features import job

    names = [name for name in os.environ.get("TEST_FEATURES", "").split(",") if name]
    run_parties(
        job.run,
        {
            "configuration": configuration.name,
            "folder": tmp_path,
            "names": names,
            "is_full": is_full,
        },
        configuration.sizes,
        [{job.PARTY: str(party)} for party in range(len(configuration.sizes))],
        deadline_s=deadline_s,
    )
    times = pickle.loads((tmp_path / "times").read_bytes())
    total, worked = (sum(column) for column in zip(*times.values(), strict=True))
    print(f"\n{configuration.name}: {len(times)} features, {total:.1f} s, {worked:.1f} s of CPU")
    for name, (seconds, of_cpu) in sorted(times.items(), key=lambda pair: -pair[1][1]):
        print(f"  {seconds:6.2f} s  {of_cpu:5.2f} s of CPU  {name}")


@pytest.mark.heavy
@pytest.mark.timeout(630)
@pytest.mark.parametrize(
    "configuration",
    [*features.CONFIGURATIONS, features.ALONE],
    ids=lambda configuration: configuration.name,
)
def test_features_hold(configuration, tmp_path):
    _launch(configuration, tmp_path, 600.0, is_full=False)


@pytest.mark.slow
@pytest.mark.timeout(1530)
@pytest.mark.parametrize(
    "configuration", features.CONFIGURATIONS, ids=lambda configuration: configuration.name
)
def test_all_features_hold_everywhere(configuration, tmp_path):
    _launch(configuration, tmp_path, 1500.0, is_full=True)


def test_the_quick_cover_meets_each_feature_twice():
    everything = features.everything()
    met = {name: [] for name in everything}
    for configuration in (*features.CONFIGURATIONS, features.ALONE):
        for feature in features.cover(configuration):
            met[feature.name].append(configuration)
    for name, feature in everything.items():
        configurations = met[name]
        if feature.is_alone:
            assert configurations == [features.ALONE], name
            continue
        assert len(configurations) == 2, name
        assert len({one.strategy for one in configurations}) == 2, name
        assert len({one.is_exact for one in configurations}) == 2, name
