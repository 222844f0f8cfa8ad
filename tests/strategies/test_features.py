# SPDX-License-Identifier: Apache-2.0
"""Feature x strategy x compression, on real Horovod processes; see `features`.

pytest tests/strategies/test_features.py -s -k "hold and ring"             with times
TEST_FEATURES=mlp,csv_logger pytest ... -k "everywhere and ring-onebit"    some features only
"""

import os
import pickle
from pathlib import Path

import pytest

from tests.strategies import features
from tests.support.ranks import run_parties

pytestmark = pytest.mark.tf


def _launch(names, tmp_path, deadline_s, is_full):
    from tests.strategies.features import job

    [sizes] = {configuration.sizes for configuration in features.configurations(names)}
    run_parties(
        job.run,
        {
            "names": list(names),
            "folder": tmp_path,
            "chosen": [name for name in os.environ.get("TEST_FEATURES", "").split(",") if name],
            "is_full": is_full,
        },
        sizes,
        [{job.PARTY: str(party)} for party in range(len(sizes))],
        deadline_s=deadline_s,
    )
    times = pickle.loads((tmp_path / "times").read_bytes())
    total, worked = (sum(column) for column in zip(*times.values(), strict=True))
    print(f"\n{len(times)} features, {total:.1f} s, {worked:.1f} s of CPU")
    for name, (seconds, of_cpu) in sorted(times.items(), key=lambda pair: -pair[1][1]):
        print(f"  {seconds:6.2f} s  {of_cpu:5.2f} s of CPU  {name}")


@pytest.mark.heavy
@pytest.mark.timeout(630)
@pytest.mark.parametrize("names", features.LAUNCHES, ids="+".join)
def test_features_hold(names, tmp_path):
    _launch(names, tmp_path, 600.0, is_full=False)


@pytest.mark.slow
@pytest.mark.timeout(1530)
@pytest.mark.parametrize("name", [one.name for one in features.CONFIGURATIONS])
def test_all_features_hold_everywhere(name, tmp_path):
    _launch([name], tmp_path, 1500.0, is_full=True)


def test_the_quick_cover_is_pairwise():
    met = {}
    launched = features.configurations(name for names in features.LAUNCHES for name in names)
    assert set(launched) == {*features.CONFIGURATIONS, features.ALONE}
    for configuration in launched:
        for feature in features.cover(configuration):
            met.setdefault(feature.name, []).append(configuration)
    everything = features.everything()
    here = Path(__file__).parent
    for name, one in everything.items():
        shown_by = one.elsewhere
        assert shown_by is None or shown_by in met or (here / shown_by).is_file(), name
    assert met.keys() == {name for name, one in everything.items() if one.shown != "never"}
    functions = {}
    for name, configurations in met.items():
        one = everything[name]
        function = name.partition("[")[0]
        if one.shown != "twice" and one.share is None:
            function = one.shown
        functions.setdefault(function, []).extend(configurations)
    for name, configurations in functions.items():
        if features.ALONE not in configurations:
            assert len({one.strategy for one in configurations}) == 2, name
            exact = {one.is_exact for one in configurations}
            assert exact == ({True} if name == "exact" else {True, False}), name
