# SPDX-License-Identifier: Apache-2.0
"""Methods of local training in plain NumPy, for a linear model with a mean squared error."""

import dataclasses
from collections.abc import Sequence

import numpy as np

f = np.float32


@dataclasses.dataclass
class Rule:
    """A server's step of a mean, in float32; one array of each kind for each tensor."""

    name: str
    rate: float
    m: list = dataclasses.field(default_factory=list)
    v: list = dataclasses.field(default_factory=list)

    def __call__(self, merged: Sequence[np.ndarray]) -> list[np.ndarray]:
        if not self.m:
            self.m = [np.zeros_like(g) for g in merged]
            self.v = [np.full_like(g, f(1e-3) * f(1e-3)) for g in merged]
        return [self._step(place, g) for place, g in enumerate(merged)]

    def _step(self, place: int, g: np.ndarray) -> np.ndarray:
        rate, b1, b2, tau = f(self.rate), f(0.9), f(0.99), f(1e-3)
        if self.name == "fedavg":
            return rate * g
        if self.name in ("fedavgm", "diloco"):
            self.m[place] = m = b1 * self.m[place] + g
            return rate * (g + b1 * m if self.name == "diloco" else m)
        m, v = self.m[place], self.v[place]
        if self.name == "fedadagrad":
            m, v = g, v + g * g
        elif self.name == "fedadam":
            m, v = b1 * m + (f(1) - b1) * g, b2 * v + (f(1) - b2) * (g * g)
        else:
            m = b1 * m + (f(1) - b1) * g
            v = v - ((f(1) - b2) * (g * g)) * np.sign(v - g * g)
        self.m[place], self.v[place] = m, v
        return (rate * m) / (np.sqrt(v) + tau)


def gradients(weights: Sequence[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of the mean squared error of `x @ w + b`."""
    error = (x @ weights[0] + weights[1] - y) * f(2.0 / y.size)
    return [x.T @ error, error.sum(0)]


def local(
    start: Sequence[np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    rate: float,
    *,
    mu: float = 0.0,
    shift: Sequence[np.ndarray] | None = None,
    momentum: float = 0.0,
    velocity: list[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Weights after local steps of SGD.

    Args:
        start: weights before.
        batches: of each step.
        rate: learning rate.
        mu: of a proximal term.
        shift: what each gradient gains (SCAFFOLD's c - c_i).
        momentum: of SGD.
        velocity: its state, changed in place.
    """
    weights = [one.copy() for one in start]
    velocity = velocity if velocity is not None else [np.zeros_like(one) for one in start]
    for x, y in batches:
        for place, g in enumerate(gradients(weights, x, y)):
            g = g + f(mu) * (weights[place] - start[place])
            if shift is not None:
                g = g + shift[place]
            velocity[place] = f(momentum) * velocity[place] - f(rate) * g
            weights[place] = weights[place] + velocity[place]
    return weights
