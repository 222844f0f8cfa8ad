# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, in memory.

Made ones, files of their publishers, folders of images, and what tensorflow-datasets has prepared.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from tf_hips.data.sets import files, folders, made, prepared
from tf_hips.data.sets.names import (
    IMAGE_FOLDER,
    NAMES,
    canonical,
    default_folder,
    is_there,
    unknown,
)
from tf_hips.data.sets.rows import DataSet, Rows
from tf_hips.errors import ConfigError

__all__ = ["IMAGE_FOLDER", "MADE", "NAMES", "DataSet", "Rows", "Where", "canonical", "find", "load"]

MADE: dict[str, Callable[[], DataSet]] = {
    "digits": made.digits,
    "synthetic": made.synthetic,
    "synthetic_text": made.synthetic_text,
}


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a data set is.

    Attributes:
        kind: "made", "files", "folder", "prepared" or "missing".
        place: its folder; for a missing one, where it was looked for; None for a made one.
    """

    kind: str
    place: Path | None


def find(name: str, folder: str | Path | None = None) -> Where:
    """Where a data set would be read from.

    Args:
        name: one of `NAMES`, or as tensorflow-datasets calls it.
        folder: where files and prepared data sets are; None: tensorflow-datasets' own folder.

    Raises:
        ConfigError: files of it are missing.
    """
    name = canonical(name)
    place = default_folder() if folder is None else Path(folder)
    if name in MADE:
        return Where("made", None)
    if name == IMAGE_FOLDER and not is_there(name, place):
        folders.find(place)
        return Where("folder", place)
    if name in files.FILES:
        found = files.find(name, place)
        if found is not None:
            return Where("files", found)
    if is_there(name, place):
        return Where("prepared", place)
    return Where("missing", place)


def load(name: str, folder: str | Path | None = None, *, image_size: int | None = None) -> DataSet:
    """Reads a data set into memory.

    Args:
        name: one of `NAMES`, or as tensorflow-datasets calls it.
        folder: where files and prepared data sets are; None: tensorflow-datasets' own folder.
        image_size: side in pixels that images are given, for folders of images and prepared data
            sets; None: 32 in folders, else as they are.

    Raises:
        ConfigError: it is not there, is damaged, or does not fit together; one line that says what
            to do.
    """
    name = canonical(name)
    where = find(name, folder)
    if where.kind == "missing":
        raise ConfigError(_missing(name, where.place))
    if where.kind not in ("folder", "prepared") and image_size is not None:
        raise ConfigError(
            f"`image_size` is for image_folder and prepared data sets. Received: {name}, "
            f"image_size={image_size}"
        )
    if where.kind == "made" or where.place is None:
        return MADE[name]()
    if where.kind == "folder":
        return folders.read(where.place, image_size or folders.DEFAULT_SIZE)
    if where.kind == "prepared":
        return prepared.read(name, where.place, image_size)
    train, test = files.read(name, where.place)
    return DataSet(name, train, test, files.CLASSES[name], str(where.place))


def _missing(name: str, place: Path | None) -> str:
    wrong = unknown(name, Path() if place is None else place)
    if wrong is not None:
        return f"The data set {wrong}"
    wanted = f", or its files {', '.join(files.FILES[name])}" if name in files.FILES else ""
    return (
        f"The data set {name} is not under {place}: it needs to be prepared{wanted}; on a machine "
        f"with a network: `tf-hips data prepare {name} --data-dir DIR`"
    )
