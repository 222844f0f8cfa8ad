# SPDX-License-Identifier: Apache-2.0
"""What momentum at the workers is worth below robust rules, beside momentum behind the rule.

The digits of `robust_accuracy`, with liars that stay the same:

    behind   rows are gradients; v <- 0.9 v + R(rows), w <- w - 0.1 v
    workers  rows are what `momentum(fp32, beta=0.9)` sends; w <- w - 1.0 R(rows)

With a mean and no liars both are the same training. Liars know all rows that honest workers send.

`python -m benchmarks.robust_momentum` prints the table: rules by attacks, "behind / workers", as
means over seeds. `--cost` prints what encoding takes, beside the compressor inside: 64 Mi floats in
one call in plain Python, and 16 Mi in a graph in pieces of 2^20, as strategies encode them.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import numpy as np

from benchmarks import harness
from benchmarks.robust_accuracy import (
    ATTACKS,
    LIARS,
    MOMENTUM,
    RATE,
    SEEDS,
    STEPS,
    WORKERS,
    Floats,
    accuracy,
    first_weights,
    honest_rows,
)
from tf_hips import ops, robust
from tf_hips.ops import graph, smoothing
from tf_hips.ops.compressor import CHUNK
from tf_hips.robust import attacks
from tf_hips.robust.attacks import Attack

SHOWN = ("none", "alie", "inner", "min-max", "min-sum")
COST_SIZE, COST_PIECES = 1 << 26, 16
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
    weights = first_weights(generator)
    codec = ops.momentum(ops.fp32(), beta=MOMENTUM)
    kept = np.zeros((workers, weights.size), np.float32)
    velocity = np.zeros_like(weights)
    who = list(attacks.liars(workers, liars, seed, 0, fixed=True))
    before: Floats | None = None
    for step in range(steps):
        rows = honest_rows(weights, rule, generator, workers, seed, step)
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
        return accuracy(weights)


def costs() -> dict[str, list[float]]:
    """Seconds of encoding in plain Python and in a graph, with momentum and without; medians."""
    import tensorflow as tf

    inner = ops.error_feedback(ops.onebit())
    codecs = (ops.momentum(inner), inner)
    values = np.random.default_rng(0).standard_normal(COST_SIZE, np.float32)
    packets = np.empty(inner.wire_bytes(COST_SIZE), np.uint8)
    piece = tf.constant(values[:CHUNK])

    def in_python(codec: ops.Compressor) -> Callable[[], object]:
        kept = np.zeros(codec.state_shape([COST_SIZE]), np.float32)
        return lambda: ops.native.encode(codec, values, ops.Key(1, 0, 0), kept, packets)

    def in_graph(codec: ops.Compressor) -> Callable[[], object]:
        states = [tf.Variable(tf.zeros(codec.state_shape([CHUNK]))) for _ in range(COST_PIECES)]

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def encode() -> list[tf.Tensor]:
            found = []
            for number, state in enumerate(states):
                packet, new = graph.encode(
                    codec, piece, seed=1, step=0, tensor_id=number, kept=state.read_value()
                )
                state.assign(new)
                found.append(packet)
            return found

        return lambda: [packet.numpy() for packet in encode()]

    found = {}
    for way, make in (("plain Python", in_python), ("graph", in_graph)):
        found[way] = [harness.timed(make(codec))[1] for codec in codecs]
    return found


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--attacks", nargs="+", default=list(SHOWN), choices=list(ATTACKS))
    parser.add_argument("--cost", action="store_true", help="what encoding takes, and no table")
    arguments = parser.parse_args()
    if arguments.cost:
        rows = [
            {"where": way, "with, s": f"{one:.3f}", "without, s": f"{two:.3f}"}
            for way, (one, two) in costs().items()
        ]
        harness.show("encoding error_feedback(onebit) with momentum before it", rows)
        return 0
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
