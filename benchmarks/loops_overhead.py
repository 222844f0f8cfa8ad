# SPDX-License-Identifier: Apache-2.0
"""What a loop costs beside plain Keras: its local steps, and its meetings.

The models, blocks and rounds are those of `make bench-keras` (see `keras_overhead`): one worker
under `FedAvg`, and `fit` of plain Keras in a process that never imports tf_hips, take turns in
short blocks. A block's time is the lower quartile of its steps, so the few that end in a meeting do
not count, and what is told is the median over the blocks; both must end with the same weights, bit
for bit. Meetings are timed by themselves: one worker with itself, the outer Nesterov step and the
averages' look at the model included.
"""

import statistics
from collections.abc import Iterator

from benchmarks import collectives_jobs, harness, keras_overhead
from benchmarks.collectives_jobs import Row
from benchmarks.jobs import job

LOCAL_STEPS = 50
MEETINGS = 20
BOUND = "cnn"  # the model that the target is about


def measured(models: tuple[str, ...], rounds: int) -> Iterator[Row]:
    """Ratios of local steps, and seconds of meetings."""
    worker = keras_overhead.WORKER
    with job(1, module=worker, threads=2) as plain, job(1, module=worker, threads=2) as hips:
        plain.ask(do="start", strategy=False)
        hips.ask(do="start", strategy=True, local_steps=LOCAL_STEPS)
        ours = keras_overhead.Variant("FedAvg", hips, "ours")
        keras = keras_overhead.Variant("plain Keras", plain, "fit")
        for model in models:
            ratio = keras_overhead.steps(model, ours, [keras], rounds)
            yield collectives_jobs.row(
                "overhead",
                f"{model}, local step of {ratio.ours * 1e3:.2f} ms",
                ratio.middle,
                "x",
                interval=harness.between(ratio.low, ratio.high),
                against=f"plain Keras, {ratio.baseline * 1e3:.2f} ms",
                about="loops-overhead-step" if model == BOUND else "",
            )
            [answer] = hips.ask(do="meetings", model=model, count=MEETINGS + 1)
            yield collectives_jobs.row(
                "overhead",
                f"{model}, a meeting of one worker",
                statistics.median(answer["seconds"]) * 1e3,
                "ms",
            )
