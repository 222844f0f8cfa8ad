# SPDX-License-Identifier: Apache-2.0
"""Folders that cannot be written, or are of another run: one line each, and nothing is lost."""

import pytest

from tests.trainer.test_command import told
from tf_hips import config
from tf_hips.callbacks.folder import BackupFolder
from tf_hips.errors import ConfigError
from tf_hips.trainer.settings import Training

pytestmark = pytest.mark.tf

# Nobody makes folders there, root included.
NOWHERE = "/proc/1/nowhere"
FOLDERS = [
    "log_dir",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("tensorboard", "tree_dir", "train_dir", "backup_dir")
    ),
]


@pytest.fixture
def alone(monkeypatch):
    for name in (config.CONFIG_VARIABLE, config.ROLE_VARIABLE, "TF_CONFIG", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def train(**options):
        from tf_hips.trainer import training

        common = {"network": "lenet", "dataset": "digits", "mode": "local", "max_steps": 4}
        training.run(Training(**common | {"eval_duration": 2, "batch_size": 16} | options))

    return train


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written_is_one_line(name, alone):
    with pytest.raises(ConfigError, match=rf"cannot be \w+ (in|to) {NOWHERE}.*: ") as caught:
        alone(**{name: NOWHERE})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_that_was_stopped_keeps_its_backup_from_another(alone, tmp_path, monkeypatch):
    from tf_hips.callbacks.contents import Contents

    write, calls = Contents._write, []

    def stop(self, draft, entries, own):
        calls.append(draft)
        if len(calls) == 2:
            raise RuntimeError("the test stops it")
        write(self, draft, entries, own)

    monkeypatch.setattr(Contents, "_write", stop)
    with pytest.raises(RuntimeError, match="the test stops it"):
        alone(max_steps=6, backup_dir=str(tmp_path))
    [left] = BackupFolder(tmp_path).backups()
    assert left.epoch == 1
    monkeypatch.setattr(Contents, "_write", write)
    with pytest.raises(ConfigError, match=r"^--backup-dir: .*another") as caught:
        alone(max_steps=6, backup_dir=str(tmp_path), network="simplenet")
    assert "\n" not in str(caught.value)
    assert BackupFolder(tmp_path).backups() == [left], "nothing is lost"
    alone(max_steps=6, backup_dir=str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "words",
    [
        ["--backup-dir", NOWHERE],
        ["--resume-from", NOWHERE],
        ["--simulated-workers", "5", "--rule", "krum(f=2)"],
    ],
)
def test_the_command_says_one_line(words):
    what = ["train", "-n", "lenet", "-dt", "digits", "--max-steps", "2", "--cpu", *words]
    mode = [] if "--rule" in words else ["-m", "local"]
    # What is known at once ends with 2, without TensorFlow.
    text = told(*what, *mode, code=2, CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
    lines = [line for line in text.splitlines() if not line.startswith(("WARNING", "I0", "W0"))]
    assert len([line for line in lines if line.startswith("tf-hips train: error: ")]) == 1
    assert "Traceback" not in text
