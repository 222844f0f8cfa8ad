# SPDX-License-Identifier: Apache-2.0
"""What `tf-hips train`, `evaluate` and `data` make of their options, and of the seeds'."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tf_hips.cli import arguments, evaluate, preflight, train
from tf_hips.cli import data as data_command
from tf_hips.errors import ConfigError
from tf_hips.trainer.modes import MODES

WHAT = ["-n", "lenet", "-dt", "digits"]


class Became(Exception):
    """Raised in place of becoming another program."""


@pytest.fixture
def command(monkeypatch):
    """Runs a command line; returns verb, settings and environment that it would become."""
    parser = arguments.Parser(prog="tf-hips")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (train, evaluate, data_command):
        module.add(commands)
    became = []

    def become(verb, settings, environment=None):
        became.append((verb, settings, environment))
        raise Became

    monkeypatch.setattr(train, "become", become)
    monkeypatch.setattr(preflight, "_check_launcher", lambda told: None)  # there is one
    for name in ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(*words):
        options = parser.parse_args(words)
        with pytest.raises(Became):
            options.run(options)
        return became.pop()

    return run


@pytest.fixture
def settings(command):
    return lambda *words: command("train", *WHAT, *words)[1]


def test_the_readme_command_of_hips_means_what_it_meant(command, tmp_path):
    _, told, environment = command(
        *("train", "-m", "sync", "-n", "alexnet", "-l", "0.001", "-b", "64", "-e", "1"),
        *("-dt", "fashion-mnist", "-dd", str(tmp_path), "-ld", str(tmp_path / "logs")),
        *("-c", "1", "-s", "1", "-gc", "1"),
    )
    assert (told.mode, told.network, told.learning_rate) == ("sync", "alexnet", 0.001)
    assert (told.batch_size, told.eval_duration, told.split) == (64, 1, "class")
    assert (told.dataset, told.data_dir) == ("fashion-mnist", str(tmp_path))
    assert told.log_dir == str(tmp_path / "logs")
    assert told.compression == "error_feedback(hips2bit(threshold=0.01))"
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
    assert not told.needs_gpu


def test_switches_of_the_seeds_may_be_off(command):
    _, told, environment = command(
        "train", *WHAT, "-c", "0", "-s", "False", "-gc", "0", "-dcasgd", "0"
    )
    assert (told.split, told.compression, told.mode) == ("iid", None, "sync")
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_options_of_pytorch_parameter_server(command, tmp_path):
    _, told, environment = command(
        *("train", "--lr", "0.01", "--momentum", "0.5", "--max-steps", "10000", "--epochs", "100"),
        *("--network", "ResNet-18", "--dataset", "Cifar10", "--batch-size", "128"),
        *("--test-batch-size", "500", "--eval-freq", "50", "--enable-gpu="),
        *("--train-dir", str(tmp_path), "--seed", "1"),
    )
    assert (told.learning_rate, told.momentum, told.max_steps) == (0.01, 0.5, 10000)
    assert (told.epochs, told.eval_freq, told.train_dir) == (100, 50, str(tmp_path))
    assert (told.eval_batch_size, told.seed) == (500, 1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"


def test_dcasgd_is_asynchronous(settings):
    assert settings("-m", "async", "-dcasgd", "1").mode == "dcasgd"
    assert settings("-m", "dcasgd").mode == "dcasgd"


@pytest.mark.parametrize("flags", sorted(train.REPLACED))
def test_a_flag_that_was_replaced_says_by_what(flags, command, capsys):
    for flag in flags:
        with pytest.raises(SystemExit) as ended:
            command("train", *WHAT, flag, "7")
        assert ended.value.code == 2
        text = capsys.readouterr().err
        assert f"{flag} is not an option here: {train.REPLACED[flags]}" in text


def test_every_flag_of_the_seeds_is_known(capsys):
    parser = arguments.Parser(prog="tf-hips")
    train.add(parser.add_subparsers(dest="command"))
    [sub] = parser._subparsers._group_actions
    known = set(sub.choices["train"]._option_string_actions)
    hips = "-l -b -le -dd -dt -g -c -n -ld -e -m -dcasgd -s -ds -gc --num-local-epochs --use-dcasgd"
    esync = "-l -ll -gl -b -dd -g -c -n -ld -e -m -s -ip -port -dcasgd"
    ps = (
        "--lr --momentum --max-steps --epochs --network --dataset --batch-size --eval-freq "
        "--enable-gpu --train-dir --test-batch-size --no-cuda --seed --log-interval --mode "
        "--kill-threshold --comm-type --num-aggregate --compress-grad --gather-type"
    )
    detox = (
        "--approach --err-mode --worker-fail --lis-simulation --group-size --bucket-size "
        "--adversarial --checkpoint-step --batch-size --test-batch-size --max-steps --epochs --lr "
        "--momentum --no-cuda --seed --log-interval --num-aggregate --network --mode --dataset "
        "--comm-type --eval-freq --train-dir --compress-grad"
    )
    assert {*hips.split(), *esync.split(), *ps.split(), *detox.split()} <= known


def test_modes_have_a_home_and_a_line(capsys):
    for mode in MODES.values():
        assert re.fullmatch(r"tf_hips\.[\w.]+:\w+", mode.home)
        assert mode.text


def test_a_mode_that_is_not_there_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        command("train", *WHAT, "-m", "lockstep")
    assert "must be one of sync, async, dcasgd, local, simulated" in capsys.readouterr().err


def test_a_file_and_set_say_the_same_as_options(command, tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "network: vgg11\ndataset: cifar10\ndata_dir: data\nlearning_rate: 0.5\ncpu: true\n"
        "split: dirichlet(0.5)\nmax_steps: 7\n"
    )
    _, told, environment = command(
        *("train", "--config", str(file), "--learning-rate", "0.25"),
        *("--set", "batch_size=32", "--set", "optimizer.weight_decay=1e-4"),
        *("--set", "optimizer.nesterov=true", "--set", "split=quantity(2)"),
    )
    assert (told.network, told.data_dir) == ("vgg11", str(tmp_path / "data"))
    assert (told.learning_rate, told.batch_size, told.max_steps) == (0.25, 32, 7)
    assert told.split == "quantity(2)"
    assert told.optimizer_options == {"weight_decay": 1e-4, "nesterov": True}
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"


def test_arguments_of_the_optimizer_are_in_the_file_that_is_printed(command, tmp_path, capsys):
    from tf_hips import cli

    words = ["train", *WHAT, "--set", "optimizer.weight_decay=1e-4", "--set", "optimizer.name=own"]
    _, meant, _ = command(*words)
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--print-config"])
    assert ended.value.code == 0
    file = tmp_path / "train.yaml"
    file.write_text(capsys.readouterr().out)
    _, again, _ = command("train", "--config", str(file))
    assert again == meant
    assert again.optimizer_options == {"weight_decay": 1e-4, "name": "own"}


def test_arguments_of_the_optimizer_in_a_file_and_on_the_command_line(command, tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "network: lenet\ndataset: digits\n"
        "optimizer_options: {weight_decay: 1e-4, nesterov: true, clipnorm: 1}\n"
    )
    words = ("train", "--config", str(file))
    told = [
        command(*words, *more)[1].optimizer_options
        for more in (
            (),
            ("--set", "optimizer.clipnorm=0.5", "--set", "optimizer.name=own"),
            ("--optimizer-options", '{"clipnorm": 2}'),
            ("--optimizer-options", '{"clipnorm": 2}', "--set", "optimizer.nesterov=false"),
        )
    ]
    assert told == [
        {"weight_decay": 1e-4, "nesterov": True, "clipnorm": 1},
        {"weight_decay": 1e-4, "nesterov": True, "clipnorm": 0.5, "name": "own"},
        {"clipnorm": 2},
        {"clipnorm": 2, "nesterov": False},
    ]


@pytest.mark.parametrize("text", ["weight_decay=1", "[1]", '"a"', ""])
def test_arguments_of_the_optimizer_are_a_mapping(command, text, capsys):
    with pytest.raises(SystemExit):
        command("train", *WHAT, "--optimizer-options", text)
    assert f'must be a mapping in JSON, as {{"nesterov": true}}. Received: {text!r}' in (
        capsys.readouterr().err
    )


def test_the_example_is_accepted(command):
    example = Path(__file__).resolve().parents[2] / "examples/train.yaml"
    _, told, _ = command("train", "--config", str(example))
    assert (told.network, told.split, told.mode) == ("lenet", "class", "sync")
    assert told.train_dir == str(example.parents[1] / "train-out/models")


def test_print_config_is_read_back(command, tmp_path, capsys, monkeypatch):
    parser = arguments.Parser(prog="tf-hips")
    train.add(parser.add_subparsers(dest="command"))
    words = ["train", *WHAT, "-l", "0.125", "-s", "1", "-b", "16", "--print-config"]
    options = parser.parse_args(words)
    assert options.run(options) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    _, told, _ = command("train", "--config", str(file))
    assert (told.learning_rate, told.split, told.batch_size) == (0.125, "class", 16)
    assert (told.network, told.dataset) == ("lenet", "digits")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "batch_sise=3"], "--set must have a key"),
        (["--set", "batch_size"], "--set must be KEY=VALUE"),
        (["--set", "batch_size=x"], "--set batch_size: must be a whole number"),
        (["--set", "optimizer=lion"], "--set optimizer must be one of sgd, adam"),
        (["-s", "1", "--split", "dirichlet(1)"], "--split-by-class and --split exclude"),
        (["-gc", "1", "--compression", "onebit"], "--use-2bit-compression and --compression"),
        (["-dcasgd", "1"], "--use-dcasgd needs --mode async"),
        (["-g", "0", "-c", "1"], "exclude each other"),
        (["--enable-gpu", "--cpu"], "exclude each other"),
        (["--momentum", "1.5"], "`momentum` must be in"),
        (["--momentum", "0.5", "--optimizer", "adam"], "`momentum` is for sgd"),
        (["-m", "async", "--optimizer", "adam"], "optimizer on the server"),
        (["-m", "dcasgd", "--momentum", "0.9"], "has no momentum"),
        (["-m", "local", "--compression", "onebit"], "on one device, without `compression`"),
        (["-m", "local", "--split", "class"], "on one device, without `split`"),
        (["-l", "0.1", "--set", "optimizer.learning_rate=0.5"], "exclude each other"),
        (["-l", "0"], "`learning_rate` must be positive"),
    ],
)
def test_what_does_not_fit_is_one_line(words, message, monkeypatch):
    parser = arguments.Parser(prog="tf-hips")
    train.add(parser.add_subparsers(dest="command"))
    monkeypatch.setattr(train, "become", lambda *_: pytest.fail("it was accepted"))
    options = parser.parse_args(["train", *WHAT, *words])
    with pytest.raises(arguments.UsageError, match=re.escape(message)):
        options.run(options)


@pytest.mark.parametrize(
    ("words", "local_rank", "visible"),
    [
        (["-g", "2"], None, "2"),
        (["--device", "gpu0,gpu1,cpu"], "1", "1"),
        (["--device", "gpu0,gpu1,cpu"], "2", "-1"),
        (["--device", "gpu0,cpu"], "2", "0"),
        (["--cpu"], "3", "-1"),
        ([], "1", None),
        (["--enable-gpu", "1"], "1", None),
    ],
)
def test_each_worker_has_its_device(words, local_rank, visible, command, monkeypatch):
    if local_rank is not None:
        monkeypatch.setenv("HOROVOD_LOCAL_RANK", local_rank)
    _, told, environment = command("train", *WHAT, *words)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible
    assert told.needs_gpu == (visible not in (None, "-1") or "--enable-gpu" in words)


def test_a_gpu_is_one_of_those_that_may_be_seen(command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a")
    for number, visible in (("0", "4"), ("1", "GPU-5a")):
        monkeypatch.setenv("TF_HIPS_LOCAL_WORKER", number)
        _, _, environment = command("train", *WHAT, "--device", "gpu0,gpu1")
        assert environment["CUDA_VISIBLE_DEVICES"] == visible
    for given, number in (("4,5", 2), ("4,-1,5", 1), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        with pytest.raises(arguments.UsageError, match="GPUs that may be seen"):
            command("train", *WHAT, "--gpu", str(number))


def test_workers_of_a_machine_are_numbered_over_all_sites(command, monkeypatch):
    # Each site has a Horovod of its own, in which ranks begin at 0.
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "0")
    for number, visible in (("0", "0"), ("1", "1"), ("2", "-1"), ("3", "0")):
        monkeypatch.setenv("TF_HIPS_LOCAL_WORKER", number)
        _, _, environment = command("train", *WHAT, "--device", "gpu0,gpu1,cpu")
        assert environment["CUDA_VISIBLE_DEVICES"] == visible


def test_an_evaluator_takes_no_gpu_of_the_workers(command, monkeypatch):
    monkeypatch.setenv("TF_HIPS_ROLE", "evaluator")
    _, _, environment = command("train", *WHAT, "--gpu", "1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"  # it was started by itself
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for words in (["--device", "gpu0,gpu1"], ["--enable-gpu"], []):
        _, told, environment = command("train", *WHAT, *words)
        assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
        assert not told.needs_gpu


def test_settings_travel_as_json(command):
    import dataclasses

    from tf_hips import config

    for words in (
        ["train", *WHAT, "--set", "optimizer.beta_1=0.5", "--optimizer", "adam"],
        ["evaluate", "--model-dir", "m", "--follow", "--eval-freq", "7"],
        ["data", "show", "digits", "--workers", "2,3", "--split", "class"],
        ["data", "prepare", "mnist", "--from", "."],
    ):
        _, told, _ = command(*words)
        text = json.dumps(dataclasses.asdict(told))
        assert config.build(type(told), json.loads(text), "the test") == told


def test_a_bad_split_is_refused_where_it_is_read(command, capsys):
    with pytest.raises(SystemExit):
        command("data", "show", "digits", "--split", "dirichlet")
    assert "`split` must be iid" in capsys.readouterr().err


def test_an_evaluator_has_numbers_it_can_use():
    from tf_hips.trainer.settings import Evaluation

    with pytest.raises(ConfigError, match="`poll_s` must be positive"):
        Evaluation(model_dir="m", poll_s=0.0)


def told(*words, code=0, **variables):
    """What a real command says: it becomes another program, and that one ends."""
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", *words],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **variables},
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.heavy
def test_data_sets_are_shown_and_what_is_missing_is_one_line(tmp_path):
    from tests.data.files import write_mnist

    write_mnist(tmp_path / "mnist", train=60, test=10)
    (tmp_path / "data_batch_1.bin").write_bytes(b"")
    listed = told("data", "show", "--data-dir", str(tmp_path))
    assert re.search(rf"mnist +files: {tmp_path}/mnist *\n", listed)
    assert re.search(r"digits +needs no file *\n", listed)
    assert re.search(r"cifar10 +not whole: .* without data_batch_2.bin", listed)
    assert re.search(r"cifar100 +not under", listed)
    shown = told(
        *("data", "show", "mnist", "--data-dir", str(tmp_path)),
        *("--split", "class", "--workers", "2,1"),
    )
    assert "28 x 28 x 1" in shown
    assert "60 to train on, 10 to test on" in shown
    assert re.search(r"\n0 +20 +6 +6 +6 +2 +0", shown)
    error = told("data", "show", "svhn", "--data-dir", str(tmp_path), code=1)
    assert error.startswith("tf-hips data show: error: The data set svhn is not under")
    assert "`tf-hips data prepare svhn --data-dir DIR`" in error
    assert error.count("\n") == 1
    ready = told("data", "prepare", "mnist", "--data-dir", str(tmp_path))
    assert ready == f"mnist is ready in {tmp_path}/mnist\n"
    error = told("data", "prepare", "digits", "--from", str(tmp_path), code=1)
    assert (
        f"`--from` must be left out for digits, which needs no file. Received: {tmp_path}" in error
    )
