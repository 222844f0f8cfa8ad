# SPDX-License-Identifier: Apache-2.0
"""How long ESync's averaging may make the movement of a member that makes few steps (NumPy).

    python -m benchmarks.esync_gains [--rate 0.05] [--seeds 3] [--quick]

Meetings until 0.9 accuracy, by task and way; sorted, one for each seed; `-0.81` is the best
accuracy of one that did not get there in 60. Members make the same numbers of local steps in each
round, so what is compared is averaging alone, without clocks. t, a_i and p_i as in docs/esync.md;
L_i is the mean loss of member i over its local steps, L the others'.

    plain       the mean
    constant b  gain min(max(t / a_i, 1), b)
    loss b      gain min(max(t / a_i, 1), min(max(L_i / L, 1), b)); with b = 2 `averaging="bounded"`
    root b      the same by the square root of L_i / L

No target is about it: it is what decision 0049 rests on.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.loops_party import BATCH, RATE, WIDTHS, samples

GOAL = 0.9
MOST = 60  # meetings
Floats: TypeAlias = npt.NDArray[np.float32]
Gains: TypeAlias = Callable[[Sequence[int], Sequence[float]], list[float]]


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, how they are split, and local steps of each member in a round."""

    data: str
    split: str
    steps: tuple[int, ...]

    @property
    def name(self) -> str:
        """As it is printed."""
        split = "by class" if self.split == "class" else "iid"
        return f"{self.data} {split}, {':'.join(map(str, self.steps))}"


TASKS = (
    Task("digits", "class", (1, 19)),
    Task("digits", "iid", (1, 19)),
    Task("digits", "class", (4, 17)),
    Task("digits", "class", (1, 98)),
    Task("digits", "class", (1, 1, 19, 19, 8)),
    Task("synthetic", "iid", (1, 19)),
    Task("synthetic", "class", (4, 17)),
    Task("synthetic", "iid", (4, 17)),
)


def by_loss(most: float, power: float = 1.0) -> Gains:
    """Gains of at most `most`, by a power of the losses' ratio."""

    def gains(steps: Sequence[int], losses: Sequence[float]) -> list[float]:
        found = []
        for loss, made in zip(losses, steps, strict=True):
            others = (sum(losses) - loss) / (len(losses) - 1)
            bound = min(max((loss / max(others, 1e-9)) ** power, 1.0), most)
            found.append(min(max(float(np.mean(steps)) / made, 1.0), bound))
        return found

    return gains


def constant(most: float) -> Gains:
    """Gains of at most `most`."""
    return lambda steps, losses: [
        min(max(float(np.mean(steps)) / made, 1.0), most) for made in steps
    ]


WAYS: dict[str, Gains] = {
    "plain": constant(1),
    "constant 1.5": constant(1.5),
    "constant 2": constant(2),
    "loss 2": by_loss(2),
    "loss 4": by_loss(4),
    "loss 8": by_loss(8),
    "root 4": by_loss(4, 0.5),
}


def weights_of(data: str, seed: int) -> list[Floats]:
    """First weights: matrices by Glorot, and biases."""
    generator = np.random.default_rng(seed)
    found: list[Floats] = []
    for rows, columns in itertools.pairwise(WIDTHS[data]):
        limit = np.sqrt(6 / (rows + columns))
        found.append(generator.uniform(-limit, limit, (rows, columns)).astype(np.float32))
        found.append(np.zeros(columns, np.float32))
    return found


def forward(weights: Sequence[Floats], x: Floats) -> list[Floats]:
    """What each layer has, the rows first and the logits last."""
    found = [x]
    for place in range(0, len(weights) - 2, 2):
        found.append(np.maximum(found[-1] @ weights[place] + weights[place + 1], 0))
    return [*found, found[-1] @ weights[-2] + weights[-1]]


def gradient(weights: Sequence[Floats], x: Floats, y: npt.NDArray) -> tuple[list[Floats], float]:
    """Of the mean cross-entropy, and that."""
    *layers, logits = forward(weights, x)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = float(-np.log(np.maximum(shares[rows, y], 1e-12)).mean())
    shares[rows, y] -= 1
    back = shares / len(y)
    found: list[Floats] = []
    for place in range(len(weights) - 2, -1, -2):
        layer = layers[place // 2]
        found = [layer.T @ back, back.sum(0), *found]
        back = (back @ weights[place].T) * (layer > 0)
    return found, loss


def batches(chosen: npt.NDArray, seed: int) -> Iterator[npt.NDArray]:
    """Rows of batches, for ever."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(chosen)
        for first in range(0, len(order) - BATCH + 1, BATCH):
            yield order[first : first + BATCH]


def meetings(task: Task, gains: Gains, rate: float, seed: int) -> tuple[int, float]:
    """How many it takes, `MOST` + 1 if it does not get there, and the best accuracy."""
    (x, y), (test_x, test_y) = samples(task.data)
    count = len(task.steps)
    parts = (y if task.split == "class" else np.arange(len(y))) % count
    streams = [
        batches(np.flatnonzero(parts == member), 100 * seed + member) for member in range(count)
    ]
    weights, best = weights_of(task.data, seed), 0.0
    for meeting in range(1, MOST + 1):
        moved, losses = [], []
        for stream, steps in zip(streams, task.steps, strict=True):
            own, total = [one.copy() for one in weights], 0.0
            for rows in itertools.islice(stream, steps):
                slopes, loss = gradient(own, x[rows], y[rows])
                total += loss
                for one, slope in zip(own, slopes, strict=True):
                    one -= rate * slope
            moved.append([old - new for old, new in zip(weights, own, strict=True)])
            losses.append(total / steps)
        chosen = gains(task.steps, losses)
        for place, one in enumerate(weights):
            for gain, movement in zip(chosen, moved, strict=True):
                one -= np.float32(gain / count) * movement[place]
        found = forward(weights, test_x)[-1].argmax(1)
        best = max(best, float(np.mean(found == test_y)))
        if best >= GOAL:
            return meeting, best
    return MOST + 1, best


def main() -> int:
    """Prints a line for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=RATE, help=f"default {RATE:g}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the first two tasks")
    arguments = parser.parse_args()
    print(f"{'':28}" + "".join(f"{name:>18}" for name in WAYS))
    for task in TASKS[: 2 if arguments.quick else None]:
        texts = []
        for gains in WAYS.values():
            found = sorted(
                meetings(task, gains, arguments.rate, seed) for seed in range(arguments.seeds)
            )
            texts.append("/".join(f"{n}" if n <= MOST else f"-{best:.2f}" for n, best in found))
        print(f"{task.name:28}" + "".join(f"{text:>18}" for text in texts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
