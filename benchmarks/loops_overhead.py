# SPDX-License-Identifier: Apache-2.0
"""What a loop costs beside plain Keras: its local steps, and its meetings.

The models, blocks, rounds and pairs of processes are those of `make bench-keras` (see
`keras_overhead`): one worker under `FedAvg`, and `fit` of plain Keras in a process that never
imports tf_hips, take turns in short blocks. A block's time is the lower quartile of its steps, so
the few that end in a meeting do not count, and what is told is the median over the blocks; both
must end with the same weights, bit for bit. Meetings are timed by themselves: one worker with
itself, the outer Nesterov step and the averages' look at the model included.
"""

import statistics
from collections.abc import Iterator

from benchmarks import collectives_jobs, harness, keras_overhead
from benchmarks.collectives_jobs import Row

LOCAL_STEPS = 50
MEETINGS = 20


def measured(models: tuple[str, ...], rounds: int) -> Iterator[Row]:
    """Ratios of local steps, and seconds of meetings."""
    meetings: dict[str, float] = {}

    def meet(model: str, ours: keras_overhead.Variant, _: keras_overhead.Variant) -> None:
        [answer] = ours.job.ask(do="meetings", model=model, count=MEETINGS + 1)
        meetings[model] = statistics.median(answer["seconds"])

    start = {"strategy": True, "local_steps": LOCAL_STEPS}
    for model, ratio in keras_overhead.in_pairs(models, rounds, start, meet).items():
        yield collectives_jobs.row(
            "overhead",
            f"{model}, local step of {ratio.ours * 1e3:.2f} ms",
            ratio.middle,
            "x",
            interval=harness.between(ratio.low, ratio.high),
            against=f"plain Keras, {ratio.baseline * 1e3:.2f} ms",
            about="loops-overhead-step" if model == keras_overhead.BOUND else "",
        )
        yield collectives_jobs.row(
            "overhead", f"{model}, a meeting of one worker", meetings[model] * 1e3, "ms"
        )
