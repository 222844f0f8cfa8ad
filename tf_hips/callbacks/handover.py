# SPDX-License-Identifier: Apache-2.0
"""Another party's backup, into this party's folder of backups."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Of a party that may have data of another length than others.

    Attributes:
        num_steps: of an epoch here; None: not known.
        first: that `fit` began with, in all parties.
        has_equal_steps: whether parties make equally many steps, however many an epoch has.
    """

    num_steps: int | None
    first: int
    has_equal_steps: bool


def meta_of(folder: BackupFolder, backup: Backup) -> dict[str, Any]:
    """What a backup says of itself."""
    return read_json(folder.place(backup) / META)


def fetch(
    folder: BackupFolder,
    number: int,
    backups: Backups,
    epochs: Epochs | None = None,
) -> list[int]:
    """Fetches it over the uplink; called on rank 0.

    Args:
        folder: gets it as a whole backup or not at all.
        number: that it gets there; what it has at the other party is not kept.
        backups: those of a strategy that comes back to its run.
        epochs: those here, where parties of a loop may have data of other lengths. None: all
            parties make the same steps, and what the backup says of an epoch must be so here.

    Returns:
        Number, epoch and step of the backup, as this party counts them.

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
        told = named(intake.name)
        if told is None:
            raise ProtocolError(f"A backup of another party must be one. Received: {intake.name}")
        was = _mark(folder.draft(draft), epochs)
        place = (told.epoch, told.step) if epochs is None else _own_place(told, was, epochs)
        backup = Backup(number, *place)
        if backup != draft:
            folder.draft(draft).rename(folder.draft(backup))
            draft = backup
        folder.finish(backup)
    except BaseException:
        folder.drop(draft)
        raise
    return [backup.number, backup.epoch, backup.step]


def _own_place(told: Backup, was: int | None, epochs: Epochs) -> tuple[int, int]:
    """Epoch and step here, where a party with `was` steps in an epoch is at `told`."""
    num_steps, first_epoch = epochs.num_steps, epochs.first
    if was == num_steps:
        return told.epoch, told.step
    if not was or not num_steps:
        return told.epoch, 0
    if epochs.has_equal_steps:
        done = (told.epoch - first_epoch) * was + told.step
        return first_epoch + done // num_steps, done % num_steps
    return told.epoch, told.step * num_steps // was


def _mark(draft: Path, epochs: Epochs | None) -> int | None:
    """Makes it this party's, with its steps in an epoch; returns how many it had."""
    try:
        meta = json.loads((draft / META).read_text("utf-8"))
        was = meta.get("steps_per_epoch")
        own = {**meta, IS_OF_OTHERS: True}
        if epochs is not None:
            own["steps_per_epoch"] = epochs.num_steps
        (draft / META).write_text(json.dumps(own), encoding="utf-8")
        return None if was is None else int(was)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ProtocolError(f"A backup of another party must be one: {error}") from error
