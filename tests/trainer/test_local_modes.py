# SPDX-License-Identifier: Apache-2.0
"""Modes with local steps: what their options mean, and runs of them by the launcher."""

import contextlib
import dataclasses
import types

import pytest

from tests.strategies.test_hierarchical_ps import serving, write_configs
from tests.support.ranks import run_parties
from tests.trainer.test_training import launched
from tf_hips import config, log
from tf_hips.cli import arguments
from tf_hips.errors import ConfigError
from tf_hips.report import runs
from tf_hips.trainer.local import Local
from tf_hips.trainer.modes import MODES
from tf_hips.trainer.settings import Training


def test_the_command_of_esync_means_what_it_meant(settings):
    told = settings(
        *("--mode", "esync", "--network", "resnet18_v1", "--dataset", "fashion_mnist"),
        *("--batch-size", "64", "--local-lr", "0.0005", "--global-lr", "1.0", "--split-by-class"),
    )
    assert (told.mode, told.network, told.split) == ("esync", "resnet18_v1", "class")
    assert (told.batch_size, told.learning_rate) == (64, 0.0005)
    assert told.local == Local(global_lr=1.0)
    assert told.local.outer == "fedavg(learning_rate=1.0)"


@pytest.mark.parametrize(
    ("words", "weighting"),
    [
        (["--rule", "compat", "-ip", "127.0.0.1"], "workers"),
        (["--rule", "compat", "-ip", "127.0.0.1", "--weighting", "uniform"], "uniform"),
        ([], "uniform"),
    ],
)
def test_what_members_of_esync_count(words, weighting, settings, monkeypatch):
    import keras

    from tf_hips.strategies import CompressedRing
    from tf_hips.trainer import rounds
    from tf_hips.trainer.ways import Way

    strategy = CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    monkeypatch.setattr(
        rounds, "_way", lambda settings, run, make, **more: Way(strategy, model.optimizer, make)
    )
    way = rounds.esync(settings("-m", "esync", *words), strategy.config)
    made = way.rounds(model, types.SimpleNamespace(steps_of_pass=1))
    assert made.loop._weighting == weighting


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["-ip", "10.1.1.34"], "10.1.1.34:10010"),
        (["-port", "10011"], "127.0.0.1:10011"),
        (["-ip", "::1", "-port", "7"], "[::1]:7"),
        (["--state-server", "https://host:10010"], "https://host:10010"),
    ],
)
def test_the_state_server_of_the_papers_rule(words, address, settings):
    told = settings("-m", "esync", "--rule", "compat", "--epsilon", "0", *words)
    assert told.local == Local(rule="compat", state_server=address, epsilon=0.0)


def test_epochs_of_hips_are_fedavg(settings):
    told = settings("-m", "sync", "-le", "5", "-l", "0.001")
    assert (told.mode, told.learning_rate, told.local) == ("fedavg", 0.001, Local(local_epochs=5))
    assert settings("-m", "normal").mode == "sync"


def test_a_file_says_the_same(settings, tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "mode: fedavg\nlocal_steps: 7\nparticipation: 0.5\nprox_mu: 0.25\nnormalise: true\n"
        "server_optimizer: fedadam(learning_rate=0.5)\n"
    )
    told = settings("--config", str(file))
    assert told.local == Local(
        local_steps=7,
        participation=0.5,
        prox_mu=0.25,
        normalise=True,
        server_optimizer=arguments.rule("fedadam(learning_rate=0.5)"),
    )
    file.write_text("mode: fedavg\nparticipation: 2\n")
    assert settings("--config", str(file)).local.participation == 2


def test_what_is_not_given_is_left_to_the_loop(settings):
    for mode, one in MODES.items():
        if one.options:
            assert settings("-m", mode).local == Local()
            assert settings("-m", mode).local.outer is None


REFUSED = [
    (["--local-steps", "3"], "`local_steps` is for the modes fedavg, hfa, diloco, streaming. "
     "Received: local_steps=3 with the mode sync"),
    (["-m", "async", "-le", "3"], "`local_epochs` is for the mode fedavg. HiPS' own -m async is "
     '`tf-hips run --rule "asgd(learning_rate=1)" -- tf-hips train -m fedavg -le 3 --rule compat`. '
     "Received: local_epochs=3 with the mode async"),
    (["-m", "dcasgd", "-le", "3"], "-m fedavg -le 3 --rule compat`. Received: local_epochs=3 with "
     "the mode dcasgd"),
    (["-m", "async", "--local-steps", "3"], "diloco, streaming. Received: local_steps=3 with"),
    (["-m", "esync", "--local-steps", "3"], "local_steps=3 with the mode esync"),
    (["-m", "fedavg", "--pace", "margin=0.1"], "`pace` is for the mode esync"),
    (["-m", "local", "-ll", "0.1"], "--local-lr is for the modes fedavg, esync"),
    (["-m", "esync", "-ll", "0.1", "-l", "0.1"], "exclude each other"),
    (["-m", "fedavg", "--local-steps", "3", "-le", "1"], "`local_steps` and `local_epochs` excl"),
    (["-m", "fedavg", "-gl", "1", "--server-optimizer", "diloco"], "exclude each other"),
    (["-m", "fedavg", "-gl", "0"], "`global_lr` must be positive"),
    (["-m", "fedavg", "--scaffold", "--normalise"], "exclude each other"),
    (["-m", "fedavg", "--scaffold", "--weighting", "samples"], "`weighting` uniform"),
    (["-m", "fedavg", "--rule", "compat", "--normalise"], "HiPS' own mean"),
    (["-m", "fedavg", "--weighting", "rows"], "`weighting` must be one of"),
    (["-m", "fedavg", "--max-steps", "30"], "`max_steps` goes with `local_steps`"),
    (["-m", "fedavg", "--prox-mu", "-1"], "`prox_mu` must be at least 0"),
    (["-m", "esync", "--rule", "compat"], "tf-hips state-server"),
    (["-m", "esync", "-ip", "host"], "`state_server` is for --rule compat"),
    (["-m", "esync", "--epsilon", "1"], "`epsilon` is for --rule compat"),
    (["-m", "esync", "--weighting", "samples"], "uniform or workers"),
    (["-m", "esync", "--rule", "compat", "-ip", "h", "--pace", "margin=0.1"], "default rule"),
    (["-m", "esync", "--rule", "compat", "-ip", "h", "--state-server", "h:1"], "exclude each"),
    (["-m", "esync", "--rule", "compat", "-port", "70000"], "--state-server-port: must be"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_means_nothing_in_a_mode_is_one_line(words, message, refused):
    refused(words, message)


def test_an_option_of_a_mode_is_one_of_ours():
    import dataclasses

    known = {field.name for field in dataclasses.fields(Local)}
    assert set().union(*(one.options for one in MODES.values())) == known


@pytest.mark.parametrize("share", [0, 0.0, 1.5, -1])
def test_a_participation_that_is_none(share):
    with pytest.raises(ConfigError, match="`participation` must be a share"):
        Local(participation=share)


@pytest.mark.tf
@pytest.mark.parametrize("mode", [name for name, one in MODES.items() if one.options])
def test_several_workers_are_needed(mode, monkeypatch):

    for name in (config.CONFIG_VARIABLE, "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=f"The mode {mode} is for several workers"):
        MODES[mode].make(Training("lenet", "digits", mode=mode), config.Run())


class _Phase:
    """A local phase of ESync that lasts `elapsed_s` so far, of which a deadline allows 1 s."""

    elapsed_s = 3.0
    is_first = False

    def ran(self, steps):
        del steps

    def begin(self, *, is_shared=False):
        del is_shared
        return 8

    def begin_epoch(self):
        pass

    @staticmethod
    def is_over(steps, elapsed_s, planned):
        return steps >= planned or elapsed_s > 1.0


@pytest.fixture
def counted():
    """A worker of ESync in its local phase; the others, and the clock, are made up."""
    from tf_hips.trainer.rounds import CountedESync

    loop = CountedESync.__new__(CountedESync)
    loop._watch = loop._paced = loop._loss = _Phase()
    loop.num_steps = 100
    loop._asked = loop._begun = None
    loop._is_alone = True
    loop._planned = loop.plan(1)
    loop._steps = 2
    return loop


@pytest.mark.tf
def test_parties_of_unequal_rows_test_after_as_many_rounds():
    from tf_hips.trainer.rounds import Rounds

    of_few, of_many = (Rounds(None, steps, epochs=1) for steps in (5, 61))
    settings = Training("lenet", "digits", mode="fedavg", epochs=9)
    intervals = [one.interval(settings, 44, 9 * one.steps) for one in (of_few, of_many)]
    assert intervals == [5, 61]
    settings = dataclasses.replace(settings, eval_duration=2)
    intervals = [one.interval(settings, 44, 9 * one.steps) for one in (of_few, of_many)]
    assert intervals == [2 * 5, 2 * 61]


@pytest.mark.tf
def test_a_test_is_no_delay_and_no_loss_of_a_phase(counted, monkeypatch):
    import keras

    from tf_hips.loops.losses import PhaseLoss
    from tf_hips.trainer import rounds
    from tf_hips.trainer.progress import Plan, Progress

    assert counted.is_enough()
    mean = keras.metrics.Mean()
    mean.update_state([1.0] * 50)  # of the phases before, in one epoch of Keras
    model = types.SimpleNamespace(_loss_tracker=mean, reset_metrics=mean.reset_state)
    model.evaluate = lambda *_, **__: mean.update_state([9.0] * 70) or {"loss": 9.0}
    counted._loss = PhaseLoss(model)
    plan = Plan(90, 10, 1, 1, 1.0, 0.1, tree=None, is_first=False)
    progress = rounds.RoundProgress(plan, lambda *_, **__: None, counted, None)
    progress._model = model
    for name in ("on_epoch_begin", "on_epoch_end"):
        monkeypatch.setattr(Progress, name, lambda *_, **__: None)
    clock = types.SimpleNamespace(monotonic=iter((0.0, 2.5)).__next__)
    monkeypatch.setattr(rounds, "time", clock)
    progress._tell({})
    assert not counted.is_enough()
    mean.update_state([3.0] * 60)
    assert counted._loss.mean == 3.0
    counted.plan(2)
    assert counted.is_enough(), "it was a pause of the phase before"


@pytest.mark.tf
def test_the_last_round_is_as_long_as_what_is_left(counted):
    counted.pause(2.5)
    counted.num_steps, counted.made = 100, 90
    assert not counted.is_enough()
    counted._steps = 10
    assert counted.is_enough(), "nobody's share is known"
    counted._steps = 2
    counted._share = 0.25
    assert not counted.is_enough()
    counted._steps = 3
    assert counted.is_enough(), "a quarter of 10"
    counted.made = 100
    counted._steps = 1
    assert counted.is_enough()


@pytest.mark.tf
def test_a_backup_of_esync_knows_how_many_steps_are_left(counted, tmp_path):
    from tf_hips.trainer.rounds import MetBackup

    counted.num_steps, left = 40, []
    backup = MetBackup(str(tmp_path), counted)
    for made in (0, 30, 41):
        counted.made = made
        left.append(backup._left())
    assert left == [40, 10, 0]


@pytest.mark.tf
def test_everybody_tests_after_a_pass_or_so_many_rounds(counted):
    counted.num_steps, counted.made, counted._steps = 100, 30, 0
    assert not counted.is_test_due()
    counted._is_due = True
    counted._steps = 1
    assert not counted.is_test_due(), "not in a local phase"
    counted._steps = 0
    assert counted.is_test_due()
    assert not counted.is_test_due(), "once"
    counted.made = 100
    assert counted.is_test_due()


def rounds_of(folder):
    """Local steps of each round, by worker in the order of sites."""
    found = {}
    for event in log.read_events(folder):
        if event["event"] == "meeting" and event["local_steps"]:
            found.setdefault((event["site"], event["rank"]), []).append(event["local_steps"])
    return dict(sorted(found.items()))


def _train_by_esync(folder):
    from tests.trainer import networks
    from tf_hips import models
    from tf_hips.trainer import training

    models.make = networks.dense
    told = Training(
        "lenet",
        "digits",
        mode="esync",
        batch_size=16,
        learning_rate=0.05,
        max_steps=40,
        eval_duration=3,
        train_dir=str(folder / "models"),
        eval_freq=10,
        local=Local(global_lr=1.0, pace="slowest_steps=4,most_slowest_steps=4,link_share=1"),
    )
    output = folder / f"{config.current().uplink.site}.txt"
    with output.open("w") as file, contextlib.redirect_stdout(file):
        training.run(told)


# What `tf-hips run` starts, from ranks that need not load TensorFlow first: LEARNING and
# test_training.py have the launcher.
@pytest.mark.tf
@pytest.mark.heavy
@pytest.mark.timeout(150)
def test_esync_of_uneven_parties(tmp_path):
    with serving("uneven") as server:
        address = f"127.0.0.1:{server.port}"
        paths = write_configs(tmp_path, "uneven", address, log_dir=str(tmp_path / "events"))
        second = config.load(paths[1])  # one party saves, as the launcher has it
        config.dump(dataclasses.replace(second, saves=False), paths[1])
        environments = [
            {"TF_HIPS_CONFIG": str(path), "TF_HIPS_SLOWDOWN": slowdown}
            for path, slowdown in zip(paths, ("60ms", "15ms"), strict=True)
        ]
        run_parties(_train_by_esync, {"folder": tmp_path}, [1, 1], environments)
    outputs = "".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert "mode esync, 2 workers, 80 steps of all" in outputs
    slow, fast = rounds_of(tmp_path / "events").values()
    assert len(slow) == len(fast) >= 4
    # The last rounds are as long as what is left.
    assert 80 <= sum(slow) + sum(fast) <= 90
    assert sum(slow) < sum(fast)
    [run] = runs.read(tmp_path / "events")
    assert [list(one.local_steps) for one in run.workers] == [slow, fast]
    assert len(run.points) == -(-len(slow) // 3)
    assert 0 < run.communication_share < 1
    events = log.read_events(tmp_path / "events")
    assert len({one["fingerprint"] for one in events if one["event"] == "result"}) == 1
    tested = [one for one in events if one["event"] == "epoch"]
    # All test on all rows, after the same meetings, with the same weights.
    by_number = {}
    for one in tested:
        by_number.setdefault(one["epoch"], set()).add(one["test_accuracy"])
    assert all(len(accuracies) == 1 for accuracies in by_number.values()), by_number
    assert sum(one["steps"] for one in tested) == sum(slow) + sum(fast)
    from tf_hips.callbacks.checkpoint_folder import CheckpointFolder

    ends = {sum(slow[:number]) for number in range(1, len(slow) + 1)}
    assert set(CheckpointFolder(tmp_path / "models").steps()) <= ends


LEARNING = [
    pytest.param(["-m", "fedavg", "--local-steps", "8"], ["--parties", "2", "--workers", "2"], 8,
                 id="fedavg"),
    pytest.param(["-m", "sync", "-le", "1", "--split", "quantity(1)", "--prox-mu", "0.01"],
                 ["--parties", "2", "--workers", "1"], None, id="epochs"),
    pytest.param(["-m", "fedavg", "--local-steps", "8", "--rule", "compat"],
                 ["--parties", "2", "--workers", "2"], 8, id="compat"),
    pytest.param(["-m", "fedavg", "--local-steps", "8"],
                 ["--parties", "2", "--workers", "1", "--rule", "fedbuff(k=2)"], 8, id="fedbuff"),
    pytest.param(["-m", "fedavg", "--local-steps", "8", "--server-optimizer", "fedavgm"],
                 ["--parties", "1", "--workers", "2"], 8, id="ring"),
    pytest.param(["-m", "hfa", "--local-steps", "4", "--party-rounds", "2"],
                 ["--parties", "2", "--workers", "2"], 4, id="hfa"),
    pytest.param(["-m", "diloco", "--local-steps", "8", "--optimizer", "adamw"],
                 ["--parties", "2", "--workers", "1"], 8, id="diloco"),
    pytest.param(["-m", "diloco", "--local-steps", "8"],
                 ["--parties", "2", "--workers", "1", "--rule", "fedbuff(k=2)"], 8,
                 id="diloco-fedbuff"),
    pytest.param(["-m", "streaming", "--local-steps", "16", "--fragments", "4"],
                 ["--parties", "2", "--workers", "1", "--compression", "error_feedback(int8)"],
                 None, id="streaming"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("mode", "launcher", "steps"), LEARNING)
def test_every_mode_with_local_steps_learns(tmp_path, mode, launcher, steps):
    rate = ["-l", "0.002"] if "adamw" in mode else ["-l", "0.05"]
    output = launched(
        tmp_path,
        *("train", "--cpu", "-n", "lenet", "-dt", "synthetic", "-b", "16", "--epochs", "4"),
        *(*mode, *rate),
        launcher=["--log-dir", str(tmp_path / "events"), *launcher],
    )
    [run] = runs.read(tmp_path / "events")
    assert run.accuracy > 0.5, output
    if steps is not None:
        made = rounds_of(tmp_path / "events")
        assert made
        for one in made.values():
            assert set(one[:-1]) == {steps}


@pytest.mark.slow  # tests/loops/test_methods.py has it without a launcher
@pytest.mark.timeout(120)
def test_participation_is_refused_where_nobody_waits(tmp_path):
    output = launched(
        tmp_path,
        *("train", "--cpu", "-n", "lenet", "-dt", "synthetic", "-b", "16", "--max-steps", "16"),
        *("-m", "fedavg", "--local-steps", "8", "--participation", "0.5"),
        launcher=["--parties", "2", "--workers", "1", "--rule", "fedbuff(k=2)"],
        code=78,
    )
    assert "`participation` and `weighting` must be left out" in output
    assert "Received: participation=0.5, weighting=None" in output


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_papers_rule(tmp_path):
    from tf_hips.ps.server.state_server import StateServer, StateServerConfig

    server = StateServer(StateServerConfig("127.0.0.1:0"))
    server.start()
    try:
        output = launched(
            tmp_path,
            *("train", "--cpu", "-n", "lenet", "-dt", "digits", "-b", "16", "-m", "esync"),
            *("--rule", "compat", "--epsilon", "0.01", "--state-server", server.address),
            *("-l", "0.05", "--max-steps", "40", "-e", "4"),
            launcher=[
                *("--parties", "2", "--workers", "1", "--log-dir", str(tmp_path / "events")),
                *("--slowdown", "worker=0:120ms", "--slowdown", "worker=1:15ms"),
            ],
        )
    finally:
        server.stop()
    assert "mode esync" in output
    slow, fast = rounds_of(tmp_path / "events").values()
    assert len(slow) == len(fast)
    assert sum(slow) < sum(fast)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_of_one_party_that_differ_do_not_back_up(tmp_path):
    output = launched(
        tmp_path,
        *("train", "--cpu", "-n", "lenet", "-dt", "digits", "-m", "esync"),
        *("--backup-dir", str(tmp_path / "backup")),
        launcher=["--parties", "1", "--workers", "2"],
        code=78,
    )
    assert "let each be a party, or train without `backup_dir`" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_esync_goes_on_where_all_have_backed_up(tmp_path):
    def run(name, steps):
        return launched(
            tmp_path,
            *("train", "--cpu", "-n", "lenet", "-dt", "digits", "-b", "16", "-m", "esync"),
            *("-l", "0.05", "--max-steps", steps, "-e", "2"),
            *("--backup-dir", str(tmp_path / "backup")),
            *("--pace", "slowest_steps=4,most_slowest_steps=4,link_share=1"),
            launcher=[
                *("--parties", "2", "--workers", "1", "--log-dir", str(tmp_path / name)),
                *("--slowdown", "worker=0:60ms", "--slowdown", "worker=1:15ms"),
            ],
        )

    run("first", "20")
    output = run("second", "60")
    assert "mode esync, 2 workers, 120 steps of all" in output
    first, second = (rounds_of(tmp_path / name) for name in ("first", "second"))
    assert 40 <= sum(map(sum, first.values())) <= 60
    # The second run makes what is left, and no more.
    made = sum(map(sum, [*first.values(), *second.values()]))
    assert 120 <= made <= 140
