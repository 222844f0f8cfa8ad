# SPDX-License-Identifier: Apache-2.0
"""The definitions of docs/aggregators.md in NumPy float64, each as its paper writes it."""

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


def mean(x: Doubles, f: int) -> Doubles:
    return x.mean(axis=0)


def median(x: Doubles, f: int) -> Doubles:
    return np.median(x, axis=0)


def trimmed_mean(x: Doubles, f: int) -> Doubles:
    return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)


def nearest_mean(x: Doubles, keep: int) -> Doubles:
    """Of each coordinate the mean of the `keep` values nearest to the median; of two the lesser."""
    ordered = np.sort(x, axis=0)
    apart = np.abs(ordered - np.median(x, axis=0))
    chosen = np.argsort(apart, axis=0, kind="stable")[:keep]
    return np.take_along_axis(ordered, chosen, axis=0).mean(axis=0)


def meamed(x: Doubles, f: int) -> Doubles:
    return nearest_mean(x, len(x) - f)


def distances(x: Doubles) -> Doubles:
    return np.stack([((x - row) ** 2).sum(axis=1) for row in x])


def ranked(x: Doubles, f: int) -> list[int]:
    """Rows in the order in which Krum likes them; equal ones by the sum over all others."""
    apart, n = distances(x), len(x)
    scores = [
        (float(np.sort(np.delete(apart[i], i))[: max(n - f - 2, 1)].sum()), float(apart[i].sum()))
        for i in range(n)
    ]
    return sorted(range(n), key=scores.__getitem__)


def krum(x: Doubles, f: int) -> Doubles:
    return x[ranked(x, f)[0]]


def multi_krum(x: Doubles, f: int) -> Doubles:
    return x[ranked(x, f)[: len(x) - f - 2]].mean(axis=0)


def bulyan(x: Doubles, f: int) -> Doubles:
    left, taken = list(range(len(x))), []
    while len(taken) < len(x) - 2 * f:
        taken.append(left.pop(ranked(x[left], f)[0]))
    return nearest_mean(x[taken], len(taken) - 2 * f)


def bulyan_of_detox(x: Doubles, f: int) -> Doubles:
    return trimmed_mean(x[ranked(x, f)[: len(x) - f - 2]], f)


def geometric_median(x: Doubles, f: int) -> Doubles:
    y = x.mean(axis=0)
    for _ in range(5000):
        weights = 1.0 / np.maximum(np.linalg.norm(x - y, axis=1), 1e-300)
        before, y = y, (weights[:, None] * x).sum(axis=0) / weights.sum()
        if np.abs(y - before).max() <= 1e-14 * np.abs(y).max():
            break
    return y


def mda(x: Doubles, f: int) -> Doubles:
    apart = distances(x)
    subsets = itertools.combinations(range(len(x)), len(x) - f)
    chosen = min(subsets, key=lambda one: float(apart[np.ix_(one, one)].max()))
    return x[list(chosen)].mean(axis=0)


def cge(x: Doubles, f: int) -> Doubles:
    chosen = np.argsort(np.linalg.norm(x, axis=1), kind="stable")[: len(x) - f]
    return x[chosen].mean(axis=0)


def majority(x: Doubles, f: int) -> Doubles:
    return np.sign(np.sign(x).sum(axis=0))


def centred_clipping(
    x: Doubles, f: int, start: Doubles | None = None, tau: float = 1.0, iterations: int = 3
) -> Doubles:
    v = x[int(np.argmin(np.sqrt(distances(x)).sum(axis=1)))] if start is None else start
    for _ in range(iterations):
        lengths = np.linalg.norm(x - v, axis=1)
        radius = tau * np.median(lengths)
        share = np.minimum(1.0, radius / np.maximum(lengths, 1e-300))
        v = v + ((x - v) * share[:, None]).mean(axis=0)
    return v


def nnm(x: Doubles, f: int) -> Doubles:
    apart = distances(x)
    return np.stack([x[np.argsort(row, kind="stable")[: len(x) - f]].mean(axis=0) for row in apart])


def clip(x: Doubles, c: float) -> Doubles:
    norms = np.linalg.norm(x, axis=1)
    radius = c * np.sort(norms)[(len(x) - 1) // 2]
    return x * np.minimum(1.0, radius / norms)[:, None]


def arc(x: Doubles, f: int) -> Doubles:
    norms = np.linalg.norm(x, axis=1)
    clipped = int(np.floor(2 * (f / len(x)) * (len(x) - f)))
    radius = np.sort(norms)[len(x) - clipped - 1]
    return x * np.minimum(1.0, radius / norms)[:, None]


RULES: dict[str, Callable[[Doubles, int], Doubles]] = {
    "mean": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "meamed": meamed,
    "krum": krum,
    "multi_krum": multi_krum,
    "bulyan": bulyan,
    "geometric_median": geometric_median,
    "majority": majority,
    "centred_clipping": centred_clipping,
    "mda": mda,
    "cge": cge,
}
