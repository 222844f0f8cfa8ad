# SPDX-License-Identifier: Apache-2.0
"""What momentum at the workers is worth below robust rules, beside momentum behind the rule.

The digits of `robust_accuracy`, with liars that stay the same:

    behind   rows are gradients; v <- 0.9 v + R(rows), w <- w - 0.1 v
    workers  rows are what `momentum(fp32, beta=0.9)` sends; w <- w - 1.0 R(rows)

With a mean and no liars both are the same training. Liars know all rows that honest workers send.

`python -m benchmarks.robust_momentum` prints the table: rules by attacks, "behind / workers", as
means over seeds.
"""

import argparse
import statistics
import sys

import numpy as np

from benchmarks import harness, robust_accuracy
from benchmarks.robust_accuracy import (
    ATTACKS,
    HIDDEN,
    LIARS,
    MOMENTUM,
    RATE,
    SEEDS,
    SIZES,
    STEPS,
    WORKERS,
    Floats,
)
from tf_hips import ops, robust
from tf_hips.ops import smoothing
from tf_hips.robust import attacks
from tf_hips.robust.attacks import Attack

SHOWN = ("none", "alie", "inner", "min-max", "min-sum")
RULES = (
    "mean",
    "median",
    "trimmed_mean(f=3)",
    "meamed(f=3)",
    "krum(f=3)",
    "multi_krum(f=3)",
    "geometric_median",
    "centred_clipping",
    "mda(f=3)",
    "nnm(f=3) >> trimmed_mean(f=3)",
)


def trained(
    rule: robust.Aggregator,
    attack: Attack | None,
    seed: int,
    *,
    at_workers: bool,
    workers: int = WORKERS,
    liars: int = LIARS,
    steps: int = STEPS,
) -> float:
    """Accuracy after training with the same `liars` of `workers` lying in all steps, in percent."""
    generator = np.random.default_rng(seed)
    scale = np.repeat((1 / 8, 0, 1 / np.sqrt(HIDDEN), 0), SIZES)
    weights = (generator.standard_normal(sum(SIZES)) * scale).astype(np.float32)
    codec = ops.momentum(ops.fp32(), beta=MOMENTUM)
    kept = np.zeros((workers, weights.size), np.float32)
    velocity = np.zeros_like(weights)
    who = list(attacks.liars(workers, liars, seed, 0, fixed=True))
    before: Floats | None = None
    for step in range(steps):
        rows = robust_accuracy._honest(weights, rule, generator, workers, seed, step)
        if at_workers:
            rows = np.stack(
                [smoothing.moved(codec, m, row) for m, row in zip(kept, rows, strict=True)]
            )
        sent = rows.copy()
        if attack is not None and liars:
            others = np.delete(rows, who, axis=0)
            sent[who] = attack(others, liars, own=rows[who], before=before, seed=seed, step=step)
        before = rule(sent, reference=before, seed=seed, step=step)
        with np.errstate(all="ignore"):
            velocity = before if at_workers else np.float32(MOMENTUM) * velocity + before
            rate = RATE / (1 - MOMENTUM) if at_workers else RATE
            weights = weights - np.float32(rate) * velocity
        if not np.isfinite(weights).all():
            break
    with np.errstate(all="ignore"):
        return robust_accuracy.accuracy(weights)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--attacks", nargs="+", default=list(SHOWN), choices=list(ATTACKS))
    arguments = parser.parse_args()
    table = []
    for text in arguments.rules:
        cells = {}
        for name in arguments.attacks:
            behind, workers = (
                statistics.mean(
                    trained(
                        robust.parse(text),
                        ATTACKS[name],
                        seed,
                        at_workers=at_workers,
                        steps=arguments.steps,
                    )
                    for seed in SEEDS[: arguments.seeds]
                )
                for at_workers in (False, True)
            )
            cells[name] = f"{behind:.1f} / {workers:.1f}"
        table.append({"rule": text, **cells})
        print(table[-1], flush=True)
    harness.show("accuracy, %: momentum behind the rule / at the workers", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
