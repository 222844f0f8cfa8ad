# SPDX-License-Identifier: Apache-2.0
"""One process of `make bench-keras` and `make bench-collectives`: trains when the driver says so.

One `fit` or loop makes all blocks of a variant, in a thread that waits between them, so blocks can
be short: what disturbs the machine then disturbs the blocks of all variants alike.

Variants: "ours" (`fit` under a strategy), "fit" (`fit` of plain Keras), "grouped" and "tape"
(loops over Horovod, see `keras_models.Loop`).
"""

import contextlib
import gc
import hashlib
import itertools
import os
import queue
import sys
import threading
import time
from typing import Any

from benchmarks import obedience

TRACE_STEPS = 8  # of a `fit` whose first step traces


class Worker:
    """What this process has made so far."""

    def __init__(self) -> None:
        self._strategy: Any = None
        self._rank = 0
        self._local_steps = 0
        self._runs: dict[tuple[str, str], Run] = {}

    def imports(self) -> dict[str, float]:
        """Seconds of `import tensorflow`, and of what comes on top of it in this order."""
        clock = time.perf_counter
        times = [clock()]
        import tensorflow  # noqa: F401

        times.append(clock())
        import tf_hips

        times.append(clock())
        import keras  # noqa: F401

        times.append(clock())
        tf_hips.HierarchicalPS  # noqa: B018

        times.append(clock())
        names = ("tensorflow", "tf_hips", "keras", "HierarchicalPS")
        return dict(zip(names, _differences(times), strict=True))

    def start(
        self, strategy: bool, compression: str | None = None, local_steps: int = 0
    ) -> dict[str, Any]:
        """Makes a strategy, or starts Horovod as its users do; with one process and no strategy,
        neither.

        With `compression` the strategy is `CompressedRing`, else `HierarchicalPS`. With
        `local_steps` models train under `FedAvg`, each with a strategy of its own.
        """
        import tensorflow  # noqa: F401

        self._local_steps = local_steps

        if strategy:
            import tf_hips

            self._strategy = (
                tf_hips.CompressedRing(compression) if compression else tf_hips.HierarchicalPS()
            )
            self._rank = self._strategy.global_rank
        elif "HOROVOD_RANK" in os.environ:
            import horovod.tensorflow as hvd

            hvd.init()
            self._rank = hvd.rank()
        return {}

    def begin(self, model: str, variant: str) -> dict[str, Any]:
        """Makes a model that is going to make blocks of steps."""
        self._runs[model, variant] = Run(self._trainer(model, variant))
        return {}

    def block(self, model: str, variant: str, steps: int) -> dict[str, Any]:
        """Makes steps; their seconds, and the processor's seconds of all of them."""
        gc.collect()
        gc.freeze()  # looked through once: what libraries and traces hold takes longer than a block
        used = time.process_time()
        times = self._runs[model, variant].block(steps)
        return {"steps": times, "cpu": time.process_time() - used}

    def finish(self, model: str, variant: str) -> dict[str, Any]:
        """Ends a model's training; a digest of the weights that train.

        The statistics of BatchNormalization are not among them: `fit` under a strategy leaves their
        mean over the ranks, a loop each rank its own.
        """
        trainer = self._runs.pop((model, variant)).finish()
        gc.unfreeze()
        weights = [weight.numpy().tobytes() for weight in trainer.model.trainable_variables]
        return {"digest": hashlib.sha256(b"".join(weights)).hexdigest()}

    def trace(self, model: str, variant: str) -> dict[str, Any]:
        """Seconds from the call of a fresh model's `fit` to the end of its first step, and of a
        later step; and the processor's seconds.
        """
        trainer = self._trainer(model, variant)
        gc.collect()
        used, times = time.process_time(), [time.perf_counter()]

        def ended() -> bool:
            times.append(time.perf_counter())
            return len(times) > TRACE_STEPS

        trainer(ended)
        first, *later = _differences(times)
        return {
            "first": first,
            "later": sorted(later)[len(later) // 2],
            "cpu": time.process_time() - used,
        }

    def meetings(self, model: str, count: int) -> dict[str, Any]:
        """Seconds of meetings of one worker with itself, Nesterov's step included."""
        from benchmarks import keras_models

        loop = self._loop(model, server_optimizer="diloco", local_steps=1)
        times: list[float] = []
        meet = loop.meet

        def timed(*, ends: bool = False) -> None:
            began = time.perf_counter()
            meet(ends=ends)
            times.append(time.perf_counter() - began)

        loop.meet = timed
        dataset = keras_models.data(model, loop.model, self._rank)
        loop.fit(dataset, steps_per_epoch=count, verbose=0)
        return {"seconds": times[1:count]}

    def _loop(self, model: str, **options: Any) -> Any:
        import tf_hips
        from benchmarks import keras_models

        strategy = tf_hips.CompressedRing()
        with strategy.scope():
            made = keras_models.make(model)
        return tf_hips.FedAvg(made, strategy, **options)

    def accuracy(self, compression: str | None, seed: int, epochs: int) -> dict[str, Any]:
        """Accuracy on handwritten digits, held out, after training under `CompressedRing`."""
        import keras

        import tf_hips
        from examples import digits

        keras.utils.set_random_seed(seed)
        (x, y), test = digits.load()
        strategy = tf_hips.CompressedRing(compression)
        batch, workers = 16, strategy.num_replicas_in_sync
        steps = len(x) // workers // batch
        shard = slice(strategy.global_rank, steps * batch * workers, workers)
        with strategy.scope():
            model = digits.build()
            rate = keras.optimizers.schedules.CosineDecay(2e-3, steps * epochs, alpha=0.02)
            model.compile(
                keras.optimizers.Adam(rate),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                steps_per_execution=8,
            )
        model.fit(x[shard], y[shard], batch_size=batch, epochs=epochs, verbose=0)
        found = model.evaluate(*test, len(test[0]), verbose=0, return_dict=True)
        return {"accuracy": float(found["accuracy"])}

    def _trainer(self, model: str, variant: str) -> Any:
        from benchmarks import keras_models

        if variant == "ours" and self._local_steps:
            loop = self._loop(model, local_steps=self._local_steps)
            dataset = keras_models.data(model, loop.model, self._rank)
            return keras_models.Fit(loop.model, dataset, [loop])
        scope = self._strategy.scope() if variant == "ours" else contextlib.nullcontext()
        with scope:
            made = keras_models.make(model)
        dataset = keras_models.data(model, made, self._rank)
        if variant in ("ours", "fit"):
            return keras_models.Fit(made, dataset)
        return keras_models.Loop(made, dataset, variant)


class Run:
    """One training, in a thread of its own, that makes steps only when told how many."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[list[float] | BaseException] = queue.SimpleQueue()
        self._left = 0
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def block(self, num_steps: int) -> list[float]:
        """Makes steps, at least one; their seconds."""
        self._todo.put(num_steps)
        return self._result()

    def finish(self) -> Any:
        """Ends the training, after at least one block; returns the trainer."""
        self._todo.put(0)
        self._result()
        self._thread.join()
        return self._trainer

    def _result(self) -> list[float]:
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _train(self) -> None:
        self._await()
        try:
            self._trainer(self._ended)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._done.put(error)
        else:
            self._done.put([])

    def _ended(self) -> bool:
        self._times.append(time.perf_counter())
        self._left -= 1
        if self._left:
            return False
        self._done.put(_differences(self._times))
        self._await()
        return self._left == 0

    def _await(self) -> None:
        self._left = self._todo.get()
        self._times = [time.perf_counter()]


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> int:
    """Obeys until the input ends."""
    obedience.obey(Worker())
    return 0


if __name__ == "__main__":
    sys.exit(main())
