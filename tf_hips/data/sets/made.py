# SPDX-License-Identifier: Apache-2.0
"""Data sets that need no file: handwritten digits of scikit-learn, and synthetic ones."""

import numpy as np

from tf_hips.data.sets.rows import DataSet, Rows
from tf_hips.errors import ConfigError

_TEST_SHARE = 0.2
_SEED = 2026  # the data are the same in every run, whatever its seed
_NUM_TRAIN, _NUM_TEST = 4096, 1024
_SIDE, _CLASSES = 28, 10
# A linear model gets about nine in ten of these right, a network more.
_NOISE = 5.0
_LENGTH = 64
_ALPHABET = np.frombuffer(b"abcdefghijklmnop", np.uint8)


def digits() -> DataSet:
    """1797 digits of 8 x 8 pixels (Alpaydin and Kaynak, UCI), a fifth of them held out.

    Raises:
        ConfigError: scikit-learn, which has them, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "The data set digits comes with scikit-learn: pip install 'tf_hips[demo]'"
        ) from error
    loaded = load_digits()
    images = np.rint(loaded.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    order = np.random.default_rng(_SEED).permutation(len(images))
    test, train = np.split(order, [round(_TEST_SHARE * len(images))])
    labels = loaded.target.astype(np.int64)
    learned, held_out = (Rows(images[rows], labels[rows]) for rows in (train, test))
    return DataSet("digits", learned, held_out, _CLASSES, "scikit-learn")


def synthetic() -> DataSet:
    """5120 images of 28 x 28 pixels: one smooth pattern for each of ten classes, and noise."""
    random = np.random.default_rng(_SEED)
    coarse = random.normal(size=(_CLASSES, 7, 7))
    patterns = coarse.repeat(_SIDE // 7, axis=1).repeat(_SIDE // 7, axis=2)

    def rows(number: int) -> Rows:
        labels = random.integers(0, _CLASSES, number)
        noisy = patterns[labels] + random.normal(scale=_NOISE, size=(number, _SIDE, _SIDE))
        pixels = np.clip(np.rint(127.5 + 15 * noisy), 0, 255).astype(np.uint8)
        return Rows(pixels[..., np.newaxis], labels.astype(np.int64))

    return DataSet("synthetic", rows(_NUM_TRAIN), rows(_NUM_TEST), _CLASSES, "made on the spot")


def synthetic_text() -> DataSet:
    """5120 texts of up to 64 bytes: four classes that prefer letters of their own."""
    random = np.random.default_rng(_SEED)
    classes = 4
    preferred = random.dirichlet(np.full(len(_ALPHABET), 0.5), size=classes)

    def rows(number: int) -> Rows:
        labels = random.integers(0, classes, number)
        lengths = random.integers(_LENGTH // 4, _LENGTH + 1, number)
        chosen = np.cumsum(preferred, axis=1)[labels][:, np.newaxis, :]
        letters = (random.random((number, _LENGTH, 1)) > chosen).sum(axis=2)
        tokens = _ALPHABET[np.minimum(letters, len(_ALPHABET) - 1)].astype(np.int32) + 1
        tokens[np.arange(_LENGTH) >= lengths[:, np.newaxis]] = 0
        return Rows(tokens, labels.astype(np.int64))

    return DataSet("synthetic_text", rows(_NUM_TRAIN), rows(_NUM_TEST), classes, "made on the spot")
