# SPDX-License-Identifier: Apache-2.0
"""`tf-hips data`: which data sets are there, what is in one, and how others are made ready."""

import argparse
from pathlib import Path
from typing import Any

from tf_hips.cli import arguments, train
from tf_hips.cli.config_file import option


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "data",
        help="show and prepare data sets",
        description="Data sets for `tf-hips train`: docs/data.md.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser(
        "show", help="list data sets, or describe one and how it would be split"
    )
    show.add_argument("name", nargs="?", help="the data set to read")
    _add_where(show)
    show.add_argument(
        "--split", type=train.split, metavar="TEXT", help="show the rows of each worker"
    )
    show.add_argument(
        "--split-over",
        choices=("worker", "party"),
        help="whether every worker or every party gets such a part (default worker)",
    )
    show.add_argument(
        "--workers",
        type=_workers,
        metavar="N,...",
        help="workers of each party (default 2,2)",
    )
    show.add_argument("--seed", type=arguments.seed, help="seed of the split (default 0)")
    show.set_defaults(run=_show)
    prepare = verbs.add_parser("prepare", help="fetch a data set, or store files as a prepared one")
    prepare.add_argument("name", help="the data set")
    _add_where(prepare)
    prepare.add_argument(
        "--from", dest="source", metavar="DIR", help="its publisher's files, or a folder of images"
    )
    prepare.add_argument(
        "--manual-dir", metavar="DIR", help="files that tensorflow-datasets cannot fetch itself"
    )
    prepare.set_defaults(run=_prepare)


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-dd", "--data-dir"),
        metavar="DIR",
        help="where files and prepared data sets are (default: tensorflow-datasets' own folder)",
    )
    parser.add_argument(
        "--image-size", type=arguments.count, metavar="N", help="side of images in pixels"
    )


def _workers(text: str) -> tuple[int, ...]:
    return tuple(arguments.count(part.strip()) for part in text.split(","))


def _show(options: argparse.Namespace) -> int:
    from tf_hips.trainer.settings import Show

    of_split = ("split_over", "workers", "seed")
    for keys, needed, what in (
        (("image_size", "split", *of_split), options.name, "the name of a data set"),
        (of_split, options.split, "--split"),
    ):
        given = [key for key in keys if getattr(options, key) is not None]
        if given and needed is None:
            raise arguments.UsageError(f"{option(given[0])} needs {what}")
    train.become(
        "show",
        Show(
            name=options.name,
            data_dir=options.data_dir,
            image_size=options.image_size,
            split=options.split,
            split_over=options.split_over or "worker",
            parties=options.workers or (2, 2),
            seed=options.seed or 0,
        ),
    )


def _prepare(options: argparse.Namespace) -> int:
    from tf_hips.trainer.settings import Prepare

    source = options.source
    if source is None and options.image_size is not None:
        raise arguments.UsageError(
            "--image-size needs --from: what is fetched stays as it is. Received: "
            f"{options.image_size}"
        )
    if source is not None and options.manual_dir is not None:
        raise arguments.UsageError("--from and --manual-dir exclude each other")
    if source is not None and not Path(source).is_dir():
        raise arguments.UsageError(
            f"--from must be a folder of files or images. Received: {source}, which is "
            f"{'no folder' if Path(source).exists() else 'not there'}"
        )
    train.become(
        "prepare",
        Prepare(
            name=options.name,
            data_dir=options.data_dir,
            source=options.source,
            manual_dir=options.manual_dir,
            image_size=options.image_size,
        ),
    )
