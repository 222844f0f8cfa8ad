# SPDX-License-Identifier: Apache-2.0
"""A run of the trainer: alone in this process, and by the launcher with an evaluator beside it."""

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.data import files as written
from tf_hips import config, log
from tf_hips.callbacks.checkpoint_folder import CheckpointFolder
from tf_hips.data import sets
from tf_hips.errors import ConfigError
from tf_hips.report import runs, trees
from tf_hips.trainer.robustness import Robust
from tf_hips.trainer.settings import Training

pytestmark = pytest.mark.tf


@pytest.fixture
def alone(monkeypatch):
    for name in (config.CONFIG_VARIABLE, config.ROLE_VARIABLE, "TF_CONFIG", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def train(**options):
        from tf_hips.trainer import training

        training.run(
            Training(**{"network": "lenet", "dataset": "digits", "mode": "local"} | options)
        )

    return train


def test_one_device_leaves_everything_behind(alone, tmp_path, capsys):
    alone(
        batch_size=32,
        max_steps=25,
        eval_duration=10,
        learning_rate=0.1,
        momentum=0.9,
        train_dir=str(tmp_path / "models"),
        eval_freq=10,
        log_dir=str(tmp_path / "events"),
        tree_dir=str(tmp_path / "trees"),
        tensorboard=str(tmp_path / "board"),
        seed=3,
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("lenet of 61706 parameters on digits (1438 rows, 10 classes)")
    assert [line.split()[1] for line in lines[1:-1]] == ["10/25", "20/25", "25/25"]
    assert re.fullmatch(r"test accuracy 0\.\d{4} after 25 steps in [\d.]+ s", lines[-1])
    events = log.read_events(tmp_path / "events")
    epochs = [one for one in events if one["event"] == "epoch"]
    assert [one["step"] for one in epochs] == [10, 20, 25]
    assert [one["samples"] for one in epochs] == [320, 320, 160]
    assert epochs[-1]["test_accuracy"] == events[-1]["test_accuracy"] > 0.3
    assert CheckpointFolder(tmp_path / "models").steps() == [10, 20, 25]
    ended = CheckpointFolder(tmp_path / "models").ended()
    assert ended == {"last_step": 25, "reason": None, "run": events[0]["run"]}
    lists = trees.summarise_tree(tmp_path / "trees")["local"]["cpu"]
    assert lists["num_samples_list"] == [320, 320, 160]
    assert lists["accuracy_list"][-1] == round(epochs[-1]["test_accuracy"], 3)
    meta = trees.read_meta(tmp_path / "trees/local/net.meta")
    assert (meta["global_iters"], meta["batch_size"]) == (25, 32)
    scalars = scalars_of(tmp_path / "board/local/worker0")
    assert [step for step, _ in scalars["test/test_accuracy"]] == [10, 20, 25]
    told = [value for _, value in scalars["test/test_accuracy"]]
    assert told == pytest.approx([one["test_accuracy"] for one in epochs])
    assert set(scalars) > {"test/loss", "test/samples", "result/test_accuracy"}
    [run] = runs.read(tmp_path / "events")
    assert run.is_single
    assert (run.label, run.workers[0].samples) == ("local", 800)
    evaluated = evaluate_at_once(tmp_path / "models")
    assert [one["step"] for one in evaluated] == [10, 20, 25]
    for one, epoch in zip(evaluated, epochs, strict=True):
        assert one["top1"] == pytest.approx(epoch["test_accuracy"])
        assert one["loss"] == pytest.approx(epoch["test_loss"], rel=1e-4)


def scalars_of(folder):
    """Of each tag (step, value), as TensorBoard reads them."""
    import tensorflow as tf

    [path] = folder.glob("events.out.tfevents.*")
    first, *events = tf.compat.v1.train.summary_iterator(str(path))
    assert first.file_version == "brain.Event:2"
    found = {}
    for event in events:
        assert abs(event.wall_time - time.time()) < 600
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def evaluate_at_once(folder):
    from tf_hips.trainer import evaluator
    from tf_hips.trainer.settings import Evaluation

    evaluator.run(Evaluation(model_dir=str(folder)))
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("small_network")
def test_a_run_that_fails_says_so_and_takes_its_bar_away(alone, tmp_path, monkeypatch, capsys):
    from tf_hips.trainer import progress

    tell = progress.Progress.on_epoch_end

    def fail(self, epoch, logs=None):
        tell(self, epoch, logs)
        if epoch == 1:
            raise RuntimeError("this one gives up")

    monkeypatch.setattr(progress.Progress, "on_epoch_end", fail)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(RuntimeError):
        alone(max_steps=6, eval_duration=2, batch_size=16, train_dir=str(tmp_path))
    ended = CheckpointFolder(tmp_path).ended()
    assert (ended["last_step"], ended["reason"]) == (4, "RuntimeError: this one gives up")
    shown = capsys.readouterr().out
    assert "\x1b[?25h" in shown.rpartition("\x1b[?25l")[2], "the cursor is there again"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.findall(r"step (\d)/6  pass 0\.0\d  loss", plain) == ["2", "4"]
    assert re.search(r"step +4/6", plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "vgg18"}, "`name` must be one of"),
        ({"dataset": "mnist", "data_dir": "nowhere"}, "mnist is not under nowhere"),
        ({"batch_size": 2000}, "Received: 1438 rows"),
        ({"mode": "async"}, "needs a server"),
        (
            {"mode": "sync", "robust": Robust(rule="median")},
            "needs the gradients of several workers",
        ),
        ({"mode": "sync", "robust": Robust(rule="median >> fedadam")}, "need a server"),
        ({"optimizer_options": {"beta": 3}}, "must be those of Keras' sgd"),
        ({"needs_gpu": True}, "need a GPU that TensorFlow can use"),
    ],
)
def test_what_cannot_be_trained_is_one_line(alone, options, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises((ConfigError, ValueError)) as caught:
        alone(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_steps_are_what_epochs_make_and_at_most_what_is_asked():
    from tf_hips.trainer.training import _num_steps

    def steps(**options):
        return _num_steps(Training("lenet", "digits", **options), 20)

    assert steps() == 200
    assert steps(epochs=3) == 60
    assert steps(max_steps=500) == 500
    assert steps(epochs=3, max_steps=50) == 50
    assert steps(epochs=3, max_steps=500) == 60


@pytest.mark.parametrize(
    ("asked", "interval", "left", "number"),
    [
        (1, 44, 440, 1),
        (10, 44, 440, 4),
        (2, 3, 3, 1),
        (4, 6, 12, 3),
        (20, 20, 30, 10),
        (5, 5, 25, 5),
    ],
)
def test_no_execution_passes_a_test_or_the_end(asked, interval, left, number):
    from tf_hips.trainer.training import _whole_executions

    assert _whole_executions(asked, interval, left, True) == number


@pytest.mark.usefixtures("small_network")
def test_executions_end_where_tests_and_the_run_do(alone, capsys):
    alone(batch_size=32, max_steps=9, eval_duration=6, steps_per_execution=4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:-1]] == ["6/9", "9/9"]
    assert " after 9 steps in " in lines[-1]


class Strategy:
    """What `sources` asks of a strategy: worker `rank` of two parties of two."""

    num_replicas_in_sync = 4

    seats = None

    class welcome:
        workers = (2, 2)

    def __init__(self, rank):
        self.rank = rank

    def sample_group(self):
        return self.rank, 4

    def replica(self):
        return self.rank

    @staticmethod
    def make_variable(value, name):
        from tf_hips.data.position import make_plain_variable

        return make_plain_variable(value, name)


def rows_of(images):
    return {image.tobytes() for image in np.asarray(images * 255).round().astype(np.uint8)}


@pytest.mark.parametrize(
    ("split", "over"), [("iid", "worker"), ("class", "worker"), ("dirichlet(1)", "party")]
)
def test_workers_have_rows_of_their_own_and_equal_steps(split, over):
    from tf_hips.trainer import sources

    data = sets.load("synthetic")
    settings = Training("lenet", "synthetic", batch_size=32, split=split, split_over=over)
    made = [sources.make(settings, data, Strategy(rank), 5) for rank in range(4)]
    assert {source.steps_of_pass for source in made} == {32}
    seen = []
    for source in made:
        steps = source.num_rows // 32
        batches = list(source.train.take(steps).as_numpy_iterator())
        assert batches[0][0].dtype == np.float32
        assert 0 <= batches[0][0].min() < batches[0][0].max() <= 1
        seen.append(rows_of(np.concatenate([x for x, _ in batches])))
        if split == "class":
            labels = np.concatenate([y for _, y in batches])
            assert len(np.unique(labels)) <= 4
            assert len(np.unique(labels[:32])) > 1, "shuffled inside"
    assert sum(map(len, seen)) == len(set.union(*seen)), "no row is two workers'"
    assert sum(source.num_rows for source in made) == len(data.train)
    tested = [rows_of(np.concatenate([x for x, _ in one.test.as_numpy_iterator()])) for one in made]
    assert sum(map(len, tested)) == len(set.union(*tested)) == len(data.test)


@pytest.mark.parametrize("split", ["iid", "class"])
def test_rows_of_a_liar_have_other_labels(split):
    from tf_hips.trainer import sources

    data = sets.load("digits")
    settings = Training("lenet", "digits", batch_size=32, split=split)
    batches = [
        next(iter(sources.make(settings, data, Strategy(1), 5, flips_labels=flips).train.take(1)))
        for flips in (False, True)
    ]
    (x, y), (same_x, flipped) = batches
    assert np.array_equal(x, same_x)
    assert np.array_equal(flipped, 9 - y.numpy())


def test_a_worker_without_a_batch_is_named():
    from tf_hips.trainer import sources

    settings = Training("lenet", "digits", batch_size=64, split="quantity(0.1)")
    with pytest.raises(ConfigError, match=r"Every worker must have a batch of 64 rows.*worker \d"):
        sources.make(settings, sets.load("digits"), Strategy(0), 0)


def test_the_task_of_an_evaluator_is_known(monkeypatch):
    monkeypatch.delenv(config.ROLE_VARIABLE, raising=False)
    for text, role in (
        ('{"cluster": {}, "task": {"type": "evaluator", "index": 0}}', "evaluator"),
        ('{"task": {"type": "worker", "index": 1}}', "worker"),
        ("{}", "worker"),
        ("no JSON", "worker"),
        ("[]", "worker"),
    ):
        monkeypatch.setenv("TF_CONFIG", text)
        assert config.role() == role
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "evaluator"}}')
    monkeypatch.setenv(config.ROLE_VARIABLE, "worker")
    assert config.role() == "worker"


@pytest.mark.parametrize("is_launched", [True, False])
def test_only_an_evaluator_that_nobody_watches_gives_up(tmp_path, monkeypatch, is_launched):
    from tf_hips.trainer import evaluator, training

    told = []
    monkeypatch.setattr(evaluator, "run", told.append)
    config.dump(config.Run(), tmp_path / "evaluator.yaml")
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(tmp_path / "evaluator.yaml"))
    if is_launched:  # as `tf_hips.cli.party.start_evaluator` does
        monkeypatch.setenv(config.ROLE_VARIABLE, "evaluator")
    else:
        monkeypatch.delenv(config.ROLE_VARIABLE, raising=False)
        monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "evaluator"}}')
    training.run(Training("lenet", "digits", train_dir=str(tmp_path)))
    assert [one.timeout_s for one in told] == [None if is_launched else 3600.0]


def test_an_evaluator_without_checkpoints_is_refused(alone, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "evaluator"}}')
    with pytest.raises(ConfigError, match="--train-dir"):
        alone()


def launched(folder, *words, launcher=(), code=0):
    """Output of `tf-hips run` on `tf-hips train`."""
    program = folder / "tf-hips"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tf_hips.cli "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", "run", *launcher, "--", str(program), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_two_parties_and_an_evaluator(tmp_path):
    written.write_mnist(tmp_path / "data/mnist", train=128, test=40)
    output = launched(
        tmp_path,
        *("train", "--cpu", "-n", "lenet", "-dt", "mnist", "-dd", str(tmp_path / "data")),
        *("-b", "16", "--max-steps", "10", "-e", "4", "-s", "1"),
        *("--tensorboard", str(tmp_path / "board"), "--train-dir"),
        *(str(tmp_path / "models"), "--eval-freq", "5", "--tree-dir", str(tmp_path / "trees")),
        launcher=[
            *("--parties", "2", "--workers", "1", "--evaluator"),
            *("--log-dir", str(tmp_path / "events"), "--compression", "error_feedback(onebit)"),
        ],
    )
    assert "mode sync, 2 workers, 10 steps" in output
    assert re.search(r"\[evaluator\] +10 +\d", output)
    lines = (tmp_path / "models/evaluations.jsonl").read_text().splitlines()
    evaluated = [json.loads(line) for line in lines]
    assert [(one["step"], one["epoch"]) for one in evaluated] == [(5, 2), (10, 3)]
    [run] = runs.read(tmp_path / "events")
    assert run.label == "sync, class"
    assert len(run.points) == 3
    assert [worker.samples for worker in run.workers] == [160, 160]
    assert run.slow_bytes is not None
    assert run.dense_bytes > 10 * 2 * 61_000 * 4
    assert 0 < run.communication_share < 1
    results = [one for one in log.read_events(tmp_path / "events") if one["event"] == "result"]
    assert len({one["fingerprint"] for one in results}) == 1 < len(results)
    assert evaluated[-1]["top1"] == pytest.approx(results[0]["test_accuracy"])
    assert set(trees.summarise_tree(tmp_path / "trees")) == {"party0", "party1"}
    for site in ("party0", "party1"):
        scalars = scalars_of(tmp_path / "board" / site / "worker0")
        assert [step for step, _ in scalars["round/seconds"]] == list(range(10))
        assert sum(value for _, value in scalars["round/sent"]) > 10 * 61_000 / 8


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "launcher", "least"),
    [
        (["-m", "async", "-l", "0.02"], [], 0.5),
        (["-m", "async", "-dcasgd", "1", "-l", "0.02"], [], 0.5),
        (["-l", "0.05", "--momentum", "0.5"], ["--parties", "1"], 0.5),
        (["-m", "sync"], ["--rule", "momentum(learning_rate=0.05, momentum=0.5)"], 0.5),
        (["-l", "0.05"], ["--intra", "ps"], 0.5),
        (["-l", "0.05", "--momentum", "0.5", "--rule", "median"], ["--parties", "1"], 0.5),
    ],
    ids=["asgd", "dcasgd", "ring", "rule of the server", "servers of parties", "rule of ranks"],
)
def test_every_mode_learns(tmp_path, mode, launcher, least):
    output = launched(
        tmp_path,
        *("train", "--cpu", "-n", "lenet", "-dt", "synthetic", "-b", "16", "--epochs", "3", *mode),
        launcher=["--workers", "2", "--log-dir", str(tmp_path / "events"), *launcher],
    )
    [run] = runs.read(tmp_path / "events")
    assert run.accuracy > least, output
    assert len(run.workers) == (2 if "1" in launcher else 4)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "launcher", "message"),
    [
        (["-m", "local"], [], "trains on one device"),
        (["-m", "async"], ["--rule", "momentum(learning_rate=0.1)"], "waits for nobody"),
        (["-m", "sync"], ["--rule", "asgd(learning_rate=0.1)"], "waits for all parties"),
        (["-l", "0.1"], ["--rule", "momentum(learning_rate=0.1)"], "are the server's"),
        (
            ["--optimizer", "adamw", "--set", "optimizer.weight_decay=0.1"],
            ["--rule", "adam(0.01)"],
            "optimizer=adamw, optimizer.weight_decay",
        ),
    ],
)
def test_modes_that_do_not_fit_the_run_are_refused(tmp_path, mode, launcher, message):
    output = launched(
        tmp_path,
        *("train", "--cpu", "-n", "lenet", "-dt", "digits", "--max-steps", "3", *mode),
        launcher=["--workers", "1", *launcher],
        code=78,
    )
    assert message in output
    assert re.search(r"\] tf-hips train: error: ", output)
    assert "Traceback" not in output


@pytest.mark.usefixtures("small_network")
def test_a_run_that_is_killed_before_its_first_backup_begins_again(alone, tmp_path, monkeypatch):
    from tf_hips.trainer import progress

    def train(**options):
        told = {"max_steps": 4, "eval_duration": 4, "eval_freq": 2, "batch_size": 16}
        folders = {name: str(tmp_path / name) for name in ("train_dir", "backup_dir")}
        alone(**told, **folders, **options)

    def fail(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 3:
            raise RuntimeError("power cut")

    with monkeypatch.context() as killed:
        killed.setattr(progress.StopAt, "on_train_batch_end", fail)
        with pytest.raises(RuntimeError, match="power cut"):
            train()
    assert CheckpointFolder(tmp_path / "train_dir").steps() == [2]
    train()
    assert CheckpointFolder(tmp_path / "train_dir").steps() == [2, 4]
    assert not (tmp_path / "backup_dir").exists()
    with pytest.raises(ConfigError, match="without those of another"):
        train()  # that one is over


@pytest.mark.usefixtures("small_network")
def test_a_party_that_comes_back_has_not_ended(alone, tmp_path, monkeypatch):
    from tf_hips.trainer import progress

    def fail(self, batch, logs=None):
        raise RuntimeError("this one gives up")

    monkeypatch.setattr(progress.StopAt, "on_train_batch_end", fail)
    config.dump(config.Run(run="r", comes_back=True), tmp_path / "run.yaml")
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(tmp_path / "run.yaml"))
    with pytest.raises(RuntimeError, match="this one gives up"):
        alone(max_steps=2, batch_size=16, train_dir=str(tmp_path / "models"))
    assert CheckpointFolder(tmp_path / "models").ended() is None


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(alone, tmp_path, monkeypatch):
    from tf_hips.trainer import progress

    def train(name, **options):
        alone(
            max_steps=40,
            eval_duration=10,
            batch_size=32,
            learning_rate=0.1,
            log_dir=str(tmp_path / name),
            train_dir=str(tmp_path / f"{name}-models"),
            eval_freq=15,
            seed=7,
            **options,
        )

    train("whole")
    tell = progress.Progress.on_epoch_end

    def fail(self, epoch, logs=None):
        tell(self, epoch, logs)
        if epoch == 2:
            raise RuntimeError("power cut")

    monkeypatch.setattr(progress.Progress, "on_epoch_end", fail)
    backup = {"backup_dir": str(tmp_path / "backup")}
    with pytest.raises(RuntimeError, match="power cut"):
        train("parts", **backup)
    monkeypatch.setattr(progress.Progress, "on_epoch_end", tell)
    train("parts", **backup)
    whole, parts = (log.read_events(tmp_path / name) for name in ("whole", "parts"))
    assert whole[-1]["fingerprint"] == parts[-1]["fingerprint"]
    assert whole[-1]["event"] == parts[-1]["event"] == "result"
    told = [one["step"] for one in parts if one["event"] == "epoch"]
    assert told == [10, 20, 30, 30, 40]
    assert CheckpointFolder(tmp_path / "parts-models").steps() == [15, 30, 40]


@pytest.mark.usefixtures("small_network")
def test_a_run_whose_last_interval_is_cut_is_over(alone, tmp_path, monkeypatch, capsys):
    from tf_hips.callbacks.folder import BackupFolder

    def train(steps=5):
        alone(
            max_steps=steps,
            eval_duration=2,
            batch_size=16,
            backup_dir=str(tmp_path / "backup"),
            train_dir=str(tmp_path / "models"),
            log_dir=str(tmp_path / "events"),
        )

    with monkeypatch.context() as killed:  # before it could delete its backups
        killed.setattr(BackupFolder, "clear", lambda self: None)
        train()
    assert (tmp_path / "backup").exists()
    with pytest.raises(ConfigError, match=r"2 more are backed up in .*; give more `--epochs`"):
        train(3)  # nothing of what has more steps is deleted
    train()
    assert "all steps were made before" in capsys.readouterr().out
    assert not (tmp_path / "backup").exists()
    events = log.read_events(tmp_path / "events")
    assert [one["step"] for one in events if one["event"] == "epoch"] == [2, 4, 5]
    results = [one for one in events if one["event"] == "result"]
    assert len({one["fingerprint"] for one in results}) == 1 < len(results)
    folder = CheckpointFolder(tmp_path / "models")
    assert (folder.steps(), folder.read(5).epoch) == ([5], 3)
    assert folder.ended()["last_step"] == 5
