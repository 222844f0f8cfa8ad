# SPDX-License-Identifier: Apache-2.0
"""Rules that look at distances: which points they choose, or with which weights.

Everything works on squared distances in double; `apart` is [n, n] with 0 on the diagonal, and an
infinity is "far". Where two points do equally well the one that comes first is taken: order of
rows, which is that of children. Definitions and sources: docs/aggregators.md.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tf_hips.ops.native import Doubles

MAX_MDA = 16
"""f of `mda` at most: its search takes 2^f steps where peers make it."""
# With nearly half the rows far away the iteration ends after some 6 steps for each row.
_WEISZFELD_STEPS = 1000
_WEISZFELD_STEPS_OF_ROW = 10
_WEISZFELD_END = 1e-9


def krum(apart: Doubles, f: int) -> list[int]:
    """All rows, the best first: by the sum of squared distances to the n - f - 2 nearest others.

    Of one neighbour at least. Two rows that are each other's nearest may have equal sums: then the
    one nearer to all others is the better one.
    """
    n = len(apart)
    neighbours = max(n - f - 2, 1)
    # Each row's own 0 comes first.
    scores = np.sort(apart, axis=1)[:, 1 : neighbours + 1].sum(axis=1)
    return [int(row) for row in np.lexsort((apart.sum(axis=1), scores))]


def best(scores: Doubles, count: int) -> list[int]:
    """The `count` lowest scores, in the order of rows."""
    return sorted(np.argsort(scores, kind="stable")[:count].tolist())


def bulyan(apart: Doubles, f: int) -> list[int]:
    """The n - 2f rows that Krum takes one after the other, of those that are left."""
    left = list(range(len(apart)))
    taken = [left.pop(krum(apart[np.ix_(left, left)], f)[0]) for _ in range(len(apart) - 2 * f)]
    return sorted(taken)


def geometric_median(apart: Doubles, nu: float) -> Doubles:
    """Weights of the smoothed geometric median, by Weiszfeld's iteration.

    `nu` is relative to a distance of honest rows: an absolute one makes a mean of it as soon as
    gradients are small.
    """
    n = len(apart)
    weights = np.full(n, 1.0 / n)
    if _are_mostly_equal(apart):
        return uniform(best(np.sqrt(apart).sum(axis=1), 1), n)
    floor = nu * spread(apart)
    for _ in range(max(_WEISZFELD_STEPS, _WEISZFELD_STEPS_OF_ROW * n)):
        inverse = 1.0 / np.maximum(_distances_to(apart, weights), floor)
        new = inverse / inverse.sum()
        moved = float(np.abs(new - weights).sum())
        weights = new
        if moved < _WEISZFELD_END:
            break
    return weights


def centred_clipping(apart: Doubles, num_rows: int, tau: float, iterations: int) -> Doubles:
    """Weights of v <- v + mean of (x_i - v) min(1, t / |x_i - v|).

    t is `tau` times the median of |x_i - v|. v begins with the reference, or without one with the
    row from which the sum of distances to the others is least.

    Args:
        apart: of the rows and, last, the reference, if there is one.
        num_rows: how many rows there are.
        tau: radius, relative.
        iterations: how often.
    """
    n = len(apart)
    first = [n - 1] if n > num_rows else best(np.sqrt(apart).sum(axis=1), 1)
    weights = uniform(first, n)
    for _ in range(iterations):
        distances = _distances_to(apart, weights)[:num_rows]
        radius = tau * float(np.median(distances))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(distances > radius, radius / distances, 1.0) / num_rows
        weights = weights * (1.0 - float(share.sum()))
        weights[:num_rows] += share
    return weights


def mda(apart: Doubles, f: int) -> list[int]:
    """The n - f rows whose two farthest are nearest; the first such rows in order of numbers.

    f is at most MAX_MDA.
    """
    diameters = np.unique(apart)
    low, high = 0, len(diameters) - 1
    while low < high:
        middle = (low + high) // 2
        if _first_without(apart > diameters[middle], f) is None:
            low = middle + 1
        else:
            high = middle
    found = _first_without(apart > diameters[low], f)
    if found is None:
        raise AssertionError("all rows are within the greatest distance")
    return found


def nearest_mixing(apart: Doubles, f: int) -> Doubles:
    """NNM: of each point the mean of its n - f nearest, itself or equal ones among them.

    [n, n + 1].
    """
    n = len(apart)
    mixing = np.zeros((n, n + 1))
    nearest = np.argsort(apart, axis=1, kind="stable")[:, : n - f]
    np.put_along_axis(mixing, nearest, 1.0 / (n - f), axis=1)
    return mixing


def buckets(order: Sequence[int], s: int) -> Doubles:
    """Means of s points each, in that order, the last of fewer; [ceil(n / s), n + 1]."""
    n = len(order)
    mixing = np.zeros((-(-n // s), n + 1))
    for bucket in range(len(mixing)):
        members = list(order[bucket * s : (bucket + 1) * s])
        mixing[bucket, members] = 1.0 / len(members)
    return mixing


def shrinking(squares: Doubles, limit: float) -> Doubles:
    """x_i min(1, sqrt(limit) / |x_i|), as means of a point and the origin; [n, n + 1].

    Args:
        squares: of the norms.
        limit: the square of the norm that longer points are shortened to.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(squares > limit, np.sqrt(limit) / np.sqrt(squares), 1.0)
    mixing = np.zeros((len(squares), len(squares) + 1))
    np.fill_diagonal(mixing, share)
    mixing[:, -1] = 1.0 - share
    return mixing


def arc_limit(squares: Doubles, f: int) -> float:
    """ARC: the square of the norm of which floor(2 (f / n) (n - f)) rows' are greater or equal."""
    n = len(squares)
    clipped = 2 * f * (n - f) // n  # at most half of them
    return float(np.sort(squares)[n - clipped - 1])


def spread(apart: Doubles) -> float:
    """A distance of two rows that less than half of the rows cannot choose; 0 where all are equal.

    With h = floor(n / 2) + 1 it is the h (h - 1) / 2 smallest one, Q_n of Rousseeuw and Croux: that
    many are between honest rows, so it is none of a liar that is far away, as the median of all
    pairs may be; and liars that are equal to each other are fewer, so they do not make it 0.
    """
    pairs = np.sort(apart[np.triu_indices(len(apart), 1)])
    if not pairs.size or pairs[-1] == 0.0:
        return 0.0
    h = len(apart) // 2 + 1
    first = int(np.searchsorted(pairs, 0.0, side="right"))  # of those that are not 0
    return float(np.sqrt(pairs[max(h * (h - 1) // 2 - 1, first)]))


def uniform(chosen: list[int], n: int) -> Doubles:
    """Weights of the mean of some of n points."""
    weights = np.zeros(n)
    weights[chosen] = 1.0 / len(chosen)
    return weights


def _are_mostly_equal(apart: Doubles) -> bool:
    """Whether more than half of the points are one."""
    return bool(((apart == 0.0).sum(axis=1) * 2 > len(apart)).any())


def _distances_to(apart: Doubles, weights: Doubles) -> Doubles:
    """Of each point to the mean with `weights`, which add up to 1."""
    to = np.einsum("ij,j->i", apart, weights)
    spread = float(np.einsum("i,i->", weights, to)) / 2
    return np.asarray(np.sqrt(np.maximum(to - spread, 0.0)), np.float64)


def _first_without(is_far: npt.NDArray[np.bool_], f: int) -> list[int] | None:
    """The first n - f points in order of numbers of which no two are far apart, or None.

    Of two that are far apart one must go: a search over f such choices.
    """
    n = len(is_far)
    masks = [sum(1 << int(j) for j in np.flatnonzero(row)) for row in is_far]

    @functools.cache
    def cover(left: int, budget: int) -> bool:
        """Whether leaving out `budget` of the points `left` keeps no two that are far apart."""
        worst, degree, ends = -1, 0, 0
        rest = left
        while rest:
            i = (rest & -rest).bit_length() - 1
            rest &= rest - 1
            found = (masks[i] & left).bit_count()
            ends += found
            if found > degree:
                worst, degree = i, found
        if degree == 0:
            return True
        # Each point that goes takes `degree` pairs with it at most. Without this, liars that sit in
        # pairs make the search as long as it can be.
        if ends > 2 * budget * degree:
            return False
        if cover(left & ~(1 << worst), budget - 1):
            return True
        return degree <= budget and cover(left & ~(masks[worst] & left), budget - degree)

    left, budget = (1 << n) - 1, f
    if not cover(left, budget):
        return None
    kept: list[int] = []
    for i in range(n):
        here = 1 << i
        if not left & here or len(kept) == n - f:
            continue
        # Keeping i means leaving out all that are far from it.
        gone = (masks[i] & left).bit_count()
        rest = left & ~masks[i] & ~here
        if gone <= budget and cover(rest, budget - gone):
            left, budget = rest, budget - gone
            kept.append(i)
        else:
            left, budget = left & ~here, budget - 1
    return kept
