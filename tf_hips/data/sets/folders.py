# SPDX-License-Identifier: Apache-2.0
"""Folders of images, one folder a class: ROOT/train/CLASS/*.png and ROOT/test/CLASS/*.png.

Classes are numbered in the order of their names. What begins with a dot is no class and no image:
desktops and notebooks put such things anywhere. `validation`, `val` and `valid` are other names
for `test`. PNG, JPEG, BMP and GIF (its first frame) are read, by TensorFlow.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tf_hips.data.sets.rows import DataSet, Rows
from tf_hips.errors import ConfigError

DEFAULT_SIZE = 32
_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif"}
_TEST_NAMES = ("test", "validation", "val", "valid")


def find(root: Path) -> tuple[Path, Path]:
    """The folders of the training and the test images.

    Raises:
        ConfigError: one of them is not there.
    """
    test = next((root / name for name in _TEST_NAMES if (root / name).is_dir()), None)
    if not (root / "train").is_dir() or test is None:
        raise ConfigError(
            "image_folder must be ROOT/train/CLASS/*.png and ROOT/test/CLASS/*.png, ROOT the data "
            f"folder. Received: {root}, without `{'train' if test else 'test'}`"
        )
    return root / "train", test


def classes_of(train: Path) -> list[str]:
    """Names of the classes, in their order.

    Raises:
        ConfigError: there is none.
    """
    names = sorted(one.name for one in train.iterdir() if _is_class(one))
    if not names:
        raise ConfigError(f"{train} must have a folder for each class. Received: none")
    return names


def images_of(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Every image file with its class, in an order that is the same everywhere.

    Raises:
        ConfigError: there is a class that is not one of `classes`, or a class without images.
    """
    unknown = sorted(one.name for one in folder.iterdir() if _is_class(one))
    unknown = [name for name in unknown if name not in classes]
    if unknown:
        raise ConfigError(
            f"{folder} must have the classes of the training images. Received: {unknown[0]!r} more"
        )
    found = []
    for number, name in enumerate(classes):
        inside = (folder / name).iterdir() if (folder / name).is_dir() else iter(())
        files = sorted(
            one for one in inside if one.suffix.lower() in _ENDINGS and not one.name.startswith(".")
        )
        if not files:
            raise ConfigError(f"{folder / name} must hold images. Received: none")
        found += [(one, number) for one in files]
    return found


def read(root: Path, size: int) -> DataSet:
    """All images, made `size` x `size` pixels with three channels.

    Raises:
        ConfigError: as for `find`, `classes_of` and `images_of`, or a file is no image.
    """
    train, test = find(root)
    classes = classes_of(train)
    learned, held_out = (_read(images_of(one, classes), size) for one in (train, test))
    return DataSet("image_folder", learned, held_out, len(classes), str(root))


def _is_class(one: Path) -> bool:
    return one.is_dir() and not one.name.startswith(".")


def _read(files: Sequence[tuple[Path, int]], size: int) -> Rows:
    import tensorflow as tf

    images = np.empty((len(files), size, size, 3), np.uint8)
    for row, (path, _) in enumerate(files):
        try:
            image = tf.io.decode_image(path.read_bytes(), channels=3, expand_animations=False)
        except tf.errors.InvalidArgumentError as error:
            raise ConfigError(
                f"{path} must be an image. Received: {path.stat().st_size} bytes that are none"
            ) from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if image.shape[:2] != (size, size):
            image = tf.image.resize(tf.cast(image, tf.float32), (size, size), antialias=True)
            image = tf.saturate_cast(tf.round(image), tf.uint8)
        images[row] = image.numpy()
    return Rows(images, np.array([label for _, label in files], np.int64))
