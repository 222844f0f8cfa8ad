# SPDX-License-Identifier: Apache-2.0
"""tf_hips: train Keras models over slow links, uneven devices and peers that cannot be trusted.

    strategy = tf_hips.HierarchicalPS(compression=tf_hips.error_feedback(tf_hips.onebit()))
    with strategy.scope():
        model = ...; model.compile(...)
    model.fit(dataset)

Names are loaded on first use (PEP 562): a server process imports this package and never pays for
TensorFlow.
"""

import importlib
import os
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CompressedRing": "tf_hips.strategies",
    "ESync": "tf_hips.loops",
    "FedAvg": "tf_hips.loops",
    "HFA": "tf_hips.loops",
    "HierarchicalPS": "tf_hips.strategies",
    "StreamingDiLoCo": "tf_hips.loops",
    "Compressor": "tf_hips.ops",
    "bf16": "tf_hips.ops",
    "bisparse": "tf_hips.ops",
    "budget": "tf_hips.ops",
    "error_feedback": "tf_hips.ops",
    "fingerprint": "tf_hips.strategies",
    "fp16": "tf_hips.ops",
    "fp32": "tf_hips.ops",
    "fp8": "tf_hips.ops",
    "gather": "tf_hips.strategies",
    "graddrop": "tf_hips.ops",
    "hips2bit": "tf_hips.ops",
    "int8": "tf_hips.ops",
    "load": "tf_hips.ops",
    "local": "tf_hips.strategies",
    "mixed": "tf_hips.ops",
    "natural": "tf_hips.ops",
    "dgc": "tf_hips.ops",
    "onebit": "tf_hips.ops",
    "powersgd": "tf_hips.ops",
    "qsgd": "tf_hips.ops",
    "randomk": "tf_hips.ops",
    "set_epoch": "tf_hips.strategies",
    "shard": "tf_hips.strategies",
    "simulate_liars": "tf_hips.strategies",
    "tbq": "tf_hips.ops",
    "terngrad": "tf_hips.ops",
    "topk": "tf_hips.ops",
    "warmup": "tf_hips.ops",
}

_PACKAGES = ("callbacks", "loops", "models", "robust")
# Of these a script needs a function now and then: `tf_hips.config.role()`.
_MODULES = ("config", "data", "errors")

__all__ = sorted([*_HOMES, *_PACKAGES, "__version__"])


if "TF_HIPS_CONFIG" in os.environ:  # a worker of the launcher's, one of many
    importlib.import_module("tf_hips.errors").print_in_one_line()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in (*_PACKAGES, *_MODULES):
        return importlib.import_module(f"tf_hips.{name}")
    raise AttributeError(f"module 'tf_hips' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
