# SPDX-License-Identifier: Apache-2.0
"""Which rows of a data set each worker has: a function of (labels, split, workers, seed).

    iid              a random part of equal size
    class            a stretch of the rows in the order of their labels, as ESync and HiPS split by
                     class; shuffled inside. `class(compat)`: not shuffled, as they do
    dirichlet(a)     of every class a share drawn from Dir(a); small `a`: few classes each
                     (Hsu et al., 2019)
    quantity(a)      parts of sizes drawn from Dir(a), of all classes alike

Over parties instead of workers: the parties get such parts, and the workers of a party random ones
of equal size of theirs.

Invariant: parts are disjoint, and together they are all rows.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tf_hips.errors import ConfigError

KINDS = ("iid", "class", "dirichlet", "quantity")
LEVELS = ("worker", "party")
_TEXT = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")
# Draws of Dir(a) until every part has a row; with more parts than that allows it is an error.
_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class Split:
    """How rows are dealt out.

    Attributes:
        kind: one of `KINDS`.
        alpha: concentration of `dirichlet` and `quantity`.
        is_compat: of `class`: whether rows stay in the order of their labels.
    """

    kind: str = "iid"
    alpha: float = 1.0
    is_compat: bool = False

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        if self.kind in ("dirichlet", "quantity"):
            short = f"{self.alpha:g}"
            return f"{self.kind}({short if float(short) == self.alpha else repr(self.alpha)})"
        return f"{self.kind}(compat)" if self.is_compat else self.kind

    @property
    def remedies(self) -> str:
        """What gives more rows to who has the fewest; for messages."""
        if self.kind in ("dirichlet", "quantity"):
            return "a larger ALPHA, another seed"
        return "more rows"


def parse(text: str) -> Split:
    """Reads `iid`, `class`, `class(compat)`, `dirichlet(0.5)` or `quantity(0.5)`.

    Raises:
        ConfigError: it is none of them.
    """
    match = _TEXT.fullmatch(text.strip())
    kind, argument = match.groups() if match else (None, None)
    if kind == "iid" and argument is None:
        return Split()
    if kind == "class" and argument in (None, "compat"):
        return Split("class", is_compat=argument is not None)
    if kind in ("dirichlet", "quantity"):
        try:
            alpha = float(argument or "")
        except ValueError:
            alpha = 0.0
        if 0 < alpha < float("inf"):
            return Split(kind, alpha)
    raise ConfigError(
        "`split` must be iid, class, class(compat), dirichlet(ALPHA) or quantity(ALPHA) with ALPHA "
        f"> 0. Received: {text!r}"
    )


def parts(
    labels: npt.ArrayLike,
    split: Split,
    parties: Sequence[int],
    *,
    seed: int,
    level: str = "worker",
) -> list[np.ndarray]:
    """Rows of every worker, by global rank.

    Args:
        labels: class of every row, [n] or [n, 1].
        split: how rows are dealt out.
        parties: number of workers of each party.
        seed: of all draws, from 0.
        level: whether workers or parties get what `split` says.

    Returns:
        For each worker the numbers of its rows, int64.

    Raises:
        ConfigError: somebody would have no row, or `labels` are not one class per row.
    """
    if level not in LEVELS:
        raise ConfigError(f"`level` must be one of {', '.join(LEVELS)}. Received: {level!r}")
    classes = np.asarray(labels)
    if classes.ndim == 2 and classes.shape[1] == 1:  # as `keras.datasets.cifar10` has them
        classes = classes[:, 0]
    if classes.ndim != 1:
        raise ConfigError(
            "`labels` must be one class per row; of one-hot rows give `labels.argmax(axis=1)`. "
            f"Received: an array of shape {classes.shape}"
        )
    everything = np.arange(len(classes), dtype=np.int64)
    if level == "worker":
        return _parts(everything, classes, split, sum(parties), seed, "worker")
    found = []
    of_parties = _parts(everything, classes, split, len(parties), seed, "party")
    for party, (rows, workers) in enumerate(zip(of_parties, parties, strict=True)):
        random = _random(seed, 1, party)
        mixed = rows if split.is_compat else random.permutation(rows)
        found += np.array_split(mixed, workers)
    _check(found, "worker", split)
    return found


def _parts(
    rows: np.ndarray, labels: np.ndarray, split: Split, number: int, seed: int, whose: str
) -> list[np.ndarray]:
    random = _random(seed, 0, 0)
    if split.kind == "iid":
        found = np.array_split(random.permutation(rows), number)
    elif split.kind == "class":
        ordered = rows[np.argsort(labels[rows], kind="stable")]
        found = np.array_split(ordered, number)
        if not split.is_compat:
            found = [random.permutation(part) for part in found]
    else:
        for _ in range(_ATTEMPTS):
            found = _drawn(rows, labels, split, number, random)
            if all(len(part) for part in found):
                break
    _check(found, whose, split)
    return found


def _drawn(
    rows: np.ndarray, labels: np.ndarray, split: Split, number: int, random: np.random.Generator
) -> list[np.ndarray]:
    """One draw of Dir(alpha), of every class by itself or of all rows together."""
    if split.kind == "quantity":
        groups = [rows]
    else:
        groups = [rows[labels[rows] == label] for label in np.unique(labels[rows])]
    gathered: list[list[np.ndarray]] = [[] for _ in range(number)]
    for group in groups:
        shares = random.dirichlet(np.full(number, split.alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(group)).astype(int)
        for mine, part in zip(gathered, np.split(random.permutation(group), cuts), strict=True):
            mine.append(part)
    return [random.permutation(np.concatenate(mine)) for mine in gathered]


def _check(found: Sequence[np.ndarray], whose: str, split: Split) -> None:
    empty = [number for number, part in enumerate(found) if not len(part)]
    if empty:
        number = sum(len(part) for part in found)
        raise ConfigError(
            f"Every {whose} must have a sample. Received: none for {whose} {empty[0]} of "
            f"{len(found)}, with {number} rows split by {split.text}; take {split.remedies}, "
            "or fewer workers"
        )


def _random(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
