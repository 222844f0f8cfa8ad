# SPDX-License-Identifier: Apache-2.0
"""Backups where the disk is full: training goes on, and nothing half-written stays."""

import errno
import threading

import pytest

from tests.callbacks import resumed
from tests.callbacks.resumed import build, callbacks, data

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.timeout(180)]


def train(model, used, epochs=3):
    """Epochs of one step: all backups are made at their ends."""
    x, y = data()
    resumed.train(model, used, epochs, rows={"x": x, "y": y, "batch_size": len(x)})


def full_for_tensorflow():
    import tensorflow as tf

    return tf.errors.ResourceExhaustedError(None, None, "x.tempstate; No space left on device")


def too_large_for_tensorflow():
    """Keras takes errors of this class for the end of the data."""
    import tensorflow as tf

    return tf.errors.OutOfRangeError(None, None, "x.tempstate; File too large")


def broken_for_tensorflow():
    import tensorflow as tf

    return tf.errors.UnknownError(None, None, "x.tempstate; Input/output error")


def read_only_for_tensorflow():
    import tensorflow as tf

    return tf.errors.PermissionDeniedError(None, None, "x_temp; Read-only file system")


def read_only():
    """As Linux leaves a disk that has failed."""
    return OSError(errno.EROFS, "Read-only file system", "x")


def full():
    return OSError(errno.ENOSPC, "No space left on device", "x")


def failing(monkeypatch, home, name, error, times):
    """Lets calls `times` of a function fail, counted from 1."""
    real, calls = getattr(home, name), []

    def call(*args, **options):
        calls.append(args)
        if len(calls) in times:
            raise error()
        return real(*args, **options)

    monkeypatch.setattr(home, name, call)


def homes():
    from tf_hips.callbacks import folder, others, snapshot

    return {
        "start": folder.BackupFolder,
        "write": snapshot,
        "write_best_weights": others,
        "finish": folder.BackupFolder,
    }


def is_told(caplog):
    return sum("training goes on with the backups that there are" in one for one in caplog.messages)


@pytest.mark.parametrize(
    ("name", "error", "times"),
    [
        ("start", full, (2, 3)),
        ("write_best_weights", full, (2, 3)),
        ("finish", full, (2, 3)),
        ("start", read_only, (2, 3)),
        ("write", full_for_tensorflow, (3, 5)),  # of two files in a backup
        ("write", too_large_for_tensorflow, (3, 5)),
        ("write", broken_for_tensorflow, (3, 5)),
        ("write", read_only_for_tensorflow, (3, 5)),
    ],
)
def test_a_full_disk_ends_no_training(tmp_path, monkeypatch, caplog, name, error, times):
    failing(monkeypatch, homes()[name], name, error, times)
    steps, used = callbacks(tmp_path, keep=1, delete_checkpoint=False)
    train(build(), used)
    assert len(steps) == 3
    assert [one.name for one in tmp_path.iterdir()] == ["00000001-epoch-1-step-0"]
    assert is_told(caplog) == 1  # not for each backup


def test_a_file_that_is_too_large_is_not_the_end_of_the_data(tmp_path, monkeypatch, caplog):
    failing(monkeypatch, homes()["write"], "write", too_large_for_tensorflow, (1,))
    steps, used = callbacks(tmp_path, save_freq=2)
    resumed.train(build(), used, epochs=1)
    assert steps == [(0, step) for step in range(resumed.STEPS)]
    assert is_told(caplog) == 1


def test_a_disk_that_has_room_again_gets_the_next_backup(tmp_path, monkeypatch, caplog):
    failing(monkeypatch, homes()["write"], "write", full, (3, 7))
    train(build(), callbacks(tmp_path, keep=1, delete_checkpoint=False)[1], epochs=5)
    assert [one.name for one in tmp_path.iterdir()] == ["00000003-epoch-5-step-0"]
    assert is_told(caplog) == 2


def test_a_disk_that_cannot_delete_keeps_the_backup_and_says_so(tmp_path, monkeypatch, caplog):
    from tf_hips.callbacks import folder

    failing(monkeypatch, folder.BackupFolder, "prune", full, (2, 3))
    train(build(), callbacks(tmp_path, keep=1, delete_checkpoint=False)[1])
    assert "00000003-epoch-3-step-0" in [one.name for one in tmp_path.iterdir()]
    assert is_told(caplog) == 0
    assert any("The backup is whole" in one for one in caplog.messages)


def test_a_disk_that_deletes_nothing_more_spoils_no_training_that_is_over(
    tmp_path, monkeypatch, caplog
):
    from tf_hips.callbacks import folder

    failing(monkeypatch, folder.BackupFolder, "clear", read_only, (1,))
    steps, used = callbacks(tmp_path, keep=1)
    train(build(), used)
    assert "The backups of a `fit` that is over are still there: " in caplog.text
    assert [one.name for one in tmp_path.iterdir()] == ["00000003-epoch-3-step-0"]
    # Another `fit` of this process is not taken for that one.
    train(build(), used)
    assert len(steps) == 6
    assert not tmp_path.exists()


def test_who_may_not_write_is_told_at_once(tmp_path, monkeypatch):
    def refused():
        return PermissionError(errno.EACCES, "Permission denied", "x")

    failing(monkeypatch, homes()["write"], "write", refused, (1,))
    with pytest.raises(PermissionError, match="Permission denied"):
        train(build(), callbacks(tmp_path, keep=1, delete_checkpoint=False)[1])


def test_memory_that_is_full_is_no_disk(tmp_path, monkeypatch):
    def out_of_memory():
        import tensorflow as tf

        return tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    failing(monkeypatch, homes()["write"], "write", out_of_memory, (1,))
    with pytest.raises(Exception, match="OOM"):
        train(build(), callbacks(tmp_path, keep=1, delete_checkpoint=False)[1])


def test_what_is_not_the_disks_ends_it_and_leaves_nothing(tmp_path, monkeypatch):
    def wrong():
        return ValueError("wrong")

    failing(monkeypatch, homes()["write"], "write", wrong, (4,))
    with pytest.raises(ValueError, match="wrong"):
        train(build(), callbacks(tmp_path)[1])
    assert [one.name for one in tmp_path.iterdir()] == ["00000001-epoch-1-step-0"]


def pair():
    """Two ranks that are threads."""
    from tf_hips.callbacks.peers import Peers

    meeting = threading.Barrier(2, timeout=20)
    values = [None, None]

    class OfTwo(Peers):
        def __init__(self, rank):
            self.strategy, self.rank, self.size, self.site = None, rank, 2, None

        def gather(self, value):
            values[self.rank] = value
            meeting.wait()
            everyone = list(values)
            meeting.wait()
            return everyone

    return [OfTwo(0), OfTwo(1)]


def test_no_rank_keeps_a_backup_that_another_one_cannot_write(tmp_path, caplog):
    from tf_hips.callbacks.folder import Backup, BackupFolder
    from tf_hips.callbacks.writing import Writing

    ends = []

    def run(peers):
        writing = Writing(peers, BackupFolder(tmp_path))
        for step in (1, 2):

            def fill(draft, step=step):
                (draft / f"rank-{peers.rank}.json").write_text("{}")
                if (peers.rank, step) == (1, 1):
                    raise full()

            writing.write(0, step, fill, {"place": None}, keep=2, protected=None)
        ends.append(peers.rank)

    threads = [threading.Thread(target=run, args=(peers,)) for peers in pair()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert sorted(ends) == [0, 1]
    assert [one.name for one in tmp_path.iterdir()] == [Backup(1, 0, 2).name]
    assert is_told(caplog) == 1


def test_another_partys_backup_that_does_not_come_whole_leaves_nothing(tmp_path):
    from tf_hips.callbacks import handover
    from tf_hips.callbacks.folder import BackupFolder

    class Backups:
        def fetch(self, intake):
            (intake._folder / "shared.data").write_bytes(b"half")
            raise full()

    with pytest.raises(OSError, match="No space left"):
        handover.fetch(BackupFolder(tmp_path), 3, Backups())
    assert not list(tmp_path.iterdir())
