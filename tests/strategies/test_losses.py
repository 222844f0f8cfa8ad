# SPDX-License-Identifier: Apache-2.0
"""A loss is divided by the number of replicas once; in one process, with a strategy's stand-in."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import loss as keras_losses
from keras.src.trainers.compile_utils import CompileLoss

from tf_hips.strategies import hooks, losses

pytestmark = pytest.mark.tf

TRUE = np.arange(12, dtype=np.float32).reshape(4, 3)
PREDICTED = np.float32(0.5) * TRUE + np.float32(1.0)
ROWS = np.mean((TRUE - PREDICTED) ** 2, axis=-1)


def number(t, p):
    return keras.ops.mean((t - p) ** 2)


class Number(keras.losses.Loss):
    def call(self, t, p):
        return number(t, p)


class OfLosses(keras.losses.Loss):
    """An object, a number and values of rows."""

    def call(self, t, p):
        rows = keras.losses.mean_squared_error(t, p)
        return keras.losses.MeanSquaredError()(t, p) + Number()(t, p) + rows


class OfOneLoss(keras.losses.Loss):
    def call(self, t, p):
        return keras.losses.MeanSquaredError()(t, p)


@pytest.fixture
def two_workers(monkeypatch):
    """What hooks do under a strategy of two workers; returns how a loss is called there."""
    strategy = types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(hooks, "_strategies", [strategy])
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    monkeypatch.setattr(keras_losses, "scale_loss_for_distribution", None)
    losses.install()
    keras_method = keras.losses.Loss.__call__
    hooked = functools.partialmethod(functools.partial(hooks._loss, keras_method))
    monkeypatch.setattr(keras.losses.Loss, "__call__", hooked)
    return strategy


@pytest.mark.parametrize(
    ("loss", "whole"),
    [
        (Number(), ROWS.mean()),
        (Number(reduction="mean_with_sample_weight"), ROWS.mean()),
        (keras.losses.MeanSquaredError(), ROWS.mean()),
        (OfLosses(), 3 * ROWS.mean()),
        (OfOneLoss(), ROWS.mean()),
        # Keras divides the mean inside, and nobody the sum.
        (OfOneLoss(reduction="sum"), ROWS.mean()),
    ],
)
def test_a_mean_is_divided_once(two_workers, loss, whole):
    assert float(loss(TRUE, PREDICTED)) == pytest.approx(whole / 2)
    two_workers.num_replicas_in_sync = 1
    assert float(loss(TRUE, PREDICTED)) == pytest.approx(whole)


@pytest.mark.parametrize("loss", [Number, keras.losses.MeanSquaredError])
@pytest.mark.parametrize("reduction", ["sum", None])
def test_what_is_no_mean_is_not_divided(two_workers, loss, reduction):
    shared = loss(reduction=reduction)(TRUE, PREDICTED)
    two_workers.num_replicas_in_sync = 1
    np.testing.assert_array_equal(shared, loss(reduction=reduction)(TRUE, PREDICTED))


def test_weights_of_rows_make_a_number_a_mean_of_rows(two_workers):
    weights = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    told = Number()(TRUE, PREDICTED, sample_weight=weights)
    assert float(told) == pytest.approx(ROWS.mean() * weights.mean() / 2)


def test_a_compiled_function_is_divided_and_told_whole(two_workers):
    """Of two outputs `compile` tells each loss, as it is without workers."""
    compiled = CompileLoss([number, number])
    told = compiled([TRUE, TRUE], [tf.constant(PREDICTED), tf.constant(PREDICTED)])
    assert float(told) == pytest.approx(ROWS.mean())
    assert [float(one.result()) for one in compiled.metrics] == pytest.approx(2 * [ROWS.mean()])


def test_strategies_of_others_are_left_to_keras(two_workers, monkeypatch):
    monkeypatch.setattr(hooks, "_strategies", [])
    assert float(Number()(TRUE, PREDICTED)) == pytest.approx(ROWS.mean())
    assert float(keras.losses.MeanSquaredError()(TRUE, PREDICTED)) == pytest.approx(ROWS.mean() / 2)
