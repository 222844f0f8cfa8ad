# SPDX-License-Identifier: Apache-2.0
"""One step of a large embedding on two ranks: its gradient as rows, and as a table.

Both ways go through `CompressedRing`; for the table the gradient is made dense before the optimizer
gets it. Start it alone on the machine:

    make bench-sparse [ARGS=--dry-run]        --dry-run stores nothing
"""

import json
import sys

from benchmarks import harness

SHAPE = (1_000_000, 64)
ROWS = 4096
RANKS = 2


def main() -> int:
    """Starts the ranks, or is one of them."""
    if "rank" in sys.argv[1:]:
        return _rank()
    rows = harness.on_ranks("benchmarks.sparse", RANKS)
    if rows is None:
        return 1
    if "--dry-run" in sys.argv[1:]:
        harness.show("sparse", rows)
        return 0
    harness.write(
        "sparse",
        rows,
        command="make bench-sparse",
        note=f"Milliseconds of one step (9 after 2 to warm up): a table of {SHAPE[0]} x {SHAPE[1]} "
        f"float32, {ROWS} lookups on each of {RANKS} ranks of one machine, one thread each.",
    )
    return 0


def _rank():
    import tensorflow as tf

    import tf_hips

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf_hips.CompressedRing()
    rows = []
    for name in ("SGD", "Adam"):
        for way in ("rows", "table"):
            seconds = _measure(strategy, name, way == "table")
            times = zip(("min", "median", "max"), seconds, strict=True)
            row = {"optimizer": name, "gradient": way}
            rows.append({**row, **{key: round(one * 1e3, 1) for key, one in times}})
            print(rows[-1], file=sys.stderr)
    print(json.dumps(rows))
    return 0


def _measure(strategy, name, is_table):
    import keras
    import tensorflow as tf

    with strategy.scope():
        table = tf.Variable(tf.zeros(SHAPE))
        optimizer = getattr(keras.optimizers, name)()

    def step(indices):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.gather(table, indices) - 1.0) ** 2)
        gradient = tape.gradient(loss, table)
        if is_table:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply_gradients([(gradient, table)])

    @tf.function
    def run(indices):
        strategy.run(step, args=(indices,))

    generator = tf.random.Generator.from_seed(strategy.global_rank)
    batches = iter([generator.uniform([ROWS], 0, SHAPE[0], tf.int64) for _ in range(11)])
    return harness.timed(lambda: run(next(batches)))


if __name__ == "__main__":
    sys.exit(main())
