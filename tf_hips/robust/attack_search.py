# SPDX-License-Identifier: Apache-2.0
"""How far liars go who know the rule: the factor of a lie that moves its result most.

ByzFL looks for the greatest distance of the result from the honest mean. In the distance is also
the noise of the rows that a rule chooses, which can be far more than the lie: of Krum, that takes
one row, it says little. So what counts here is the way along the lie's own direction.
"""

from collections.abc import Callable

import numpy as np

from tf_hips.errors import ToleranceError
from tf_hips.ops.native import Doubles, Floats

FACTORS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""What is tried first, with the factors that other codes have; 100 is the most."""
# Then between the best one and its neighbours, halfway, above and below by turns.
_HALVINGS = 3


def farthest(
    rows: Doubles,
    f: int,
    rule: Callable[[Floats], Floats],
    start: Doubles,
    direction: Doubles,
) -> Doubles:
    """The lie `start + factor direction`, of all factors that are tried the one that moves most.

    Args:
        rows: of the honest, [m, d].
        f: how many send the lie.
        rule: what is made of all rows, [m + f, d].
        start: where factors begin, [d].
        direction: where they go, [d]; how far the result is moved along it counts.
    """
    mean = rows.mean(axis=0)
    sent = np.empty((len(rows) + f, rows.shape[1]), np.float32)
    sent[: len(rows)] = rows

    def moved(factor: float) -> float:
        sent[len(rows) :] = start + factor * direction
        try:
            result = rule(sent).astype(np.float64)
        except ToleranceError:  # it names those who lie so, which they do not want
            return -np.inf
        return float(np.einsum("i,i->", result - mean, direction))

    return np.asarray(start + worst_factor(moved) * direction, np.float64)


def worst_factor(moved: Callable[[float], float]) -> float:
    """The factor for which `moved` is most, after 20 calls: of FACTORS, and of some near the best.

    Of factors that move equally the first that was tried is taken.
    """
    values = [moved(factor) for factor in FACTORS]
    at = int(np.argmax(values))
    best, most = FACTORS[at], values[at]
    below = FACTORS[at - 1] if at else 0.0
    above = FACTORS[min(at + 1, len(FACTORS) - 1)]
    for _ in range(_HALVINGS):
        for is_up in (True, False):
            tried = (best + (above if is_up else below)) / 2
            value = moved(tried)
            if value > most:
                below, above = (best, above) if is_up else (below, best)
                best, most = tried, value
            elif is_up:
                above = tried
            else:
                below = tried
    return best
