# SPDX-License-Identifier: Apache-2.0
"""One core of a server: what it takes to decode, sum and encode again, for `make bench-ps`.

A round of 4 children goes through the server's own store, in one thread on one core: each packet
is decoded and looked through for NaN and infinities when it comes; when all have come they are
merged, the sum is looked through, and encoded with the residual of the way down. Gigabytes are
those of the gradients as fp32, all children's. Network and journal are not in it.

`kernel` is the same without the two looks, one call of the C library per chunk; `copy` copies as
many bytes of memory as the gradients have. A process of its own, because it stays on one core.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.terms.model import Model

CHILDREN = 4


def main() -> int:
    """Measures what the order on the command line says, and prints it as JSON."""
    order = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shapes = [tuple(shape) for shape in order["shapes"]]
    compressor = compressors.parse(order["text"])
    model = Model(tuple(shapes))
    sites = [f"s{child}" for child in range(CHILDREN)]
    store = Store(model, sites, compressor, compressor, 7)
    packets = [
        [
            native.encode(
                compressor.codec,
                np.random.default_rng((child, chunk)).standard_normal(where.size, np.float32),
                native.Key(0, 0, 0),
            )
            for chunk, where in enumerate(model.chunks)
        ]
        for child in range(CHILDREN)
    ]
    residuals = [
        np.zeros(where.size, np.float32) if compressor.has_residual else None
        for where in model.chunks
    ]

    def stored(number: int) -> None:
        store.begin(number)
        for chunk in range(len(model.chunks)):
            for child in range(CHILDREN):
                store.add(number, child, [(chunk, packets[child][chunk])])

    def kernel(number: int) -> None:
        for chunk, where in enumerate(model.chunks):
            merged = native.merge(
                compressor, [packets[child][chunk] for child in range(CHILDREN)], where.size
            )
            key = native.Key(1, number, where.tensor, where.offset)
            native.encode(compressor, merged, key, kept=residuals[chunk])

    source = np.ones(model.num_elements, np.float32)
    target = np.zeros_like(source)

    def copy(number: int) -> None:
        for _ in range(CHILDREN):
            np.copyto(target, source)

    ways: dict[str, Callable[[int], None]] = {"stored": stored, "kernel": kernel, "copy": copy}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(order["rounds"] + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way(number)
            seconds[name].append(time.perf_counter() - began)
    gigabytes = CHILDREN * model.dense_bytes / 1e9
    found = {name: [gigabytes / one for one in measured[1:]] for name, measured in seconds.items()}
    found["median"] = {name: statistics.median(values) for name, values in found.items()}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
