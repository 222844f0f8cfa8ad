# SPDX-License-Identifier: Apache-2.0
"""What `tf-hips data` does: tells which data sets are there, and prepares others."""

import sys
from pathlib import Path

import numpy as np

from tf_hips import tables
from tf_hips.data import sets, splits
from tf_hips.data.sets import names, prepared
from tf_hips.errors import ConfigError
from tf_hips.trainer.settings import Prepare, Show


def show(told: Show) -> None:
    """Prints a line for each data set, or a table about one.

    Raises:
        ConfigError: it is not there, or is damaged.
    """
    if told.name is None:
        columns = (tables.Column("data set"), tables.Column("where", folds=True))
        tables.show(columns, [(name, _where(name, told.data_dir)) for name in sets.NAMES])
        tables.console().print("others: any that tensorflow-datasets has prepared, by its name")
        return
    data = sets.load(told.name, told.data_dir, image_size=told.image_size)
    facts = (
        ("data set", data.name),
        ("from", data.source),
        ("sample", " x ".join(map(str, data.shape)) + (" bytes" if data.is_text else "")),
        ("classes", str(data.classes)),
        ("rows", f"{len(data.train)} to train on, {len(data.test)} to test on"),
    )
    tables.show((tables.Column(""), tables.Column("", folds=True)), facts, has_head=False)
    if told.split is not None:
        _show_split(data, told, splits.parse(told.split))


def _show_split(data: sets.DataSet, told: Show, split: splits.Split) -> None:
    """How many rows each worker gets, and how many of each class; on a terminal of those that fit.

    Columns that are left out would be named one by one, of a thousand classes too.
    """
    found = splits.parts(data.train.y, split, told.parties, seed=told.seed, level=told.split_over)
    rows = []
    for worker, part in enumerate(found):
        counts = np.bincount(data.train.y[part], minlength=data.classes)
        rows.append((str(worker), str(len(part)), *map(str, counts)))
    labels = map(str, range(data.classes))
    columns = (tables.Column("worker"), *tables.numbers("rows", *labels))
    shown = data.classes
    if not tables.fits(columns, rows):
        shown = 1
        while tables.fits(columns[: 3 + shown], [row[: 3 + shown] for row in rows]):
            shown += 1
    out = tables.console()
    title = f"\nsplit {split.text} over each {told.split_over}, seed {told.seed}"
    out.print(title, soft_wrap=True)
    which = f"each of the {data.classes} classes"
    if shown < data.classes:
        which = f"the first {shown} of {data.classes} classes; a file or a pipe gets all"
    out.print(f"rows of each worker, and of {which}", soft_wrap=True)
    tables.show(columns[: 2 + shown], [row[: 2 + shown] for row in rows])


def prepare(told: Prepare) -> None:
    """Makes a data set ready under `data_dir`.

    Raises:
        ConfigError: it cannot be fetched from here, or its files are damaged.
    """
    folder = names.default_folder() if told.data_dir is None else Path(told.data_dir)
    name = sets.canonical(told.name)
    if name in sets.MADE:
        for option, given in (("--from", told.source), ("--manual-dir", told.manual_dir)):
            if given is not None:
                raise ConfigError(
                    f"`{option}` must be left out for {name}, which needs no file. "
                    f"Received: {given}"
                )
        sys.stdout.write(f"{name} needs no file\n")
        return
    if told.source is not None:
        data = sets.load(name, told.source, image_size=told.image_size)
        if data.source != told.source and sets.find(name, told.source).kind == "prepared":
            raise ConfigError(f"`--from` must be a folder of files. Received: {data.source}")
        place = prepared.store(data, folder)
    else:
        where = sets.find(name, folder)
        if where.kind in ("files", "folder"):
            data = sets.load(name, folder)
            place = Path(data.source)
        else:
            manual = None if told.manual_dir is None else Path(told.manual_dir)
            place = prepared.download(name, folder, manual)
    sys.stdout.write(f"{name} is ready in {place}\n")


def _where(name: str, folder: str | None) -> str:
    try:
        found = sets.find(name, folder)
    except ConfigError as error:
        return "not there" if name == sets.IMAGE_FOLDER else f"not whole: {error}"
    if found.kind == "made":
        return "needs no file"
    return f"not under {found.place}" if found.kind == "missing" else f"{found.kind}: {found.place}"
