# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation: n rows of d floats in, one row out, of which some may lie.

    value        rules as plain values, and their texts
    rows         which rows are refused: NaN, infinities, absurd norms
    points       squared distances, and means of points that are known by them only
    selection    rules that look at distances
    deciding     what each step makes of points, and the rule at the end of them
    aggregator   Aggregator: `robust.nnm(f=2) >> robust.trimmed_mean(f=2)`, called with rows
    bearing      whom a rule does not bear, for warnings
    sketches     rules on distances for rows at several places, of which sketches travel
    votes        majorities of signs on packets of onebit
    detox        groups of workers that compute the same, and their vote
    attacks      what peers that lie may send, for tests and studies
    adversary    which workers of a run lie, and what those send
    graph        the same in TensorFlow; import it by name, it imports TensorFlow

Definitions and sources: docs/aggregators.md; what is not protected: docs/robustness.md. Imports no
TensorFlow, opens no socket. `adversary`, `attacks` and `detox` are imported when they are asked
for: a server that starts needs none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tf_hips.robust.aggregator import Aggregation, Aggregator, parse
from tf_hips.robust.rows import Limits, Rejected
from tf_hips.robust.rules import (
    arc,
    bucketing,
    bulyan,
    centred_clipping,
    cge,
    clip,
    geometric_median,
    krum,
    majority,
    mda,
    meamed,
    mean,
    median,
    multi_krum,
    nnm,
    trimmed_mean,
)
from tf_hips.robust.sketches import Sketched, sketched
from tf_hips.robust.value import NAMES, PRE_NAMES, PreAggregator
from tf_hips.robust.votes import onebit_majority

if TYPE_CHECKING:
    from tf_hips.robust import adversary, attacks, detox
    from tf_hips.robust.adversary import Adversary

# `graph` needs TensorFlow, which nothing that serves imports: it is no name of `__all__`.
_LAZY = ("adversary", "attacks", "detox", "graph")

__all__ = [
    "NAMES",
    "PRE_NAMES",
    "Adversary",
    "Aggregation",
    "Aggregator",
    "Limits",
    "PreAggregator",
    "Rejected",
    "Sketched",
    "adversary",
    "arc",
    "attacks",
    "bucketing",
    "bulyan",
    "centred_clipping",
    "cge",
    "clip",
    "detox",
    "geometric_median",
    "krum",
    "majority",
    "mda",
    "meamed",
    "mean",
    "median",
    "multi_krum",
    "nnm",
    "onebit_majority",
    "parse",
    "sketched",
    "trimmed_mean",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"tf_hips.robust.{name}")
    if name == "Adversary":
        return importlib.import_module("tf_hips.robust.adversary").Adversary
    raise AttributeError(f"module 'tf_hips.robust' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "Adversary"})
