# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: each kind of data trains as arrays do."""

import keras
import numpy as np
import tensorflow as tf

from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job
from tests.strategies.features.models import build_mlp, linear

_STEPS = 2


def _batches(own):
    return [
        tuple(array[step * BATCH : (step + 1) * BATCH] for array in own) for step in range(_STEPS)
    ]


class Rows(keras.utils.PyDataset):
    """Batches by number."""

    def __init__(self, own):
        super().__init__(workers=2)
        self._batches = _batches(own)

    def __len__(self):
        return _STEPS

    def __getitem__(self, index):
        return self._batches[index]


def _arrays(strategy, own):
    return {"x": own[0], "y": own[1], "batch_size": BATCH, "shuffle": False}


def _tensors(strategy, own):
    return {
        "x": tf.constant(own[0]),
        "y": tf.constant(own[1]),
        "batch_size": BATCH,
        "shuffle": False,
    }


def _tf_data(strategy, own):
    return {"x": tf.data.Dataset.from_tensor_slices(tuple(own)).batch(BATCH)}


def _generator(strategy, own):
    def forever():
        while True:
            yield from _batches(own)

    return {"x": forever(), "steps_per_epoch": _STEPS}


def _pydataset(strategy, own):
    return {"x": Rows(own), "shuffle": False}


def _from_function(strategy, own):
    def make(context):
        assert context.input_pipeline_id == strategy.global_rank
        assert context.num_input_pipelines == strategy.num_replicas_in_sync
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return tf.data.Dataset.from_tensor_slices(tuple(own)).batch(BATCH).repeat()

    return {"x": strategy.distribute_datasets_from_function(make), "steps_per_epoch": _STEPS}


def _distributed(strategy, own):
    dataset = tf.data.Dataset.from_tensor_slices(tuple(own)).batch(BATCH)
    return {"x": strategy.experimental_distribute_dataset(dataset)}


_FEEDS = {
    "arrays": _arrays,
    "tensors": _tensors,
    "tf_data": _tf_data,
    "generator": _generator,
    "pydataset": _pydataset,
    "distribute_datasets_from_function": _from_function,
    "experimental_distribute_dataset": _distributed,
}


@feature()
def inputs(job: Job):
    own = job.shard(linear(job, _STEPS))
    strategy = job.strategy()
    model = job.make(lambda: build_mlp(keras.optimizers.SGD(0.1), run_eagerly=True), strategy)
    start, expected = job.gather(model.get_weights())[0], None
    for number, (kind, feed) in enumerate(_FEEDS.items(), 1):
        model.set_weights(start)
        job.equal(model.fit(**feed(strategy, own), verbose=0).history)
        job.assert_replicas(model)
        assert int(model.optimizer.iterations.numpy()) == number * _STEPS, kind
        expected = model.get_weights() if expected is None else expected
        if job.is_exact:
            # With compression, what one `fit` kept back goes into the next.
            for mine, theirs in zip(model.get_weights(), expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6, err_msg=kind)


@feature(elsewhere="inputs")
def shuffled_arrays(job: Job):
    # Keras shuffles what a rank has, by a seed of its own; the replicas need not agree on it.
    model = job.make(lambda: job.eagerly(build_mlp()))
    own = job.shard(linear(job, _STEPS))
    history = job.equal(model.fit(*own, batch_size=BATCH, epochs=2, verbose=0).history)
    assert history["loss"][1] < history["loss"][0]
    job.assert_replicas(model)
    assert np.isfinite(model.get_weights()[0]).all()
