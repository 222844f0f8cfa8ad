# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics are those of all rows of all replicas, exactly, wherever Keras shows them."""

import contextlib
import io
import re

import keras
import numpy as np

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close
from tests.strategies.features.models import build_mlp, linear

# Rows of the two ranks: not the same number.
_ROWS = (slice(0, 13), slice(13, 19))
# So that both take two steps.
_BATCHES = (8, 4)


class Positives(keras.metrics.Metric):
    """Twice the number of positive targets: a metric of the user's own, with an integer state."""

    def __init__(self, name="positives"):
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_true > 0.5, "int32")))

    def result(self):
        return self.count * 2


def _build():
    metrics = keras.metrics
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(
        keras.optimizers.SGD(0.0),
        "binary_crossentropy",
        metrics=[
            "accuracy",
            metrics.AUC(num_thresholds=20, name="auc"),
            metrics.Precision(name="precision"),
            metrics.Recall(name="recall"),
            metrics.BinaryIoU(name="iou"),
            metrics.R2Score(name="r2"),
            metrics.F1Score(threshold=0.5, average="micro", name="f1"),
            metrics.MeanSquaredError(name="mse"),
            metrics.RootMeanSquaredError(name="rmse"),
            metrics.CosineSimilarity(name="cosine"),
            Positives(),
        ],
        weighted_metrics=["mae", metrics.BinaryAccuracy(name="weighted")],
        run_eagerly=True,
    )
    return model


def _data(job):
    x, y = linear(job, 2)
    weights = np.random.default_rng(5).uniform(0.2, 3.0, len(x)).astype(np.float32)
    return x, (y[:, :1] > 0).astype(np.float32), weights


@feature()
def metrics_are_exact(job: Job):
    x, y, weights = _data(job)
    rows = _ROWS[job.rank]
    own = (x[rows], y[rows], weights[rows])
    model = job.make(_build)
    # A rate of zero: the metrics of the epoch are those of an evaluation.
    history = model.fit(training.rows(own, _BATCHES[job.rank]), verbose=0).history
    history = {name: values[0] for name, values in job.equal(history).items()}
    options = {"sample_weight": own[2], "verbose": 0, "batch_size": 4, "return_dict": True}
    evaluated = job.equal(model.evaluate(*own[:2], **options))

    def together():
        model = _build()
        model.set_weights(start)
        last = _ROWS[-1].stop
        return model.evaluate(
            x[:last], y[:last], sample_weight=weights[:last], verbose=0, return_dict=True
        )

    start = model.get_weights()
    expected = job.one_process(together)
    close(evaluated, expected)
    close(history, expected)
    # Against plain NumPy too, so that Keras does not vouch for itself.
    out = np.concatenate(job.gather(model.predict(own[0], verbose=0)))
    target = y[: len(out)]
    close(
        {name: evaluated[name] for name in ("accuracy", "mse", "positives")},
        {
            "accuracy": np.mean((out > 0.5) == (target > 0.5)),
            "mse": np.mean((out - target) ** 2),
            "positives": 2 * target.sum(),
        },
    )


@feature(elsewhere="metrics_are_exact")
def metrics_of_batches_are_exact(job: Job):
    x, y, weights = _data(job)
    rows = _ROWS[job.rank]
    model = job.make(_build)
    told = model.train_on_batch(x[rows], y[rows], weights[rows], return_dict=True)
    job.equal(told)
    model.reset_metrics()
    tested = job.equal(model.test_on_batch(x[rows], y[rows], weights[rows], return_dict=True))
    start = model.get_weights()

    def together():
        model = _build()
        model.set_weights(start)
        last = _ROWS[-1].stop
        return model.test_on_batch(x[:last], y[:last], weights[:last], return_dict=True)

    expected = job.one_process(together)
    close(tested, expected)
    close(told, expected)


@feature()
def progress_bar_shows_all_replicas(job: Job):
    model = job.make(lambda: build_mlp(run_eagerly=True))
    own = job.shard(linear(job, 2))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        data = training.rows(own)
        history = model.fit(data, epochs=2, validation_data=data).history
    text = shown.getvalue()
    job.equal(history)
    if job.rank:
        assert text == ""  # one bar, not one for each worker
        return
    lines = [line for line in re.split(r"[\r\n]+", text) if "val_loss" in line]
    assert len(lines) == 2, text
    for epoch, line in enumerate(lines):
        numbers = dict(re.findall(r"(\w+): ([-+.e\d]+)", line))
        for name, values in history.items():
            np.testing.assert_allclose(float(numbers[name]), values[epoch], rtol=2e-3, err_msg=line)


@feature(elsewhere="test_divergence.py")
def evaluation_on_one_rank(job: Job):
    from tf_hips.strategies import local

    x, y = linear(job, 2)
    model = job.make(lambda: build_mlp(run_eagerly=True))
    model.fit(*job.shard([x, y]), batch_size=BATCH, verbose=0)
    if job.rank == 0:
        with local():
            told = model.evaluate(x[:5], y[:5], verbose=0, return_dict=True)
        expected = np.mean((model.predict(x[:5], verbose=0) - y[:5]) ** 2)
        np.testing.assert_allclose(told["loss"], expected, rtol=1e-5)
