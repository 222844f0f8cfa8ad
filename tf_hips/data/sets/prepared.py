# SPDX-License-Identifier: Apache-2.0
"""Data sets that tensorflow-datasets has prepared: the door to all others.

A prepared data set is a folder DIR/NAME/VERSION; who reads it needs neither a network nor the code
that made it. `store` makes such a folder of rows that are in memory, so that what was read from a
publisher's files can be taken anywhere.
"""

import contextlib
import importlib.resources
import importlib.resources.abc
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tf_hips.data.sets.rows import DataSet, Rows
from tf_hips.errors import ConfigError

TEXT_LENGTH = 256
_VERSION = "1.0.0"
_TEST_NAMES = ("test", "validation")
_NO_LABEL = -1
_MAX_BYTES = 1 << 33  # of one data set in memory


def _tfds() -> Any:
    """tensorflow-datasets, quiet.

    4.9.10 imports `importlib_resources`, which is the standard library's since Python 3.11, without
    asking for it (tensorflow/datasets#11212).
    """
    if importlib.util.find_spec("importlib_resources") is None:
        sys.modules.setdefault("importlib_resources", importlib.resources)
    import tensorflow_datasets

    tensorflow_datasets.disable_progress_bar()
    return tensorflow_datasets


def read(name: str, folder: Path, image_size: int | None) -> DataSet:
    """Reads a prepared data set of images or texts with classes.

    Args:
        name: `NAME`, `NAME/CONFIG` or `NAME:VERSION`.
        folder: where it is prepared.
        image_size: side in pixels that images are given; None: they have one size.

    Raises:
        ConfigError: it is damaged, is no such data set, or is too large for memory.
    """
    tfds = _tfds()
    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=str(folder))
    except (tfds.core.registered.DatasetNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{name} under {folder} must be as tensorflow-datasets prepares it. Received: "
            f"{_first_line(error)}"
        ) from error
    source, target = _keys(name, builder.info)
    classes = getattr(builder.info.features[target], "num_classes", None)
    if not classes:
        raise ConfigError(
            f"{name} must have classes. Received: `{target}`, which is "
            f"{type(builder.info.features[target]).__name__}"
        )
    splits = builder.info.splits
    if "train" not in splits:
        raise ConfigError(f"{name} must have a split `train`. Received: {', '.join(splits)}")

    def rows(split: str) -> Rows:
        import tensorflow as tf

        try:
            return _rows(tfds, builder, split, source, target, image_size)
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise ConfigError(
                f"The split {split} of {name} under {folder} cannot be read: {_first_line(error)}"
            ) from error

    # Those who publish a benchmark keep its labels: all of them are -1 in the test rows of GLUE.
    found = (rows(one) for one in _TEST_NAMES if one in splits)
    test = next((one for one in found if not (one.y == _NO_LABEL).all()), None)
    train = rows("train[:80%]" if test is None else "train")
    test = rows("train[80%:]") if test is None else test
    return DataSet(name, train, test, int(classes), str(builder.data_dir))


def store(data: DataSet, folder: Path) -> Path:
    """Writes a data set as tensorflow-datasets would; returns its folder.

    Raises:
        ConfigError: it is there already, or `data` are texts.
    """
    if data.is_text:
        raise ConfigError(f"Only images can be stored. Received: {data.name}, which are texts")
    place = folder / data.name / _VERSION
    if place.exists():
        raise ConfigError(f"`--data-dir` must not have {data.name} yet. Received: {place}")
    tfds = _tfds()
    import tensorflow as tf

    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=data.shape),
            "label": tfds.features.ClassLabel(num_classes=data.classes),
        }
    )
    with _silent():
        tfds.dataset_builders.store_as_tfds_dataset(
            name=data.name,
            version=_VERSION,
            features=features,
            split_datasets={
                name: tf.data.Dataset.from_tensor_slices({"image": rows.x, "label": rows.y})
                for name, rows in (("train", data.train), ("test", data.test))
            },
            data_dir=str(folder),
            disable_shuffling=True,
        )
    return place


def download(name: str, folder: Path, manual: Path | None) -> Path:
    """Has tensorflow-datasets fetch and prepare a data set; returns its folder.

    Args:
        name: as tensorflow-datasets calls it.
        folder: where to.
        manual: folder of files that its publisher gives to people only; None: none are needed.

    Raises:
        ConfigError: there is no such data set, or it cannot be fetched from here.
    """
    tfds = _tfds()
    try:
        builder = tfds.builder(name, data_dir=str(folder))
    except (tfds.core.registered.DatasetNotFoundError, ValueError) as error:
        raise ConfigError(
            f"tensorflow-datasets must have the data set. Received: {name!r}, which it does not "
            "know"
        ) from error
    if builder.is_prepared():
        return Path(str(builder.data_dir))
    command = f"tf-hips data prepare {name} --data-dir DIR"
    advice = (
        f"on a machine with a network: `{command}`, then copy DIR/{name} from there to "
        f"{folder / name} here"
    )
    if manual is None:
        unknown = _unknown_host(builder)
        if unknown is not None:
            raise ConfigError(f"{name} cannot be downloaded here (no way to {unknown}); {advice}")
    config = tfds.download.DownloadConfig(manual_dir=None if manual is None else str(manual))
    try:
        builder.download_and_prepare(download_config=config)
    except (tfds.download.DownloadError, OSError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be prepared here ({_first_line(error)}); {advice}"
        ) from error
    return Path(str(builder.data_dir))


def _unknown_host(builder: Any) -> str | None:
    """A host that the data come from and whose name nobody here knows.

    tensorflow-datasets would try it ten times, for minutes.
    """
    hosts = {urlsplit(str(url)).hostname for url in builder.url_infos}
    for host in sorted(host for host in hosts if host):
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            return host
    return None


def _keys(name: str, info: Any) -> tuple[str, str]:
    if info.supervised_keys:
        return str(info.supervised_keys[0]), str(info.supervised_keys[1])
    for source in ("image", "text", "sentence"):
        if source in info.features and "label" in info.features:
            return source, "label"
    raise ConfigError(f"{name} must have samples with labels. Received: {', '.join(info.features)}")


def _rows(
    tfds: Any, builder: Any, split: str, source: str, target: str, image_size: int | None
) -> Rows:
    import tensorflow as tf

    feature = builder.info.features[source]
    dataset = builder.as_dataset(split=split, shuffle_files=False)
    number = int(dataset.cardinality())
    if isinstance(feature, tfds.features.Text):
        x = np.zeros((number, TEXT_LENGTH), np.int32)
    else:
        if feature.np_dtype != np.uint8:
            raise ConfigError(
                f"Images of {builder.info.name} must be bytes; others go through `tf_hips.shard` "
                f"in a script. Received: {np.dtype(feature.np_dtype).name}"
            )
        shape = tuple(feature.shape)
        if image_size is not None:
            shape = (image_size, image_size, shape[-1])
        if len(shape) != 3 or None in shape:
            raise ConfigError(
                f"Images of {builder.info.name} must be given one size (--image-size N). Received: "
                f"images of shape {shape}"
            )
        if number * int(np.prod(shape)) > _MAX_BYTES:
            raise ConfigError(
                f"{builder.info.name} must fit into {_MAX_BYTES >> 30} GiB of memory; a larger one "
                f"goes through `tf_hips.shard` in a script. Received: {number} x {shape} bytes"
            )
        x = np.zeros((number, *shape), np.uint8)

        def fit(row: Any) -> Any:
            image = row[source]
            if image_size is not None:
                resized = tf.image.resize(tf.cast(image, tf.float32), shape[:2], antialias=True)
                image = tf.saturate_cast(tf.round(resized), tf.uint8)
            return {source: image, target: row[target]}

        dataset = dataset.map(fit)
    y = np.zeros(number, np.int64)
    for row, sample in enumerate(dataset.as_numpy_iterator()):
        y[row] = sample[target]
        if x.ndim == 2:
            letters = np.frombuffer(sample[source][:TEXT_LENGTH], np.uint8)
            x[row, : len(letters)] = letters.astype(np.int32) + 1
        else:
            x[row] = sample[source]
    return Rows(x, y)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps tensorflow-datasets from printing where it writes."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
