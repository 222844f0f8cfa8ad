# SPDX-License-Identifier: Apache-2.0
"""A data set that is in memory, and what every one of them must be."""

import dataclasses

import numpy as np

from tf_hips.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Rows:
    """Samples and their classes.

    Attributes:
        x: images, uint8 [n, height, width, channels]; or texts, int32 [n, length], as tokens of
            `tf_hips.models.TOKENS`.
        y: classes, int64 [n], from 0.
    """

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


@dataclasses.dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        name: as it was asked for.
        train: to learn from.
        test: to judge by.
        classes: number of classes.
        source: where it comes from: a folder, or a few words.
    """

    name: str
    train: Rows
    test: Rows
    classes: int
    source: str

    def __post_init__(self) -> None:
        """Checks that both parts fit together.

        Raises:
            ConfigError: a part is empty, numbers of rows or shapes differ, or a label is out of
                range.
        """
        for part, rows in (("training", self.train), ("test", self.test)):
            check(rows, self.classes, f"the {part} rows of {self.name} in {self.source}")
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise ConfigError(
                f"{self.name} in {self.source}: training and test samples must have one shape. "
                f"Received: {self.train.x.shape[1:]} and {self.test.x.shape[1:]}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self.train.x.shape[1:])

    @property
    def is_text(self) -> bool:
        """Whether samples are texts."""
        return len(self.shape) == 1


def check(rows: Rows, classes: int, what: str) -> None:
    """Looks at all rows once.

    Raises:
        ConfigError: there are none, samples and labels are not equally many, or a label is out of
            range; names the row.
    """
    if len(rows.x) != len(rows.y):
        raise ConfigError(
            f"There must be a label for each sample in {what}. Received: {len(rows.x)} samples, "
            f"{len(rows.y)} labels"
        )
    if not len(rows):
        raise ConfigError(f"There must be a sample at least in {what}. Received: none")
    wrong = np.flatnonzero((rows.y < 0) | (rows.y >= classes))
    if wrong.size:
        raise ConfigError(
            f"Labels must be from 0 to {classes - 1} in {what}. Received: {rows.y[wrong[0]]} in "
            f"row {wrong[0]}"
        )
