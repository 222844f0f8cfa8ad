# SPDX-License-Identifier: Apache-2.0
"""Files as their publishers lay them out: idx.gz of MNIST's kind, and CIFAR's binaries.

    train-images-idx3-ubyte.gz  train-labels-idx1-ubyte.gz  t10k-...      MNIST, Fashion-MNIST
    data_batch_1.bin ... data_batch_5.bin  test_batch.bin                 CIFAR-10
    train.bin  test.bin                                                   CIFAR-100

An idx file: two zero bytes, the type (8: uint8), the number of axes, each axis as a big-endian
uint32, then the values. A record of CIFAR: one byte for the class (CIFAR-100: the coarse one, then
the fine one), then 32 x 32 bytes each of red, green and blue.
"""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tf_hips.data.sets.rows import Rows
from tf_hips.errors import ConfigError

_UINT8 = 8
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
# Far above any data set of this format; a header must not decide how much memory is taken.
_MAX_BYTES = 1 << 33
MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR100_FILES = ("train.bin", "test.bin")
# Folders in which archives and the seeds' READMEs have them, below the data folder.
_FOLDERS = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion_mnist": ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
    "cifar10": ("cifar10", "cifar-10-batches-bin", "cifar-10"),
    "cifar100": ("cifar100", "cifar-100-binary", "cifar-100"),
}
FILES = {
    "mnist": MNIST_FILES,
    "fashion_mnist": MNIST_FILES,
    "cifar10": CIFAR10_FILES,
    "cifar100": CIFAR100_FILES,
}
CLASSES = {"mnist": 10, "fashion_mnist": 10, "cifar10": 10, "cifar100": 100}


def find(name: str, folder: Path) -> Path | None:
    """The folder with files of a data set: one below, or `folder` itself; None where there is none.

    Folders that bear the name come first: the files of MNIST and Fashion-MNIST are called alike.

    Raises:
        ConfigError: some of the files are there, and some are missing.
    """
    for place in (*(folder / one for one in _FOLDERS[name]), folder):
        there = [one for one in FILES[name] if (place / one).is_file()]
        if not there:
            continue
        missing = [one for one in FILES[name] if one not in there]
        if missing:
            raise ConfigError(
                f"{name} must have the files {', '.join(FILES[name])}. Received: {place} without "
                f"{', '.join(missing)}"
            )
        return place
    return None


def read(name: str, place: Path) -> tuple[Rows, Rows]:
    """Training and test rows.

    Raises:
        ConfigError: a file is cut off, has another size or format; names it.
    """
    if name in ("mnist", "fashion_mnist"):
        images, labels, test_images, test_labels = (place / one for one in FILES[name])
        return _images(images, labels), _images(test_images, test_labels)
    *train, test = (place / one for one in FILES[name])
    num_labels = 2 if name == "cifar100" else 1
    return _records(train, num_labels), _records([test], num_labels)


def read_idx(path: Path) -> np.ndarray:
    """The array of one idx file, compressed by gzip.

    Raises:
        ConfigError: it is cut off, too long, or no such file.
    """
    try:
        with gzip.open(path, "rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _UINT8 or not 1 <= head[3] <= 4:
                raise ConfigError(
                    f"{path} must be an idx file of bytes. Received: one that begins with "
                    f"{head.hex() or 'nothing'}"
                )
            axes = np.frombuffer(file.read(4 * head[3]), ">u4")
            if len(axes) != head[3]:
                raise EOFError
            shape = tuple(int(one) for one in axes)
            expected = int(np.prod([1, *shape], dtype=object))
            if expected > _MAX_BYTES:
                raise ConfigError(
                    f"{path} must have at most {_MAX_BYTES} values. Received: {expected}"
                )
            data = file.read(expected + 1)
    except (EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} is cut off, as if half-downloaded: it must be fetched again. Received: "
            f"{path.stat().st_size} bytes"
        ) from error
    except gzip.BadGzipFile as error:
        raise ConfigError(f"{path} must be compressed by gzip. Received: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != expected:
        more = "more" if len(data) > expected else str(len(data))
        raise ConfigError(f"{path} must hold {expected} values. Received: {more}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _images(images: Path, labels: Path) -> Rows:
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1:
        wrong, axes, found = (images, 3, x) if x.ndim != 3 else (labels, 1, y)
        raise ConfigError(f"{wrong} must have {axes} axes. Received: shape {found.shape}")
    if len(x) != len(y):
        raise ConfigError(
            f"{images} and {labels.name} must have equally many rows. Received: {len(x)} and "
            f"{len(y)}"
        )
    return Rows(x[..., np.newaxis], y.astype(np.int64))


def _records(paths: Sequence[Path], num_labels: int) -> Rows:
    size = num_labels + _PIXELS
    found = []
    for path in paths:
        try:
            data = np.fromfile(path, np.uint8)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if not data.size or data.size % size:
            raise ConfigError(
                f"{path} must be records of {size} bytes; half-downloaded, it must be fetched "
                f"again. Received: {data.size} bytes"
            )
        found.append(data.reshape(-1, size))
    records = np.concatenate(found)
    planes = records[:, num_labels:].reshape(-1, 3, _SIDE, _SIDE)
    labels = records[:, num_labels - 1].astype(np.int64)
    return Rows(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)
