# SPDX-License-Identifier: Apache-2.0
"""What `tf-hips train`, `evaluate` and `data` refuse at once: one line, 2, and no TensorFlow."""

import subprocess
import sys

import pytest

from tf_hips import config
from tf_hips.cli import main, train

DIGITS = ["train", "-n", "lenet", "-dt", "digits"]
WRONG = {
    "network": (
        ["train", "-n", "lennet", "-dt", "digits", "-m", "local"],
        ["--network must be one of alexnet,", "did you mean lenet?", "Received: 'lennet'"],
    ),
    "data set": (
        ["train", "-n", "lenet", "-dt", "digitz", "-m", "local"],
        ["--dataset must be one of digits,", "did you mean digits? Received: 'digitz'"],
    ),
    "data set like none": (
        ["train", "-n", "lenet", "-dt", "xyzzy", "-dd", "nowhere", "-m", "local"],
        ["--dataset xyzzy is not under ", "nowhere: it must be one of digits,"],
    ),
    "images for texts": (
        ["train", "-n", "transformer", "-dt", "digits", "-m", "local"],
        ["--network transformer needs a data set of texts. Received: --dataset digits"],
    ),
    "texts for images": (
        ["train", "-n", "lenet", "-dt", "synthetic-text", "-m", "local"],
        ["--network lenet needs a data set of images. Received: --dataset synthetic_text"],
    ),
    "no server": ([*DIGITS, "-m", "async"], ["--mode async needs a server: `tf-hips run`"]),
    "no others": ([*DIGITS, "-m", "fedavg"], ["--mode fedavg is for several workers"]),
    "esync alone": ([*DIGITS, "-m", "esync"], ["--mode esync is for several workers"]),
    "rule": (
        [*DIGITS, "--simulated-workers", "5", "-m", "krum", "--worker-fail", "3"],
        ["--simulated-workers 5 must be enough", "krum needs n >= 2 f + 3 rows. Received: n=5"],
    ),
    "resume": (
        [*DIGITS, "-m", "local", "--resume-from", "nothere.meta"],
        ["--resume-from must be a net.meta", "nothere.meta, which is not there"],
    ),
    "folder of a file": (
        [*DIGITS, "-m", "local", "--train-dir", "file/checkpoints"],
        ["--train-dir must be a folder, or one that can be made", "/file, which is a file"],
    ),
    "folder that is a file": (
        [*DIGITS, "-m", "local", "--backup-dir", "file"],
        ["--backup-dir must be a folder", "/file: which is a file"],
    ),
    "folder of the system": (
        [*DIGITS, "-m", "local", "--log-dir", "/proc/none"],
        ["--log-dir must be a folder", "/proc, which takes no files: "],
    ),
    "no checkpoints": (
        ["evaluate", "--model-dir", "models"],
        ["--model-dir must be a folder of checkpoints", "Received: ", "models"],
    ),
    "evaluated network": (
        ["evaluate", "--model-dir", ".", "-n", "lennet"],
        ["--network must be one of", "did you mean lenet?"],
    ),
    "source": (
        ["data", "prepare", "mnist", "--from", "nowhere"],
        ["--from must be a folder", "Received: nowhere, which is not there"],
    ),
    "size of what is fetched": (
        ["data", "prepare", "mnist", "--image-size", "16"],
        ["--image-size needs --from: ", "Received: 16"],
    ),
    "two sources": (
        ["data", "prepare", "mnist", "--from", ".", "--manual-dir", "."],
        ["--from and --manual-dir exclude each other"],
    ),
    "split of a list": (
        ["data", "show", "--split", "iid"],
        ["--split needs the name of a data set"],
    ),
    "size in a list": (
        ["data", "show", "--image-size", "9"],
        ["--image-size needs the name of a data set"],
    ),
    "workers of a list": (
        ["data", "show", "--workers", "2"],
        ["--workers needs the name of a data set"],
    ),
    "seed without a split": (
        ["data", "show", "digits", "--seed", "0"],
        ["--seed needs --split"],
    ),
    "level without a split": (
        ["data", "show", "digits", "--split-over", "worker"],
        ["--split-over needs --split"],
    ),
}


@pytest.fixture
def alone(monkeypatch, tmp_path):
    for name in (config.CONFIG_VARIABLE, config.ROLE_VARIABLE, "TF_CONFIG", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_said_at_once(case, alone, capsys, monkeypatch):
    words, texts = WRONG[case]
    monkeypatch.setattr(train, "become", lambda *_: pytest.fail("it was accepted"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    text = capsys.readouterr().err
    assert ended.value.code == 2, text
    assert text.count("\n") == 1
    for part in texts:
        assert part in text


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "local"],
        ["-n", "ResNet-18"],
        ["-n", "transformer", "-dt", "synthetic-text"],
        ["--simulated-workers", "9", "-m", "krum", "--worker-fail", "3"],
        ["-dt", "own", "-dd", "prepared"],
    ],
)
def test_what_can_be_is_accepted(words, alone, monkeypatch, tmp_path):
    (tmp_path / "prepared/own/1.0.0").mkdir(parents=True)
    (tmp_path / "prepared/own/1.0.0/dataset_info.json").write_text("{}")

    def become(*_):
        raise BlockingIOError

    monkeypatch.setattr(train, "become", become)
    with pytest.raises(SystemExit) as ended:
        main([*DIGITS, *words])
    assert ended.value.code == 1  # of `become`


def test_a_job_of_several_needs_no_server_for_local_steps(alone, monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setattr(train, "become", lambda *_: 0)
    with pytest.raises(SystemExit) as ended:
        main([*DIGITS, "-m", "fedavg"])
    assert ended.value.code is None
    for mode in ("async", "hfa"):
        with pytest.raises(SystemExit) as ended:
            main([*DIGITS, "-m", mode])
        assert ended.value.code == 2
        assert f"--mode {mode} needs a server" in capsys.readouterr().err


def test_it_is_said_without_tensorflow(tmp_path):
    program = (
        "import sys\n"
        "from tf_hips import cli\n"
        "try:\n"
        "    cli.main(['train', '-n', 'lennet', '-dt', 'digits'])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 2\n"
        "sys.exit(len({'tensorflow', 'keras'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.tf
def test_the_names_are_those_of_the_tables():
    from tf_hips import models
    from tf_hips.data import sets
    from tf_hips.data.sets import files, names
    from tf_hips.models import names as networks

    assert tuple(models.NETWORKS) == networks.NAMES
    assert tuple(sets.MADE) == names.MADE_NAMES
    assert tuple(files.FILES) == names.FILE_NAMES
