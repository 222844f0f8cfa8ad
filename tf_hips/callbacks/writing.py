# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a party write a backup together, and what a disk that is full does to it.

A run is worth more than one of its backups: where a disk is full, or fails, on any rank, all ranks
go on with the backups that there are, and that is said. What was begun is deleted, for the room
that it takes. Whatever else is wrong ends `fit`.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks import seals
from tf_hips.callbacks.folder import Backup, BackupFolder
from tf_hips.callbacks.handover import META
from tf_hips.callbacks.peers import Peers

Trouble = list[str]  # its kind, and what is said

# What a disk says that is full or fails; Linux lets one that has failed be read only.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Writing:
    """Writes the backups of one party."""

    def __init__(self, peers: Peers, folder: BackupFolder) -> None:
        """Nothing is written yet.

        Args:
            peers: the ranks of the party.
            folder: of its backups.
        """
        self._peers = peers
        self._folder = folder
        self._told: set[str] = set()  # kinds of trouble since the last backup

    def write(
        self,
        epoch: int,
        step: int,
        fill: Callable[[Path], None],
        meta: dict[str, Any],
        *,
        keep: int,
        protected: Backup | None,
    ) -> None:
        """Writes one backup, unless the disk does not take it; called on all ranks.

        Args:
            epoch: the epoch that goes on with it.
            step: the next step of that epoch.
            fill: writes the files of this rank into a folder.
            meta: what rank 0 says of the backup, JSON values.
            keep: how many backups stay.
            protected: one that stays, too.

        Raises:
            FileNotFoundError: the ranks do not share the directory.
            PeerError: the other ranks, or the server, cannot be reached.
        """
        peers, folder = self._peers, self._folder

        def start() -> list[int]:
            numbers = [backup.number for backup in folder.backups()]
            backup = Backup(max(numbers, default=0) + 1, epoch, step)
            folder.start(backup)
            return [backup.number, epoch, step]

        place, trouble = peers.on_first(lambda: _attempt(start))
        if trouble is not None:
            self._tell(trouble)
            return
        backup = Backup(*place)
        draft = folder.draft(backup)

        def finish() -> None:
            self._check_shared(draft)
            told = meta | seals.of_ranks(draft, peers.size)
            (draft / META).write_text(json.dumps(told), encoding="utf-8")
            folder.finish(backup)

        def close() -> tuple[Trouble | None, bool]:
            _, trouble = _attempt(finish)
            # It has its name, and is a backup, even where the folder then cannot be synced.
            if not folder.place(backup).exists():
                return trouble, False
            if peers.backups is not None and meta["place"] is not None:
                peers.backups.note(meta["place"])
            return trouble or _attempt(lambda: folder.prune(keep, protected))[1], True

        is_whole = False
        try:
            found = peers.together(lambda: _attempt(lambda: fill(draft))[1])
            trouble = next((one for one in found if one is not None), None)
            if trouble is None:
                trouble, is_whole = peers.on_first(close)
        except Exception:
            self._drop(backup)
            raise
        if not is_whole:
            self._drop(backup)
        else:
            self._told.clear()
        if trouble is not None:
            self._tell(trouble, is_whole=is_whole)

    def _check_shared(self, draft: Path) -> None:
        for rank in range(self._peers.size):
            if not (draft / f"rank-{rank}.json").exists():
                raise FileNotFoundError(
                    "`directory` must be on a file system that all ranks share. Received: "
                    f"{self._folder.path}, where rank 0 does not see what rank {rank} wrote"
                )

    def _drop(self, backup: Backup) -> None:
        if self._peers.rank == 0:
            self._folder.drop(backup)

    def _tell(self, trouble: Trouble, *, is_whole: bool = False) -> None:
        kind, text = trouble
        if self._peers.rank == 0 and kind not in self._told:
            log.warning(
                "The backup is whole, but its folder %s is not in order: %s"
                if is_whole
                else "Backing up to %s fails, and training goes on with the backups that there "
                "are: %s",
                self._folder.path,
                text,
            )
        self._told.add(kind)


def _attempt(action: Callable[[], Any]) -> tuple[Any, Trouble | None]:
    """What `action` returns, or what is wrong with the disk; raises what else it raises."""
    try:
        return action(), None
    except (FileNotFoundError, ConnectionError):
        raise  # the wrong folder, or another process
    except OSError as error:
        # NumPy gives no number where it could write a part only.
        if error.errno not in (*_OF_DISKS, None):
            raise
        return None, [errno.errorcode.get(error.errno or 0, type(error).__name__), str(error)]
    except tf.errors.OpError as error:  # where TensorFlow writes; one class is of memory, too
        # Keras would take some of these classes for the end of the data.
        told = (number for number in _OF_DISKS if os.strerror(number) in error.message)
        number = next(told, None)
        if number is None:
            raise
        return None, [errno.errorcode[number], error.message]
