# SPDX-License-Identifier: Apache-2.0
"""Models, weights and checkpoints: one rank of a party writes, all can read."""

import keras
import numpy as np
import tensorflow as tf

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import Job
from tests.strategies.features.models import Subclassed, build_mlp, linear
from tf_hips.strategies import local

# As a script has it that imports the function before it makes a strategy.
_EARLY_SAVE = keras.saving.save_model


def _build():
    return build_mlp(keras.optimizers.Adam(0.01), run_eagerly=True)


def _fit(model, rows, epochs=1):
    return model.fit(training.rows(rows), epochs=epochs, verbose=0).history


def _is_writer(job: Job) -> bool:
    """Whether this is the first rank of its party."""
    return job.rank == sum(job.configuration.sizes[: job.party])


def _assert_equal(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@feature()
def save_and_load_a_model(job: Job):
    rows = job.shard(linear(job, 2))
    model = job.make(_build)
    _fit(model, rows)
    # Every rank calls `save`; each to a path of its own here, so that we see who writes.
    path = job.folder / f"of-{job.rank}.keras"
    model.save(path)
    assert path.exists() == _is_writer(job)
    for ending in ("keras", "h5"):
        for name, save in (("early", _EARLY_SAVE), ("late", keras.saving.save_model)):
            path = job.folder / f"{name}-{job.rank}.{ending}"
            save(model, path)
            assert path.exists() == _is_writer(job), path
    if job.rank == 0:
        model.save(job.folder / "alone.keras")  # by one rank, waiting for nobody
    with local():
        model.save(job.folder / f"own-{job.rank}.keras")
        assert (job.folder / f"own-{job.rank}.keras").exists()
    job.gather(None)
    [written] = job.folder.glob("of-*.keras")

    # Outside of the scope: a plain model, to evaluate.
    plain = keras.models.load_model(written)
    _assert_equal(plain.get_weights(), model.get_weights())
    with local():
        assert np.isfinite(plain.evaluate(*rows, verbose=0)).all()

    # Inside: it trains on, slots and all. What compression kept back is not in the file.
    strategy = job.strategy()
    with strategy.scope():
        loaded = keras.models.load_model(written)
        loaded.run_eagerly = True
    assert loaded.distribute_strategy is strategy
    if job.is_exact:
        _assert_equal(training.values(loaded), training.values(model))
    _fit(loaded, rows)
    job.assert_replicas(loaded)
    if job.is_exact:
        _fit(model, rows)
        _assert_equal(training.values(loaded), training.values(model))


@feature(elsewhere="save_and_load_a_model")
def save_and_load_a_subclassed_model(job: Job):
    def build():
        model = Subclassed()
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    rows = job.shard(linear(job, 1))
    model = job.make(build)
    _fit(model, rows)
    model.save(job.folder / "model.keras")
    job.gather(None)
    loaded = keras.models.load_model(job.folder / "model.keras")
    _assert_equal(loaded.get_weights(), model.get_weights())


@feature()
def save_and_load_weights(job: Job):
    rows = job.shard(linear(job, 1))
    model = job.make(_build)
    _fit(model, rows)
    path = job.folder / f"of-{job.rank}.weights.h5"
    model.save_weights(path)
    assert path.exists() == _is_writer(job)
    other = job.make(_build)
    # The first rank of all alone loads: what it has is what all begin with.
    if job.rank == 0:
        other.load_weights(path)
    else:
        assert not np.array_equal(other.get_weights()[0], model.get_weights()[0])
    other.optimizer.learning_rate = 0.0
    _fit(other, rows)
    job.assert_replicas(other)
    _assert_equal(other.get_weights(), model.get_weights())


@feature()
def export_a_model(job: Job):
    rows = job.shard(linear(job, 1))
    model = job.make(_build)
    _fit(model, rows)
    model.export(job.folder / "exported", verbose=False)
    job.gather(None)
    served = tf.saved_model.load(str(job.folder / "exported"))
    np.testing.assert_allclose(
        served.serve(rows[0]), model.predict(rows[0], verbose=0), rtol=1e-5, atol=1e-6
    )


@feature(elsewhere="test_momentum.py")
def tf_checkpoint(job: Job):
    rows = job.shard(linear(job, 2))
    model = job.make(_build)
    _fit(model, rows)
    # Each rank its own file: TensorFlow writes from every process that asks.
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(job.folder / f"rank{job.rank}"))
    before = training.values(model)
    _fit(model, rows)

    other = job.make(_build)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path)
    _assert_equal(other.get_weights(), before[: len(other.get_weights())])
    _fit(other, rows)
    job.assert_replicas(other)
    if job.is_exact:
        _assert_equal(training.values(other), training.values(model))
