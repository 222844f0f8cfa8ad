# SPDX-License-Identifier: Apache-2.0
"""What `tf-hips data` does: tells which data sets are there, and prepares others."""

import sys
from pathlib import Path

import numpy as np

from tf_hips.data import sets, splits
from tf_hips.data.sets import names, prepared
from tf_hips.errors import ConfigError
from tf_hips.trainer.settings import Prepare, Show

_WIDE = 400


def show(told: Show) -> None:
    """Prints a line for each data set, or a table about one.

    Raises:
        ConfigError: it is not there, or is damaged.
    """
    from rich.console import Console
    from rich.table import Table

    # A file or a pipe has no width; what is cut off there would be lost.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    if told.name is None:
        table = Table("data set", "where", box=None, pad_edge=False)
        for name in sets.NAMES:
            table.add_row(name, _where(name, told.data_dir))
        console.print(table)
        console.print("others: any that tensorflow-datasets has prepared, by its name")
        return
    data = sets.load(told.name, told.data_dir, image_size=told.image_size)
    table = Table("", "", show_header=False, box=None, pad_edge=False)
    table.add_row("data set", data.name)
    table.add_row("from", data.source)
    table.add_row("sample", " x ".join(map(str, data.shape)) + (" bytes" if data.is_text else ""))
    table.add_row("classes", str(data.classes))
    table.add_row("rows", f"{len(data.train)} to train on, {len(data.test)} to test on")
    console.print(table)
    if told.split is None:
        return
    split = splits.parse(told.split)
    found = splits.parts(data.train.y, split, told.parties, seed=told.seed, level=told.split_over)
    console.print(f"\nsplit {split.text} over each {told.split_over}, seed {told.seed}")
    rows = Table("worker", box=None, pad_edge=False)
    rows.add_column("rows", justify="right")
    shown = range(min(data.classes, 10))
    for label in shown:
        rows.add_column(f"class {label}", justify="right")
    for worker, part in enumerate(found):
        counts = np.bincount(data.train.y[part], minlength=data.classes)
        rows.add_row(str(worker), str(len(part)), *(str(counts[label]) for label in shown))
    console.print(rows)


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
