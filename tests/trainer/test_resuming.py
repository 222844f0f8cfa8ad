# SPDX-License-Identifier: Apache-2.0
"""`--resume-from net.meta`: there and back again, and what cannot be gone on from."""

import json
import types

import pytest

from tf_hips import config, log
from tf_hips.errors import ConfigError
from tf_hips.report import trees
from tf_hips.trainer.settings import Training

pytestmark = pytest.mark.tf


@pytest.fixture
def alone(monkeypatch):
    for name in (config.CONFIG_VARIABLE, config.ROLE_VARIABLE, "TF_CONFIG", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def train(**options):
        from tf_hips.trainer import training

        common = {"network": "lenet", "dataset": "digits", "mode": "local", "batch_size": 32}
        training.run(Training(**common | options))

    return train


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_there_and_back_again(alone, tmp_path):
    common = {"tree_dir": str(tmp_path / "trees"), "eval_duration": 10, "seed": 3}
    alone(max_steps=15, learning_rate=0.1, **common)
    place = tmp_path / "trees/local"
    before = trees.read_meta(place / "net.meta")
    assert before["global_iters"] == 15
    # Steps so small that weights stay what they were: the accuracy is that of the file.
    more = {"learning_rate": 1e-12, "log_dir": str(tmp_path / "events"), **common}
    alone(max_steps=30, resume_from=str(place / "net.meta"), **more)
    after = trees.read_meta(place / "net.meta")
    assert (after["global_iters"], after["begin_time"]) == (30, before["begin_time"])
    assert after["test_acc"] == before["test_acc"]
    epochs = [one for one in log.read_events(tmp_path / "events") if one["event"] == "epoch"]
    assert [one["step"] for one in epochs] == [25, 30]
    lists = trees.summarise_tree(tmp_path / "trees")["local"]["cpu"]
    assert lists["num_samples_list"] == [320, 160, 320, 160]
    assert lists["elapsed_time_list"] == sorted(lists["elapsed_time_list"])
    with pytest.raises(ConfigError, match=r"must have steps left\. Received: 30 of 30 steps"):
        alone(max_steps=30, resume_from=str(place), **common)
    with pytest.raises(ConfigError, match=r"must be of simplenet for digits\. Received: .*another"):
        alone(network="simplenet", max_steps=40, resume_from=str(place), **common)
    (place / trees.WEIGHTS).write_bytes(b"\x89HDF and then nothing")
    with pytest.raises(ConfigError, match="of another model or damaged") as caught:
        alone(max_steps=40, resume_from=str(place), **common)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("small_network")
def test_the_rate_that_is_written_is_the_one_that_was_used(alone, tmp_path):
    options = {"learning_rate": 0.2, "gradient_accumulation_steps": 2}
    alone(max_steps=3, eval_duration=2, optimizer_options=options, tree_dir=str(tmp_path))
    meta = trees.read_meta(tmp_path / "local/net.meta")
    assert meta["learning_rate"] == 0.2
    assert meta["global_iters"] == 3  # steps, and not those that change weights


def test_a_run_that_accumulates_gradients_goes_on_at_its_step(tmp_path):
    import keras

    from tf_hips.callbacks.optimizers import counter
    from tf_hips.trainer import resuming

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    resuming.save(model, tmp_path)
    resuming.load(model, resuming.Resumed(5, 0.0, tmp_path / trees.WEIGHTS), "this")
    assert int(counter(model.optimizer).numpy()) == 5


@pytest.mark.parametrize(
    ("rule", "rounds", "expected"),
    [
        (None, None, 0.01),
        ("mean", None, 0.01),
        ("krum(f=1) >> fedadam(learning_rate=0.3)", None, 0.3),
        ("dc_asgd(learning_rate=0.4)", None, 0.4),
        ("fedavgm(learning_rate=0.5)", 1, 0.01),  # of the outer step
    ],
)
def test_a_rule_that_makes_the_steps_has_their_rate(rule, rounds, expected):
    from tf_hips.ps import rules
    from tf_hips.trainer.ways import rate_of

    strategy = types.SimpleNamespace(rule=None if rule is None else rules.parse(rule))
    way = types.SimpleNamespace(strategy=strategy, rounds=rounds)
    assert rate_of(Training("lenet", "digits"), way) == expected


@pytest.mark.parametrize("goes_on", [True, False])
def test_files_of_another_run_do_not_stay_in_a_tree(tmp_path, goes_on):
    from tf_hips.comm import primitives
    from tf_hips.trainer import training

    primitives.init()
    old = tmp_path / "here/local/cpu/iter-7.txt"
    old.parent.mkdir(parents=True)
    old.write_text("of a run before")
    # The weights are of the tree that is written to, or of another one.
    meta = tmp_path / ("here" if goes_on else "there") / "party0/net.meta"
    settings = Training("lenet", "digits", tree_dir=str(tmp_path / "here"), resume_from=str(meta))
    assert training._tree(settings, config.Run()) == old.parent
    assert old.exists() == goes_on
    assert old.parent.is_dir()


def test_workers_on_one_device_have_folders_of_their_own(tmp_path, monkeypatch):
    from tf_hips.comm import primitives
    from tf_hips.trainer import training

    settings = Training("lenet", "digits", tree_dir=str(tmp_path))
    devices = ["gpu0", "gpu1", "gpu0", "cpu", "gpu0"]
    monkeypatch.setattr(primitives, "gather_objects", lambda value, what: devices)
    found = []
    for rank, device in enumerate(devices):
        monkeypatch.setattr(primitives, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(training, "_device", lambda device=device: device)
        found.append(training._tree(settings, config.Run()).name)
    assert found == ["gpu0", "gpu1", "gpu0-1", "cpu", "gpu0-2"]


def test_a_run_that_goes_on_from_a_backup_keeps_its_tree(tmp_path):
    from tf_hips.callbacks import folder
    from tf_hips.comm import primitives
    from tf_hips.trainer import training

    primitives.init()
    run = config.Run(uplink=config.Uplink("hub:1", "west/0"))
    settings = Training(
        "lenet", "digits", tree_dir=str(tmp_path / "tree"), backup_dir=str(tmp_path / "kept")
    )
    old = tmp_path / "tree/west-0/cpu/iter-1.txt"
    old.parent.mkdir(parents=True)
    for has_backup in (True, False):
        old.write_text("of a test before")
        backups = folder.BackupFolder(tmp_path / "kept/west/0")
        if has_backup:
            backup = folder.Backup(1, 3, 0)
            backups.start(backup)
            backups.finish(backup)
            assert backups.backups()
        else:
            backups.clear()
        assert training._tree(settings, run) == old.parent
        assert old.exists() == has_backup


def write(path, **told):
    path.write_text(json.dumps({"test_acc": 0.7, **told}))
    return path


@pytest.mark.parametrize(
    ("told", "files", "message"),
    [
        ({"global_iters": 94, "begin_time": 1.5}, [], "Received: none"),
        ({"global_iters": 94, "begin_time": 1.5}, ["net.params"], "net.params of HiPS, which"),
        ({"global_iters": 94}, [], "must say `global_iters` and `begin_time`"),
        ({"global_iters": -1, "begin_time": 1.5}, [], "must say `global_iters`"),
        ({"test_acc": None}, [], "must be a net.meta of HiPS"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_line(told, files, message, tmp_path):
    from tf_hips.trainer import resuming

    write(tmp_path / "net.meta", **told)
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=message) as caught:
        resuming.find(tmp_path)
    assert "\n" not in str(caught.value)


def test_one_way_to_go_on_at_a_time():
    with pytest.raises(ConfigError, match="`resume_from` and `backup_dir` exclude each other"):
        Training("lenet", "digits", resume_from="a", backup_dir="b")


@pytest.mark.parametrize(
    ("step", "epoch", "begin_s", "numbers", "before_s"),
    [
        (20, 2, None, [1, 2, 3], 20.0),  # from a backup: the third interval is made again
        (30, 5, 1.0, [1, 2, 3, 4], 30.0),  # from weights, with intervals of another length
        (0, 0, 1.0, [1], 0.0),  # with local steps a run begins at 0
    ],
)
def test_the_clock_and_numbers_of_a_tree_go_on(tmp_path, step, epoch, begin_s, numbers, before_s):
    from tf_hips.trainer.progress import Plan, Progress

    folder = tmp_path / "local" / "cpu"
    told = {"computing_s": 9.0, "aggregation_s": 0.0, "evaluation_s": 1.0, "num_samples": 10}
    for number in (1, 2, 3):
        trees.write_iteration(folder, number, **told, total_s=10.0 * number, accuracy=0.5)
    plan = Plan(90, 10, 1, 1, 1.0, 0.1, tree=folder, is_first=False, begin_s=begin_s)
    progress = Progress(plan, lambda *_, **__: None, None)
    optimizer = types.SimpleNamespace(iterations=step)
    progress._model = types.SimpleNamespace(optimizer=optimizer)
    progress._peers = types.SimpleNamespace(rank=1, steps_made=lambda one: one.iterations)
    progress.on_train_begin()
    progress.on_epoch_begin(epoch)
    optimizer.iterations += 10
    progress.on_epoch_end(epoch, {"loss": 1.0})
    lists = trees.summarise_tree(tmp_path)["local"]["cpu"]
    assert len(lists["elapsed_time_list"]) == len(numbers)
    assert before_s <= lists["elapsed_time_list"][-1] < before_s + 10
    progress.on_epoch_begin(epoch + 1)
    progress.on_epoch_end(epoch + 1, {"loss": 1.0})
    assert (folder / f"iter-{numbers[-1] + 1}.txt").exists()
