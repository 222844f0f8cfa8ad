# SPDX-License-Identifier: Apache-2.0
"""Types other than float32."""

import keras
import numpy as np

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job
from tests.strategies.features.models import build_mlp, compare, linear


@feature(elsewhere="mixed_float16")
def mixed_bfloat16(job: Job):
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")

    def build():
        return job.eagerly(build_mlp(keras.optimizers.SGD(0.05)))

    model, _ = compare(job, build, linear(job, 3), rtol=0.05, atol=0.02)
    assert {str(weight.dtype) for weight in model.weights} == {"float32"}


@feature()
def float64_weights(job: Job):
    keras.mixed_precision.set_dtype_policy("float64")
    # To a server, as through a codec, values travel as float32.
    near = 1e-6 if job.has_uplink else 1e-9
    model, _ = compare(
        job, lambda: build_mlp(run_eagerly=True), linear(job, 2), rtol=near, atol=near
    )
    assert {str(weight.dtype) for weight in model.weights} == {"float64"}


@feature()
def mixed_float16(job: Job):
    """One rank alone overflows: the step is skipped on all, and the scale halves on all."""
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    model = job.make(lambda: build_mlp(keras.optimizers.SGD(1e-2)))
    x, y = job.shard(linear(job, 4))
    x = x.copy()
    if job.rank == 1:
        x[BATCH : 2 * BATCH] = 1e30
    model.fit(training.rows([x, y]), verbose=0)
    job.assert_replicas(model)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert int(model.optimizer.inner_optimizer.iterations.numpy()) == 3
    assert float(model.optimizer.dynamic_scale.numpy()) == model.optimizer.initial_scale / 2
