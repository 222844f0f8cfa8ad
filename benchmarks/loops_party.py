# SPDX-License-Identifier: Apache-2.0
"""One party of the trainings of `make bench-loops`: does what the driver says (`obedience`).

A training is prepared first, in a thread of its own: it joins, and makes the one step that traces.
Then it stands still until all parties of all trainings that run side by side have come so far. The
time is that since then.
"""

import os
import queue
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import obedience

BATCH = 32
RATE = 0.05
LOOK_S = 0.1  # at least, from one look at the accuracy to the next
WIDTHS = {"digits": (64, 512, 512, 10), "synthetic": (784, 384, 10)}  # 0.3 M weights each


class Party:
    """What this process trains."""

    def __init__(self) -> None:
        self._training: Training | None = None

    def prepare(self, **order: Any) -> dict[str, Any]:
        """Joins and traces."""
        self._training = Training(**order)
        self._training.prepare()
        return {}

    def train(self) -> dict[str, Any]:
        """Trains; what it has measured."""
        if self._training is None:
            raise RuntimeError("A training must be prepared before it begins. Received: none")
        return self._training.train()


class Training:
    """One training of one party."""

    def __init__(self, **order: Any) -> None:
        """Does nothing yet.

        Args:
            order: see `loops_trainings.Order`, whose fields these are.
        """
        self._order = order
        self._said: queue.SimpleQueue[BaseException | dict[str, Any]] = queue.SimpleQueue()
        self._may_go = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def prepare(self) -> None:
        """Returns when the first step has been traced."""
        self._thread.start()
        self._heard()

    def train(self) -> dict[str, Any]:
        """Returns at the end."""
        self._may_go.set()
        answer = self._heard()
        self._thread.join()
        return answer

    def _heard(self) -> dict[str, Any]:
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def _run(self) -> None:
        try:
            self._said.put(self._trained())
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._said.put(error)

    def _trained(self) -> dict[str, Any]:
        import keras

        import tf_hips
        from tf_hips import config
        from tf_hips.esync.clock import SKEW_VARIABLE

        order = self._order
        os.environ[SKEW_VARIABLE] = str(order["skew_s"])
        uplink = config.Uplink(order["server"], order["site"])
        run = config.Run(order["run"], order["seed"], uplink, order["log_dir"])
        keras.utils.set_random_seed(order["seed"])
        strategy = tf_hips.HierarchicalPS(order["compression"], config=run)
        with strategy.scope():
            model = _model(order["data"], order["optimizer"], order["rate"])
        how = dict(order["loop"])
        kinds = {"fedavg": tf_hips.FedAvg, "esync": tf_hips.ESync}
        kind = how.pop("kind")
        loop = kinds[kind](model, strategy, **how) if kind in kinds else None
        self._steps = 0
        self._own_s: list[float] = []
        self._meetings: list[dict[str, float]] = []
        self._waited_s = 0.0
        self._judge = Judge(order) if order["judges"] else None
        self._stand_in(model, loop)
        if loop is not None:
            self._watch_meetings(model, loop, strategy)
        (model if loop is None else loop).fit(
            dataset(order), steps_per_epoch=order["steps"], epochs=1, verbose=0
        )
        ended = time.monotonic() - self._began
        accuracies = [] if self._judge is None else self._judge.close()
        final = Judge.accuracy_of(order["data"], model.get_weights())
        strategy.close()
        return {
            "seconds": ended,
            "steps": self._steps,
            "step_ms": 1e3 * statistics.median(self._own_s[1:] or self._own_s),
            "meetings": self._meetings,
            "accuracies": accuracies,
            "accuracy": final,
        }

    def _stand_in(self, model: Any, loop: Any) -> None:
        """Stands in for the train function: pads steps, and stops where it is time."""
        from tf_hips.strategies.slowdown import Padding, Slowdown

        order = self._order
        model.make_train_function()
        function = model.train_function
        padding = Padding(Slowdown(least_s=order["step_s"]))
        over = Path(order["over"])

        def padded(iterator: Any) -> Any:
            began = time.monotonic()
            logs = function(iterator)
            if not self._steps:
                self._said.put({})
                self._may_go.wait()
                began = self._began = time.monotonic()
                if hasattr(loop, "_watch"):
                    loop._watch.begin()  # a step counts from here, as if it were traced
            self._own_s.append(time.monotonic() - began)
            padding.pad(self._own_s[-1], 1)
            self._steps += 1
            if self._is_over():
                over.touch()
            if over.exists():
                model.stop_training = True
            return logs

        model.train_function = padded

    def _is_over(self) -> bool:
        order = self._order
        if not order["judges"]:
            return False
        if time.monotonic() - self._began > order["seconds"]:
            return True
        has_all = len(self._meetings) >= order["least_meetings"]
        has_reached = self._judge is None or self._judge.has_reached or not order["goal"]
        return bool(order["least_meetings"] or order["goal"]) and has_all and has_reached

    def _watch_meetings(self, model: Any, loop: Any, strategy: Any) -> None:
        gather, meet = strategy.gather_objects, loop.meet

        def gathered(value: Any, label: str) -> Any:
            began = time.monotonic()
            found = gather(value, label)
            if label == "a meeting of a loop":
                self._waited_s = time.monotonic() - began
            return found

        def met(*, ends: bool = False) -> None:
            steps, self._waited_s = loop.steps, 0.0
            meet(ends=ends)
            at = time.monotonic() - self._began
            self._meetings.append({"at": at, "waited_s": self._waited_s, "steps": steps})
            if self._judge is not None:
                self._judge.look(at, len(self._meetings), model, is_last=ends)

        strategy.gather_objects, loop.meet = gathered, met


class Judge:
    """Accuracies of the models of meetings, computed in a thread beside the training."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Has looked at nothing."""
        self._data, self._goal = order["data"], order["goal"]
        self._todo: queue.SimpleQueue[tuple[float, int, list[Any]] | None] = queue.SimpleQueue()
        self._found: list[tuple[float, int, float]] = []
        self._looked_s = float("-inf")
        self.has_reached = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self, at_s: float, meeting: int, model: Any, *, is_last: bool) -> None:
        """Takes the weights, unless they were taken a moment ago."""
        if is_last or at_s - self._looked_s >= LOOK_S:
            self._looked_s = at_s
            self._todo.put((at_s, meeting, model.get_weights()))

    def close(self) -> list[tuple[float, int, float]]:
        """Seconds, meetings so far and accuracy of each look."""
        self._todo.put(None)
        self._thread.join()
        return self._found

    def _run(self) -> None:
        while (found := self._todo.get()) is not None:
            at_s, meeting, weights = found
            right = self.accuracy_of(self._data, weights)
            self._found.append((at_s, meeting, right))
            self.has_reached |= bool(self._goal) and right >= self._goal

    @staticmethod
    def accuracy_of(name: str, weights: list[Any]) -> float:
        """Of the held-out samples."""
        import numpy as np

        x, y = samples(name)[1]
        *hidden, (kernel, bias) = zip(weights[::2], weights[1::2], strict=True)
        for one, more in hidden:
            x = np.maximum(x @ one + more, 0)
        return float(np.mean((x @ kernel + bias).argmax(1) == y))


def samples(name: str) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Vectors in [0, 1] and classes: to train with, and held out."""
    import numpy as np

    from tf_hips.data.sets import made

    if name not in _SAMPLES:
        found = {"digits": made.digits, "synthetic": made.synthetic}[name]()
        _SAMPLES[name] = tuple(
            ((rows.x.reshape(len(rows), -1) / 255).astype(np.float32), rows.y)
            for rows in (found.train, found.test)
        )
    return _SAMPLES[name]


_SAMPLES: dict[str, Any] = {}


def dataset(order: dict[str, Any]) -> Any:
    """Batches of a party's own samples, for ever."""
    import numpy as np
    import tensorflow as tf

    x, y = samples(order["data"])[0]
    number, parties = order["number"], order["parties"]
    # By class: each has classes of its own.
    chosen = (y if order["split"] == "class" else np.arange(len(y))) % parties == number
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    made = tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen]))
    made = made.shuffle(int(chosen.sum()), seed=100 * order["seed"] + number).repeat()
    return made.batch(BATCH).prefetch(4).with_options(options)


def _model(data: str, optimizer: str, rate: float) -> Any:
    import keras

    first, *hidden, classes = WIDTHS[data]
    layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
    model = keras.Sequential([keras.Input((first,)), *layers, keras.layers.Dense(classes)])
    made = {"sgd": keras.optimizers.SGD, "adamw": keras.optimizers.AdamW}[optimizer](rate)
    model.compile(made, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main() -> int:
    """Obeys until the input ends."""
    obedience.obey(Party())
    return 0


if __name__ == "__main__":
    sys.exit(main())
