# SPDX-License-Identifier: Apache-2.0
"""Which backup a run goes on from, and how backups stand in their folder, without a training."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.tf


def folder_of(path, backups, session="s"):
    """A folder with whole backups: (number, epoch, step, round) of each."""
    from tf_hips.callbacks.folder import Backup, BackupFolder

    folder = BackupFolder(path)
    for number, epoch, step, round_number in backups:
        backup = Backup(number, epoch, step)
        place = {"session": session, "round": round_number}
        (folder.start(backup) / "meta.json").write_text(json.dumps({"place": place}))
        folder.finish(backup)
    return folder


class _Peers:
    """One party of several; the others say `others`."""

    def __init__(self, others=(), *, has_rounds=False, backups=None, has_equal_steps=False):
        self.others, self.has_rounds, self.backups = list(others), has_rounds, backups
        self.has_equal_steps = has_equal_steps

    def on_first(self, action):
        return action()

    together = on_first

    def gather_from_all(self, value, label):
        return [value, *self.others]

    gather_from_whole_run = gather_from_all


def chosen(folder, peers, check=lambda backup: None, num_steps=None):
    from tf_hips.callbacks.choosing import Choice

    choice = Choice(peers, folder, check, num_steps)
    found = choice.backup()
    return (None if found is None else (found.number, found.epoch, found.step)), choice.is_back


def test_the_newest_step_that_all_have(tmp_path):
    folder = folder_of(tmp_path, [(3, 0, 5, 5), (4, 1, 0, 6), (5, 1, 5, 11), (6, 2, 0, 12)])
    assert chosen(folder, _Peers()) == ((6, 2, 0), False)
    others = [[[1, 0], [1, 5], [2, 5]], [[0, 5], [1, 0], [1, 5], [3, 0]]]
    assert chosen(folder, _Peers(others)) == ((5, 1, 5), False)
    with pytest.raises(ValueError, match=r"same step.*worker 1: \[\]\. .*from a saved model"):
        chosen(folder, _Peers([[]]))
    empty = folder_of(tmp_path / "empty", [])
    assert chosen(empty, _Peers([[]])) == (None, False)


def test_the_newest_backup_of_the_newest_round_that_all_have(tmp_path):
    """Of parties that train apart in a round; a backup without a place is of no round."""
    folder = folder_of(tmp_path, [(1, 0, 2, 1), (2, 0, 4, 2), (3, 0, 6, 2), (4, 1, 0, 3)])
    of_older = folder.path / "00000005-epoch-1-step-2"
    of_older.mkdir()
    (of_older / "meta.json").write_text("{}")
    peers = _Peers([[1, 2, 2, None], [0, 1, 2]], has_rounds=True)
    assert chosen(folder, peers) == ((3, 0, 6), False)
    with pytest.raises(ValueError, match=r"must have a backup of the same round.*worker 1: \[9"):
        chosen(folder, _Peers([[9, None]], has_rounds=True))


def test_who_comes_back_takes_its_own_newest_one_or_another_partys(tmp_path):
    calls = []

    def fetch(intake):
        """Another party's backup, whatever its number there."""
        intake._header = SimpleNamespace(name="00000002-epoch-4-step-1")
        draft = next(tmp_path.glob("**/.writing-*"))
        (draft / "meta.json").write_text(json.dumps({"place": {"session": "s", "round": 9}}))

    backups = SimpleNamespace(
        can_come_back=lambda place: place["round"] >= 7,
        come_back=lambda place: calls.append(("back", place["round"])),
        is_lacking=lambda: True,
        fetch=fetch,
        note=lambda place: calls.append(("note", place["round"])),
    )
    check = lambda backup: calls.append(("check", backup.number))  # noqa: E731
    own = folder_of(tmp_path / "own", [(1, 0, 0, 8), (2, 0, 3, 7)])
    assert chosen(own, _Peers(backups=backups), check) == ((2, 0, 3), True)
    assert calls == [("check", 2), ("back", 7)]  # restored before others rely on it
    calls.clear()
    older = folder_of(tmp_path / "older", [(6, 0, 0, 5), (7, 0, 3, 6)])
    assert chosen(older, _Peers(backups=backups), check) == ((8, 4, 1), True)  # the newest here
    assert calls == [("check", 8), ("back", 9), ("note", 9)]
    assert [one.number for one in older.backups()] == [6, 7, 8]


@pytest.mark.parametrize(
    ("here", "there", "has_equal_steps", "place"),
    [
        (20, 20, True, (1, 8)),
        (12, 20, True, (2, 4)),  # 28 steps
        (12, 20, False, (1, 4)),
        (50, 20, True, (0, 28)),
        (50, 20, False, (1, 20)),
        (None, 20, True, (1, 0)),
        (12, None, True, (1, 0)),
        (None, None, True, (1, 8)),
    ],
)
def test_another_partys_backup_where_epochs_have_other_lengths(
    tmp_path, here, there, has_equal_steps, place
):
    peers = _Peers(has_rounds=True, has_equal_steps=has_equal_steps)
    assert taken(tmp_path, peers, here, there) == (place, here)


@pytest.mark.parametrize(("here", "there"), [(20, 20), (12, 20), (None, 20), (12, None)])
def test_without_a_loop_another_partys_backup_stays_as_it_is(tmp_path, here, there):
    """All parties make the same steps, so an epoch of another length is refused by name."""
    assert taken(tmp_path, _Peers(), here, there) == ((1, 8), there)


def taken(tmp_path, peers, here, there):
    """Takes another party's backup; its place and steps in an epoch here.

    Args:
        tmp_path: for the folder.
        peers: of a party that has no backup.
        here: steps of an epoch.
        there: the same of the other party.
    """

    def fetch(intake):
        intake._header = SimpleNamespace(name="00000002-epoch-1-step-8")
        draft = next(tmp_path.glob("**/.writing-*"))
        (draft / "meta.json").write_text(json.dumps({"place": {}, "steps_per_epoch": there}))

    peers.backups = SimpleNamespace(
        can_come_back=lambda place: True,
        come_back=lambda place: None,
        is_lacking=lambda: True,
        fetch=fetch,
        note=lambda place: None,
    )
    folder = folder_of(tmp_path, [])
    (_, *place), is_back = chosen(folder, peers, num_steps=here)
    assert is_back
    # The next process of this party takes it for its own.
    [backup] = folder.backups()
    meta = json.loads((folder.place(backup) / "meta.json").read_text())
    assert meta["is_of_others"]
    return tuple(place), meta["steps_per_epoch"]


@pytest.mark.parametrize(
    ("here", "there", "place"),
    [
        (20, 20, (12, 8)),
        (11, 20, (14, 4)),  # 48 steps of this `fit`
        (50, 20, (10, 48)),
    ],
)
def test_another_partys_backup_of_a_fit_that_began_at_a_later_epoch(here, there, place):
    """Epochs before it have no steps here, so a place never counts them."""
    from tf_hips.callbacks.folder import Backup
    from tf_hips.callbacks.handover import Epochs, _own_place

    assert _own_place(Backup(2, 12, 8), there, Epochs(here, 10, True)) == place


def test_a_backup_has_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    from tf_hips.callbacks.folder import Backup, BackupFolder

    told = []
    fsync, rename = os.fsync, Path.rename

    def syncing(descriptor):
        told.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renaming(path, to):
        told.append("rename")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "rename", renaming)
    folder, backup = BackupFolder(tmp_path / "run"), Backup(1, 2, 40)
    draft = folder.start(backup)
    for name in "ab":
        (draft / name).write_text("x")
    folder.finish(backup)
    assert sorted(told[:2]) == ["a", "b"]
    assert told[2:] == [draft.name, "rename", "run"]
    assert folder.newest().name == "00000001-epoch-2-step-40"


def test_the_newest_backups_stay_and_one_that_is_protected(tmp_path):
    from tf_hips.callbacks.folder import Backup

    folder = folder_of(tmp_path, [(number, 0, number, number) for number in range(1, 7)])
    for name in (".writing-00000009-epoch-0-step-9", ".deleting-00000003-epoch-0-step-3", "mine"):
        (tmp_path / name).mkdir()
    folder.prune(2, protected=Backup(3, 0, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000003-epoch-0-step-3",
        "00000005-epoch-0-step-5",
        "00000006-epoch-0-step-6",
        "mine",
    ]
