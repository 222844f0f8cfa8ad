# SPDX-License-Identifier: Apache-2.0
"""Part `diloco` of `make bench-loops`: bytes of the slow tier, and what they cost in accuracy.

Two parties train an MLP of 0.3 million weights on their halves of the digits with AdamW, once with
a dense sum of gradients in every step, and once with DiLoCo: 50 local steps, then the outer
Nesterov step of the server on movements that are compressed both ways. Bytes are those on the
sockets of the uplinks (TCP_INFO), from the handshake and the first synchronisation on, both ways.
Accuracies are those of the last model on held-out digits, means over seeds.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import loops_trainings
from benchmarks.collectives_jobs import Row, ratio_row, row
from benchmarks.loops_trainings import Training
from tf_hips import log

LOCAL_STEPS, STEPS = 50, 1000
SEEDS = (0, 1, 2)
COMPRESSION = "error_feedback(terngrad(bitwidth=4))"
# The paper's momentum is 0.9, for thousands of outer steps; there are 20 here.
RULE = "diloco(learning_rate=0.7, momentum=0.6)"
RATE = 1e-3
SECONDS = 300.0


def training(seed: int, log_dir: str, *, is_local: bool) -> Training:
    """One of the two."""
    return Training(
        step_s=(0.0, 0.0),
        loop={"kind": "fedavg", "local_steps": LOCAL_STEPS} if is_local else {"kind": "plain"},
        rule=RULE if is_local else "mean",
        seed=seed,
        steps=STEPS,
        seconds=SECONDS,
        compression=COMPRESSION if is_local else "fp32",
        optimizer="adamw",
        rate=RATE,
        log_dir=log_dir,
    )


def num_bytes(folder: Path) -> int:
    """Of all uplinks of a run, both ways."""
    left = [one for one in log.read_events(folder) if one["event"] == "left"]
    return sum(int(one["sent"]) + int(one["received"]) for one in left)


def measured() -> Iterator[Row]:
    """Bytes and accuracies."""
    with (
        loops_trainings.crew(2 * len(SEEDS)) as crew,
        tempfile.TemporaryDirectory(prefix="hips-bench") as name,
    ):
        accuracies: dict[bool, list[float]] = {}
        sizes: dict[bool, list[int]] = {}
        for is_local in (False, True):
            folders = [Path(name, f"{is_local}-{seed}") for seed in SEEDS]
            found = crew.train(
                [
                    training(seed, str(folder), is_local=is_local)
                    for seed, folder in zip(SEEDS, folders, strict=True)
                ]
            )
            accuracies[is_local] = [100 * one.accuracy for one in found]
            sizes[is_local] = [num_bytes(folder) for folder in folders]
    for is_local in (False, True):
        way = f"DiLoCo, H = {LOCAL_STEPS}, {COMPRESSION}" if is_local else "synchronous, dense"
        shown = ", ".join(f"{one:.4g}" for one in accuracies[is_local])
        mean = statistics.mean(accuracies[is_local])
        yield row("diloco", f"{way}: accuracy after {STEPS} steps", mean, "%", against=shown)
        yield row("diloco", f"{way}: bytes", statistics.median(sizes[is_local]) / 1e6, "MB")
    lost = [a - b for a, b in zip(accuracies[False], accuracies[True], strict=True)]
    yield row(
        "diloco",
        "accuracy that DiLoCo costs",
        statistics.mean(lost),
        "points",
        against=", ".join(f"{one:.3g}" for one in lost),
        about="loops-diloco-points",
    )
    yield ratio_row(
        "diloco",
        "bytes of the synchronous training over those of DiLoCo",
        [a / b for a, b in zip(sizes[False], sizes[True], strict=True)],
        about="loops-diloco-bytes",
    )
