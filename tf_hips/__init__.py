# SPDX-License-Identifier: Apache-2.0
"""tf_hips: train Keras models over slow links, uneven devices and peers that cannot be trusted.

    strategy = tf_hips.HierarchicalPS(compression=tf_hips.error_feedback(tf_hips.onebit()))
    with strategy.scope():
        model = ...; model.compile(...)
    model.fit(dataset)

Names are loaded on first use (PEP 562): a server process imports this package and never pays for
TensorFlow. A type checker reads the imports below.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_hips import callbacks, config, data, errors, loops, models, robust
    from tf_hips.loops import (
        HFA,
        ESync,
        FedAvg,
        StreamingDiLoCo,
    )
    from tf_hips.ops import (
        Compressor,
        bf16,
        bisparse,
        budget,
        dgc,
        eden,
        error_feedback,
        fp8,
        fp16,
        fp32,
        graddrop,
        hips2bit,
        int8,
        load,
        mixed,
        momentum,
        natural,
        onebit,
        powersgd,
        qsgd,
        randomk,
        tbq,
        terngrad,
        topk,
        warmup,
    )
    from tf_hips.strategies import (
        CompressedRing,
        HierarchicalPS,
        fingerprint,
        gather,
        local,
        set_epoch,
        shard,
        simulate_liars,
    )

__version__ = "0.1.0"

_HOMES = {
    "CompressedRing": "tf_hips.strategies",
    "Compressor": "tf_hips.ops",
    "ESync": "tf_hips.loops",
    "FedAvg": "tf_hips.loops",
    "HFA": "tf_hips.loops",
    "HierarchicalPS": "tf_hips.strategies",
    "StreamingDiLoCo": "tf_hips.loops",
    "bf16": "tf_hips.ops",
    "bisparse": "tf_hips.ops",
    "budget": "tf_hips.ops",
    "dgc": "tf_hips.ops",
    "eden": "tf_hips.ops",
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
    "momentum": "tf_hips.ops",
    "natural": "tf_hips.ops",
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

_MODULES = ("callbacks", "config", "data", "errors", "loops", "models", "robust")

__all__ = [
    "HFA",
    "CompressedRing",
    "Compressor",
    "ESync",
    "FedAvg",
    "HierarchicalPS",
    "StreamingDiLoCo",
    "__version__",
    "bf16",
    "bisparse",
    "budget",
    "callbacks",
    "config",
    "data",
    "dgc",
    "eden",
    "error_feedback",
    "errors",
    "fingerprint",
    "fp8",
    "fp16",
    "fp32",
    "gather",
    "graddrop",
    "hips2bit",
    "int8",
    "load",
    "local",
    "loops",
    "mixed",
    "models",
    "momentum",
    "natural",
    "onebit",
    "powersgd",
    "qsgd",
    "randomk",
    "robust",
    "set_epoch",
    "shard",
    "simulate_liars",
    "tbq",
    "terngrad",
    "topk",
    "warmup",
]


if "TF_HIPS_CONFIG" in os.environ:  # a worker of the launcher's, one of many
    importlib.import_module("tf_hips.errors").print_in_one_line()


if not TYPE_CHECKING:  # else any name would do

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            errors = importlib.import_module("tf_hips.errors")
            with errors.packages_wanted(f"tf_hips.{name}"):
                value = getattr(importlib.import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        if name in _MODULES:
            return importlib.import_module(f"tf_hips.{name}")
        raise AttributeError(f"module 'tf_hips' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
