# SPDX-License-Identifier: Apache-2.0
"""Trees of HiPS and ESync of which not every round was tested, or that say less."""

import json

from tf_hips.report import runs, trees


def write_rounds(folder, rounds, tested, *, computing=trees.COMPUTING, seconds=10.0):
    """One file for each round, which takes `seconds`; every `tested`-th has an accuracy."""
    folder.mkdir(parents=True)
    for number in range(1, rounds + 1):
        told = {
            "num_iters": number,
            "time": {"0": {"get_batch": 0.1, computing: 8.0, trees.AGGREGATION: 2.0}},
            "num_samples": 64,
            "total_time": seconds * number,
        }
        if tested and number % tested == 0:
            told["accuracy"] = round(0.1 * number, 1)
            told["time"]["0"]["evaluation"] = 90.0
        (folder / f"iter-{number}.txt").write_text(json.dumps(told))


def test_an_accuracy_is_of_the_round_that_was_tested(tmp_path):
    root = tmp_path / "sync"
    write_rounds(root / "cloud1/gpu0", 10, tested=0)
    write_rounds(root / "cloud3/gpu0", 10, tested=3)
    expected = ((30.0, 0.3), (60.0, 0.6), (90.0, 0.9))
    [run] = runs.read(root)
    assert (run.points, run.seconds) == (expected, 100.0)
    summary = trees.summarise_tree(root)
    assert "accuracy_time_list" not in summary["cloud1"]["gpu0"]
    trees.write_summary(summary, tmp_path / "Sync.json")
    assert runs.read(tmp_path / "Sync.json")[0].points == expected


def test_accuracies_without_a_time_are_no_points(tmp_path, caplog):
    write_rounds(tmp_path / "tree/cloud3/gpu0", 10, tested=3)
    summary = trees.summarise_tree(tmp_path / "tree")
    del summary["cloud3"]["gpu0"]["accuracy_time_list"]  # as ESync's own summary.py writes it
    trees.write_summary(summary, tmp_path / "Sync.json")
    [run] = runs.read(tmp_path / "Sync.json")
    assert (run.points, run.seconds) == ((), 100.0)
    assert "cloud3/gpu0 has 3 accuracies of 10 rounds, and does not say of which" in caplog.text
    file = tmp_path / "tree/cloud3/gpu0/iter-6.txt"
    told = json.loads(file.read_text())
    del told["total_time"]
    file.write_text(json.dumps(told))
    assert runs.read(tmp_path / "tree")[0].points == ()


def test_what_hips_calls_training_is_time_of_training(tmp_path):
    for device, tested in (("gpu0", 1), ("gpu1", 0)):
        folder = tmp_path / "hips/logs" / device
        write_rounds(folder, 5, tested, computing="local training", seconds=100.0)
    [run] = runs.read(tmp_path / "hips/logs")
    assert [(one.seconds, one.with_tests) for one in run.workers] == [(50.0, False)] * 2
    assert run.communication_share == 0.2  # of the other 90 s of each round, tests, nothing
