# SPDX-License-Identifier: Apache-2.0
"""The sum of one step's gradients on two ranks of one machine: PowerSGD beside exact sums.

Gradients have the shapes of a CNN (VGG-11 for 32 x 32 pictures) and of an MLP (three layers of
2048). Two ranks on one machine have the fastest link there is, so this is what PowerSGD costs at
worst; what it saves is bytes. The ways take turns in one loop. Start it alone on the machine:

    make bench-low-rank [ARGS=--dry-run]        --dry-run stores nothing
"""

import json
import math
import statistics
import sys
import time

from benchmarks import harness

RANKS = 2
ROUNDS = 11
WARM_UP = 2
WAYS = (
    None,
    "error_feedback(powersgd(rank=1))",
    "error_feedback(powersgd(rank=4))",
    "error_feedback(onebit)",
)


def _convolutions(*filters):
    shapes, before = [], 3
    for number in filters:
        shapes += [(3, 3, before, number), (number,)]
        before = number
    return shapes


MODELS = {
    "cnn": [
        *_convolutions(64, 128, 256, 256, 512, 512, 512, 512),
        *[(512, 512), (512,), (512, 512), (512,), (512, 10), (10,)],
    ],
    "mlp": [(784, 2048), (2048,), *[(2048, 2048), (2048,)] * 2, (2048, 10), (10,)],
}


def main() -> int:
    """Starts the ranks, or is one of them."""
    if "rank" in sys.argv[1:]:
        return _rank()
    rows = harness.on_ranks("benchmarks.low_rank", RANKS)
    if rows is None:
        return 1
    if "--dry-run" in sys.argv[1:]:
        harness.show("low_rank", rows)
        return 0
    harness.write(
        "low_rank",
        rows,
        command="make bench-low-rank",
        note=f"Milliseconds of one sum of all gradients over {RANKS} ranks of one machine, one "
        f"thread each: {ROUNDS} rounds after {WARM_UP} to warm up, in each of which all ways take "
        "their turn. KiB: what one rank gives for its gradients (`Compressor.wire_bytes_of`).",
    )
    return 0


def _rank():
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.allreduce import plain
    from tf_hips.comm.reducers import make_reducer
    from tf_hips.ops.compressor import parse

    tf.config.threading.set_intra_op_parallelism_threads(1)
    primitives.init()
    rank = primitives.rank()

    def reducer(shapes, text, label):
        if text is None:
            return lambda vectors, step: plain(vectors, label)
        return make_reducer(
            shapes,
            parse(text),
            label=label,
            worker_seed=rank,
            owner_seed=rank,
            common_seed=1,
            make_variable=lambda value, name: tf.Variable(value, trainable=False, name=name),
        )

    rows = []
    for model, shapes in MODELS.items():
        generator = np.random.default_rng(rank)
        gradients = [
            tf.constant(generator.standard_normal(math.prod(shape), np.float32)) for shape in shapes
        ]
        ways = [
            tf.function(reducer(shapes, text, f"{model}.{place}"))
            for place, text in enumerate(WAYS)
        ]
        seconds = [[] for _ in ways]
        for number in range(WARM_UP + ROUNDS):
            for place, way in enumerate(ways):
                primitives.barrier()
                began = time.perf_counter()
                sums = way(gradients, tf.constant(number, tf.int64))
                sums[-1].numpy()
                if number >= WARM_UP:
                    seconds[place].append(time.perf_counter() - began)
        for text, times in zip(WAYS, seconds, strict=True):
            compressor = parse(text or "fp32")
            num_bytes = sum(
                4 * math.prod(shape) if text is None else compressor.wire_bytes_of(shape)
                for shape in shapes
            )
            rows.append(
                {
                    "model": model,
                    "compression": text or "none",
                    "KiB": round(num_bytes / 1024),
                    **{
                        name: round(1e3 * of(times), 1)
                        for name, of in (("min", min), ("median", statistics.median), ("max", max))
                    },
                }
            )
            print(rows[-1], file=sys.stderr)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
