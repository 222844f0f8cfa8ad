# SPDX-License-Identifier: Apache-2.0
"""What the data sets are called, and whether one is prepared; for the command line, too."""

import difflib
import os
from pathlib import Path

MADE_NAMES = ("digits", "synthetic", "synthetic_text")
FILE_NAMES = ("mnist", "fashion_mnist", "cifar10", "cifar100")
IMAGE_FOLDER = "image_folder"
# What `tf-hips data show` lists; any other name is asked of tensorflow-datasets.
NAMES = (*MADE_NAMES, *FILE_NAMES, IMAGE_FOLDER)


def canonical(name: str) -> str:
    """The name as it is used here: `Fashion-MNIST`, `Cifar10` and `image-folder` are known, too."""
    plainly = name.lower().replace("-", "_")
    squeezed = {one.replace("_", ""): one for one in NAMES}
    return squeezed.get(plainly.replace("_", ""), name)


def default_folder() -> Path:
    """Where tensorflow-datasets keeps what it prepares, unless it is told otherwise."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def is_there(name: str, folder: Path) -> bool:
    """Whether a data set of that name is prepared under `folder`, whatever its version."""
    place = folder / name.partition(":")[0]
    return place.is_dir() and any(place.rglob("dataset_info.json"))


def unknown(name: str, place: Path) -> str | None:
    """What is wrong with a name that is none of `NAMES` and not prepared; None: nothing is."""
    name = canonical(name)
    if name in NAMES or is_there(name, place):
        return None
    near = difflib.get_close_matches(name.lower().replace("-", "_"), NAMES, 1)
    if near:
        return f"must be one of {', '.join(NAMES)}; did you mean {near[0]}? Received: {name!r}"
    return (
        f"{name} is not under {place}: it must be one of {', '.join(NAMES)}, or be prepared there; "
        "if tensorflow-datasets has it, on a machine with a network: `tf-hips data prepare "
        f"{name} --data-dir DIR`"
    )
