# SPDX-License-Identifier: Apache-2.0
"""Keras 2 is refused where it would train: `tf_keras`, and `tf.keras` if TF_USE_LEGACY_KERAS is 1.

It finds a strategy by itself, and nothing here finds its models: gradients would pass by the
compression and the server's rule, or stay on their worker where a model is made outside of the
scope. Neither looks like an error. It may be imported long after a strategy is made, or never.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tf_hips.errors import ProtocolError

_NAME = "tf_keras"
_OF_MODELS = ("compile", "fit", "train_on_batch")

# Of a method's name: whether it would train beside others, now.
Trains = Callable[[str], bool]


def watch(trains: Trains) -> None:
    """Lets Keras 2 ask `trains` whatever it does, from now on or once it is imported."""
    if _NAME in sys.modules:
        _wrap_all(sys.modules[_NAME], trains)
    sys.meta_path.insert(0, _Finder(trains))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what Python finds, and wraps it when it is there."""

    def __init__(self, trains: Trains) -> None:
        self._trains = trains

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Where `tf_keras` is, and nothing else."""
        if name != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap_all(module, self._trains)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap_all(module: Any, trains: Trains) -> None:
    for name in _OF_MODELS:
        _wrap(module.Model, name, trains)
    for optimizers in (module.optimizers, module.optimizers.legacy):
        _wrap(optimizers.Optimizer, "apply_gradients", trains)


def _wrap(owner: type, name: str, trains: Trains) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if trains(name):
            raise ProtocolError(
                "Strategies of tf_hips train models and optimizers of Keras 3: write `import "
                "keras` in place of tf_keras, and leave TF_USE_LEGACY_KERAS unset where a script "
                f"says `tf.keras`. Received: `{name}` of {type(self).__name__}, of Keras 2. If "
                "this worker is to train on its own, put it inside `with tf_hips.local():`."
            )
        return method(self, *args, **kwargs)

    checked.autograph_info__ = {"do_not_convert": True}  # type: ignore[attr-defined]
    setattr(owner, name, checked)
