# SPDX-License-Identifier: Apache-2.0
"""Rules under attack: accuracy on handwritten digits after training, for `make bench-robust`.

All workers are rows of one process: a network of 64, 32 and 10 units in NumPy, a batch of 16 rows
for each worker, drawn by seed and step, and SGD with momentum of the aggregate. Liars know all
honest gradients and the rule. A group of DETOX draws one batch of r times as many rows for all of
its members.

Workers draw from all rows, and others lie in each step. With a split (`class`, `dirichlet(0.5)`)
the honest ones have rows of their own, as `tf_hips.data` deals them out; the last ones draw from
all rows, and if somebody lies it is they. So in each column the same rows are learned.

`python -m benchmarks.robust_accuracy` prints the table: rules by attacks, with the worst attack of
each rule, as means over seeds; with `--split class` that of unlike data.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.collectives_jobs import Row, row
from tf_hips import robust
from tf_hips.data import splits
from tf_hips.robust import attacks, detox
from tf_hips.robust.attacks import Attack

Floats = npt.NDArray[np.float32]

SEEDS = (0, 1, 2)
WORKERS, LIARS, R = 15, 3, 3
DETOX_CASES = ((15, 3), (45, 9))
STEPS, BATCH, RATE, MOMENTUM = 300, 16, 0.1, 0.9
HIDDEN = 32
SIZES = (64 * HIDDEN, HIDDEN, HIDDEN * 10, 10)
RULES = (
    "mean",
    "median",
    "trimmed_mean(f=3)",
    "meamed(f=3)",
    "krum(f=3)",
    "multi_krum(f=3)",
    "bulyan(f=3)",
    "geometric_median",
    "centred_clipping",
    "mda(f=3)",
    "cge(f=3)",
    "nnm(f=3) >> trimmed_mean(f=3)",
    "nnm(f=3) >> krum(f=3)",
)
ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "reversed": attacks.reversed_gradient(),
    "constant": attacks.constant(),
    "gaussian": attacks.gaussian(),
    "sign flip": attacks.sign_flip(),
    "alie": attacks.alie(z=1.5),
    "inner": attacks.inner_product(2.0),
    # Near zero: where noise is more than signal, honest rows are nearer to it than to each other.
    "small inner": attacks.inner_product(0.1),
    "free riding": attacks.free_riding(),
    "mimic": attacks.mimic(),
    "min-max": attacks.min_max(),
    "min-sum": attacks.min_sum(),
}
SEARCHED = {"best alie": "alie", "best inner": "inner_product"}
"""Attacks with the factor that moves the rule most, searched in each step."""
SPLIT = "class"
SPLIT_RULES = (
    "mean",
    "median",
    "trimmed_mean(f=3)",
    "krum(f=3)",
    "multi_krum(f=3)",
    "geometric_median",
    "centred_clipping",
    "arc(f=3) >> trimmed_mean(f=3)",
    "bucketing(s=2) >> trimmed_mean(f=3)",
    "nnm(f=3) >> trimmed_mean(f=3)",
    "nnm(f=3) >> krum(f=3)",
)


@dataclasses.dataclass(frozen=True)
class Digits:
    """Rows and labels to train on, and others to look at."""

    rows: Floats
    labels: npt.NDArray[np.int64]
    held_rows: Floats
    held_labels: npt.NDArray[np.int64]


@functools.cache
def digits() -> Digits:
    """scikit-learn's 1,797 digits; every fifth is held back."""
    from sklearn.datasets import load_digits

    found = load_digits()
    rows = (found.data / 16 - 0.3).astype(np.float32)
    is_held = np.arange(len(rows)) % 5 == 0
    return Digits(rows[~is_held], found.target[~is_held], rows[is_held], found.target[is_held])


def gradients(weights: Floats, rows: Floats, labels: npt.NDArray[np.int64]) -> Floats:
    """Of each worker the gradient of its mean loss: rows [n, b, 64], labels [n, b]; [n, d]."""
    first, first_bias, second, second_bias = _parts(weights)
    hidden = np.maximum(rows @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    scores -= scores.max(axis=2, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=2, keepdims=True)
    shares[np.arange(len(rows))[:, None], np.arange(rows.shape[1])[None], labels] -= 1
    shares /= rows.shape[1]
    back = (shares @ second.T) * (hidden > 0)
    found = (
        rows.transpose(0, 2, 1) @ back,
        back.sum(axis=1),
        hidden.transpose(0, 2, 1) @ shares,
        shares.sum(axis=1),
    )
    return np.concatenate([one.reshape(len(rows), -1) for one in found], axis=1)


def accuracy(weights: Floats) -> float:
    """Of the rows that were held back, in percent."""
    first, first_bias, second, second_bias = _parts(weights)
    data = digits()
    scores = np.maximum(data.held_rows @ first + first_bias, 0) @ second + second_bias
    return float((scores.argmax(axis=1) == data.held_labels).mean() * 100)


def trained(
    rule: robust.Aggregator | detox.Detox,
    attack: Attack | None,
    seed: int,
    *,
    workers: int = WORKERS,
    liars: int = LIARS,
    steps: int = STEPS,
    split: str | None = None,
) -> float:
    """Accuracy after training with `liars` of `workers` lying.

    Args:
        rule: what is made of the rows of all.
        attack: what liars send; None: nobody lies.
        seed: of everything that is drawn.
        workers: how many there are.
        liars: how many of them lie.
        steps: of the training.
        split: how rows of the data are dealt out to those who never lie, the first ones; None: all
            draw from all rows, and others lie in each step.
    """
    dealt = None if split is None else _dealt(split, workers - liars, seed)
    generator = np.random.default_rng(seed)
    weights = first_weights(generator)
    velocity = np.zeros_like(weights)
    before: Floats | None = None
    for step in range(steps):
        honest = honest_rows(weights, rule, generator, workers, seed, step, dealt)
        sent = honest.copy()
        if attack is not None and liars:
            who = list(attacks.liars(workers, liars, seed, step))
            if dealt is not None:
                who = list(range(len(dealt), workers))
            others = np.delete(honest, who, axis=0)
            sent[who] = attack(others, liars, own=honest[who], before=before, seed=seed, step=step)
        if isinstance(rule, detox.Detox):
            merged = rule.run(sent, seed=seed, step=step).vector
        else:
            merged = rule(sent, reference=before, seed=seed, step=step)
        before = merged
        with np.errstate(all="ignore"):
            velocity = np.float32(MOMENTUM) * velocity + merged
            weights = weights - np.float32(RATE) * velocity
        if not np.isfinite(weights).all():
            break
    with np.errstate(all="ignore"):
        return accuracy(weights)


def first_weights(generator: np.random.Generator) -> Floats:
    """Weights of the network, [d], before training."""
    scale = np.repeat((1 / 8, 0, 1 / np.sqrt(HIDDEN), 0), SIZES)
    return (generator.standard_normal(sum(SIZES)) * scale).astype(np.float32)


def honest_rows(
    weights: Floats,
    rule: robust.Aggregator | detox.Detox,
    generator: np.random.Generator,
    workers: int,
    seed: int,
    step: int,
    dealt: Sequence[npt.NDArray[np.int64]] | None = None,
) -> Floats:
    """What everybody would send who does not lie."""
    data = digits()
    if not isinstance(rule, detox.Detox):
        chosen = generator.integers(0, len(data.rows), (workers, BATCH))
        for worker, mine in enumerate(dealt or ()):
            chosen[worker] = generator.choice(mine, BATCH)
        return gradients(weights, data.rows[chosen], data.labels[chosen])
    seats = detox.groups(workers, rule.r, seed, step, fixed=rule.fixed)
    found = np.empty((workers, weights.size), np.float32)
    for group, members in enumerate(seats):
        own = np.random.default_rng(detox.sampling_seed(seed, step, group))
        chosen = own.integers(0, len(data.rows), (1, BATCH * rule.r))
        found[list(members)] = gradients(weights, data.rows[chosen], data.labels[chosen])
    return found


def _dealt(split: str, workers: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Rows of each worker."""
    return splits.parts(digits().labels, splits.parse(split), [workers], seed=seed)


def _parts(weights: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    first, first_bias, second, second_bias = np.split(weights, np.cumsum(SIZES)[:-1])
    return first.reshape(64, HIDDEN), first_bias, second.reshape(HIDDEN, 10), second_bias


def measured(num_seeds: int = len(SEEDS), steps: int = STEPS) -> Iterator[Row]:
    """The worst attack of each rule, and what DETOX is worth against a little that is enough."""
    seeds = SEEDS[:num_seeds]
    for text in RULES:
        yield _worst(text, all_attacks(robust.parse(text), seeds, steps))
    for text in SPLIT_RULES:
        cells = all_attacks(robust.parse(text), seeds, steps, SPLIT)
        yield _worst(f"{text}, data by {SPLIT}", cells)
    attack = ATTACKS["alie"]
    for workers, liars in DETOX_CASES:
        clean, plain, grouped = (
            statistics.mean(
                trained(rule, one, seed, workers=workers, liars=liars, steps=steps)
                for seed in seeds
            )
            for rule, one in (
                (robust.mean(), None),
                (robust.median(), attack),
                (detox.Detox(R, robust.median()), attack),
            )
        )
        shown = f"clean {clean:.4g} %, DETOX {grouped:.4g} %, median alone {plain:.4g} %"
        what = f"points that alie costs DETOX, {workers} workers, {liars} lie"
        about = "robust-detox-points"
        yield row("accuracy", what, clean - grouped, "points", about=about, against=shown)
        what = f"points that it costs a median alone, {workers} workers, {liars} lie"
        yield row("accuracy", what, clean - plain, "points", against=shown)


def _worst(what: str, cells: dict[str, float]) -> Row:
    worst = min(cells, key=cells.__getitem__)
    shown = ", ".join(f"{name} {value:.3g}" for name, value in cells.items())
    return row("accuracy", f"{what}, worst attack: {worst}", cells[worst], "%", against=shown)


def attacks_on(rule: robust.Aggregator, split: str | None = None) -> dict[str, Attack | None]:
    """All attacks of the table, by column; a search in each step is of like data only."""
    if split is not None:
        return ATTACKS
    searched = {name: attacks.optimal(base, rule.text) for name, base in SEARCHED.items()}
    return {**ATTACKS, **searched}


def all_attacks(
    rule: robust.Aggregator, seeds: Sequence[int], steps: int, split: str | None = None
) -> dict[str, float]:
    """Mean accuracy by attack."""
    return {
        name: statistics.mean(
            trained(rule, attack, seed, steps=steps, split=split) for seed in seeds
        )
        for name, attack in attacks_on(rule, split).items()
    }


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rules", nargs="+", help="texts; else those of the table")
    parser.add_argument("--split", help="such as class or dirichlet(0.5); else all draw from all")
    arguments = parser.parse_args()
    table = []
    for text in arguments.rules or (SPLIT_RULES if arguments.split else RULES):
        seeds = SEEDS[: arguments.seeds]
        cells = all_attacks(robust.parse(text), seeds, arguments.steps, arguments.split)
        shown = {name: f"{value:.1f}" for name, value in cells.items()}
        table.append({"rule": text, **shown, "worst": f"{min(cells.values()):.1f}"})
        print(table[-1], flush=True)
    harness.show("accuracy, %", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
