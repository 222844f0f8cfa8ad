# SPDX-License-Identifier: Apache-2.0
"""Small data sets in their publishers' layouts."""

import gzip
from pathlib import Path

import numpy as np


def write_idx(path: Path, values: np.ndarray) -> None:
    """`values`, uint8, as an idx file compressed by gzip."""
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def write_mnist(folder: Path, train: int = 40, test: int = 20, seed: int = 0) -> None:
    """Images of 28 x 28 and labels from 0 to 9, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for part, number in (("train", train), ("t10k", test)):
        write_idx(
            folder / f"{part}-images-idx3-ubyte.gz", random.integers(0, 256, (number, 28, 28))
        )
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", np.arange(number) % 10)


def cifar_records(labels: np.ndarray, seed: int) -> tuple[bytes, np.ndarray]:
    """Records of CIFAR with `labels`, uint8 [n, k], and their images [n, 32, 32, 3]."""
    planes = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    flat = planes.reshape(len(labels), -1)
    records = np.concatenate([labels.astype(np.uint8), flat], axis=1)
    return records.tobytes(), planes.transpose(0, 2, 3, 1)


def write_cifar10(folder: Path, rows: int = 10) -> None:
    """Five files of `rows` images each to learn from, one to judge by."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for seed, name in enumerate(names):
        labels = (np.arange(rows) % 10)[:, np.newaxis]
        (folder / name).write_bytes(cifar_records(labels, seed)[0])
