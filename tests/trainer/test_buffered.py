# SPDX-License-Identifier: Apache-2.0
"""Five parties that wait for nobody, one of whom lies: FedBuff loses, behind a robust rule not."""

import statistics

import pytest

from tests.trainer.test_training import launched
from tf_hips import log

pytestmark = [pytest.mark.tf, pytest.mark.slow]

LIAR = ("--q", "1", "--err-mode", "rev_grad")
WAYS = {
    "movements": ("fedavg", ("--local-steps", "5"), "fedbuff(k=4)"),
    "gradients": ("async", (), "fedbuff(k=4, learning_rate=0.1)"),
}


def accuracy(folder, way, before="", liar=()):
    """Of the median party; each tests its own weights."""
    mode, words, rule = WAYS[way]
    folder.mkdir()
    rate = ("-l", "0.05", "--momentum", "0.5") if mode == "fedavg" else ()
    output = launched(
        folder,
        *("train", "--cpu", "-m", mode, "-n", "lenet", "-dt", "digits", "-b", "16"),
        *("--max-steps", "240", *rate, *words, *liar),
        launcher=[
            *("--parties", "5", "--workers", "1", "--rule", before + rule),
            *("--log-dir", str(folder / "events")),
        ],
    )
    events = log.read_events(folder / "events")
    assert sum(one["event"] == "lies" for one in events) == bool(liar), output
    results = [one["test_accuracy"] for one in events if one["event"] == "result"]
    assert len(results) >= 5, output
    return statistics.median(results)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_one_of_five_that_sends_reversed_updates(tmp_path, way):
    clean = accuracy(tmp_path / "clean", way)
    lost = accuracy(tmp_path / "lost", way, liar=LIAR)
    robust = accuracy(tmp_path / "robust", way, "trimmed_mean(f=1) >> ", LIAR)
    assert clean > 0.8 and lost < 0.5, (clean, lost, robust)
    assert robust > clean - 0.05, (clean, lost, robust)
