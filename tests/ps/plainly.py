# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds in plain NumPy: what a server must compute, update by update.

Weights are here: w of the server, and of each child what it has. A server keeps only differences of
them; in float32 these are other numbers than differences of weights, so w begins with 0.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.terms.model import Model

Floats = npt.NDArray[np.float32]
f = np.float32
ONE = f(1)

# The rules of the tests, with what `Plainly` calls them.
RULES = {
    "asgd(0.1)": "asgd",
    "dc_asgd(0.1, 0.5)": "constant",
    "dc_asgd(0.1, 0.5, adaptive=True, decay=0.9)": "adaptive",
    "dc_asgd(0.1, 0.5, compat=True)": "compat",
    "fedasync(0.6, staleness=constant)": "mix",
    "fedasync(0.6, staleness=polynomial, a=0.5)": "polynomial",
    "fedasync(0.6, staleness=hinge, a=2, b=1)": "hinge",
    "fedbuff(3, 0.8, 0.5)": "buffered",
    "momentum(0.1, 0.8, asynchronous=True)": "momentum",
    "momentum(0.1, 0.8, nesterov=True, asynchronous=True)": "nesterov",
    "adam(0.01, asynchronous=True)": "adam",
}


class Plainly:
    """A server of asynchronous rounds."""

    def __init__(
        self, rule: str, model: Model, sites: Sequence[str], up: str, down: str, seed: int
    ) -> None:
        self.model = model
        self.up, self.down = compressors.parse(up), compressors.parse(down)
        self.update: Callable[[int, int, Floats], Floats] = getattr(self, RULES[rule])
        self.seeds = [native.derive_seed(seed, f"server/{site}") for site in sites]
        zeros = [np.zeros(chunk.size, np.float32) for chunk in model.chunks]
        self.w = [zero.copy() for zero in zeros]
        self.children = [[zero.copy() for zero in zeros] for _ in sites]
        self.kept: list[list[Floats]] = [[zero.copy(), zero.copy()] for zero in zeros]
        self.updates = [0] * len(zeros)
        self.seen = [[0] * len(zeros) for _ in sites]
        self.buffered_updates = [0] * len(zeros)

    def push(self, child: int, number: int, chunk: int, packet: npt.NDArray[np.uint8]) -> bytes:
        """A packet of one child; the answer."""
        where = self.model.chunks[chunk]
        g = native.decode(self.up.at(number).codec, packet, where.size)
        self.w[chunk] = self.update(child, chunk, g)
        owed = self.children[child][chunk] - self.w[chunk]
        key = native.Key(self.seeds[child], number, where.tensor, where.offset)
        answer = native.encode(self.down.at(number).codec, owed, key)
        got = native.decode(self.down.at(number).codec, answer, where.size)
        self.children[child][chunk] = self.children[child][chunk] - got
        self.seen[child][chunk] = self.updates[chunk]
        return answer.tobytes()

    def _drift(self, child: int, chunk: int) -> Floats:
        return self.w[chunk] - self.children[child][chunk]

    def _staleness(self, child: int, chunk: int) -> int:
        return self.updates[chunk] - self.seen[child][chunk]

    def asgd(self, child: int, chunk: int, g: Floats) -> Floats:
        self.updates[chunk] += 1
        return self.w[chunk] - f(0.1) * g

    def constant(self, child: int, chunk: int, g: Floats) -> Floats:
        return self.w[chunk] - f(0.1) * (g + f(0.5) * g * g * self._drift(child, chunk))

    def adaptive(self, child: int, chunk: int, g: Floats) -> Floats:
        self.kept[chunk][0] = square = f(0.9) * self.kept[chunk][0] + (ONE - f(0.9)) * (g * g)
        strength = f(0.5) / np.sqrt(square + f(1e-7))
        return self.w[chunk] - f(0.1) * (g + strength * g * g * self._drift(child, chunk))

    def compat(self, child: int, chunk: int, g: Floats) -> Floats:
        w, previous = self.w[chunk], self.kept[chunk][0]
        self.kept[chunk][0] = w
        return w - f(0.1) * (g + f(0.5) * g * g * (w - previous))

    def _mixed(self, child: int, chunk: int, g: Floats, alpha: float) -> Floats:
        self.updates[chunk] += 1
        # (1 - alpha) w + alpha w_i, where w_i = w_child - g, in the order that loses least.
        return self.w[chunk] - f(alpha) * (g + self._drift(child, chunk))

    def mix(self, child: int, chunk: int, g: Floats) -> Floats:
        return self._mixed(child, chunk, g, float(f(0.6)))

    def polynomial(self, child: int, chunk: int, g: Floats) -> Floats:
        late = self._staleness(child, chunk)
        return self._mixed(child, chunk, g, float(f(0.6)) * (1 + late) ** -0.5)

    def hinge(self, child: int, chunk: int, g: Floats) -> Floats:
        late = self._staleness(child, chunk)
        weight = 1.0 if late <= 1 else 1 / (2 * (late - 1) + 1)
        return self._mixed(child, chunk, g, float(f(0.6)) * weight)

    def buffered(self, child: int, chunk: int, g: Floats) -> Floats:
        weight = f((1.0 + self._staleness(child, chunk)) ** -0.5)
        self.kept[chunk][0] = self.kept[chunk][0] + weight * g
        self.buffered_updates[chunk] += 1
        if self.buffered_updates[chunk] % 3:
            return self.w[chunk]
        self.updates[chunk] += 1
        held, self.kept[chunk][0] = self.kept[chunk][0], np.zeros_like(g)
        return self.w[chunk] - f(float(f(0.8)) / 3) * held

    def _velocity(self, chunk: int, g: Floats) -> Floats:
        self.kept[chunk][0] = f(0.8) * self.kept[chunk][0] + g
        return self.kept[chunk][0]

    def momentum(self, child: int, chunk: int, g: Floats) -> Floats:
        return self.w[chunk] - f(0.1) * self._velocity(chunk, g)

    def nesterov(self, child: int, chunk: int, g: Floats) -> Floats:
        return self.w[chunk] - f(0.1) * (g + f(0.8) * self._velocity(chunk, g))

    def adam(self, child: int, chunk: int, g: Floats) -> Floats:
        self.updates[chunk] += 1
        t, b1, b2 = self.updates[chunk], float(f(0.9)), float(f(0.999))
        m, v = self.kept[chunk]
        m = m + (g - m) * (ONE - f(0.9))
        v = v + (g * g - v) * (ONE - f(0.999))
        self.kept[chunk] = [m, v]
        rate = f(float(f(0.01)) * np.sqrt(1 - b2**t) / (1 - b1**t))
        return self.w[chunk] - (m * rate) / (np.sqrt(v) + f(1e-7))
