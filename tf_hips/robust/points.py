# SPDX-License-Identifier: Apache-2.0
"""Points that are known by their squared distances only, and weighted means of them.

All rules but those of coordinates need nothing else of n rows: a matrix of n x n numbers, however
long the rows are. Of means a_i = sum_k A_ik x_k whose weights add up to 1, distances follow from
those of the points:

    |a_i - a_j|^2 = M_ij - (M_ii + M_jj) / 2,   M = A D A^T

so rules can follow each other (`nnm >> krum`) before a single row is mixed. The last point is the
origin: distances to it are norms, and a row that is clipped is a mean of itself and the origin.

Sums here are NumPy's own loops, never BLAS, whose order depends on the number of threads.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from tf_hips.ops.native import Doubles


@dataclasses.dataclass(frozen=True)
class Points:
    """m means of n rows and the origin.

    Attributes:
        weights: [m, n + 1]: what each is made of; of each the sum is 1. The last column is the
            origin's.
        squared: [m + 1, m + 1]: squared distances between them and, last, to the origin.
    """

    weights: Doubles
    squared: Doubles

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.weights)

    @property
    def apart(self) -> Doubles:
        """Squared distances between the points, [m, m]; 0 on the diagonal."""
        return self.squared[:-1, :-1]

    @property
    def squares(self) -> Doubles:
        """Squares of their norms, [m]."""
        return self.squared[:-1, -1]

    @property
    def norms(self) -> Doubles:
        """Their norms, [m]."""
        return np.asarray(np.sqrt(self.squared[:-1, -1]), np.float64)

    def mixed(self, weights: Doubles) -> "Points":
        """Means of these points and the origin: `weights` [k, m + 1], of each the sum is 1."""
        origin = np.zeros((1, weights.shape[1]))
        origin[0, -1] = 1.0
        with_origin = np.concatenate([weights, origin])
        product = np.einsum(
            "ik,kj->ij", np.einsum("ik,kj->ij", with_origin, self.squared), with_origin.T.copy()
        )
        own = np.diagonal(product) / 2
        # Sums first: (i, j) and (j, i) must be equal to the bit, or ties are decided by rounding.
        squared = np.maximum((product + product.T) / 2 - (own[:, None] + own[None, :]), 0.0)
        # What is the same mean is at no distance, whatever rounding says.
        _, names = np.unique(with_origin, axis=0, return_inverse=True)
        names = names.reshape(-1)
        squared[names[:, None] == names[None, :]] = 0.0
        mine = np.zeros((self.count + 1, self.weights.shape[1]))
        mine[:-1] = self.weights
        mine[-1, -1] = 1.0
        return Points(np.einsum("ik,kj->ij", weights, mine), squared)

    def no_longer(self, limit: float, which: npt.NDArray[np.bool_]) -> "Points":
        """The same, where it is known of some that the square of their norm is `limit`.

        After `mixed` it is only up to rounding, which must not choose between equal ones.
        """
        squared = self.squared.copy()
        at = np.flatnonzero(which)
        squared[at, -1] = squared[-1, at] = limit
        return Points(self.weights, squared)


def points(squares: list[float], pairs: list[float]) -> Points:
    """The rows themselves.

    Args:
        squares: of the norm of each of n rows.
        pairs: squared distances in the order of `numpy.triu_indices(n, 1)`.
    """
    n = len(squares)
    squared = np.zeros((n + 1, n + 1))
    if pairs:
        squared[np.triu_indices(n, 1)] = pairs
    squared[:n, n] = squares
    return Points(np.eye(n, n + 1), squared + squared.T)


def only(of: Points, chosen: list[int]) -> Points:
    """Some of the points."""
    kept = [*chosen, of.count]
    return Points(of.weights[chosen], of.squared[np.ix_(kept, kept)])
