# SPDX-License-Identifier: Apache-2.0
"""Keras 2 is refused where it would train past a strategy; a stand-in of its shape is imported."""

import importlib
import sys

import pytest

from tf_hips.errors import ProtocolError

pytestmark = pytest.mark.tf

STAND_IN = """
import types

class Model:
    def compile(self, optimizer): return "compiled"
    def fit(self, x): return "trained"
    def train_on_batch(self, x): return "trained"
    def predict(self, x): return "predicted"

class Sequential(Model):
    pass

class Optimizer:
    def apply_gradients(self, pairs): return "applied"

class OptimizerV2:
    def apply_gradients(self, pairs): return "applied"

optimizers = types.SimpleNamespace(
    Optimizer=Optimizer, legacy=types.SimpleNamespace(Optimizer=OptimizerV2)
)
"""
REFUSED = r"`import keras` in place of tf_keras.*TF_USE_LEGACY_KERAS.*Received: `{}` of {}, of"


@pytest.fixture
def import_keras_2(tmp_path, monkeypatch):
    (tmp_path / "tf_keras.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tf_keras", raising=False)
    yield lambda: importlib.import_module("tf_keras")
    sys.modules.pop("tf_keras", None)


def _refused(name, owner):
    return pytest.raises(ProtocolError, match=REFUSED.format(name, owner))


def test_keras_2_is_refused_in_a_scope_however_late_it_comes(import_keras_2):
    import tf_hips

    strategy = tf_hips.CompressedRing()
    keras_2 = import_keras_2()
    model, optimizer = keras_2.Sequential(), keras_2.optimizers.Optimizer()
    old = keras_2.optimizers.legacy.Optimizer()
    with strategy.scope():
        with _refused("compile", "Sequential"):
            model.compile("sgd")
        with tf_hips.local():
            assert model.compile("sgd") == "compiled"
        assert model.predict(0) == "predicted"
    with _refused("apply_gradients", "Optimizer"):
        strategy.run(optimizer.apply_gradients, ([],))
    with _refused("apply_gradients", "OptimizerV2"):
        strategy.run(old.apply_gradients, ([],))
    # Outside of the scope the only worker is nobody's concern.
    assert model.fit(0) == "trained"


def test_a_worker_of_several_does_not_train_keras_2_on_its_own(import_keras_2, monkeypatch):
    import tf_hips
    from tf_hips.strategies import hooks, legacy

    keras_2 = import_keras_2()
    before = len(sys.meta_path)
    legacy.watch(hooks._trains_with_others)  # as where it was imported first
    del sys.meta_path[: len(sys.meta_path) - before]
    strategy, model = tf_hips.CompressedRing(), keras_2.Sequential()
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", 2)
    assert model.compile("sgd") == "compiled"  # to evaluate, maybe
    for name in ("fit", "train_on_batch"):
        with _refused(name, "Sequential"):
            getattr(model, name)(0)
    with tf_hips.local():
        assert model.fit(0) == "trained"
    monkeypatch.undo()  # alone again
    assert model.fit(0) == "trained"
