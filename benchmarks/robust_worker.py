# SPDX-License-Identifier: Apache-2.0
"""One rank of the part `step` of `make bench-robust`: a rule over the ranks beside their sum.

    robust   what `CompressedRing(robust=...)` does with the gradients

The rest is `collectives_worker`'s.
"""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import obedience
from benchmarks.collectives_worker import SEED, Worker


class RobustWorker(Worker):
    """What this rank has made so far."""

    def _robust(self, name: str, rule: str, text: str, topology: str) -> Any:
        import tensorflow as tf

        from tf_hips import robust
        from tf_hips.comm.robust_sum import make_robust_reducer
        from tf_hips.ops.compressor import parse

        def tell(step: int, refused: Sequence[Any], error: Exception | None) -> None:
            raise AssertionError(f"nobody lies here. Received: {refused} in step {step}") from error

        return make_robust_reducer(
            self._shapes,
            parse(text),
            robust.parse(rule),
            label=name,
            worker_seed=self._rank,
            owner_seed=self._rank,
            rule_seed=SEED,
            make_variable=lambda value, title: tf.Variable(value, trainable=False, name=title),
            tell=tell,
            topology=topology,
        )


if __name__ == "__main__":
    obedience.obey(RobustWorker())
    sys.exit(0)
