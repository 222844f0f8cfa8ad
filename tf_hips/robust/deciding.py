# SPDX-License-Identifier: Apache-2.0
"""What each step of a rule decides, from squared distances of rows alone.

Points come in, n x n numbers whatever the length of the rows; out come means of them: those that a
pre-aggregator makes, and those that the rule at the end is made of.
"""

import hashlib
import math

import numpy as np

from tf_hips.errors import ToleranceError
from tf_hips.ops.native import Doubles
from tf_hips.ops.native_robust import CoordinateRule
from tf_hips.robust import selection
from tf_hips.robust.points import Points, only
from tf_hips.robust.value import AUTO, Step

COORDINATE = {
    "median": CoordinateRule.MEDIAN,
    "trimmed_mean": CoordinateRule.TRIMMED,
    "meamed": CoordinateRule.NEAREST,
    "majority": CoordinateRule.MAJORITY,
}
"""Rules that look at each coordinate for itself."""


def secret_order(count: int, seed: int, step: int, purpose: str) -> list[int]:
    """The numbers 0 .. count - 1 in an order that only who has the seed can foresee."""
    keys = [
        hashlib.sha256(f"{seed}/{purpose}/{step}/{number}".encode()).digest()
        for number in range(count)
    ]
    return sorted(range(count), key=lambda number: keys[number])


def drop_of(rule: CoordinateRule, f: int) -> int:
    """How many values of a coordinate a rule that bears f leaves out, on either side or in all."""
    return f if rule in (CoordinateRule.TRIMMED, CoordinateRule.NEAREST) else 0


def before(
    step: Step, f: int, mine: Points, num_rows: int, seed: int, number: int
) -> tuple[Points, int]:
    """What a pre-aggregator makes of the rows; a reference behind them stays as it is."""
    rows = only(mine, list(range(num_rows)))
    limit = math.inf
    match step.name:
        case "nnm":
            mixing = selection.nearest_mixing(rows.apart, f)
        case "bucketing":
            order = secret_order(num_rows, seed, number, "robust/bucketing")
            mixing = selection.buckets(order, int(step["s"]))
        case "clip":
            limit = float(step["c"]) ** 2 * float(np.sort(rows.squares)[(num_rows - 1) // 2])
            mixing = selection.shrinking(rows.squares, limit)
        case _:
            limit = selection.arc_limit(rows.squares, f)
            mixing = selection.shrinking(rows.squares, limit)
    references = mine.count - num_rows
    full = np.zeros((len(mixing) + references, mine.count + 1))
    full[: len(mixing), :num_rows] = mixing[:, :-1]
    full[: len(mixing), -1] = mixing[:, -1]
    for reference in range(references):
        full[len(mixing) + reference, num_rows + reference] = 1.0
    mixed = mine.mixed(full)
    if limit < math.inf:
        is_long = np.zeros(mixed.count, bool)
        is_long[:num_rows] = rows.squares > limit
        mixed = mixed.no_longer(limit, is_long)
    return mixed, len(mixing)


def of_rule(
    step: Step, f: int, mine: Points, num_rows: int
) -> tuple[tuple[CoordinateRule, int] | None, Doubles, list[int] | None]:
    """What becomes of coordinates, of which means of the points, and which points are in them."""
    n = num_rows
    apart = mine.apart[:n, :n]
    chosen: list[int] | None = None
    coordinate: tuple[CoordinateRule, int] | None = None
    match step.name:
        case "mean":
            weights = selection.uniform(list(range(n)), n)
        case "median" | "trimmed_mean" | "meamed" | "majority":
            rule = COORDINATE[step.name]
            coordinate = rule, drop_of(rule, f)
        case "krum" | "multi_krum":
            chosen = sorted(selection.krum(apart, f)[: count_of(step, n, f)])
        case "bulyan" if step["compat"]:
            chosen = sorted(selection.krum(apart, f)[: n - f - 2])
            coordinate = CoordinateRule.TRIMMED, f
        case "bulyan":
            chosen = selection.bulyan(apart, f)
            coordinate = CoordinateRule.NEAREST, 2 * f
        case "mda":
            chosen = selection.mda(apart, f)
        case "cge":
            chosen = selection.best(mine.norms[:n], n - f)
        case "geometric_median":
            weights = selection.geometric_median(apart, float(step["nu"]))
        case _:  # centred_clipping
            tau, iterations = float(step["tau"]), int(step["iterations"])
            all_weights = selection.centred_clipping(mine.apart, n, tau, iterations)
            return None, np.append(all_weights, 0.0)[None][:, : mine.count], None
    if coordinate is not None:
        weights_of = np.eye(mine.count)[list(range(n)) if chosen is None else chosen]
        return coordinate, weights_of, chosen
    if chosen is not None:
        weights = selection.uniform(chosen, n)
    full = np.zeros((1, mine.count))
    full[0, :n] = weights
    return None, full, chosen


def count_of(step: Step, n: int, f: int) -> int:
    """How many of n rows Krum or multi-Krum takes."""
    most = n - f - 2
    count = 1 if step.name == "krum" else int(step["m"]) if step["m"] != AUTO else most
    if not 1 <= count <= most:
        raise ToleranceError(
            f"{step.name} needs 1 <= m <= n - f - 2. Received: m={count}, n={n}, f={f}"
        )
    return count
