# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds under a robust rule, beside NumPy: what a server must answer.

One list of rows for each child, looked through again with every packet; rules are those of
`robust`, called with all rows at once. Weights are here, as in `plainly`.
"""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tf_hips import robust
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.terms.model import Model
from tf_hips.robust.aggregator import Measures

Floats = npt.NDArray[np.float32]
Packet = npt.NDArray[np.uint8]
f = np.float32

Push = tuple[int, int, int]  # child, round, chunk


def schedule(num_children: int, num_chunks: int, num_packets: int, seed: int = 0) -> list[Push]:
    """Packets of children of different speed: chunks in any order, one round after the other."""
    draw = random.Random(seed)
    owed = {child: (0, list(range(num_chunks))) for child in range(num_children)}
    weights = [8, 4, 3, 3, 2, 2, 1][:num_children]
    order = []
    for _ in range(num_packets):
        child = draw.choices(range(num_children), weights)[0]
        number, chunks = owed[child]
        order.append((child, number, chunks.pop(draw.randrange(len(chunks)))))
        if not chunks:
            owed[child] = (number + 1, list(range(num_chunks)))
    return order


class Oracle:
    """A server of asynchronous rounds with `rule >> fedbuff(k, rate, exponent)`."""

    def __init__(
        self,
        rule: str,
        k: int,
        rate: float,
        exponent: float,
        model: Model,
        sites: Sequence[str],
        up: str,
        down: str,
        seed: int,
    ) -> None:
        self.rule = robust.parse(rule)
        self.k, self.rate, self.exponent = k, f(rate), exponent
        self.model, self.seed = model, seed
        self.up, self.down = compressors.parse(up), compressors.parse(down)
        self.seeds = [native.derive_seed(seed, f"server/{site}") for site in sites]
        self.w = [np.zeros(chunk.size, np.float32) for chunk in model.chunks]
        self.children = [[one.copy() for one in self.w] for _ in sites]
        self.steps = [0] * len(self.w)
        self.seen = [[0] * len(self.w) for _ in sites]
        # By child: of each chunk its values, and the step that the child knew of.
        self.rows: dict[int, dict[int, tuple[Floats, int]]] = {}
        self.coming: dict[int, dict[int, tuple[Floats, int]]] = {}
        self.before: list[Floats] | None = None

    def push(self, child: int, number: int, chunk: int, packet: Packet) -> bytes:
        """A packet of one child; the answer."""
        where = self.model.chunks[chunk]
        values = native.decode(self.up.at(number).codec, packet, where.size)
        row = (values, self.seen[child][chunk])
        if self.rule.is_coordinate and self.rule.rule.name != "mean":
            self.rows.setdefault(child, {})[chunk] = row
            self._step_of(chunk)
        else:
            self.coming.setdefault(child, {})[chunk] = row
            if len(self.coming[child]) == len(self.w):
                self.rows[child] = self.coming.pop(child)
                self._step()
        owed = self.children[child][chunk] - self.w[chunk]
        key = native.Key(self.seeds[child], number, where.tensor, where.offset)
        codec = self.down.at(number).codec
        answer = native.encode(codec, owed, key)
        got = native.decode(codec, answer, where.size)
        self.children[child][chunk] = self.children[child][chunk] - got
        self.seen[child][chunk] = self.steps[chunk]
        return answer.tobytes()

    def _weighed(self, values: Floats, staleness: int) -> Floats:
        weighed: Floats = f((1.0 + staleness) ** -self.exponent) * values
        return weighed

    def _step_of(self, chunk: int) -> None:
        held = {child: one[chunk] for child, one in sorted(self.rows.items()) if chunk in one}
        if len(held) < self.k:
            return
        now = self.steps[chunk]
        rows = [self._weighed(values, now - since) for values, since in held.values()]
        self.w[chunk] = self.w[chunk] - self.rate * self.rule(rows)
        self.steps[chunk] += 1
        for child in held:
            del self.rows[child][chunk]

    def _step(self) -> None:
        if len(self.rows) < self.k:
            return
        now = self.steps[0]
        rows = []
        for _, one in sorted(self.rows.items()):
            staleness = now - min(since for _, since in one.values())
            rows.append([self._weighed(one[place][0], staleness) for place in range(len(self.w))])
        result = self._of_rows(rows, now)
        if self.rule.rule.name == "centred_clipping":
            self.before = result
        for place, one in enumerate(result):
            self.w[place] = self.w[place] - self.rate * one
            self.steps[place] += 1
        self.rows.clear()

    def _of_rows(self, rows: list[list[Floats]], step: int) -> list[Floats]:
        """What the rule makes of whole rows; sums go by chunk, as their bits are defined."""
        rule, before = self.rule, self.before
        parts = [
            rule.measure(list(some), reference=[] if before is None else [before[place]])
            for place, some in enumerate(zip(*rows, strict=True))
        ]
        measures = parts[0]
        for part in parts[1:]:
            measures = Measures.joined(measures, part)
        decision = rule.decide(
            measures,
            rows=[np.concatenate(row) for row in rows],
            seed=self.seed,
            step=step,
            with_reference=before is not None,
        )
        return [
            rule.apply(
                decision, list(some), reference=None if before is None else before[place]
            ).vector
            for place, some in enumerate(zip(*rows, strict=True))
        ]
