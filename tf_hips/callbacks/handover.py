# SPDX-License-Identifier: Apache-2.0
"""Another party's backup, into this party's folder of backups."""

import json
from pathlib import Path
from typing import Any

from tf_hips.callbacks.folder import Backup, BackupFolder, named, read_json
from tf_hips.callbacks.party import Backups
from tf_hips.errors import ProtocolError
from tf_hips.ps.transport.parcel import Intake

META = "meta.json"
IS_OF_OTHERS = "is_of_others"
"""What a backup says that another party has made: residuals in it are not this one's."""


def meta_of(folder: BackupFolder, backup: Backup) -> dict[str, Any]:
    """What a backup says of itself."""
    return read_json(folder.place(backup) / META)


def fetch(folder: BackupFolder, number: int, backups: Backups) -> list[int]:
    """Fetches it over the uplink; called on rank 0.

    Args:
        folder: gets it as a whole backup or not at all.
        number: that it gets there; what it has at the other party is not kept.
        backups: those of a strategy that comes back to its run.

    Returns:
        Number, epoch and step of the backup.

    Raises:
        PeerError: no party has one, or it cannot be reached.
        ProtocolError: what came is no backup.
        OSError: it cannot be written.
    """
    draft = Backup(number, 0, 0)
    try:
        folder.start(draft)
        intake = Intake(folder.draft(draft))
        backups.fetch(intake)
        _mark(folder.draft(draft))
        told = named(intake.name)
        if told is None:
            raise ProtocolError(f"A backup of another party must be one. Received: {intake.name}")
        backup = Backup(number, told.epoch, told.step)
        if backup != draft:
            folder.draft(draft).rename(folder.draft(backup))
            draft = backup
        folder.finish(backup)
    except BaseException:
        folder.drop(draft)
        raise
    return [backup.number, backup.epoch, backup.step]


def _mark(draft: Path) -> None:
    try:
        meta = json.loads((draft / META).read_text("utf-8"))
        (draft / META).write_text(json.dumps({**meta, IS_OF_OTHERS: True}), encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise ProtocolError(f"A backup of another party must be one: {error}") from error
